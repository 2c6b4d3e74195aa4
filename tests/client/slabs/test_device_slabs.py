"""A publisher's slabs on a device: written there, settled before the seal, copied where needed."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from time import monotonic

import pytest
import torch
from tests.client.slabs.test_own_slabs import (
    ANSWERED,
    GOOD,
    LONG,
    SOON,
    Desk,
    a_claim,
    slabs,
    slot_of,
)
from tests.fake_cuda.driver import FakeCuda
from tests.fake_cuda.visible import MIG_GPU, ONE_GPU, OTHER_GPU

from teacher_logits.device_memory import HANDLE_BYTES, MemoryKind
from teacher_logits.devices.probe import probe_of
from teacher_logits.devices.views import DeviceView, device_tensor
from teacher_logits.errors import (
    ConfigError,
    DeadlinePassedError,
    PoolFullError,
    RequestInvalidError,
)
from teacher_logits.layout import Column, ColumnKind, is_on_device
from teacher_logits.pool import PAGE_BYTES
from teacher_logits_client import line
from teacher_logits_client.config import HostCopies
from teacher_logits_client.openers.device_choice import choose_device
from teacher_logits_client.openers.devices import Devices
from teacher_logits_client.slabs.claims import Claim, Granted, Sealing
from teacher_logits_client.slabs.own_buffers import OwnBuffer, register
from teacher_logits_client.slabs.own_slabs import OwnSlabs
from teacher_logits_client.slabs.placed_columns import place_columns

IDS = ColumnKind.TOPK_IDS


@contextmanager
def on_a_device(
    folder: Path,
    *,
    pages: int = 8,
    slab_pages: int | None = None,
    memory_bytes: int | None = None,
    host_copies: HostCopies = HostCopies.AS_NEEDED,
) -> Iterator[tuple[OwnSlabs, Desk, FakeCuda]]:
    node = folder / "node"
    node.mkdir()
    memory = FakeCuda(node, memory_bytes=memory_bytes)
    probe = probe_of(memory, memory.devices()[0])
    with slabs(
        folder, pages=pages, slab_pages=slab_pages, probe=probe, host_copies=host_copies
    ) as (way, desk):
        yield way, desk, memory


def a_whole_claim(step: int) -> Claim:
    claim = a_claim(step)
    size = max(column.end_bytes for column in claim.payload.columns)
    return replace(claim, payload=replace(claim.payload, size_bytes=size))


def column_of(claim: Claim, kind: ColumnKind) -> Column:
    return claim.payload.column(kind)


def sealing_of(claim: Claim) -> Sealing:
    return Sealing(columns=claim.payload.columns, bad_row_count=0, valid_count=None, digest="")


def written(way: OwnSlabs, claim: Claim) -> Granted:
    """Reserve, and fill the ids."""
    granted = way.reserve(claim, until=monotonic() + LONG)
    granted.room.tensors([column_of(claim, IDS)])[IDS].fill_(7)
    return granted


def in_twin(way: OwnSlabs, claim: Claim, kind: ColumnKind) -> bytes:
    """What readers without the device would see."""
    held = way.room.table.find(f"p-{claim.step}")
    assert held is not None
    slab = way.room.shelf[held.extent.slab_id]
    column = column_of(claim, kind)
    room: memoryview = slab.room(held.extent)  # type: ignore[attr-defined]
    return bytes(room[column.offset_bytes : column.end_bytes])


def test_columns_over_positions_lie_on_the_device_and_those_over_rows_in_the_twin(
    tmp_path: Path,
) -> None:
    with on_a_device(tmp_path) as (way, _, memory):
        claim = a_whole_claim(0)
        granted = way.reserve(claim, until=monotonic() + LONG)
        for kind, tensor in granted.room.tensors(claim.payload.columns).items():
            place = memory.locate(tensor.data_ptr())
            assert (place.kind is MemoryKind.PLAIN) == is_on_device(kind), kind


def test_a_slab_is_passed_with_the_handle_of_its_device_memory(tmp_path: Path) -> None:
    with on_a_device(tmp_path) as (way, desk, _):
        way.reserve(a_whole_claim(0), until=monotonic() + LONG)
        assert [len(handle) for handle in desk.handles.values()] == [HANDLE_BYTES]


def test_a_draft_s_room_is_settled_before_anybody_may_read_it(tmp_path: Path) -> None:
    with on_a_device(tmp_path) as (way, _, memory):
        claim = a_whole_claim(0)
        granted = way.reserve(claim, until=monotonic() + LONG)
        ids = granted.room.tensors(claim.payload.columns)[IDS]
        ids.zero_()

        def kernel() -> None:
            ids.fill_(9)

        memory.enqueue(kernel, device=memory.devices()[0])
        assert int(ids.max()) == 0
        granted.room.settle()
        assert int(ids.min()) == 9


def test_nothing_is_copied_where_every_reader_opens_the_device(tmp_path: Path) -> None:
    with on_a_device(tmp_path) as (way, desk, _):
        claim = a_whole_claim(0)
        written(way, claim)
        way.seal("p-0", sealing_of(claim), until=monotonic() + LONG)
        assert desk.seals == [False]
        assert not any(in_twin(way, claim, IDS))


@pytest.mark.parametrize("why", ["hinted", "refused", "always"])
def test_a_copy_on_the_host_is_made_where_a_reader_needs_it(tmp_path: Path, why: str) -> None:
    copies = HostCopies.ALWAYS if why == "always" else HostCopies.AS_NEEDED
    with on_a_device(tmp_path, host_copies=copies) as (way, desk, _):
        desk.hints_copy, desk.needs_copy = why == "hinted", True
        claim = a_whole_claim(0)
        granted = written(way, claim)
        way.seal("p-0", sealing_of(claim), until=monotonic() + LONG)
        assert desk.seals == ([False, True] if why == "refused" else [True])
        assert in_twin(way, claim, IDS) == bytes(granted.room.read(column_of(claim, IDS)))
        assert slot_of(way, "p-0") == 2


def test_a_device_without_memory_shows_as_a_full_pool(tmp_path: Path) -> None:
    with on_a_device(tmp_path, memory_bytes=PAGE_BYTES) as (way, _, memory):
        with pytest.raises(PoolFullError, match=memory.devices()[0].uuid):
            way.reserve(a_whole_claim(0), until=monotonic() + ANSWERED)


def test_where_the_usual_slab_cannot_be_had_a_small_one_may_do(tmp_path: Path) -> None:
    with on_a_device(tmp_path, pages=64, memory_bytes=4 * PAGE_BYTES) as (way, desk, _):
        way.reserve(a_whole_claim(0), until=monotonic() + LONG)
        assert len(desk.handles) == 1


def test_what_lies_on_the_device_alone_is_waited_for_and_what_was_copied_need_not_be(
    tmp_path: Path,
) -> None:
    with on_a_device(tmp_path) as (way, desk, _):
        for step in range(2):
            desk.hints_copy = desk.needs_copy = step == 1
            claim = a_whole_claim(step)
            written(way, claim)
            way.seal(f"p-{step}", sealing_of(claim), until=monotonic() + LONG)
        with pytest.raises(DeadlinePassedError, match="still read"):
            way.wait_free(until=monotonic() + SOON, but_copied=True)
        desk.free(0)
        way.wait_free(until=monotonic() + LONG, but_copied=True)
        with pytest.raises(DeadlinePassedError, match="still read"):
            way.wait_free(until=monotonic() + SOON)
        desk.free(1)
        way.wait_free(until=monotonic() + LONG)


def test_what_lies_on_the_host_outlives_its_publisher_and_is_not_waited_for(tmp_path: Path) -> None:
    with slabs(tmp_path) as (way, _):
        way.reserve(a_claim(0), until=monotonic() + LONG)
        way.seal("p-0", GOOD, until=monotonic() + LONG)
        way.wait_free(until=monotonic() + LONG, but_copied=True)


# --- buffers that publishers own


class Owned:
    """A buffer of a publisher's own, and a claim whose columns lie in it."""

    def __init__(self, way: OwnSlabs, memory: FakeCuda, *, pages: int = 32) -> None:
        device = memory.devices()[0]
        self.address = memory.allocate(pages * PAGE_BYTES, device=device)
        self.bytes = view(memory, self.address, pages * PAGE_BYTES)
        self.buffer: OwnBuffer = register(way, self.bytes)
        self.way = way

    def claim(self, step: int, first_page: int) -> Claim:
        plain = a_whole_claim(step)
        tensors = {}
        at = first_page * PAGE_BYTES
        for column in plain.payload.columns:
            if is_on_device(column.kind):
                flat = self.bytes[at : at + column.size_bytes]
                dtype = {"topk_ids": torch.int32, "topk_logprobs": torch.float16}
                view = flat.view(dtype.get(column.kind.value, torch.float32))
                tensors[column.kind.value] = view.view(column.shape)
                at += 256
        placed = place_columns(plain.payload.columns, tensors, tuple(self.way.registered.values()))
        payload = replace(plain.payload, columns=placed.columns, size_bytes=placed.size_bytes)
        return replace(plain, payload=payload, place=placed.place)


