"""The opener of device memory: what it shows, what it opens and closes, and what it waits for."""

import gc
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.client.losses.shards import shard_of, some_ids
from tests.client.openers.device_writer import IDS, NEVER, PAGE, DeviceWriter
from tests.fake_cuda.child import Child, child
from tests.fake_cuda.driver import FakeCuda
from tests.fake_cuda.faulty import Fault, FaultyMemory, gate, is_held, let_go
from tests.fake_cuda.log import done, faults, read_log
from tests.fake_cuda.spec import Spec
from tests.processes.test_fifty_steps import await_true

from teacher_logits.device_memory import DeviceMemory
from teacher_logits.devices.views import DeviceView, device_tensor
from teacher_logits.digest import payload_digest
from teacher_logits.errors import DeadlinePassedError, SlabOpenError, StalePayloadError
from teacher_logits.layout import ColumnKind, is_on_device
from teacher_logits.payload import Extent
from teacher_logits.tensors import column_tensor
from teacher_logits.terms import LeaseTerms
from teacher_logits.transport import Transport
from teacher_logits_client.openers import OpenedPayload, devices, last_reads
from teacher_logits_client.openers.cuda_ipc import CudaIpcOpener
from teacher_logits_client.openers.devices import Devices, OpenedSlabs
from teacher_logits_client.openers.driver_threads import DriverThreads
from teacher_logits_client.openers.own import OwnPayload
from teacher_logits_client.openers.shared_memory import SharedMemoryOpener
from teacher_logits_client.payloads import LeasedPayload
from teacher_logits_client.payloads.returns import Returner


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("node")


@pytest.fixture(scope="module")
def process(node: Path) -> Iterator[Child]:
    with child(Spec(folder=str(node))) as started:
        yield started


@pytest.fixture
def writer(process: Child) -> Iterator[DeviceWriter]:
    made = DeviceWriter(process)
    yield made
    made.close()


@pytest.fixture
def cuda(tmp_path: Path) -> FakeCuda:
    return FakeCuda(tmp_path)


class Side:
    """A reader's side: the openers of one session."""

    def __init__(self, writer: DeviceWriter, memory: DeviceMemory) -> None:
        self.host = SharedMemoryOpener(writer.pass_slab)
        self.slabs = OpenedSlabs(Devices(memory))
        self.opener = CudaIpcOpener(self.host, self.slabs)

    def open(self, lease: LeaseTerms, *, until: float = NEVER) -> OpenedPayload:
        return self.opener.open(lease, until=until)

    def close(self) -> None:
        self.opener.close()
        self.host.close()


@pytest.fixture
def side(writer: DeviceWriter, cuda: FakeCuda) -> Iterator[Side]:
    made = Side(writer, cuda)
    yield made
    made.close()
    assert faults(cuda.log.operations) == []


def tensors(lease: LeaseTerms, opened: OpenedPayload) -> dict[ColumnKind, torch.Tensor]:
    return {each.kind: column_tensor(opened.view_of(each), each) for each in lease.payload.columns}


def expected() -> dict[ColumnKind, torch.Tensor]:
    shard = shard_of(IDS)
    data = bytearray(shard.data)
    return {each.kind: column_tensor(data, each) for each in shard.payload.columns}


def assert_right(found: dict[ColumnKind, torch.Tensor]) -> None:
    for kind, tensor in expected().items():
        assert torch.equal(found[kind].view(torch.uint8), tensor.view(torch.uint8)), kind


