"""Batches of trainers as rows, and in the keys of NeMo RL and verl (reports R04, R32).

Whatever the layout, the loss is that of the rows themselves.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import teacher_logits_client as tl
from teacher_logits.errors import ConfigError, PayloadInvalidError
from teacher_logits_client import Targets, select_top_k
from teacher_logits_client.losses import Tail, forward_kl, reverse_kl
from teacher_logits_client.trainers import nemo_rl, verl
from teacher_logits_client.trainers.batch_rows import BatchRows, padded_rows, rows_of

V, K = 12, 4


@dataclass(frozen=True)
class Case:
    """Rows of any lengths, what both sides say at each of their positions, and which count."""

    lengths: list[int]
    teacher: torch.Tensor
    student: torch.Tensor
    counts: torch.Tensor

    @property
    def offsets(self) -> list[int]:
        return [0, *torch.tensor(self.lengths).cumsum(0).tolist()]

    def flat_targets(self, windows: torch.Tensor | None = None) -> Targets:
        """Targets of whole rows, or of windows of them, as the service makes them."""
        kept = select_top_k(self.teacher, k=K)
        if windows is None:
            windows = torch.tensor([[0, length] for length in self.lengths])
        places: list[int] = []
        valid: list[bool] = []
        for start, length, (first, count) in zip(
            self.offsets, self.lengths, windows.tolist(), strict=False
        ):
            places += range(start + first, start + first + count)
            valid += [at < length - 1 for at in range(first, first + count)]
        at = torch.tensor(places, dtype=torch.int64)
        sums = windows[:, 1].cumsum(0)
        return Targets(
            topk_ids=kept.topk_ids[at],
            topk_logprobs=kept.topk_logprobs[at].float(),
            log_tail=kept.log_tail[at, 0],
            actual_logprob=None,
            valid=torch.tensor(valid, dtype=torch.bool),
            temperature=1.0,
            row_offsets=torch.cat([sums.new_zeros(1), sums]),
            row_firsts=windows[:, 0],
        )

    def wanted(self) -> tuple[float, torch.Tensor]:
        """The loss of flat rows, and the student's gradient there."""
        logits = self.student.clone().requires_grad_()
        loss, count = forward_kl(logits, self.flat_targets(), self.counts)
        loss.backward()
        assert logits.grad is not None
        return float(loss.detach()) / max(int(count), 1), logits.grad

    def spread(
        self, flat: torch.Tensor, starts: list[int], width: int, fill: float
    ) -> torch.Tensor:
        """Flat positions as a rectangle, each row from its own column on."""
        shape = (len(self.lengths), width, *flat.shape[1:])
        out = torch.full(shape, fill, dtype=flat.dtype)
        for row, (start, length) in enumerate(zip(self.offsets, self.lengths, strict=False)):
            out[row, starts[row] : starts[row] + length] = flat[start : start + length]
        return out


@st.composite
def cases(draw: st.DrawFn) -> Case:
    lengths = draw(st.lists(st.integers(1, 7), min_size=1, max_size=5))
    chance = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    size = (sum(lengths), V)
    counts = torch.rand(size[0], generator=chance) < draw(st.sampled_from([0.0, 0.5, 1.0]))
    return Case(
        lengths,
        3 * torch.randn(size, generator=chance),
        torch.randn(size, generator=chance, dtype=torch.float64),
        counts,
    )


