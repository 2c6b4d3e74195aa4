"""What students reported of losses and targets: R03, R16, R21, R31, R48 (trainers: R20, R23)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import teacher_logits_client as tl
from teacher_logits.errors import SessionRefusedError
from teacher_logits_client import Targets, losses, select_top_k, testing
from teacher_logits_client.losses import Tail

if TYPE_CHECKING:
    from collections.abc import Iterator

GRID = tl.BatchGrid(global_batch_size=2, data_parallel_size=1, micro_batch_size=2)
K, V = 8, 40


@pytest.fixture(scope="module")
def client() -> Iterator[tl.Client]:
    with testing.serve() as server, tl.connect(server.address) as connected:
        yield connected


def targets_of(teacher: torch.Tensor) -> Targets:
    kept = select_top_k(teacher, k=K)
    return Targets(
        topk_ids=kept.topk_ids,
        topk_logprobs=kept.topk_logprobs.float(),
        log_tail=kept.log_tail[:, 0],
        actual_logprob=None,
        valid=torch.ones(len(teacher), dtype=torch.bool),
        temperature=1.0,
        row_offsets=torch.tensor([0, len(teacher)]),
    )


@pytest.mark.slow
def test_r03_a_loss_over_4096_tokens_of_151936_ids_takes_less_than_50_mb_beside_its_gradient() -> (
    None
):
    """In a process of its own, for the high-water mark of one that did nothing else is its own."""
    script = Path(__file__).with_name("peak_loss.py")

    said = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=280, check=True
    )
    found = json.loads(said.stdout)

    assert found["extra_mib"] < 50
    assert found["loss"] == pytest.approx(found["dense"], rel=1e-4)


@given(seed=st.integers(0, 10_000))
@settings(max_examples=60, deadline=None)
def test_r16_with_the_tail_as_a_bucket_kl_never_falls_below_zero_nor_its_gradient_dies(
    seed: int,
) -> None:
    """Truncated it does, in 89 % of that report's steps, and a clamp then drops the gradient."""
    chance = torch.Generator().manual_seed(seed)
    teacher, logits = (3 * torch.randn(1, V, generator=chance) for _ in range(2))
    student = logits.double().requires_grad_()
    targets = targets_of(teacher)
    p, q = teacher.double().log_softmax(1), student.detach().log_softmax(1)
    dense = float((p.exp() * (p - q)).sum())

    loss, _ = losses.forward_kl(student, targets)
    loss.backward()
    truncated, _ = losses.forward_kl(student.detach(), targets, tail=Tail.TRUNCATED)

    assert -1e-6 <= float(loss.detach()) <= dense + 1e-5
    if float(truncated) < 0:
        assert student.grad is not None
        assert float(student.grad.abs().sum()) > 1e-3


def test_r21_ragged_rows_have_no_infinity_in_their_targets_and_none_in_a_gradient(
    client: tl.Client,
) -> None:
    rows = [torch.tensor([1, 2, 3, 4, 5]), torch.tensor([7])]
    student = torch.zeros(2, 5, 256, requires_grad=True)
    with (
        client.open_session(tl.StudentProfile(batch_grid=GRID, top_k=K)) as session,
        session.score(rows).result() as payload,
    ):
        targets = payload.targets
        for each in (targets.topk_logprobs, targets.log_tail):
            assert bool(each.isfinite().all())
        loss, _ = losses.reverse_kl(student, targets)
    loss.backward()

    assert student.grad is not None
    assert bool(student.grad.isfinite().all())
    assert not bool(student.grad[1, 1:].any())  # padding


def test_r31_who_computed_a_payload_and_how_is_told_and_may_be_insisted_on(
    client: tl.Client,
) -> None:
    with client.open_session(tl.StudentProfile(batch_grid=GRID)) as session:
        engine, arithmetic = session.teacher.engine, session.teacher.arithmetic_type
    wanted = tl.StudentProfile(batch_grid=GRID, engine=engine, arithmetic_type=arithmetic)
    client.open_session(wanted).close()
    another = tl.StudentProfile(batch_grid=GRID, arithmetic_type="bfloat16")

    with pytest.raises(SessionRefusedError, match="bfloat16") as refused:
        client.open_session(another)

    assert (engine, arithmetic) == ("toy", "float32")
    assert "float32" in str(refused.value)


def test_r48_a_prompt_17_tokens_longer_for_the_teacher_leaves_the_students_positions(
    client: tl.Client,
) -> None:
    rows = [torch.tensor([5, 6, 7, 8]), torch.tensor([9, 10])]
    prefix = list(range(100, 117))
    with client.open_session(tl.StudentProfile(batch_grid=GRID, top_k=K)) as session:
        told = session.score(rows, prefix_ids=[prefix, []]).result()
        whole = session.score([torch.cat([torch.tensor(prefix), rows[0]]), rows[1]]).result()
        with told, whole:
            offsets = told.row_offsets.tolist()
            same = torch.equal(
                told.columns["topk_logprobs"], whole.columns["topk_logprobs"][len(prefix) :]
            )

    assert offsets == [0, 4, 6]
    assert same