class TestReading:
    def test_columns_over_positions_are_the_writers_own_memory(
        self, writer: DeviceWriter, side: Side, cuda: FakeCuda
    ) -> None:
        lease = writer.lease(page=2)
        opened = side.open(lease)
        found = tensors(lease, opened)

        assert_right(found)
        assert not opened.copied
        (at,) = {each.address for each in done(cuda.log.operations, "open")}
        for column in lease.payload.columns:
            if is_on_device(column.kind):
                place = at + 2 * PAGE + column.offset_bytes
                assert found[column.kind].data_ptr() == place
        del found

    def test_not_a_page_of_the_twin_is_taken_for_what_lies_on_the_device(
        self, writer: DeviceWriter, side: Side
    ) -> None:
        lease = writer.lease(shard_of(some_ids(80)))
        holes = writer.twin.hole_bytes(0, writer.size_bytes)

        opened = side.open(lease)
        for column in lease.payload.columns:
            opened.bytes_of(column)
            column_tensor(opened.view_of(column), column).sum()
        opened.vacate()

        rows_from = lease.payload.column(ColumnKind.ROW_OFFSETS).offset_bytes
        assert writer.twin.hole_bytes(0, writer.size_bytes) == holes > rows_from // PAGE * PAGE > 0

    def test_writes_into_columns_over_rows_stay_here_and_are_dropped(
        self, writer: DeviceWriter, side: Side
    ) -> None:
        lease = writer.lease()
        opened = side.open(lease)
        column = lease.payload.column(ColumnKind.ROW_STATUS)
        column_tensor(opened.view_of(column), column).fill_(7)

        assert opened.vacate() == PAGE
        assert_right(tensors(lease, side.open(lease)))

    def test_the_digest_is_that_of_the_host(self, writer: DeviceWriter, side: Side) -> None:
        shard = shard_of(IDS)
        opened = side.open(writer.lease())

        def digest(bytes_of: Callable[..., memoryview | bytes]) -> str:
            return payload_digest(
                (each.kind.value, each.element_type.value, each.shape, bytes_of(each))
                for each in shard.payload.columns
            )

        assert digest(opened.bytes_of) == digest(
            lambda each: shard.data[each.offset_bytes : each.end_bytes]
        )

    def test_a_driver_that_hangs_over_a_copy_costs_the_deadline_and_has_the_room_until_then(
        self, writer: DeviceWriter, cuda: FakeCuda, tmp_path: Path
    ) -> None:
        shut = gate(tmp_path / "gate")
        side = Side(writer, FaultyMemory(cuda, (Fault(call="record", hang=shut, times=1),)))
        lease, calls = writer.lease(), DriverThreads()
        own = OwnPayload(side.open(lease), lease.payload.columns)
        with pytest.raises(DeadlinePassedError, match="the copies of a payload"):
            own.copy_by(0.0, calls)
        await_true(lambda: is_held(shut))
        own.vacate()  # whoever wanted it has no more to do with it
        side.host.forget(None)
        assert side.opener.has("slab")

        let_go(shut)

        await_true(lambda: not side.opener.has("slab"))

    def test_a_copy_of_ones_own_is_good_when_the_room_is_reused(
        self, writer: DeviceWriter, side: Side
    ) -> None:
        lease = writer.lease()
        own = OwnPayload(side.open(lease), lease.payload.columns).copy()
        writer.lease(shard_of([[1, 2]] * 6), generation=4)

        assert own.copied
        assert own.is_current()
        found = tensors(lease, own)
        assert_right(found)
        assert bytes(own.bytes_of(lease.payload.column(ColumnKind.TOPK_IDS))) == bytes(
            found[ColumnKind.TOPK_IDS].view(torch.uint8).flatten().tolist()
        )

    def test_shared_memory_never_reads_what_lies_on_a_device_alone(
        self, writer: DeviceWriter, side: Side
    ) -> None:
        with pytest.raises(SlabOpenError, match="device memory alone"):
            side.host.open(writer.lease(), until=NEVER)

    def test_shared_memory_reads_a_host_copy_and_no_device(
        self, writer: DeviceWriter, side: Side, cuda: FakeCuda
    ) -> None:
        lease = writer.lease(on_device=False)

        assert_right(tensors(lease, side.host.open(lease, until=NEVER)))
        assert cuda.log.operations == []

    def test_writes_into_a_host_copy_stay_here_and_are_dropped_wherever_they_are(
        self, writer: DeviceWriter, side: Side
    ) -> None:
        lease = writer.lease(shard_of(some_ids(80)), on_device=False)
        opened = side.host.open(lease, until=NEVER)
        column = lease.payload.column(ColumnKind.TOPK_IDS)
        before = bytes(opened.bytes_of(column))
        column_tensor(opened.view_of(column), column).fill_(7)

        assert opened.vacate() >= column.size_bytes // PAGE * PAGE > 0
        assert bytes(side.host.open(lease, until=NEVER).bytes_of(column)) == before