@given(case=cases(), data=st.data())
@settings(max_examples=60, deadline=None)
def test_padding_on_either_side_changes_neither_loss_nor_count(
    case: Case, data: st.DataObject
) -> None:
    pads = [data.draw(st.integers(0, 3)) for _ in case.lengths]
    width = max(p + n for p, n in zip(pads, case.lengths, strict=True)) + data.draw(
        st.integers(0, 2)
    )
    tokens = case.spread(torch.ones(len(case.teacher)), pads, width, 0.0)
    mask = case.spread(case.counts, pads, width, True)  # what padding says does not matter
    ids = torch.arange(tokens.numel()).view(tokens.shape)
    rows = padded_rows(ids, tokens, mask)
    skipped = data.draw(st.integers(0, min(int(each) for each in rows.columns)))  # type: ignore[union-attr]
    logits = case.spread(case.student, pads, width, torch.nan)[:, skipped:]

    loss, count = forward_kl(
        logits, rows.place(case.flat_targets(rows.windows), skipped=skipped), rows.mask[:, skipped:]
    )

    assert int(count) == int(rows.mask.sum())
    assert float(loss) / max(int(count), 1) == pytest.approx(case.wanted()[0], abs=1e-9)
    assert [len(row) for row in rows.rows] == case.lengths


@given(case=cases())
@settings(max_examples=40, deadline=None)
def test_a_packed_line_is_its_rows(case: Case) -> None:
    places = torch.tensor([[at for length in case.lengths for at in range(length)]])
    labels = torch.where(case.counts, 1, -100).roll(1).unsqueeze(0)
    ids = torch.zeros_like(places)

    rows = rows_of({"input_ids": ids, "labels": labels, "position_ids": places})
    loss, count = forward_kl(case.student, rows.place(case.flat_targets()), rows.mask)

    assert [len(row) for row in rows.rows] == case.lengths
    assert int(count) == int(rows.mask.sum())
    assert float(loss) / max(int(count), 1) == pytest.approx(case.wanted()[0], abs=1e-9)


@pytest.mark.parametrize("positions", [[2, 3, 4, 5, 6], [3, 4, 0, 1, 2]])
def test_packed_rows_start_at_their_first_token(positions: list[int]) -> None:
    """Neither where positions are shifted, nor where a line starts in the middle of a row."""
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    batch = {"input_ids": ids, "labels": ids, "position_ids": torch.tensor([positions])}

    with pytest.raises(PayloadInvalidError, match=f"position_ids start at {positions[0]}"):
        rows_of(batch)


def test_a_gap_in_a_row_is_refused_with_its_place() -> None:
    tokens = torch.tensor([[1, 1, 1], [1, 0, 1]])

    with pytest.raises(PayloadInvalidError, match="row 1 of attention_mask has a gap: 2 tokens"):
        padded_rows(torch.zeros_like(tokens), tokens, tokens != 0)


def test_rows_without_a_token_and_a_mask_that_is_none_are_refused() -> None:
    empty = {name: torch.zeros(2, 0, dtype=torch.int64) for name in ("input_ids", "labels")}
    with pytest.raises(PayloadInvalidError, match="rows without a token"):
        rows_of(empty)

    batch: dict[str, object] = {name: torch.ones(1, 3, dtype=torch.int64) for name in empty}
    with pytest.raises(ConfigError, match="attention_mask is a list"):
        rows_of({**batch, "attention_mask": [[0, 1, 1]]})


def test_a_batch_without_labels_says_what_it_has() -> None:
    with pytest.raises(ConfigError, match="a batch has input_ids: give it input_ids and labels"):
        rows_of({"input_ids": torch.zeros(1, 2, dtype=torch.int64)})


def test_a_batch_with_more_than_the_teacher_is_told_is_refused() -> None:
    ids = torch.zeros(1, 2, dtype=torch.int64)

    with pytest.raises(ConfigError, match="a batch has pixel_values, and the teacher is served"):
        rows_of({"input_ids": ids, "labels": ids, "pixel_values": torch.zeros(1, 3, 2, 2)})


def a_window(rows: BatchRows, row: int) -> tuple[int, int]:
    first, count = rows.windows[row].tolist()
    return first, count


def test_the_teacher_is_asked_for_nothing_but_what_counts() -> None:
    labels = torch.tensor([[-100, -100, 5, 6, -100], [-100] * 5])
    ids = torch.arange(10).view(2, 5)

    rows = rows_of({"input_ids": ids, "labels": labels})

    assert a_window(rows, 0) == (1, 2)
    assert a_window(rows, 1) == (0, 0)


