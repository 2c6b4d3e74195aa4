"""Slabs of a teacher worker's own: who reads, who frees, and what a death leaves behind."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from teacher_logits.errors import (
    PayloadInvalidError,
    PayloadRetiredError,
    PoolFullError,
    SlabOpenError,
)
from teacher_logits_client.ray import slab_reading
from teacher_logits_client.ray.opening import open_payload
from teacher_logits_client.ray.slab_reading import open_slab
from teacher_logits_client.ray.slab_references import SlabReference
from teacher_logits_client.ray.slab_room import SlabRoom
from teacher_logits_client.ray.teacher import DeferredTeacher

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from teacher_logits_client.ray.rooms import DeferredPayload

SHAPE = (2, 4, 8)
SIZE = 2 * 4 * 8 * 12


@pytest.fixture
def room() -> Iterator[SlabRoom]:
    made = SlabRoom(budget_bytes=3 * SIZE)
    yield made
    made.close()


def put(room: SlabRoom, value: float) -> DeferredPayload:
    teacher = DeferredTeacher(data_parallel_rank=0, room=room)
    tensors = {
        "topk_logits": torch.full(SHAPE, value),
        "topk_indices": torch.zeros(SHAPE, dtype=torch.int64),
    }
    return teacher.put(tensors, step=int(value), rows=range(2))


def reference_of(payload: DeferredPayload) -> SlabReference:
    assert isinstance(payload.source, SlabReference)
    return payload.source


def read(payload: DeferredPayload) -> torch.Tensor:
    return open_payload(payload).views()["topk_logits"]


def await_true(look: Callable[[], bool], what: str) -> None:
    """Wait for what another thread or process does soon."""
    until = time.monotonic() + 30
    while not look():
        assert time.monotonic() < until, what
        os.sched_yield()


def has_room(room: SlabRoom) -> bool:
    try:
        room.give_back(room.take(SIZE))
    except PoolFullError:
        return False
    return True


def test_a_reader_sees_what_was_put_where_it_lies(room: SlabRoom) -> None:
    first, second = put(room, 1.0), put(room, 2.0)

    assert torch.equal(read(first), torch.full(SHAPE, 1.0))
    assert torch.equal(read(second), torch.full(SHAPE, 2.0))


def test_arithmetic_in_place_stays_with_the_reader(room: SlabRoom) -> None:
    payload = put(room, 1.0)
    read(payload).add_(5)

    assert torch.equal(read(payload), torch.full(SHAPE, 1.0))


def test_a_slab_is_written_into_again_when_others_were_put_after_it(room: SlabRoom) -> None:
    """Two slabs take turns, whatever the number of steps."""
    places = set()
    for step in range(1, 9):
        payload = put(room, float(step))
        places.add(reference_of(payload).number)
        assert torch.equal(read(payload), torch.full(SHAPE, float(step)))
        await_true(lambda: not room.is_read(), "its reader's end was not heard")
    assert places == {0, 1}


def test_a_payload_that_was_written_over_is_refused(room: SlabRoom) -> None:
    old = put(room, 1.0)
    put(room, 2.0)
    put(room, 3.0)

    with pytest.raises(PayloadRetiredError, match="keep"):
        read(old)


def test_a_slab_is_mapped_once_for_all_of_its_payloads(room: SlabRoom) -> None:
    """And shows each as it was put, whatever was done to the one before."""
    places = set()
    for step in range(1, 9):
        view = read(put(room, float(step)))
        assert torch.equal(view, torch.full(SHAPE, float(step)))
        view.mul_(-1)
        places.add(view.data_ptr())
        del view
        await_true(lambda: not room.is_read(), "its reader's end was not heard")
    assert len(places) == 2


def test_two_readers_of_a_payload_have_a_map_each(room: SlabRoom) -> None:
    payload = put(room, 1.0)
    first, second = read(payload), read(payload)
    first.add_(1)

    assert torch.equal(second, torch.full(SHAPE, 1.0))


def test_a_map_goes_when_its_owner_has_closed_the_slab(room: SlabRoom) -> None:
    gone = SlabRoom(budget_bytes=SIZE)
    payload = put(gone, 1.0)
    name = reference_of(payload).socket_name
    read(payload)
    assert any(name in key for key in slab_reading._idle)
    gone.close()
    read(put(room, 1.0))

    assert not any(name in key for key in slab_reading._idle)


def test_a_retired_payload_keeps_no_room_that_nobody_reads(room: SlabRoom) -> None:
    numbers = set()
    for step in range(1, 5):
        numbers.add(reference_of(put(room, float(step))).number)
        room.retire()
    assert numbers == {0}


def test_a_slab_that_is_read_is_not_written_into(room: SlabRoom) -> None:
    held = read(put(room, 1.0))
    for step in (2.0, 3.0, 4.0):
        put(room, step)

    assert torch.equal(held, torch.full(SHAPE, 1.0))


def test_a_budget_spent_on_readers_is_an_error_until_they_let_go(room: SlabRoom) -> None:
    held = [read(put(room, float(step))) for step in (1, 2, 3)]
    with pytest.raises(PoolFullError) as refusal:
        put(room, 4.0)
    assert refusal.value.facts == {"need": SIZE, "held": 3 * SIZE, "budget": 3 * SIZE}

    held.pop(0)
    await_true(lambda: has_room(room), "the room of a view that is gone")


def test_a_payload_that_fits_no_slab_takes_the_place_of_free_ones(room: SlabRoom) -> None:
    put(room, 1.0)
    put(room, 2.0)
    room.give_back(room.take(2 * SIZE))

    with pytest.raises(PoolFullError):
        room.take(3 * SIZE)


def test_a_payload_stays_until_it_can_have_been_opened() -> None:
    with pytest.raises(PayloadInvalidError, match="keep is 0"):
        SlabRoom(budget_bytes=SIZE, keep=0)


READER = """
import sys
from teacher_logits.payload import Extent
from teacher_logits_client.ray.slab_reading import open_slab
from teacher_logits_client.ray.slab_references import SlabReference
slab_id, size, generation, number, name, secret = sys.argv[1:]
extent = Extent(slab_id=slab_id, offset_bytes=0, size_bytes=int(size), slot=0,
                generation=int(generation))
