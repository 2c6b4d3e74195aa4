"""Which opener brings a lease's bytes, and what becomes of device memory that cannot be opened."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, cast

import pytest
from tests.client.openers.device_writer import NEVER, DeviceWriter
from tests.fake_cuda.child import Child, child
from tests.fake_cuda.driver import FakeCuda
from tests.fake_cuda.faulty import Fault, FaultyMemory
from tests.fake_cuda.spec import Spec

from teacher_logits.errors import HostCopyNeededError, SlabOpenError, TransportFailure
from teacher_logits.grid import BatchGrid
from teacher_logits.profiles import StudentProfile
from teacher_logits.terms import StreamTerms
from teacher_logits.transport import PREFERENCE, Locality, Transport
from teacher_logits_client.config import MapMode
from teacher_logits_client.openers.buffers import BufferPool
from teacher_logits_client.openers.devices import Devices
from teacher_logits_client.sessions.agreement import Agreed
from teacher_logits_client.sessions.openers import SessionOpeners

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from teacher_logits.device_memory import DeviceMemory
    from teacher_logits.errors import TeacherLogitsError
    from teacher_logits.terms import SessionTerms
    from teacher_logits_client.line import Line, PassedSlab

GRID = BatchGrid(global_batch_size=1, data_parallel_size=1, micro_batch_size=1)


class SessionTermsOnly:
    session_id = "s-1"
    stream = StreamTerms()


class SlabLine:
    """A line that passes one writer's slabs."""

    def __init__(self, writer: DeviceWriter) -> None:
        self._writer = writer

    def get_slab(self, slab_id: str, timeout: float) -> PassedSlab:
        return self._writer.pass_slab(slab_id, timeout)

    def is_revoked(self, lease_id: str) -> bool:
        return False

    def watch(self, fd: int) -> Callable[[], None]:
        return lambda: None


class Side:
    """The openers of one session, and what they told."""

    def __init__(
        self,
        writer: DeviceWriter,
        memory: DeviceMemory,
        *,
        transports: tuple[Transport, ...] = PREFERENCE,
        locality: Locality = Locality.PREFER,
    ) -> None:
        self.withdrawn: list[tuple[str, str]] = []
        self.counts: list[str] = []
        self.streamed: list[str] = []
        profile = StudentProfile(batch_grid=GRID, transports=transports, locality=locality)
        self.openers = SessionOpeners(
            Agreed(
                terms=cast("SessionTerms", SessionTermsOnly()),
                profile=profile,
                refusals=(),
                line=cast("Line", SlabLine(writer)),
                resident=None,
            ),
            devices=Devices(memory),
            mode=MapMode.COW,
            buffers=BufferPool(),
            read=self._read,
            count=lambda name, by=1: self.counts.append(name),
            withdraw=self._withdraw,
        )

    def _withdraw(self, writer_id: str, why: TeacherLogitsError) -> None:
        self.withdrawn.append((writer_id, why.message))

    def _read(self, lease_id: str, offset: int, timeout: float) -> Iterable[bytes]:
        self.streamed.append(lease_id)
        raise HostCopyNeededError("the writer made no host copy of it")


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Child]:
    with child(Spec(folder=str(tmp_path_factory.mktemp("node")))) as started:
        yield started


@pytest.fixture
def writer(process: Child) -> Iterator[DeviceWriter]:
    made = DeviceWriter(process)
    yield made
    made.close()


@pytest.fixture
def cuda(tmp_path: Path) -> FakeCuda:
    return FakeCuda(tmp_path)


BROKEN = (Fault(call="open", error=999),)


@pytest.mark.parametrize("settled", [Transport.CUDA_IPC, Transport.SHARED_MEMORY, None])
def test_what_lies_on_a_device_is_read_there_however_its_writer_was_settled(
    writer: DeviceWriter, cuda: FakeCuda, settled: Transport | None
) -> None:
    side = Side(writer, cuda)

    opened, transport = side.openers.open(writer.lease(), settled=settled, until=NEVER)

    assert transport is Transport.CUDA_IPC
    assert not opened.copied


def test_a_host_copy_is_read_on_the_host_and_counts_as_no_fallback(
    writer: DeviceWriter, cuda: FakeCuda
) -> None:
    side = Side(writer, cuda)

    _, transport = side.openers.open(
        writer.lease(on_device=False), settled=Transport.CUDA_IPC, until=NEVER
    )

    assert transport is Transport.SHARED_MEMORY
    assert side.counts == []
    assert cuda.log.operations == []


def test_what_can_be_opened_at_once_is_what_is_open(writer: DeviceWriter, cuda: FakeCuda) -> None:
    side = Side(writer, cuda)
    there, here = writer.lease(), writer.lease(page=1, on_device=False)
    settled = Transport.CUDA_IPC
    assert not side.openers.opens_at_once(here, settled=settled)

    side.openers.open(here, settled=settled, until=NEVER)
    assert side.openers.opens_at_once(here, settled=settled)
    assert not side.openers.opens_at_once(there, settled=settled)

    side.openers.open(there, settled=settled, until=NEVER)
    assert side.openers.opens_at_once(there, settled=settled)
    assert not side.openers.opens_at_once(replace(there, extent=None), settled=settled)


@pytest.mark.parametrize(
    ("transports", "locality", "streams"),
    [
        (PREFERENCE, Locality.PREFER, True),
        (PREFERENCE, Locality.REQUIRE, False),
        ((Transport.CUDA_IPC,), Locality.PREFER, False),
    ],
)
def test_a_device_that_breaks_is_said_with_the_way_out_and_told_to_the_server(
    writer: DeviceWriter,
    cuda: FakeCuda,
    *,
    transports: tuple[Transport, ...],
    locality: Locality,
    streams: bool,
) -> None:
    memory = FaultyMemory(cuda, BROKEN)
    side = Side(writer, memory, transports=transports, locality=locality)
    lease = writer.lease()

    with pytest.raises(SlabOpenError, match=r"999.*host_copies='always'") as caught:
        side.openers.open(lease, settled=Transport.CUDA_IPC, until=NEVER)

    assert caught.value.facts["number"] == 999
    assert caught.value.facts["writer_id"] == "publisher"
    assert [writer_id for writer_id, _ in side.withdrawn] == ["publisher"]
    assert side.streamed == ([lease.lease_id] if streams else [])


def test_other_failures_are_left_as_they_are(writer: DeviceWriter, cuda: FakeCuda) -> None:
    side = Side(writer, cuda, transports=(Transport.SHARED_MEMORY,))
    lease = writer.lease(on_device=False)
    assert lease.extent is not None
    outside = replace(lease, extent=replace(lease.extent, offset_bytes=1 << 40))

    with pytest.raises(TransportFailure, match="outside slab"):
        side.openers.open(outside, settled=Transport.SHARED_MEMORY, until=NEVER)
    assert side.withdrawn == []