# --- NeMo RL


def nemo_batch(case: Case, width: int, *, with_tail: bool = False) -> dict[str, torch.Tensor]:
    """A batch in NeMo RL's keys, padded on the right."""
    starts = [0] * len(case.lengths)
    counted = case.spread(case.counts.roll(1), starts, width, True).float()
    return {
        "input_ids": case.spread(torch.arange(len(case.teacher)), starts, width, 0),
        "input_lengths": torch.tensor(case.lengths),
        "token_mask": counted,
        "sample_mask": torch.ones(len(case.lengths)),
        **nemo_rl.to_batch(case.flat_targets(), width=width, with_tail=with_tail),
    }


@given(case=cases(), room=st.integers(0, 2))
@settings(max_examples=40, deadline=None)
def test_targets_go_into_the_keys_of_nemo_rl_and_come_back(case: Case, room: int) -> None:
    width = max(case.lengths) + room
    logits = case.spread(case.student, [0] * len(case.lengths), width, torch.nan)
    for with_tail, tail in ((True, Tail.BUCKET), (False, Tail.RENORMALISED)):
        batch = nemo_batch(case, width, with_tail=with_tail)
        loss, count = forward_kl(
            logits, nemo_rl.to_targets(batch), nemo_rl.position_mask(batch), tail=tail
        )
        plain, same = forward_kl(case.student, case.flat_targets(), case.counts, tail=tail)

        assert batch["teacher_topk_indices"].dtype == torch.int64
        assert int(count) == int(same)
        assert float(loss) == pytest.approx(float(plain), abs=1e-5)


