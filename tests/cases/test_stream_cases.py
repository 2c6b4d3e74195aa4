"""Soft cross entropy over tiles of the vocabulary, and its state after each of them."""

from __future__ import annotations

import pytest
import torch
from tests.cases.golden import arrays

from teacher_logits_client.losses import dense_forward_kl, dense_soft_cross_entropy
from teacher_logits_client.losses.streaming import StreamedSums

GOLDEN = {
    key: torch.from_numpy(value) for key, value in arrays("losses_golden.npz", "stream/").items()
}
TILE = int(GOLDEN["tile"])
STUDENT, TEACHER = GOLDEN["student_logits"], GOLDEN["teacher_logits"]
LOSSES = {"ce": dense_soft_cross_entropy, "kl": dense_forward_kl}
TILES = [TILE, 1, STUDENT.shape[1]]


def assert_near(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.allclose(got, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("number", range(len(GOLDEN["acc"])))
def test_acc(number: int) -> None:
    sums = StreamedSums.of_none(len(STUDENT), STUDENT.dtype, STUDENT.device)
    for each in range(number + 1):
        columns = slice(each * TILE, (each + 1) * TILE)
        sums.fold(TEACHER[:, columns], STUDENT[:, columns])

    # There d and e are of the logits themselves, and here of how far they are below the largest.
    cross = sums.cross + sums.student_top * sums.teacher_sum
    entropy = sums.entropy + sums.teacher_top * sums.teacher_sum
    tops = sums.teacher_top, sums.teacher_sum, sums.student_top, sums.student_sum
    assert_near(torch.stack([*tops, cross, entropy]), GOLDEN["acc"][number])


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("name", LOSSES)
class TestLosses:
    def test_values(self, name: str, tile: int) -> None:
        each = torch.arange(len(STUDENT))

        sums, counts = LOSSES[name](STUDENT, TEACHER, bin_ids=each, bins=len(each), tile=tile)

        assert_near(sums, GOLDEN[name])
        assert counts.tolist() == [1] * len(each)

    def test_dz(self, name: str, tile: int) -> None:
        leaf = STUDENT.clone().requires_grad_()
        LOSSES[name](leaf, TEACHER, tile=tile)[0].backward()

        assert leaf.grad is not None
        assert_near(leaf.grad, GOLDEN["dz"])
