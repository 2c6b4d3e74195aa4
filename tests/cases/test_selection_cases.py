"""Selection against the golden answers: groups sel/, ties/, kgev/ and nonfinite/.

Sizes and temperatures come from the file. Tolerance of fp32 values: 2e-6 absolute and 1e-5
relative, by the README.
"""

import numpy as np
import pytest
import torch
from tests.cases.golden import arrays

from teacher_logits.codec import retemper
from teacher_logits.layout import RowStatus
from teacher_logits.selection import Selection, select_top_k
from teacher_logits.selection.given_ids import score_given
from teacher_logits.selection.nucleus import cap_nucleus, pack
from teacher_logits.selection.partial_selection import (
    PartialSelection,
    merge_partials,
    select_partial,
)
from teacher_logits.selection_rules import Nucleus

FILE = "losses_golden.npz"
SEL, TIES, KGEV = arrays(FILE, "sel/"), arrays(FILE, "ties/"), arrays(FILE, "kgev/")
NONFINITE = arrays(FILE, "nonfinite/")
NAMES = sorted({key.split("/")[0] for key in SEL if key.startswith("T") and "/" in key})
TEMPERATURES = {name: float(name[1:]) for name in NAMES}
# The rows that nonfinite/ gives the answer of, by the number in the field's name.
ROWS = [int(key[3:-4]) for key in NONFINITE if key.startswith("row") and key.endswith("_idx")]


def flat(values: np.ndarray, axes: int) -> torch.Tensor:
    """A golden array with all but its last axes joined to one of positions."""
    return torch.from_numpy(values).reshape(-1, *values.shape[values.ndim - axes :])


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.allclose(got.double(), expected.double(), atol=2e-6, rtol=1e-5)


def selected(dtype: torch.dtype = torch.float32) -> Selection:
    ids = flat(SEL["ids"], 0).view(SEL["ids"].shape)
    next_ids = torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], -1)], 1)
    return select_top_k(
        torch.from_numpy(SEL["logits"]).to(dtype),
        k=int(SEL["K"]),
        temperatures=(1.0, *(t for t in TEMPERATURES.values() if t != 1.0)),
        vocab_size=int(SEL["vocab_real"]),
        next_ids=next_ids,
    )


def column(name: str) -> int:
    others = [n for n in NAMES if TEMPERATURES[n] != 1.0]
    return 0 if TEMPERATURES[name] == 1.0 else 1 + others.index(name)


class TestSel:
    def test_idx(self) -> None:
        assert torch.equal(selected().topk_ids, flat(SEL["idx"], 1))

    def test_val(self) -> None:
        got = selected()

        assert_close(got.topk_logprobs + got.logsumexp[:, :1], flat(SEL["val"], 1))

    @pytest.mark.parametrize("name", NAMES)
    def test_lse(self, name: str) -> None:
        assert_close(selected().logsumexp[:, column(name)], flat(SEL[f"{name}/lse"], 0))

    @pytest.mark.parametrize("name", NAMES)
    def test_log_tail(self, name: str) -> None:
        assert_close(selected().log_tail[:, column(name)], flat(SEL[f"{name}/log_tail"], 0))

    @pytest.mark.parametrize("name", NAMES)
    def test_logprob(self, name: str) -> None:
        got = selected()
        at_1, at_tau = got.logsumexp[:, 0], got.logsumexp[:, column(name)]

        tempered = retemper(got.topk_logprobs, at_1, at_tau, TEMPERATURES[name])

        assert_close(tempered, flat(SEL[f"{name}/logprob"], 1))

    def test_actual_logprob(self) -> None:
        actual = selected().actual_logprob

        assert actual is not None
        assert_close(actual, flat(SEL["actual_logprob"], 0))

    def test_entropy(self) -> None:
        """Of the whole vocabulary kept: what its true log-probabilities say."""
        vocabulary = int(SEL["vocab_real"])
        got = select_top_k(
            torch.from_numpy(SEL["logits"]), k=vocabulary, vocab_size=vocabulary
        ).topk_logprobs.double()

        assert_close(-(got.exp() * got).sum(1), flat(SEL["entropy"], 0))

    def test_status(self) -> None:
        assert (selected().status == RowStatus.OK).all()


NUCLEI = sorted({key.split("/")[0] for key in SEL if key.startswith("nucleus_")})


@pytest.mark.parametrize("name", NUCLEI)
class TestNucleus:
    def cut(self, name: str) -> Selection:
        mass, least = name.removeprefix("nucleus_p").split("_min")
        others = (t for t in TEMPERATURES.values() if t != 1.0)
        nucleus = Nucleus(mass=float(mass), least=int(least))
        return cap_nucleus(selected(), nucleus, temperatures=(1.0, *others))

    def test_k(self, name: str) -> None:
        assert torch.equal((self.cut(name).topk_ids >= 0).sum(1), flat(SEL[f"{name}/k"], 0).long())

    def test_offsets(self, name: str) -> None:
        cut = self.cut(name)
        entries = pack(cut.topk_ids, cut.topk_logprobs)

        assert entries.offsets.tolist() == SEL[f"{name}/offsets"].tolist()
        assert len(entries.ids) == len(entries.logprobs) == entries.offsets[-1]

    def test_log_tail(self, name: str) -> None:
        assert_close(self.cut(name).log_tail[:, 0], flat(SEL[f"{name}/log_tail"], 0))