@given(case=cases(), size=st.sampled_from([1, 2, 4]))
@settings(max_examples=40, deadline=None)
def test_r32_context_parallel_parts_of_uneven_rows_add_up_to_the_whole(
    case: Case, size: int
) -> None:
    width = -(-max(case.lengths) // (2 * size)) * 2 * size
    logits = case.spread(case.student, [0] * len(case.lengths), width, 0.0).requires_grad_()
    batch = nemo_batch(case, width, with_tail=True) | {"logits": logits}
    whole, count = forward_kl(logits, nemo_rl.to_targets(batch), nemo_rl.position_mask(batch))
    whole.backward()
    wanted, sums, counts = logits.grad, 0.0, 0
    logits.grad = None
    chunk = width // (2 * size)
    for rank in range(size):
        part = nemo_rl.context_parallel_part(batch, size=size, rank=rank)
        own = [*range(rank * chunk, (rank + 1) * chunk)]
        own += range((2 * size - 1 - rank) * chunk, (2 * size - rank) * chunk)
        loss, some = forward_kl(
            logits[:, own], nemo_rl.to_targets(part), nemo_rl.position_mask(part)
        )
        loss.backward()
        sums, counts = sums + float(loss.detach()), counts + int(some)

    assert counts == int(count)
    assert sums == pytest.approx(float(whole.detach()), abs=1e-9)
    torch.testing.assert_close(logits.grad, wanted)


def test_r04_a_padded_length_of_another_layout_is_refused_with_both_shapes() -> None:
    case = Case([3, 2], torch.randn(5, V), torch.randn(5, V), torch.ones(5, dtype=torch.bool))
    batch = nemo_batch(case, 4)
    batch["teacher_topk_indices"] = batch["teacher_topk_indices"][:, :3]

    with pytest.raises(PayloadInvalidError, match=r"has shape \(2, 3, 4\).* are \(2, 4\)"):
        nemo_rl.to_targets(batch)
    with pytest.raises(PayloadInvalidError, match="pad them to a multiple"):
        nemo_rl.context_parallel_part(nemo_batch(case, 5), size=2, rank=0)
    with pytest.raises(PayloadInvalidError, match="the batch is 2 tokens wide"):
        nemo_rl.to_batch(case.flat_targets(), width=2)


def test_a_served_teacher_answers_as_nemo_rls_policy_does(teacher: str) -> None:
    ids = torch.tensor([[1, 2, 3, 4], [5, 6, 0, 0]])
    data = {"input_ids": ids, "input_lengths": torch.tensor([4, 2])}
    grid = tl.BatchGrid(global_batch_size=2, data_parallel_size=1, micro_batch_size=2)
    with (
        tl.connect(teacher) as client,
        client.open_session(tl.StudentProfile(batch_grid=grid, top_k=8)) as session,
    ):
        made = nemo_rl.get_topk_logits(session, data, 5)
        with pytest.raises(PayloadInvalidError, match="9 entries a position are wanted"):
            nemo_rl.get_topk_logits(session, data, 9)
        with pytest.raises(PayloadInvalidError, match="k is -1: give a whole number"):
            nemo_rl.get_topk_logits(session, data, -1)

    assert made["topk_logits"].shape == made["topk_indices"].shape == (2, 4, 5)
    assert made["topk_indices"].dtype == torch.int64
    assert not bool(made["topk_logits"][1, 2:].any())


# --- verl


@given(case=cases())
@settings(max_examples=40, deadline=None)
def test_targets_go_into_the_keys_of_verl_and_come_back(case: Case) -> None:
    lengths = torch.tensor(case.lengths)
    batch = verl.to_batch(case.flat_targets(), lengths, with_tail=True)
    targets = verl.to_targets(batch)
    mask = case.counts & targets.valid

    assert batch["teacher_ids"].is_nested
    assert (batch["teacher_ids"].dtype, batch["teacher_logprobs"].dtype) == (
        torch.int32,
        torch.float32,
    )
    for loss in (forward_kl, reverse_kl):
        found, count = loss(case.student, targets, mask)
        wanted, same = loss(case.student, case.flat_targets(), case.counts)
        assert int(count) == int(same)
        assert float(found) == pytest.approx(float(wanted), abs=1e-5)


def test_keys_of_verl_without_a_tail_leave_what_the_k_do_not_have() -> None:
    case = Case([3], torch.zeros(3, V), torch.randn(3, V), torch.ones(3, dtype=torch.bool))
    batch = verl.to_batch(case.flat_targets(), torch.tensor([3]))

    targets = verl.to_targets(batch)

    assert targets.log_tail[:2].exp().tolist() == pytest.approx([1 - K / V] * 2)
    assert sorted(batch) == ["teacher_ids", "teacher_logprobs"]


def test_padded_keys_of_verl_need_to_be_told_where_the_tokens_are() -> None:
    case = Case([2, 3], torch.randn(5, V), torch.randn(5, V), torch.ones(5, dtype=torch.bool))
    nested = verl.to_batch(case.flat_targets(), torch.tensor([2, 3]))
    padded = {name: each.to_padded_tensor(0) for name, each in nested.items()}
    tokens = torch.tensor([[1, 1, 0], [1, 1, 1]])

    found = verl.to_targets(padded, attention_mask=tokens)

    assert torch.equal(found.topk_logprobs, verl.to_targets(nested).topk_logprobs)
    with pytest.raises(PayloadInvalidError, match="has padding, and the attention mask None"):
        verl.to_targets(padded)


def test_the_response_of_verl_counts_from_the_token_in_front_of_it() -> None:
    responses = [torch.tensor([1, 0, 1]), torch.tensor([1])]
    nested = torch.nested.as_nested_tensor(responses, layout=torch.jagged)

    mask = verl.position_mask({"response_mask": nested}, torch.tensor([5, 3]))

    assert mask.tolist() == [0, 1, 0, 1, 0, 0, 1, 0]
    with pytest.raises(PayloadInvalidError, match="a response of 3 tokens and 3 in all"):
        verl.position_mask({"response_mask": nested}, torch.tensor([3, 3]))