def view(memory: FakeCuda, address: int, size_bytes: int) -> torch.Tensor:
    """A tensor over device memory, as a teacher has one of its own allocator."""
    device = memory.view_device(memory.devices()[0])
    whole = DeviceView(address, size_bytes, device=device, owner=None)
    return device_tensor(whole, dtype=torch.uint8, shape=(size_bytes,), offset_bytes=0)


def test_what_is_published_from_an_own_buffer_lies_where_its_owner_wrote_it(
    tmp_path: Path,
) -> None:
    with on_a_device(tmp_path) as (way, desk, memory):
        own = Owned(way, memory)
        claim = own.claim(0, first_page=3)
        own.bytes.fill_(5)
        granted = way.reserve(claim, until=monotonic() + LONG)
        assert granted.is_written
        tensors = granted.room.tensors(claim.payload.columns)
        assert own.address < tensors[IDS].data_ptr() < own.address + len(own.bytes)
        assert int(tensors[IDS].view(torch.uint8).min()) == 5
        way.seal("p-0", sealing_of(claim), until=monotonic() + LONG)
        assert desk.seals == [False]


def test_an_own_buffer_is_free_when_nobody_reads_what_was_published_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line, "SAY_WHY_SECONDS", LONG)
    with on_a_device(tmp_path) as (way, desk, memory):
        own = Owned(way, memory)
        own.buffer.wait_free(timeout=LONG)
        for step, page in ((0, 0), (1, 8)):
            claim = own.claim(step, page)
            way.reserve(claim, until=monotonic() + LONG)
            way.seal(f"p-{step}", sealing_of(claim), until=monotonic() + LONG)
        desk.free(0)
        desk.holders = "rank 3 reads it"
        with pytest.raises(DeadlinePassedError, match="rank 3 reads it"):
            own.buffer.wait_free(timeout=SOON)
        desk.free(1)
        own.buffer.close(timeout=LONG)
        assert "drop_slab" in desk.asked


