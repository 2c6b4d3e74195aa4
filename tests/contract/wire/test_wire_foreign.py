"""Messages of a peer of another make: read, or refused by an error of the tree."""

from __future__ import annotations

import inspect
import pkgutil
import random
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

import pytest
import torch
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.encoded import written
from tests.foreign import filled, message_class

from teacher_logits import wire
from teacher_logits.errors import RequestInvalidError, TeacherLogitsError
from teacher_logits.wire import errors, session

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MODULES = [
    import_module(each.name) for each in pkgutil.walk_packages(wire.__path__, f"{wire.__name__}.")
] + [wire]
TRIES = 12
"""Messages of each kind and example."""


def readers() -> Iterator[tuple[str, Callable[[random.Random], object]]]:
    """Everything that reads a message, with one of its messages at random."""
    payload = written(torch.zeros(2, 8), top_k=2).payload
    for module in MODULES:
        for name, read in vars(module).items():
            if not name.endswith("_from_wire") or not inspect.isfunction(read):
                continue
            first, *more = inspect.signature(read).parameters.values()
            if read.__module__ != module.__name__ or ".v1" in first.annotation:
                continue
            if "_pb2." not in first.annotation and not first.annotation.startswith("messages."):
                continue  # a number
            given = {"payload": payload, "slab_id": "s-1"}
            rest = {each.name: given[each.name] for each in more if each.name in given}
            where = module.__name__.removeprefix(f"{wire.__name__}.")
            make = message_class(first.annotation)
            yield f"{where}.{name}", partial(_read_one, read, make, rest)


def _read_one(
    read: Callable[..., object],
    make: Callable[[], object],
    rest: dict[str, object],
    dice: random.Random,
) -> object:
    return read(filled(dice, make()), **rest)


READERS = dict(readers())


def test_every_reader_is_among_them() -> None:
    assert len(READERS) == len(list(readers()))
    names = {name.rpartition(".")[2] for name in READERS}
    assert {
        *("session_from_wire", "lease_from_wire", "mail_from_wire", "student_from_wire")
    } <= names


@pytest.mark.parametrize("name", READERS)
@settings(max_examples=15)
@given(seed=st.integers(0, 1 << 32))
def test_a_message_is_read_or_refused_by_the_tree(name: str, seed: int) -> None:
    dice = random.Random(seed)
    for _ in range(TRIES):
        try:
            READERS[name](dice)
        except TeacherLogitsError:
            continue


@settings(max_examples=50)
@given(seed=st.integers(0, 1 << 32))
def test_a_status_is_an_error_or_none(seed: int) -> None:
    dice = random.Random(seed)
    status = filled(dice, status_pb2.Status())
    for details in (
        error_details_pb2.ErrorInfo,
        error_details_pb2.BadRequest,
        error_details_pb2.RetryInfo,
    ):
        detail = filled(dice, details())
        if isinstance(detail, error_details_pb2.ErrorInfo):
            detail.domain = errors.DOMAIN
            detail.reason = dice.choice(sorted(errors.BY_REASON))
        status.details.add().Pack(detail)

    found = errors.from_status(status)

    assert found is None or isinstance(found, TeacherLogitsError)


@pytest.mark.parametrize("span", [(2**63 - 1, 0), (-(2**63), 0), (-1, 0)])
def test_a_span_of_time_that_is_none_is_refused_with_its_numbers(span: tuple[int, int]) -> None:
    seconds, nanos = span

    with pytest.raises(RequestInvalidError, match="ttl is") as refusal:
        session.duration_from_wire(Duration(seconds=seconds, nanos=nanos), field="ttl")
    assert refusal.value.facts == {"field": "ttl", "seconds": seconds, "nanos": nanos}