class TestHandles:
    def test_one_is_opened_whatever_comes_in_its_slab(
        self, writer: DeviceWriter, side: Side, cuda: FakeCuda
    ) -> None:
        for page in range(3):
            side.open(writer.lease(page=page)).vacate()

        assert len(done(cuda.log.operations, "open")) == writer.passed == 1

    def test_one_is_opened_for_many_threads(
        self, writer: DeviceWriter, side: Side, cuda: FakeCuda
    ) -> None:
        leases = [writer.lease(page=page) for page in range(4)]
        with ThreadPoolExecutor(4) as threads:
            opened = list(threads.map(side.open, leases))

        assert len(opened) == 4
        assert len(done(cuda.log.operations, "open")) == 1

    def test_is_closed_with_the_last_lease_on_a_slab_that_is_gone(
        self, writer: DeviceWriter, side: Side, cuda: FakeCuda
    ) -> None:
        first, second = (side.open(writer.lease(page=page)) for page in range(2))
        side.host.forget(["slab"])
        first.vacate()
        assert done(cuda.log.operations, "close") == []

        second.vacate()

        assert len(done(cuda.log.operations, "close")) == 1
        assert len(side.slabs) == 0

    def test_is_closed_where_the_writer_retired_the_slab(
        self, process: Child, cuda: FakeCuda
    ) -> None:
        writer = DeviceWriter(process)
        side = Side(writer, cuda)
        opened = side.open(writer.lease())
        writer.close()

        opened.vacate()

        assert len(done(cuda.log.operations, "close")) == 1

    def test_stays_open_between_leases_and_is_closed_with_the_session(
        self, writer: DeviceWriter, side: Side, cuda: FakeCuda
    ) -> None:
        side.open(writer.lease()).vacate()
        assert done(cuda.log.operations, "close") == []

        side.close()

        assert len(done(cuda.log.operations, "close")) == 1

    def test_stays_open_under_a_view_that_outlives_all(
        self, writer: DeviceWriter, side: Side, cuda: FakeCuda
    ) -> None:
        lease = writer.lease()
        opened = side.open(lease)
        kept = tensors(lease, opened)[ColumnKind.TOPK_IDS]
        opened.vacate()
        side.close()
        del opened
        assert torch.equal(kept, expected()[ColumnKind.TOPK_IDS])
        assert done(cuda.log.operations, "close") == []

        del kept

        assert len(done(cuda.log.operations, "close")) == 1

    def test_a_slab_at_the_address_of_another_is_opened_for_itself(
        self, process: Child, cuda: FakeCuda
    ) -> None:
        """Address reuse under a new handle: nothing is kept by address."""
        first = DeviceWriter(process, name="first")
        one = Side(first, cuda)
        lease = first.lease()
        one.open(lease).vacate()
        one.host.forget(["first"])
        first.close()
        process.ask("free", first.address)
        second = DeviceWriter(process, name="second")
        other = Side(second, cuda)
        lease = second.lease()

        assert_right(tensors(lease, other.open(lease)))
        places = [each.address for each in done(cuda.log.operations, "open")]
        assert places[0] == places[1]
        second.close()

    def test_a_device_that_is_not_seen_is_named(self, writer: DeviceWriter, tmp_path: Path) -> None:
        side = Side(writer, FakeCuda(tmp_path, devices=()))

        with pytest.raises(SlabOpenError, match=r"GPU-0.*does not see"):
            side.open(writer.lease())
        assert side.host.has("slab")

    def test_a_driver_that_hangs_costs_the_deadline_and_leaves_nothing_open(
        self, writer: DeviceWriter, cuda: FakeCuda, tmp_path: Path
    ) -> None:
        shut = gate(tmp_path / "gate")
        side = Side(writer, FaultyMemory(cuda, (Fault(call="open", hang=shut, times=1),)))
        lease = writer.lease()
        with pytest.raises(DeadlinePassedError, match="driver was not done with slab slab"):
            side.open(lease, until=0.0)
        assert not side.opener.has("slab")

        let_go(shut)
        assert_right(tensors(lease, side.open(lease)))

        side.close()
        assert len(side.slabs) == 0


