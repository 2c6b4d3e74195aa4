"""Late proofs: evidence of device memory that is shown after the handshake, and taken back."""

from __future__ import annotations

import queue
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, cast

import pytest
from tests.client.sessions.test_device_evidence import CHALLENGE, HERE, NONCE, probe, process
from tests.fake_cuda.driver import FakeCuda
from tests.fake_cuda.log import done
from tests.fake_cuda.visible import OTHER_GPU

from teacher_logits.errors import ServerUnreachableError, SlabOpenError
from teacher_logits.grid import BatchGrid
from teacher_logits.profiles import StudentProfile
from teacher_logits.transport import Refusal, RefusalReason, Settlement, Transport, proof_of
from teacher_logits_client.openers.devices import Devices
from teacher_logits_client.sessions.agreement import Agreed
from teacher_logits_client.sessions.late_proofs import LateProofs

if TYPE_CHECKING:
    from pathlib import Path

    from teacher_logits.device_memory import DeviceMemory, DeviceProbe
    from teacher_logits.terms import SessionTerms
    from teacher_logits_client.calls import Calls

__all__ = ["probe", "process"]

LONG = 30.0
Shown = tuple[Mapping[tuple[Transport, str], bytes], Sequence[Refusal]]
SETTLED = (Settlement(writer_id="w-1", transport=Transport.CUDA_IPC),)


@dataclass(frozen=True)
class Terms:
    """What of a session's terms is looked at."""

    session_id: str = "s-1"
    settlements: tuple[Settlement, ...] = ()


@dataclass
class Server:
    """Stands in for the calls: what it was shown, and how it settles then."""

    shown: queue.SimpleQueue[Shown] = field(default_factory=queue.SimpleQueue)
    refuses: bool = False

    def prove_locality(
        self,
        session_id: str,
        *,
        proofs: Mapping[tuple[Transport, str], bytes],
        failures: Sequence[Refusal],
        timeout: float,
    ) -> Terms:
        self.shown.put((proofs, failures))
        if self.refuses:
            raise ServerUnreachableError("not now")
        return Terms(settlements=SETTLED)


class Rig:
    """Late proofs over a pretended server; ``settled`` is what they told the session."""

    def __init__(self, memory: DeviceMemory) -> None:
        self.server = Server()
        self.settled: queue.SimpleQueue[Sequence[Settlement]] = queue.SimpleQueue()
        grid = BatchGrid(global_batch_size=1, data_parallel_size=1, micro_batch_size=1)
        self.late = LateProofs(
            Agreed(
                terms=cast("SessionTerms", Terms()),
                profile=StudentProfile(batch_grid=grid, hints=HERE),
                refusals=(),
                line=None,
                resident=None,
                nonce=NONCE,
            ),
            calls=cast("Calls", self.server),
            devices=Devices(memory),
            settle=self.settled.put,
        )


@pytest.fixture
def cuda(tmp_path: Path) -> FakeCuda:
    return FakeCuda(tmp_path)


@pytest.fixture
def rig(cuda: FakeCuda) -> Iterator[Rig]:
    made = Rig(cuda)
    yield made
    made.late.close()


def told(probe: DeviceProbe) -> Settlement:
    return Settlement(writer_id=probe.writer_id, transport=Transport.SHARED_MEMORY, probe=probe)


def test_a_writer_that_comes_late_is_proven_and_settled_anew(rig: Rig, probe: DeviceProbe) -> None:
    rig.late.prove([told(probe)])

    proofs, failures = rig.server.shown.get(timeout=LONG)
    mac = proof_of(CHALLENGE, nonce=NONCE, transport=Transport.CUDA_IPC)
    assert (proofs, failures) == ({(Transport.CUDA_IPC, "w-1"): mac}, [])
    assert rig.settled.get(timeout=LONG) == SETTLED


def test_its_memory_is_tried_once_however_often_it_is_told(
    rig: Rig, probe: DeviceProbe, cuda: FakeCuda
) -> None:
    rig.late.prove([told(probe), told(probe)])
    rig.late.prove([told(probe)])
    rig.settled.get(timeout=LONG)
    other = replace(probe, writer_id="w-2", memory=replace(probe.memory, handle=bytes(64)))
    rig.late.prove([told(other)])

    rig.server.shown.get(timeout=LONG)
    proofs, failures = rig.server.shown.get(timeout=LONG)
    assert (proofs, [each.writer_id for each in failures]) == ({}, ["w-2"])
    assert len(done(cuda.log.operations, "open")) == 1


def test_writers_of_one_process_are_proven_each_although_they_share_a_probe(
    rig: Rig, probe: DeviceProbe
) -> None:
    for writer_id in ("w-1", "w-2"):
        rig.late.prove([told(replace(probe, writer_id=writer_id))])

        proofs, _ = rig.server.shown.get(timeout=LONG)
        assert list(proofs) == [(Transport.CUDA_IPC, writer_id)]


def test_settlements_without_device_memory_start_nothing(rig: Rig, cuda: FakeCuda) -> None:
    rig.late.prove([Settlement(writer_id="w-1", transport=Transport.STREAM)])

    assert rig.late._thread is None
    assert cuda.log.operations == []


def test_a_failure_is_shown_with_its_reason(tmp_path: Path, probe: DeviceProbe) -> None:
    rig = Rig(FakeCuda(tmp_path, devices=(OTHER_GPU,)))

    rig.late.prove([told(probe)])

    _, (failure,) = rig.server.shown.get(timeout=LONG)
    assert failure.reason is RefusalReason.OTHER_DEVICE
    rig.late.close()


def test_memory_that_cannot_be_opened_any_more_is_taken_back_once(rig: Rig) -> None:
    for _ in range(3):
        rig.late.withdraw("w-1", SlabOpenError("the device is gone"))

    proofs, (failure,) = rig.server.shown.get_nowait()  # the server knows, before anybody is told
    assert proofs == {}
    assert (failure.transport, failure.writer_id) == (Transport.CUDA_IPC, "w-1")
    assert failure.message == "the device is gone"
    assert rig.server.shown.empty()
    assert rig.settled.get_nowait() == SETTLED


def test_a_server_that_does_not_answer_leaves_things_as_they_are(
    rig: Rig, probe: DeviceProbe
) -> None:
    rig.server.refuses = True
    rig.late.prove([told(probe)])
    rig.server.shown.get(timeout=LONG)
    rig.server.refuses = False
    rig.late.withdraw("w-1", SlabOpenError("gone"))

    rig.server.shown.get(timeout=LONG)
    assert rig.settled.get(timeout=LONG) == SETTLED
    assert rig.settled.empty()


def test_nothing_is_started_after_the_end(rig: Rig, probe: DeviceProbe) -> None:
    rig.late.close()
    rig.late.prove([told(probe)])

    assert rig.late._thread is None
