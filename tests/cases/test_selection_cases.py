"""Selection against the golden answers: groups sel/, ties/, kgev/ and nonfinite/.

Sizes and temperatures come from the file. Of `sel/` the fields `nucleus_*`, `tp*` and `score_*`
belong to later work. Tolerance of fp32 values: 2e-6 absolute and 1e-5 relative, by the README.
"""

import numpy as np
import pytest
import torch
from tests.cases.golden import arrays

from teacher_logits.codec import retemper
from teacher_logits.layout import RowStatus
from teacher_logits.selection import Selection, select_top_k

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