def test_a_place_that_is_still_read_is_waited_for(tmp_path: Path) -> None:
    with on_a_device(tmp_path) as (way, desk, memory):
        own = Owned(way, memory)
        claim = own.claim(0, 0)
        way.reserve(claim, until=monotonic() + LONG)
        way.seal("p-0", sealing_of(claim), until=monotonic() + LONG)
        with pytest.raises(PoolFullError, match="step 0 is not read by all yet"):
            way.reserve(own.claim(1, 0), until=monotonic() + ANSWERED)
        desk.free(0)
        way.reserve(own.claim(2, 0), until=monotonic() + LONG)
        assert slot_of(way, "p-2") == 3


@pytest.mark.parametrize(
    ("kind", "way_out"),
    [
        (MemoryKind.VIRTUAL, "expandable_segments:False"),
        (MemoryKind.POOL, "backend:native"),
        (MemoryKind.MANAGED, "cudaMallocManaged"),
        (MemoryKind.HOST, "on the device"),
    ],
)
def test_memory_that_nobody_else_can_open_is_refused_with_the_setting(
    tmp_path: Path, kind: MemoryKind, way_out: str
) -> None:
    with on_a_device(tmp_path) as (way, _, memory):
        address = memory.allocate(PAGE_BYTES, device=memory.devices()[0], kind=kind)
        with pytest.raises(RequestInvalidError, match=way_out):
            register(way, view(memory, address, PAGE_BYTES))


def test_memory_that_the_driver_does_not_know_is_refused(tmp_path: Path) -> None:
    with on_a_device(tmp_path) as (way, _, _memory):
        with pytest.raises(RequestInvalidError, match="does not know"):
            register(way, torch.zeros(16, dtype=torch.uint8))


def test_a_buffer_has_to_be_contiguous_and_there(tmp_path: Path) -> None:
    with on_a_device(tmp_path) as (way, _, memory):
        address = memory.allocate(PAGE_BYTES, device=memory.devices()[0])
        flat = view(memory, address, PAGE_BYTES)
        for storage in (flat[::2], flat[:0]):
            with pytest.raises(RequestInvalidError, match="contiguous"):
                register(way, storage)


def test_memory_is_registered_by_publishers_on_a_device_alone(tmp_path: Path) -> None:
    with slabs(tmp_path) as (way, _):
        with pytest.raises(RequestInvalidError, match="device="):
            register(way, torch.zeros(16, dtype=torch.uint8))


# --- which device


def test_a_device_is_named_by_ordinal_or_uuid(tmp_path: Path) -> None:
    memory = FakeCuda(tmp_path, devices=(ONE_GPU, OTHER_GPU))
    first, second = memory.devices()
    for given in ("cuda", "cuda:0", 0, "0", first.uuid, torch.device("cuda:0")):
        assert choose_device(given, Devices(memory)) == (memory, first)
    for given in ("cuda:1", 1, second.uuid, torch.device("cuda:1")):
        assert choose_device(given, Devices(memory)) == (memory, second)


@pytest.mark.parametrize("given", ["cuda:7", "cpu", "", True, torch.device("cpu"), 2, -1])
def test_a_device_that_is_not_there_is_refused_with_those_that_are(
    tmp_path: Path, given: object
) -> None:
    memory = FakeCuda(tmp_path, devices=(ONE_GPU, MIG_GPU))
    with pytest.raises(ConfigError, match=ONE_GPU[0]):
        choose_device(given, Devices(memory))  # type: ignore[arg-type]


def test_the_host_is_no_device_but_what_is_had_without_one(tmp_path: Path) -> None:
    memory = FakeCuda(tmp_path, devices=(ONE_GPU,))
    for given in ("cpu", torch.device("cpu")):
        with pytest.raises(ConfigError, match="host memory is used where device= is left out"):
            choose_device(given, Devices(memory))
