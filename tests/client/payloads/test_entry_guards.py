"""What a payload of a sample, or of chosen ids, is held against before it is handed out."""

from dataclasses import replace

import pytest
import torch

from teacher_logits.digest import row_digest
from teacher_logits.errors import AlignmentError, PayloadInvalidError
from teacher_logits.grid import BatchGrid
from teacher_logits.layout import ColumnKind, sampled_columns, scored_id_columns
from teacher_logits.payload import Payload
from teacher_logits.profiles import StudentProfile
from teacher_logits.selection.given_ids import score_given
from teacher_logits.selection.sampling import sample_threshold
from teacher_logits.selection_rules import ClientIds, Nucleus, Sampled
from teacher_logits.terms import Verdict
from teacher_logits_client.payloads.guards import check_scored
from teacher_logits_client.rows import RowBatch, make_row_batch

ROWS = [[3, 5, 2, 7], [1, 6]]
POSITIONS, VOCABULARY, M = 6, 9, 3
NEXT = torch.tensor([5, 2, 7, -1, 6, -1])
IDS = torch.tensor([[5, 0, 1], [0, 1, 3], [0, 1, 2], [4, 5, 6], [6, 7, 8], [2, 1, 0]])
PROFILE = StudentProfile(
    batch_grid=BatchGrid(global_batch_size=2, data_parallel_size=1, micro_batch_size=1),
    top_k=M,
    selection=Sampled(seed=4),
)
Columns = dict[ColumnKind, torch.Tensor]


def a_batch(**given: object) -> RowBatch:
    batch = make_row_batch(ROWS, vocabulary_size=VOCABULARY, prefix_vocabulary_size=VOCABULARY)
    return replace(batch, **given)  # type: ignore[arg-type]


def logits() -> torch.Tensor:
    return torch.randn(POSITIONS, VOCABULARY, generator=torch.Generator().manual_seed(3))


def rows() -> Columns:
    digests = bytearray(b"".join(row_digest(row) for row in ROWS))
    return {
        ColumnKind.ROW_OFFSETS: torch.tensor([0, 4, 6]),
        ColumnKind.ROW_WINDOWS: torch.tensor([[0, 4], [0, 2]], dtype=torch.int32),
        ColumnKind.ROW_DIGESTS: torch.frombuffer(digests, dtype=torch.uint8).view(2, 16),
        ColumnKind.ROW_STATUS: torch.zeros(2, dtype=torch.uint8),
    }


def a_payload(**given: object) -> Payload:
    values = {
        "payload_id": "p-1",
        "teacher_id": "teacher",
        "teacher_revision": "",
        "first_row": 0,
        "row_count": 2,
        "position_count": POSITIONS,
        "top_k": M,
        "temperatures": (1.0,),
        "vocabulary_size": VOCABULARY,
        **given,
    }
    return Payload(**values)  # type: ignore[arg-type]


def sampled() -> tuple[Payload, Columns]:
    columns, size = sampled_columns(row_count=2, position_count=POSITIONS, entry_count=M)
    drawn = torch.full((POSITIONS,), 0.4, dtype=torch.float64)
    sample = sample_threshold(logits(), m=M, uniforms=drawn)
    return a_payload(columns=columns, size_bytes=size, selection=Sampled(seed=4)), {
        ColumnKind.SAMPLED_IDS: sample.ids,
        ColumnKind.SAMPLED_WEIGHTS: sample.weights.float(),
        ColumnKind.ENTROPY: sample.entropy.float(),
        ColumnKind.ACTUAL_LOGPROB: torch.full((POSITIONS,), -1.0),
        **rows(),
    }


def chosen() -> tuple[Payload, Columns]:
    columns, size = scored_id_columns(
        row_count=2, position_count=POSITIONS, entry_count=M, temperature_count=1
    )
    scores = score_given(logits(), IDS, next_ids=NEXT)
    assert scores.actual_logprob is not None
    return a_payload(columns=columns, size_bytes=size, selection=ClientIds()), {
        ColumnKind.SCORED_IDS: IDS.int(),
        ColumnKind.SCORED_LOGPROBS: scores.logprobs,
        ColumnKind.LOG_TAIL: scores.log_tail,
        ColumnKind.LOGSUMEXP: scores.logsumexp,
        ColumnKind.ACTUAL_LOGPROB: scores.actual_logprob,
        **rows(),
    }