class TestRefusals:
    @pytest.mark.parametrize(
        ("offset", "size"),
        [
            (8 * PAGE, PAGE),
            (7 * PAGE, 2 * PAGE),
            ((1 << 63) - 1, PAGE),
            (1 << 64, PAGE),
            (-PAGE, PAGE),
        ],
    )
    def test_an_extent_outside_of_the_slab(
        self, writer: DeviceWriter, side: Side, offset: int, size: int
    ) -> None:
        extent = Extent(slab_id="slab", offset_bytes=offset, size_bytes=size, slot=0, generation=2)

        with pytest.raises(SlabOpenError):
            side.open(replace(writer.lease(), extent=extent))

    def test_a_payload_behind_the_devices_part(
        self, writer: DeviceWriter, side: Side, cuda: FakeCuda
    ) -> None:
        lease = writer.lease(page=7)
        writer.size_bytes -= PAGE

        with pytest.raises(SlabOpenError, match=r"topk_ids.*not among the 28672 bytes"):
            side.open(lease)
        side.host.forget(["slab"])
        assert len(done(cuda.log.operations, "close")) == 1  # no lease was left on it

    def test_an_allocation_that_is_smaller_than_it_is_said_to_be(
        self, writer: DeviceWriter, side: Side
    ) -> None:
        writer.size_bytes *= 2
        writer.exported = replace(writer.exported, allocation_bytes=writer.size_bytes)

        with pytest.raises(SlabOpenError, match="of its allocation of 32768 bytes"):
            side.open(writer.lease())

    def test_room_that_was_reused_before_it_was_opened(
        self, writer: DeviceWriter, side: Side
    ) -> None:
        lease = writer.lease()
        writer.lease(generation=4)

        with pytest.raises(StalePayloadError, match=r"generation 4.*generation 2"):
            side.open(lease)

    def test_the_exit_check_is_read_on_the_host(self, writer: DeviceWriter, side: Side) -> None:
        opened = side.open(writer.lease())
        assert opened.is_current()

        writer.twin.mark(0, 3)

        assert not opened.is_current()

    def test_a_slab_that_was_passed_before_it_was_settled_is_asked_for_again(
        self, writer: DeviceWriter, side: Side
    ) -> None:
        writer.passes_device = False
        with pytest.raises(SlabOpenError, match="passed without its device memory"):
            side.open(writer.lease())
        writer.passes_device = True

        lease = writer.lease(page=1)
        assert_right(tensors(lease, side.open(lease)))
        assert_right(tensors(lease, side.open(lease)))
        assert writer.passed == 3


class Late:
    """A read that a device does when somebody waits for it, and not before."""

    def __init__(self, cuda: FakeCuda, tensor: torch.Tensor) -> None:
        self.seen: list[torch.Tensor] = []
        address, shape, dtype = tensor.data_ptr(), tensor.shape, tensor.dtype
        size = tensor.numel() * tensor.element_size()

        def read() -> None:
            view = DeviceView(address, size, device=(1, 0))
            self.seen.append(device_tensor(view, dtype=dtype, shape=shape).clone())

        cuda.enqueue(read, device=cuda.devices()[0])