BOUNDS = SEL["tp_bounds"].tolist()
SHARDS = list(range(len(BOUNDS) - 1))


class TestTensorParallel:
    def shard(self, rank: int) -> PartialSelection:
        start, stop = BOUNDS[rank : rank + 2]
        return select_partial(
            torch.from_numpy(SEL["logits"])[..., start:stop],
            k=int(SEL["K"]),
            first_id=start,
            vocab_size=int(SEL["vocab_real"]),
        )

    @pytest.mark.parametrize("rank", SHARDS)
    def test_idx_and_val(self, rank: int) -> None:
        got, kept = self.shard(rank), SEL[f"tp{rank}/idx"].shape[-1]

        assert torch.equal(got.ids[:, :kept].int(), flat(SEL[f"tp{rank}/idx"], 1))
        assert_close(got.logits[:, :kept], flat(SEL[f"tp{rank}/val"], 1))
        assert (got.ids[:, kept:] == -1).all()

    @pytest.mark.parametrize("rank", SHARDS)
    def test_lse_rest(self, rank: int) -> None:
        assert_close(self.shard(rank).log_rest[:, 0], flat(SEL[f"tp{rank}/lse_rest"], 0))

    @pytest.mark.parametrize("rank", SHARDS)
    def test_lse(self, rank: int) -> None:
        got = self.shard(rank)
        lse = torch.logaddexp(got.logits.double().logsumexp(1), got.log_rest[:, 0])

        assert_close(lse, flat(SEL[f"tp{rank}/lse"], 0))

    @pytest.mark.parametrize("order", [SHARDS, SHARDS[::-1]], ids=["in order", "backwards"])
    def test_all_shards_are_the_whole(self, order: list[int]) -> None:
        got = merge_partials(map(self.shard, order)).finish()

        assert torch.equal(got.topk_ids, flat(SEL["idx"], 1))
        assert_close(got.logsumexp[:, 0], flat(SEL["T1.0/lse"], 0))
        assert_close(got.topk_logprobs, flat(SEL["T1.0/logprob"], 1))
        assert_close(got.log_tail[:, 0], flat(SEL["T1.0/log_tail"], 0))


def test_score_logprob() -> None:
    """Some ids stand at a position twice: the mass outside is that of all others all the same."""
    logits, vocabulary = flat(SEL["logits"], 1), int(SEL["vocab_real"])
    ids = flat(SEL["score_ids"], 1)

    got = score_given(logits, ids, vocab_size=vocabulary)

    assert_close(got.logprobs, flat(SEL["score_logprob"], 1))
    others = logits[:, :vocabulary].double().scatter(1, ids.long(), -torch.inf).logsumexp(1)
    assert_close(got.log_tail[:, 0], others - flat(SEL["T1.0/lse"], 0))
    assert_close(got.logsumexp[:, 0], flat(SEL["T1.0/lse"], 0))


class TestTies:
    def selected(self, dtype: torch.dtype = torch.float32) -> Selection:
        return select_top_k(torch.from_numpy(TIES["logits"]).to(dtype), k=TIES["idx"].shape[-1])

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_idx(self, dtype: torch.dtype) -> None:
        logits = torch.from_numpy(TIES["logits"])
        if not torch.equal(logits.to(dtype).float(), logits):
            pytest.skip("the grid of these logits is too fine for the type")

        assert torch.equal(self.selected(dtype).topk_ids, flat(TIES["idx"], 1))

    def test_val(self) -> None:
        got = self.selected()

        assert_close(got.topk_logprobs + got.logsumexp, flat(TIES["val"], 1))

    def test_log_tail(self) -> None:
        assert_close(self.selected().log_tail[:, 0], flat(TIES["log_tail"], 0))


class TestKgev:
    def selected(self) -> Selection:
        k = max(16, KGEV["logits"].shape[-1])
        return select_top_k(torch.from_numpy(KGEV["logits"]), k=k)

    def test_idx(self) -> None:
        kept = KGEV["idx"].shape[-1]

        assert torch.equal(self.selected().topk_ids[:, :kept], flat(KGEV["idx"], 1))
        assert (self.selected().topk_ids[:, kept:] == -1).all()

    def test_logprob(self) -> None:
        kept = KGEV["idx"].shape[-1]

        assert_close(self.selected().topk_logprobs[:, :kept], flat(KGEV["logprob"], 1))
        assert (self.selected().topk_logprobs[:, kept:] == -torch.inf).all()

    def test_log_tail(self) -> None:
        assert torch.equal(self.selected().log_tail[:, 0].double(), flat(KGEV["log_tail"], 0))


class TestNonfinite:
    def test_status(self) -> None:
        got = select_top_k(torch.from_numpy(NONFINITE["logits"]), k=3).status

        assert got.tolist() == NONFINITE["status"].tolist()

    @pytest.mark.parametrize("row", ROWS)
    def test_a_row_with_infinities_below(self, row: int) -> None:
        ids, logprobs = (flat(NONFINITE[f"row{row}_{f}"], 1) for f in ("idx", "logprob"))

        got = select_top_k(torch.from_numpy(NONFINITE["logits"]), k=ids.shape[1])[row : row + 1]

        assert torch.equal(got.topk_ids, ids)
        assert_close(got.topk_logprobs, logprobs)
        if bool((ids < 0).any()):
            assert got.log_tail.item() == -torch.inf
