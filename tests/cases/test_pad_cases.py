"""Padding of a validation batch against NeMo RL's own answers; ours where theirs are defects.

Every case falls under exactly one of the three tests.
"""

import copy

import pytest
import torch
from tests.cases.golden import PadCase, Value, each, pad_cases

from teacher_logits.errors import PayloadInvalidError
from teacher_logits.x_token import PaddingTargetError, pad_distillation_val_batch

Batch = dict[str, object]

CASES = pad_cases("pad_cases.jsonl")


def rows_of(value: Value) -> int | None:
    """None where a tensor has no dimension."""
    shape = value["shape"] if value["kind"] == "tensor" else [len(value["data"])]
    return shape[0] if shape else None


def padded_wrongly(case: PadCase) -> bool:
    """Whether upstream's answer, though no error, is not a batch of `target_size` rows."""
    if case.expected is None:
        return False
    return {rows_of(value) for value in case.expected.values()} - {case.target_size} != set()


def batch_of(values: dict[str, Value]) -> Batch:
    return {key: _made(value) for key, value in values.items()}


def _made(value: Value) -> object:
    if value["kind"] == "tensor":
        dtype = getattr(torch, value["dtype"])
        return torch.tensor(value["data"], dtype=dtype).reshape(value["shape"])
    if value["kind"] == "list":
        return copy.deepcopy(value["data"])
    raise ValueError(f"a case holds a {value['kind']}, which this test cannot make")


def assert_same(found: Batch, expected: Batch) -> None:
    """Keys in order, types, element types and values, to the bit."""
    assert list(found) == list(expected)
    for key, value in expected.items():
        assert type(found[key]) is type(value), key
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(found[key], value, rtol=0, atol=0, equal_nan=True)
        else:
            assert found[key] == value, key


@each([case for case in CASES if case.expected is not None and not padded_wrongly(case)])
def test_a_batch_is_padded_as_upstream_pads_it(case: PadCase) -> None:
    assert case.expected is not None
    batch = batch_of(case.batch)

    padded = pad_distillation_val_batch(batch, case.target_size)

    assert_same(padded, batch_of(case.expected))
    assert (padded is batch) == case.same_object
    assert_same(batch, batch_of(case.batch))


@each([case for case in CASES if padded_wrongly(case)])
def test_what_upstream_pads_wrongly_is_refused(case: PadCase) -> None:
    """Upstream returns keys of other row counts than asked for, and says nothing.

    Ours differs on purpose: an empty tensor has no row to repeat and stays empty there, and
    keys that differ stay different; the next stage would slice rows that do not belong together.
    """
    batch = batch_of(case.batch)

    with pytest.raises(PayloadInvalidError, match=r"rows"):
        pad_distillation_val_batch(batch, case.target_size)

    assert_same(batch, batch_of(case.batch))


@each([case for case in CASES if case.expected is None])
def test_what_upstream_stumbles_over_is_refused_by_name(case: PadCase) -> None:
    """Upstream's KeyError, TypeError or IndexError says where it fell; ours says what to change."""
    batch = batch_of(case.batch)
    refusal = PaddingTargetError if case.error == "AssertionError" else PayloadInvalidError

    with pytest.raises(refusal):
        pad_distillation_val_batch(batch, case.target_size)

    assert_same(batch, batch_of(case.batch))