class TestLastReads:
    """Room goes back behind them, whoever gave them to the device, and on whichever stream."""

    @pytest.fixture
    def opened(self, writer: DeviceWriter, side: Side) -> OpenedPayload:
        return side.open(writer.lease())

    @pytest.fixture
    def ids(self, writer: DeviceWriter, opened: OpenedPayload) -> torch.Tensor:
        return tensors(writer.lease(), opened)[ColumnKind.TOPK_IDS]

    def test_are_waited_for_in_the_closers_stream(
        self, opened: OpenedPayload, ids: torch.Tensor, cuda: FakeCuda
    ) -> None:
        late = Late(cuda, ids)
        opened.finish(outlived=False)
        assert late.seen == []

        opened.vacate()

        assert torch.equal(late.seen[0], expected()[ColumnKind.TOPK_IDS])
        assert done(cuda.log.operations, "synchronise") == []

    def test_what_comes_after_the_close_is_not_waited_for(
        self, opened: OpenedPayload, ids: torch.Tensor, cuda: FakeCuda
    ) -> None:
        opened.finish(outlived=False)
        after = Late(cuda, ids)

        opened.vacate()

        assert after.seen == []

    def test_are_waited_for_on_a_stream_that_was_noted(
        self,
        opened: OpenedPayload,
        ids: torch.Tensor,
        cuda: FakeCuda,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        def current(stream: object) -> AbstractContextManager[None]:
            return cuda.in_stream(stream)  # type: ignore[arg-type]

        monkeypatch.setattr(last_reads, "current", current)
        stream = cuda.new_stream(device=cuda.devices()[0])
        with cuda.in_stream(stream):
            late = Late(cuda, ids)
        opened.note_stream(stream)  # type: ignore[arg-type]
        opened.finish(outlived=False)

        opened.vacate()

        assert len(late.seen) == 1

    def test_are_waited_for_on_a_stream_that_the_owner_recorded(
        self, writer: DeviceWriter, side: Side, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(last_reads, "current", cuda.in_stream)
        stream = cuda.new_stream(device=cuda.devices()[0])
        returner = Returner()
        lease = writer.lease()
        payload = LeasedPayload(
            lease=lease,
            opened=side.open(lease),
            transport=Transport.CUDA_IPC,
            returner=returner,
            give_back=lambda: None,
        ).adopt()
        with cuda.in_stream(stream):
            late = Late(cuda, payload.columns["topk_ids"])
        payload.record_stream(stream)  # type: ignore[arg-type]
        payload.close()

        assert returner.wait(30)
        assert len(late.seen) == 1
        returner.tear_loose()

    @pytest.mark.parametrize("is_closed", [True, False], ids=["outlived", "never closed"])
    def test_all_work_is_waited_for_where_nobody_knows_which(
        self, opened: OpenedPayload, ids: torch.Tensor, cuda: FakeCuda, is_closed: bool
    ) -> None:
        with cuda.in_stream(cuda.new_stream(device=cuda.devices()[0])):
            late = Late(cuda, ids)
        if is_closed:
            opened.finish(outlived=True)

        opened.vacate()

        assert len(late.seen) == 1

    def test_room_does_not_go_back_from_a_device_that_cannot_say(
        self, writer: DeviceWriter, cuda: FakeCuda
    ) -> None:
        broken = (Fault(call="record", error=999), Fault(call="synchronise", error=999, times=1))
        side = Side(writer, FaultyMemory(cuda, broken))
        lease = writer.lease()
        opened = side.open(lease)
        opened.view_of(lease.payload.columns[0])
        returned: list[str] = []
        returner = Returner()
        payload = LeasedPayload(
            lease=lease,
            opened=opened,
            transport=Transport.CUDA_IPC,
            returner=returner,
            give_back=lambda: returned.append(lease.lease_id),
        ).adopt()
        payload.close()

        assert returner.wait(30)
        assert returned == []
        returner.tear_loose()

    def test_the_server_hears_of_a_lease_behind_its_last_read(
        self, writer: DeviceWriter, side: Side, cuda: FakeCuda
    ) -> None:
        lease = writer.lease()
        returned: list[bool] = []
        returner = Returner()
        payload = LeasedPayload(
            lease=lease,
            opened=side.open(lease),
            transport=Transport.CUDA_IPC,
            returner=returner,
            give_back=lambda: returned.append(bool(late.seen)),
        ).adopt()
        late = Late(cuda, payload.columns["topk_ids"])
        payload.close()

        assert returner.wait(30)
        assert returned == [True]
        returner.tear_loose()


def test_a_forked_child_touches_no_driver_and_returns_nothing(
    writer: DeviceWriter, side: Side, cuda: FakeCuda, tmp_path: Path
) -> None:
    lease = writer.lease()
    returned: list[str] = []
    returner = Returner()
    payload = LeasedPayload(
        lease=lease,
        opened=side.open(lease),
        transport=Transport.CUDA_IPC,
        returner=returner,
        give_back=lambda: returned.append(lease.lease_id),
    ).adopt()
    ids = payload.columns["topk_ids"]

    gc.collect()  # a channel that another test has left is not to be closed in the child
    child_pid = os.fork()
    if not child_pid:
        try:
            payload.close()
            del payload, ids
            side.close()
            gc.collect()
        finally:
            os._exit(0)
    os.waitpid(child_pid, 0)

    assert [each for each in read_log(tmp_path) if each.pid == child_pid] == []
    assert torch.equal(ids, expected()[ColumnKind.TOPK_IDS])
    del ids
    payload.close()
    assert returner.wait(30)
    returner.tear_loose()


def test_nothing_of_a_driver_is_touched_where_all_lies_on_the_host(
    writer: DeviceWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find() -> None:
        raise AssertionError("a driver was looked for")

    monkeypatch.setattr(devices, "find_driver", find)
    host = SharedMemoryOpener(writer.pass_slab)
    slabs = OpenedSlabs(Devices())
    CudaIpcOpener(host, slabs)

    host.open(writer.lease(on_device=False), until=NEVER).vacate()
    host.forget(["slab"])

    assert len(slabs) == 0