def check(made: tuple[Payload, Columns], batch: RowBatch | None) -> dict[str, Verdict]:
    payload, columns = made
    found = check_scored(payload, columns, batch=batch, profile=PROFILE, reject_bad_rows=True)
    return {each.name: each.verdict for each in found}


class TestSamples:
    def test_that_are_right_pass_and_say_that_there_is_nothing_to_look_up(self) -> None:
        assert check(sampled(), a_batch(seed=4)) == {
            "row_status": Verdict.PASSED,
            "row_digests": Verdict.PASSED,
            "lookup_identity": Verdict.UNCHECKED,
        }

    def test_of_another_seed_than_was_sent_are_refused(self) -> None:
        with pytest.raises(PayloadInvalidError, match=r"Sampled\(seed=4\); .* Sampled\(seed=5\)"):
            check(sampled(), a_batch(seed=5))

    def test_of_another_session_have_any_seed(self) -> None:
        payload, columns = sampled()

        check((replace(payload, selection=Sampled(seed=99)), columns), None)

    def test_of_another_size_are_refused(self) -> None:
        payload, columns = sampled()

        with pytest.raises(PayloadInvalidError, match=r"K = 2 .* asked for K = 3"):
            check((replace(payload, top_k=2), columns), a_batch(seed=4))

    def test_whose_weights_were_damaged_are_refused_by_row_and_position(self) -> None:
        payload, columns = sampled()
        columns[ColumnKind.SAMPLED_WEIGHTS][4, 1] += 0.01

        with pytest.raises(PayloadInvalidError, match="row 1, position 0: weights"):
            check((payload, columns), a_batch(seed=4))

    def test_are_no_nucleus(self) -> None:
        payload, columns = sampled()
        asked = replace(PROFILE, selection=Nucleus(mass=0.5))

        with pytest.raises(PayloadInvalidError, match=r"entries of Sampled\(seed=4\)"):
            check_scored(payload, columns, batch=None, profile=asked, reject_bad_rows=True)


class TestChosenIds:
    def test_that_are_right_pass(self) -> None:
        found = check(chosen(), a_batch(chosen=IDS.int(), seed=4))

        assert set(found.values()) == {Verdict.PASSED}

    def test_other_ids_than_were_sent_are_refused(self) -> None:
        sent = IDS.int().clone()
        sent[2, 1] = 8

        with pytest.raises(PayloadInvalidError, match=r"position 2 .* were sent"):
            check(chosen(), a_batch(chosen=sent))

    def test_the_k_best_in_their_stead_are_refused(self) -> None:
        with pytest.raises(PayloadInvalidError, match=r"entries of Sampled.* asked for ClientIds"):
            check(sampled(), a_batch(chosen=IDS.int()))

    def test_another_log_probability_of_the_next_token_is_found(self) -> None:
        payload, columns = chosen()
        columns[ColumnKind.ACTUAL_LOGPROB][4] -= 0.01

        with pytest.raises(AlignmentError, match="position 4: the token that comes next is 6"):
            check((payload, columns), a_batch(chosen=IDS.int()))

    def test_where_no_next_token_is_among_them_nothing_was_looked_up(self) -> None:
        payload, columns = chosen()
        ids = torch.tensor([[8, 0, 1]] * POSITIONS)
        scores = score_given(logits(), ids)
        columns[ColumnKind.SCORED_IDS], columns[ColumnKind.SCORED_LOGPROBS] = (
            ids.int(),
            scores.logprobs,
        )
        columns[ColumnKind.LOG_TAIL] = scores.log_tail

        found = check((payload, columns), a_batch(chosen=ids.int()))

        assert found["lookup_identity"] is Verdict.UNCHECKED

    def test_a_tail_that_is_another_is_refused(self) -> None:
        payload, columns = chosen()
        columns[ColumnKind.LOG_TAIL][5] += 0.01

        with pytest.raises(PayloadInvalidError, match=r"row 1, position 1: .* sum to one"):
            check((payload, columns), a_batch(chosen=IDS.int()))

    def test_of_another_session_are_what_they_say(self) -> None:
        assert check(chosen(), None)["row_status"] is Verdict.PASSED
