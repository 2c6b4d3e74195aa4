"""Rows and fields that mean nothing are refused in words of ours, and no loss is handed a NaN."""

from __future__ import annotations

import math

import pytest
import torch

from teacher_logits.errors import PayloadInvalidError
from teacher_logits_client.data_plane.fields import TopKForm
from teacher_logits_client.data_plane.jagged import pack_jagged
from teacher_logits_client.data_plane.padded import pad_jagged
from teacher_logits_client.data_plane.row_meta import RowMeta
from teacher_logits_client.trainers import nemo_rl

IDS = torch.randint(0, 9, (2, 5))
NAN, INF = math.nan, math.inf


@pytest.mark.parametrize("lengths", [None, 5, "53", [5, NAN], [5, 10**30]])
def test_lengths_that_are_none_pack_nothing(lengths: object) -> None:
    with pytest.raises(PayloadInvalidError, match="length"):
        pack_jagged({"input_ids": IDS}, lengths)  # type: ignore[arg-type]


@pytest.mark.parametrize("fields", [None, [IDS], {"input_ids": "x"}, {"input_ids": IDS.to("meta")}])
def test_fields_are_tensors_by_their_names(fields: object) -> None:
    with pytest.raises(PayloadInvalidError):
        pack_jagged(fields, [5, 3])  # type: ignore[arg-type]
    with pytest.raises(PayloadInvalidError):
        pad_jagged(fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("pad", ["x", NAN, INF, 300, 0.5])
def test_padding_is_a_number_that_the_field_holds(pad: object) -> None:
    packed = pack_jagged({"input_ids": IDS.to(torch.int8)}, [5, 3])
    with pytest.raises(PayloadInvalidError, match=r"input_ids is torch.int8"):
        pad_jagged(packed, pad_values={"input_ids": pad})  # type: ignore[dict-item]


def test_a_form_is_of_types_and_a_list_of_names() -> None:
    with pytest.raises(PayloadInvalidError, match="floating-point"):
        TopKForm(k=1, value_type="float32")  # type: ignore[arg-type]
    with pytest.raises(PayloadInvalidError, match="a list of names"):
        TopKForm(k=1).train_fields("input_ids")


@pytest.mark.parametrize(
    "given",
    [
        {"partition_id": None},
        {"partition_id": ""},
        {"sample_ids": "ab"},
        {"sample_ids": None},
        {"sequence_lengths": 5},
        {"tags": "ab"},
        {"pad_to_seqlen": None},
        {"pad_to_seqlen": -1},
        {"pad_to_seqlen": NAN},
    ],
)
def test_rows_are_of_a_partition_and_lists_of_them(given: dict[str, object]) -> None:
    told = {"partition_id": "t", "sample_ids": ("a", "b"), "sequence_lengths": (1, 2), **given}
    with pytest.raises(PayloadInvalidError, match=next(iter(given))):
        RowMeta(**told)  # type: ignore[arg-type]


def test_one_row_is_dropped_by_its_name_and_not_by_its_letters() -> None:
    meta = RowMeta(partition_id="t", sample_ids=("a", "b", "ab"), sequence_lengths=(1, 2, 3))

    assert meta.drop("ab").sample_ids == ("a", "b")
    with pytest.raises(PayloadInvalidError, match=r"row 0\.5 is wanted"):
        meta.take([0.5])  # type: ignore[list-item]


def batch(**given: torch.Tensor) -> dict[str, torch.Tensor]:
    """Two rows of 4 tokens, the second one padded: 3 positions count of the first, 2 of it."""
    return {
        "input_lengths": torch.tensor([4, 3]),
        "token_mask": torch.ones(2, 4),
        "sample_mask": torch.ones(2),
        "teacher_topk_logits": torch.randn(2, 4, 3),
        "teacher_topk_indices": torch.randint(0, 9, (2, 4, 3)),
        **given,
    }


def at(row: int, position: int, value: float, like: torch.Tensor) -> torch.Tensor:
    made = like.clone()
    made[row, position] = value
    return made


VALUES, TAIL = torch.randn(2, 4, 3), torch.full((2, 4), -3.0)
CHOSEN = torch.arange(24).reshape(2, 4, 3)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"teacher_topk_logits": at(1, 0, NAN, VALUES)}, "a value that is NaN or"),
        ({"teacher_topk_logits": at(1, 0, INF, VALUES)}, "a value that is NaN or"),
        ({"teacher_topk_logits": at(1, 0, -INF, VALUES)}, "no value above -inf"),
        ({"teacher_topk_indices": at(1, 0, 2**40, CHOSEN)}, "an id beyond int32"),
        ({"teacher_topk_indices": at(1, 0, -7, CHOSEN)}, "an id beyond int32"),
        ({"teacher_log_tail": at(1, 0, NAN, TAIL)}, "a tail that is NaN"),
        ({"teacher_log_tail": at(1, 0, INF, TAIL)}, "a tail that is NaN"),
        ({"token_mask": at(1, 1, NAN, torch.ones(2, 4))}, "a mask that is no number"),
    ],
)
def test_what_a_loss_would_spread_is_refused_at_its_position(
    given: dict[str, torch.Tensor], told: str
) -> None:
    with pytest.raises(PayloadInvalidError, match=f"position 0 of row 1 counts, and has {told}"):
        nemo_rl.to_targets(batch(**given))


def test_padding_may_be_anything() -> None:
    wild = VALUES.clone()
    wild[:, 3], wild[1, 2] = NAN, INF
    targets = nemo_rl.to_targets(batch(teacher_topk_logits=wild))

    assert targets.topk_logprobs.isfinite().all()
    assert int(targets.valid.sum()) == 5


def test_an_entry_of_no_mass_is_absent_and_makes_no_nan() -> None:
    some = VALUES.clone()
    some[0, 0, 1] = -INF
    targets = nemo_rl.to_targets(batch(teacher_topk_logits=some))

    assert targets.topk_logprobs.isfinite().all()
    assert float(targets.topk_logprobs[0].exp().sum()) == pytest.approx(1.0)


def test_positions_have_an_entry() -> None:
    none = {"teacher_topk_logits": VALUES[..., :0], "teacher_topk_indices": VALUES[..., :0].long()}
    with pytest.raises(PayloadInvalidError, match="0 entries"):
        nemo_rl.to_targets(batch(**none))
    with pytest.raises(PayloadInvalidError, match="give a mapping"):
        nemo_rl.to_targets([VALUES])  # type: ignore[arg-type]
