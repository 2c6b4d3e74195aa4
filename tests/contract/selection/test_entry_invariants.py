"""What must hold of samples and of chosen ids, by row and position; damage is found."""

from collections.abc import Callable

import pytest
import torch

from teacher_logits.errors import PayloadInvalidError
from teacher_logits.layout import ColumnKind as Kind
from teacher_logits.selection.given_ids import score_given
from teacher_logits.selection.invariants import check_invariants
from teacher_logits.selection.sampling import sample_threshold

VOCABULARY, POSITIONS = 40, 5
TEMPERATURES = (1.0, 2.0)
Columns = dict[Kind, torch.Tensor]


def logits() -> torch.Tensor:
    return torch.randn(POSITIONS, VOCABULARY, generator=torch.Generator().manual_seed(1)) * 2


def rows() -> Columns:
    return {
        Kind.ROW_OFFSETS: torch.tensor([0, 3, 5]),
        Kind.ROW_WINDOWS: torch.tensor([[0, 3], [0, 2]], dtype=torch.int32),
        Kind.ROW_STATUS: torch.zeros(2, dtype=torch.uint8),
    }


def sampled() -> Columns:
    sample = sample_threshold(
        logits(), m=6, uniforms=torch.full((POSITIONS,), 0.3, dtype=torch.float64)
    )
    return {
        Kind.SAMPLED_IDS: sample.ids,
        Kind.SAMPLED_WEIGHTS: sample.weights.float(),
        Kind.ENTROPY: sample.entropy.float(),
        Kind.ACTUAL_LOGPROB: torch.full((POSITIONS,), -1.0),
        **rows(),
    }


def chosen() -> Columns:
    ids = torch.arange(4).repeat(POSITIONS, 1)
    ids[4, 3] = -1
    scores = score_given(logits(), ids, temperatures=TEMPERATURES)
    return {
        Kind.SCORED_IDS: ids.int(),
        Kind.SCORED_LOGPROBS: scores.logprobs,
        Kind.LOG_TAIL: scores.log_tail,
        Kind.LOGSUMEXP: scores.logsumexp,
        Kind.ACTUAL_LOGPROB: torch.full((POSITIONS,), -1.0),
        **rows(),
    }


@pytest.mark.parametrize("made", [sampled, chosen])
def test_what_is_right_passes(made: Callable[[], Columns]) -> None:
    check_invariants(made(), vocab_size=VOCABULARY, temperatures=TEMPERATURES)


@pytest.mark.parametrize(
    ("made", "kind", "value", "rule"),
    [
        (sampled, Kind.SAMPLED_IDS, VOCABULARY, "outside the vocabulary"),
        (sampled, Kind.SAMPLED_IDS, -2, "outside the vocabulary"),
        (sampled, Kind.SAMPLED_IDS, -1, "a weight without an id"),
        (sampled, Kind.SAMPLED_WEIGHTS, -0.1, "NaN, below 0 or above 1"),
        (sampled, Kind.SAMPLED_WEIGHTS, torch.nan, "NaN, below 0 or above 1"),
        (sampled, Kind.SAMPLED_WEIGHTS, 0.0, "do not sum to one"),
        (sampled, Kind.ENTROPY, 9.0, "an entropy outside"),
        (sampled, Kind.ENTROPY, torch.nan, "an entropy outside"),
        (sampled, Kind.ACTUAL_LOGPROB, 1.0, "actual_logprob"),
        (chosen, Kind.SCORED_IDS, VOCABULARY, "outside the vocabulary"),
        (chosen, Kind.SCORED_IDS, -1, "a log-probability without an id"),
        (chosen, Kind.SCORED_LOGPROBS, torch.nan, "NaN or above 0"),
        (chosen, Kind.SCORED_LOGPROBS, -0.01, "do not sum to one at temperature 1"),
        (chosen, Kind.LOG_TAIL, -9.0, "do not sum to one at temperature 1"),
        (chosen, Kind.LOG_TAIL, torch.nan, "NaN or above 0"),
        (chosen, Kind.LOGSUMEXP, torch.inf, "logsumexp that is not finite"),
        (chosen, Kind.ACTUAL_LOGPROB, torch.nan, "actual_logprob"),
    ],
)
def test_damage_is_named_by_row_and_position(
    made: Callable[[], Columns], kind: Kind, value: float, rule: str
) -> None:
    columns = made()
    if columns[kind].dim() == 1:
        columns[kind][3] = value
    else:
        columns[kind][3, 0] = value

    with pytest.raises(PayloadInvalidError, match=rf"row 1, position 0: .*{rule}"):
        check_invariants(columns, vocab_size=VOCABULARY, temperatures=TEMPERATURES)


@pytest.mark.parametrize(("made", "kind"), [(sampled, Kind.SAMPLED_IDS), (chosen, Kind.SCORED_IDS)])
def test_an_id_that_stands_there_twice_is_named(made: Callable[[], Columns], kind: Kind) -> None:
    columns = made()
    columns[kind][1, 1] = columns[kind][1, 0]

    with pytest.raises(PayloadInvalidError, match=r"row 0, position 1: .*stands there twice"):
        check_invariants(columns, vocab_size=VOCABULARY, temperatures=TEMPERATURES)


def test_a_tail_of_another_temperature_is_found() -> None:
    columns = chosen()
    columns[Kind.LOG_TAIL] = columns[Kind.LOG_TAIL].flip(1)

    with pytest.raises(PayloadInvalidError, match="do not sum to one"):
        check_invariants(columns, vocab_size=VOCABULARY, temperatures=TEMPERATURES)


@pytest.mark.parametrize(
    ("made", "kind"), [(sampled, Kind.SAMPLED_WEIGHTS), (chosen, Kind.LOG_TAIL)]
)
def test_a_column_that_is_missing_is_named(made: Callable[[], Columns], kind: Kind) -> None:
    columns = made()
    del columns[kind]

    with pytest.raises(PayloadInvalidError, match=f"no column {kind.value}"):
        check_invariants(columns, vocab_size=VOCABULARY, temperatures=TEMPERATURES)


def test_rows_that_are_bad_are_not_looked_at() -> None:
    columns = sampled()
    columns[Kind.ROW_STATUS][1] = 1
    columns[Kind.SAMPLED_WEIGHTS][3:] = torch.nan

    check_invariants(columns, vocab_size=VOCABULARY)
