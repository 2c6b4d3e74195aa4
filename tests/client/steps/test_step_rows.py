"""Which rows of a step a rank reads, and which of them are padding: as ``x_token`` cuts them."""

import random

import torch
from hypothesis import given
from hypothesis import strategies as st

import teacher_logits_client as tl
from teacher_logits import x_token
from teacher_logits_client.steps.batches import real_rows_of, rows_of_rank


@given(
    rows=st.integers(1, 40),
    student=st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3)),
    teacher=st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3)),
    seed=st.integers(0, 9),
)
def test_the_padded_batch_is_cut_for_ranks_as_steps_are(
    rows: int, student: tuple[int, int, int], teacher: tuple[int, int, int], seed: int
) -> None:
    """Row for row, what ``x_token`` pads and a rank shards is what a step's batch names."""

    def grid(dp: int, mbs: int, times: int) -> tl.BatchGrid:
        return tl.BatchGrid(
            global_batch_size=dp * mbs * times, data_parallel_size=dp, micro_batch_size=mbs
        )

    ours = grid(*student)
    target = x_token.padding_target(rows, student=ours, teachers=[grid(*teacher)])
    dice = random.Random(seed)
    batch = {
        "row": torch.tensor([dice.randrange(1000) for _ in range(rows)]),
        "sample_mask": torch.ones(rows),
    }
    padded = x_token.pad_distillation_val_batch(batch, target)
    for start in range(0, target, ours.global_batch_size):
        step = {key: value[start : start + ours.global_batch_size] for key, value in padded.items()}
        real_rows = min(max(rows - start, 0), ours.global_batch_size)
        for rank in range(ours.data_parallel_size):
            named = rows_of_rank(tl.StudentProfile(batch_grid=ours, data_parallel_rank=rank))
            real = len(real_rows_of(named, real_rows))
            mask = step["sample_mask"][named.start : named.stop]
            assert mask.tolist() == [1.0] * real + [0.0] * (len(named) - real)
            assert len(named) % ours.micro_batch_size == 0
