"""The causality probe finds the mistakes that engines make with positions, and passes the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from teacher_logits.errors import AlignmentError
from teacher_logits.terms import Verdict
from teacher_logits_server.engines import EngineProfile, Row
from teacher_logits_server.engines.probe import probe_causality

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

VOCABULARY = 40


class Teacher:
    """Logits from a running mean of random vectors; ``spoil`` sees the rows of a pass whole."""

    def __init__(
        self,
        spoil: Callable[[list[torch.Tensor]], list[torch.Tensor]] = lambda rows: rows,
        *,
        vocabulary_size: int = VOCABULARY,
        max_row_tokens: int = 64,
    ) -> None:
        self.profile = EngineProfile(
            name="mean",
            vocabulary_size=vocabulary_size,
            head_rows=VOCABULARY,
            max_row_tokens=max_row_tokens,
            arithmetic_type="float32",
        )
        self.spoil = spoil
        self.longest = 0
        chance = torch.Generator().manual_seed(0)
        self.vectors = torch.randn(VOCABULARY, VOCABULARY, generator=chance)

    def logits(self, rows: Sequence[Row]) -> Iterator[torch.Tensor]:
        whole = []
        for row in rows:
            self.longest = max(self.longest, len(row.token_ids))
            assert row.token_ids.max() < self.profile.vocabulary_size
            counts = torch.arange(1, len(row.token_ids) + 1).unsqueeze(1)
            whole.append(self.vectors[row.token_ids].cumsum(0) / counts)
        for row, logits in zip(rows, self.spoil(whole), strict=True):
            yield logits[row.first : row.first + row.count]


def test_a_causal_teacher_passes_and_the_check_says_what_was_tried() -> None:
    check = probe_causality(Teacher())
    assert check.name == "causality"
    assert check.verdict is Verdict.PASSED
    assert "of 16 positions" in check.detail
    assert "(0, 8, 15)" in check.detail


def test_a_teacher_of_short_rows_is_probed_with_short_rows() -> None:
    teacher = Teacher(max_row_tokens=2)
    assert probe_causality(teacher).verdict is Verdict.PASSED
    assert teacher.longest == 2


def test_a_vocabulary_of_one_leaves_it_unchecked() -> None:
    assert probe_causality(Teacher(vocabulary_size=1)).verdict is Verdict.UNCHECKED


def test_changed_tokens_stay_inside_the_smallest_vocabulary() -> None:
    assert probe_causality(Teacher(vocabulary_size=2)).verdict is Verdict.PASSED


def late(rows: list[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.cat([torch.ones_like(row[:1]), row[:-1]]) for row in rows]


def early(rows: list[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.cat([row[1:], torch.ones_like(row[:1])]) for row in rows]


def looks_ahead(rows: list[torch.Tensor]) -> list[torch.Tensor]:
    return [row + row[-1:] for row in rows]


def feels_the_rows_beside_it(rows: list[torch.Tensor]) -> list[torch.Tensor]:
    longest = max(map(len, rows))
    return [row * (1.0 + longest - len(row)) for row in rows]


@pytest.mark.parametrize(
    ("spoil", "verdict"),
    [
        pytest.param(late, "late", id="one late"),
        pytest.param(early, "early", id="one early"),
        pytest.param(looks_ahead, "early", id="looks ahead"),
        pytest.param(
            lambda rows: [torch.ones_like(row) for row in rows], "unmoved", id="ignores tokens"
        ),
    ],
)
def test_a_teacher_that_is_off_is_refused_with_the_position(
    spoil: Callable[[list[torch.Tensor]], list[torch.Tensor]], verdict: str
) -> None:
    with pytest.raises(AlignmentError, match=f"engine mean failed, {verdict}: token") as told:
        probe_causality(Teacher(spoil))
    assert told.value.facts["verdict"] == verdict
    assert told.value.facts["position"] in (0, 8, 15)


def test_a_teacher_whose_rows_feel_the_rows_beside_them_is_refused() -> None:
    with pytest.raises(AlignmentError, match="padding must not reach"):
        probe_causality(Teacher(feels_the_rows_beside_it))


def test_a_noisy_teacher_passes_if_its_noise_stays_far_below_what_a_token_does() -> None:
    chance = torch.Generator().manual_seed(1)

    def noisy(rows: list[torch.Tensor]) -> list[torch.Tensor]:
        return [row + 1e-3 * torch.randn(row.shape, generator=chance) for row in rows]

    check = probe_causality(Teacher(noisy))
    assert check.verdict is Verdict.PASSED
    assert "e-03" in check.detail


def test_a_teacher_lost_in_its_noise_is_refused() -> None:
    chance = torch.Generator().manual_seed(1)

    def drowned(rows: list[torch.Tensor]) -> list[torch.Tensor]:
        return [row + torch.randn(row.shape, generator=chance) for row in rows]

    with pytest.raises(AlignmentError, match="unmoved"):
        probe_causality(Teacher(drowned))


def test_a_teacher_that_answers_with_nan_cannot_be_probed() -> None:
    with pytest.raises(AlignmentError, match="row 0 hold a NaN at position 0"):
        probe_causality(Teacher(lambda rows: [row * torch.nan for row in rows]))