held = open_slab(SlabReference(extent=extent, number=int(number), socket_name=name,
                               secret=bytes.fromhex(secret), host="", pid=0))
print("open", flush=True)
sys.stdin.read()
"""


def test_a_reader_that_is_killed_lets_go(room: SlabRoom) -> None:
    reference = reference_of(put(room, 1.0))
    extent = reference.extent
    told = (extent.slab_id, extent.size_bytes, extent.generation, reference.number,
            reference.socket_name, reference.secret.hex())  # fmt: skip
    command = [sys.executable, "-c", READER, *map(str, told)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == b"open\n"
        assert room.is_read()
        reader.kill()
    await_true(lambda: not room.is_read(), "a dead reader's end was not heard")


OWNER = """
import sys, torch
from teacher_logits_client.ray.slab_room import SlabRoom
from teacher_logits_client.ray.teacher import DeferredTeacher
room = SlabRoom(budget_bytes=1 << 20)
teacher = DeferredTeacher(data_parallel_rank=0, room=room)
told = {"topk_logits": torch.ones(2, 4, 8), "topk_indices": torch.zeros(2, 4, 8).long()}
source = teacher.put(told, step=1, rows=range(2)).source
extent = source.extent
print(extent.slab_id, extent.size_bytes, extent.generation, source.number, source.socket_name,
      source.secret.hex(), flush=True)
sys.stdin.read()
"""


def test_what_is_open_outlives_a_killed_owner_and_nothing_else_does(room: SlabRoom) -> None:
    command = [sys.executable, "-c", OWNER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        slab_id, size, generation, number, name, secret = owner.stdout.readline().decode().split()
        mine = reference_of(put(room, 1.0))
        reference = replace(
            mine,
            extent=replace(
                mine.extent, slab_id=slab_id, size_bytes=int(size), generation=int(generation)
            ),
            number=int(number),
            socket_name=name,
            secret=bytes.fromhex(secret),
            pid=owner.pid,
        )
        held = open_slab(reference)
        owner.kill()

    assert held[: 4 * 64].view(np.float32).tolist() == [1.0] * 64
    del held
    assert not any(name in key for key in slab_reading._idle)
    with pytest.raises(SlabOpenError, match=f"process {owner.pid}"):
        open_slab(reference)


def test_who_does_not_have_the_secret_is_hung_up_on(room: SlabRoom) -> None:
    reference = replace(reference_of(put(room, 1.0)), secret=bytes(16))

    with pytest.raises(SlabOpenError, match="hung up"):
        open_slab(reference)


@pytest.mark.parametrize("said", [b"", b"x", b"y" * 500])
def test_who_speaks_another_language_is_hung_up_on(room: SlabRoom, said: bytes) -> None:
    reference = reference_of(put(room, 1.0))
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.settimeout(30)
        stranger.connect(f"\0{reference.socket_name}")
        stranger.send(said)
        assert stranger.recv(1) == b""
    assert not room.is_read()


def test_an_extent_beyond_the_slab_is_refused(room: SlabRoom) -> None:
    reference = reference_of(put(room, 1.0))
    beyond = replace(reference, extent=replace(reference.extent, size_bytes=1 << 30))

    with pytest.raises(SlabOpenError, match="outside slab"):
        open_slab(beyond)
    await_true(lambda: not room.is_read(), "a refused reader's end was not heard")


def test_a_closed_room_lends_nothing_and_its_readers_read_on() -> None:
    room = SlabRoom(budget_bytes=SIZE)
    payload = put(room, 1.0)
    held = read(payload)
    room.close()

    assert torch.equal(held, torch.full(SHAPE, 1.0))
    with pytest.raises(SlabOpenError):
        read(payload)
