"""Device evidence: a writer's memory opened on trial, and why it could not be."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, NoReturn, cast

import pytest
from tests.fake_cuda.child import Child, child
from tests.fake_cuda.driver import FakeCuda
from tests.fake_cuda.faulty import Fault, FaultyMemory, gate, let_go
from tests.fake_cuda.log import done, faults, still_open
from tests.fake_cuda.spec import Spec
from tests.fake_cuda.visible import MIG_GPU, ONE_GPU, OTHER_GPU

from teacher_logits.device_memory import PROBE_BYTES, DeviceMemory, DeviceProbe
from teacher_logits.profiles import NodeHints
from teacher_logits.transport import Refusal, RefusalReason, Transport, proof_of
from teacher_logits_client.calls.opened import OpenedSession
from teacher_logits_client.openers import devices
from teacher_logits_client.openers.devices import Devices
from teacher_logits_client.sessions import device_evidence
from teacher_logits_client.sessions.device_evidence import (
    DeviceEvidence,
    note_exported,
    try_devices,
)
from teacher_logits_client.sessions.evidence import DeviceSide, Evidence, gather

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from teacher_logits.terms import SessionTerms

NONCE = b"n" * 32
CHALLENGE = bytes(range(PROBE_BYTES))
HERE = NodeHints(host_name="here", namespaces={"pid": 4711})
LONG = 120.0


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Child]:
    with child(Spec(folder=str(tmp_path_factory.mktemp("node")))) as started:
        yield started


@pytest.fixture(scope="module")
def probe(process: Child) -> DeviceProbe:
    """A challenge amid an allocation."""
    address = process.number("allocate", 4096)
    process.ask("write", address + 256, CHALLENGE, device=None)
    return DeviceProbe(
        writer_id="w-1",
        memory=process.export(address + 256),
        pid_namespace=4711,
        host="here",
    )


@pytest.fixture
def cuda(tmp_path: Path) -> FakeCuda:
    return FakeCuda(tmp_path)


def tried(
    memory: DeviceMemory | None, *probes: DeviceProbe, seconds: float = LONG
) -> DeviceEvidence:
    return try_devices(
        probes, Devices(memory), nonce=NONCE, hints=HERE, until=time.monotonic() + seconds
    )


def refusal(memory: DeviceMemory | None, probe: DeviceProbe, **given: float) -> Refusal:
    evidence = tried(memory, probe, **given)
    assert evidence.proofs == {}
    (found,) = evidence.failures
    assert (found.transport, found.writer_id) == (Transport.CUDA_IPC, probe.writer_id)
    return found


def test_what_was_read_there_is_proven_and_nothing_stays_open(
    cuda: FakeCuda, probe: DeviceProbe
) -> None:
    mac = proof_of(CHALLENGE, nonce=NONCE, transport=Transport.CUDA_IPC)

    assert tried(cuda, probe) == DeviceEvidence(proofs={(Transport.CUDA_IPC, "w-1"): mac})
    assert still_open(cuda.log.operations) == {}
    assert faults(cuda.log.operations) == []


def test_each_writer_is_tried_for_itself(cuda: FakeCuda, probe: DeviceProbe) -> None:
    gone = replace(probe, writer_id="w-2", memory=replace(probe.memory, handle=bytes(64)))

    evidence = tried(cuda, gone, probe)

    assert list(evidence.proofs) == [(Transport.CUDA_IPC, "w-1")]
    assert [each.writer_id for each in evidence.failures] == ["w-2"]


def test_without_a_driver_the_writers_device_is_named(
    probe: DeviceProbe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "find_driver", lambda: None)

    found = refusal(None, probe)

    assert found.reason is RefusalReason.NO_DEVICE
    assert ONE_GPU[0] in found.message
    assert "libcuda" in found.message


def test_without_a_device_too(tmp_path: Path, probe: DeviceProbe) -> None:
    assert refusal(FakeCuda(tmp_path, devices=()), probe).reason is RefusalReason.NO_DEVICE


def test_a_device_that_is_not_seen_is_named_beside_those_that_are(
    tmp_path: Path, probe: DeviceProbe
) -> None:
    found = refusal(FakeCuda(tmp_path, devices=(OTHER_GPU, MIG_GPU)), probe)

    assert found.reason is RefusalReason.OTHER_DEVICE
    for uuid in (ONE_GPU[0], OTHER_GPU[0], MIG_GPU[0], "CUDA_VISIBLE_DEVICES"):
        assert uuid in found.message


def test_another_pid_namespace_is_named_with_the_way_out_before_a_driver_is_touched(
    cuda: FakeCuda, probe: DeviceProbe
) -> None:
    found = refusal(cuda, replace(probe, pid_namespace=4712))

    assert found.reason is RefusalReason.OTHER_PID_NAMESPACE
    for named in ("4711", "4712", "--pid", "shareProcessNamespace"):
        assert named in found.message
    assert cuda.log.operations == []


def test_a_handle_of_this_processs_own_is_not_even_tried(
    cuda: FakeCuda, probe: DeviceProbe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_evidence, "_exported", {})
    note_exported(probe.memory.handle)

    assert refusal(cuda, probe).reason is RefusalReason.OWN_HANDLE
    assert cuda.log.operations == []


@pytest.mark.parametrize(
    ("number", "name", "reason"),
    [
        (1, "CUDA_ERROR_INVALID_VALUE", RefusalReason.DRIVER_FAILED),
        (100, "CUDA_ERROR_NO_DEVICE", RefusalReason.NO_DEVICE),
        (101, "CUDA_ERROR_INVALID_DEVICE", RefusalReason.NO_PEER_ACCESS),
        (201, "CUDA_ERROR_INVALID_CONTEXT", RefusalReason.DRIVER_FAILED),
        (217, "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED", RefusalReason.NO_PEER_ACCESS),
        (801, "CUDA_ERROR_NOT_SUPPORTED", RefusalReason.DRIVER_FAILED),
        (999, "CUDA_ERROR_UNKNOWN", RefusalReason.DRIVER_FAILED),
    ],
)
@pytest.mark.parametrize("call", ["devices", "open", "copy_to_host"])
def test_what_the_driver_says_is_told_by_number_and_name(
    cuda: FakeCuda,
    probe: DeviceProbe,
    *,
    call: str,
    number: int,
    name: str,
    reason: RefusalReason,
) -> None:
    broken = FaultyMemory(cuda, (Fault(call=call, error=number),))

    found = refusal(broken, probe)

    assert found.reason is reason
    assert f"{number} ({name})" in found.message
    assert ONE_GPU[0] in found.message
    assert still_open(cuda.log.operations) == {}


def test_a_mig_device_is_called_one(tmp_path: Path, probe: DeviceProbe) -> None:
    found = refusal(FakeCuda(tmp_path, devices=((ONE_GPU[0], "a slice", True),)), probe)

    assert found.reason is RefusalReason.MIG
    assert "801 (CUDA_ERROR_NOT_SUPPORTED)" in found.message


def test_a_probe_that_reaches_out_of_its_allocation_is_refused(
    cuda: FakeCuda, probe: DeviceProbe
) -> None:
    memory = replace(probe.memory, base_offset_bytes=4096, allocation_bytes=1 << 20)

    found = refusal(cuda, replace(probe, memory=memory))

    assert found.reason is RefusalReason.DRIVER_FAILED
    assert "of its allocation of 4096 bytes" in found.message
    assert still_open(cuda.log.operations) == {}


def test_a_driver_that_hangs_costs_its_deadline_and_what_was_read_before_counts(
    cuda: FakeCuda, probe: DeviceProbe, tmp_path: Path
) -> None:
    shut = gate(tmp_path / "gate")
    slow = FaultyMemory(cuda, (Fault(call="open", hang=shut, after=1, times=1),))

    evidence = tried(slow, probe, replace(probe, writer_id="w-2"), seconds=1.0)

    assert list(evidence.proofs) == [(Transport.CUDA_IPC, "w-1")]
    (found,) = evidence.failures
    assert (found.reason, found.writer_id) == (RefusalReason.DRIVER_SLOW, "w-2")
    assert ONE_GPU[0] in found.message
    let_go(shut)
    for thread in threading.enumerate():
        if thread.name == "teacher-logits-driver":  # the one that was left behind
            thread.join(30)
    assert len(done(cuda.log.operations, "close")) == 2
    assert still_open(cuda.log.operations) == {}


def test_a_process_that_may_have_no_thread_more_is_told_so_by_a_refusal(
    cuda: FakeCuda, probe: DeviceProbe, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    found = refusal(cuda, probe)

    assert found.reason is RefusalReason.DRIVER_FAILED
    assert "ulimit -u" in found.message


class TestHints:
    def test_name_the_devices_of_a_driver_that_was_given(self, cuda: FakeCuda) -> None:
        assert Devices(cuda).seen() == (ONE_GPU[0],)

    def test_touch_no_driver_that_was_not(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The kernel driver says it as text; that takes no context, and forks stay possible."""
        about = tmp_path / "0000:01:00.0"
        about.mkdir()
        (about / "information").write_text(
            "Model: \t\t NVIDIA H200\nGPU UUID: \t GPU-1234\nBus Type: PCIe\n"
        )
        (tmp_path / "other").mkdir()
        (tmp_path / "other" / "information").write_text("Model: none\n")
        monkeypatch.setattr(devices, "_ABOUT_GPUS", str(tmp_path / "*" / "information"))
        monkeypatch.setattr(devices, "find_driver", lambda: 1 // 0)

        assert Devices().seen() == ("GPU-1234",)

    def test_leave_out_what_a_driver_will_not_say(self, cuda: FakeCuda) -> None:
        assert Devices(FaultyMemory(cuda, (Fault(call="devices", error=999),))).seen() == ()


class TestWithoutALine:
    """The host part of device memory comes over the broker line."""

    def gathered(self, cuda: FakeCuda, *probes: DeviceProbe) -> Evidence:
        terms = cast("SessionTerms", SimpleNamespace(epoch="e-1", session_id="s-1"))
        opened = OpenedSession(
            terms=terms, broker_path="/nowhere/broker", nonce=NONCE, device_probes=probes
        )

        def no_line(path: str, timeout: float) -> NoReturn:
            raise FileNotFoundError(2, "No such file or directory")

        return gather(
            opened,
            (Transport.CUDA_IPC, Transport.STREAM),
            "",
            no_line,
            until=time.monotonic() + LONG,
            devices=DeviceSide(devices=Devices(cuda), hints=HERE),
        )

    def test_nothing_is_tried_and_the_reason_is_the_lines(
        self, probe: DeviceProbe, cuda: FakeCuda
    ) -> None:
        evidence = self.gathered(cuda, probe)

        found = {each.transport: each for each in evidence.failures}[Transport.CUDA_IPC]
        assert found.reason is RefusalReason.BROKER_UNREACHABLE
        assert "/nowhere/broker" in found.message
        assert cuda.log.operations == []

    def test_nothing_is_said_where_no_writer_has_device_memory(self, cuda: FakeCuda) -> None:
        evidence = self.gathered(cuda)

        assert [each.transport for each in evidence.failures] == [Transport.SHARED_MEMORY]
