"""Device evidence: device memory of each writer, opened on trial before anything is read there.

    probe of a writer   ->  opened, its first bytes read back, closed   ->  a MAC over them

Only the trial knows: devices are hidden and split, handles do not cross PID namespaces, drivers
refuse and hang. What stands in the way is a refusal that names both sides' facts, and no error.

The driver is called on a thread of its own, so that one that hangs costs its deadline and no more.
Nothing of it is touched where no writer has device memory.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from teacher_logits.device_memory import PROBE_BYTES, DeviceError
from teacher_logits.devices.ranges import outside_allocation
from teacher_logits.errors import DeadlinePassedError, NotAvailable, TransportFailure
from teacher_logits.transport import Refusal, RefusalReason, Transport, proof_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from teacher_logits.device_memory import Device, DeviceMemory, DeviceProbe
    from teacher_logits.profiles import NodeHints
    from teacher_logits_client.openers.devices import Devices

TRIAL_SECONDS = 10.0
"""How long all trials of one handshake may take; never more than half of what that may."""

_SELF_OPENED, _NO_DEVICE = 201, 100
_NO_PEER = frozenset({101, 217, 705})

#: Handles that were exported here, with the process that was: a fork of it is another.
_exported: dict[bytes, int] = {}


@dataclass(frozen=True, kw_only=True)
class DeviceEvidence:
    """What was read of writers' device memory, by writer, and what could not be."""

    proofs: dict[tuple[Transport, str], bytes] = field(default_factory=dict)
    failures: list[Refusal] = field(default_factory=list)


def note_exported(handle: bytes) -> None:
    """Remember a handle of this process's own: no process can open one of its own."""
    _exported[handle] = os.getpid()


def try_devices(
    probes: Sequence[DeviceProbe],
    devices: Devices,
    *,
    nonce: bytes,
    hints: NodeHints,
    until: float,
) -> DeviceEvidence:
    """Open each probe on trial, and return what that proves.

    ``hints`` are what this side says of where it lives. ``until`` is of ``time.monotonic``.
    """
    trial = _Trial(devices, hints)
    now = time.monotonic()
    deadline = min(now + TRIAL_SECONDS, now + max(0.0, until - now) / 2)
    try:
        devices.calls.before(
            deadline, lambda: trial.run(probes), undo=lambda count: None, what="the probes"
        )
    except NotAvailable as late:  # or no thread was to be had
        trial.is_over = True
        is_slow = isinstance(late, DeadlinePassedError)
        reason = RefusalReason.DRIVER_SLOW if is_slow else RefusalReason.DRIVER_FAILED
        why = late.message
    else:
        reason, why = RefusalReason.DRIVER_SLOW, ""
    evidence = DeviceEvidence()
    for probe in probes:
        found = trial.found.get(probe.writer_id)
        if found is None:
            found = _refusal(probe, reason, f"{why}; {trial.sides(probe)}")
        if isinstance(found, Refusal):
            evidence.failures.append(found)
        else:
            mac = proof_of(found, nonce=nonce, transport=Transport.CUDA_IPC)
            evidence.proofs[Transport.CUDA_IPC, probe.writer_id] = mac
    return evidence


class _Trial:
    """One go through some probes; ``found`` is the challenge or the refusal of each, by writer."""

    def __init__(self, devices: Devices, hints: NodeHints) -> None:
        self.found: dict[str, bytes | Refusal] = {}
        #: Nobody waits for the rest.
        self.is_over = False
        self._devices = devices
        self._hints = hints
        self._visible: tuple[Device, ...] | None = None

    def run(self, probes: Sequence[DeviceProbe]) -> int:
        """Try one probe after the other; return how many."""
        for probe in probes:
            if self.is_over:
                break
            try:
                self.found[probe.writer_id] = self._try(probe)
            except DeviceError as error:
                self.found[probe.writer_id] = self._failed(probe, error)
            except TransportFailure as error:
                why = f"{error.message}; {self.sides(probe)}"
                self.found[probe.writer_id] = _refusal(probe, RefusalReason.DRIVER_FAILED, why)
        return len(self.found)

    def sides(self, probe: DeviceProbe) -> str:
        """Say what either side has."""
        if self._visible is None:
            seen = "which devices this process sees is not known"
        else:
            uuids = ", ".join(each.uuid for each in self._visible) or "none"
            seen = f"this process sees {uuids}"
        return f"the writer's device is {probe.memory.device_uuid}, and {seen}"

    def _try(self, probe: DeviceProbe) -> bytes | Refusal:
        if _exported.get(probe.memory.handle) == os.getpid():
            return _refusal(
                probe,
                RefusalReason.OWN_HANDLE,
                f"the writer lives in this process ({os.getpid()}), and CUDA lets no process open "
                "memory that it exported itself",
            )
        ours, theirs = self._hints.namespaces.get("pid", 0), probe.pid_namespace
        if ours and theirs and ours != theirs:
            return _refusal(
                probe,
                RefusalReason.OTHER_PID_NAMESPACE,
                f"this process is in PID namespace {ours} and the writer in {theirs}, and CUDA's "
                "handles do not cross: share one (docker --pid=container:NAME or --pid=host; "
                "Kubernetes shareProcessNamespace: true in one pod, or hostPID)",
            )
        memory = self._devices.find()
        if memory is None:
            return _refusal(
                probe,
                RefusalReason.NO_DEVICE,
                f"the writer's device is {probe.memory.device_uuid}, and this process finds no "
                "CUDA driver (libcuda.so.1)",
            )
        return self._open(probe, memory)

    def _open(self, probe: DeviceProbe, memory: DeviceMemory) -> bytes | Refusal:
        self._visible = memory.devices()
        device = self._device_of(probe)
        if device is None:
            reason = RefusalReason.OTHER_DEVICE if self._visible else RefusalReason.NO_DEVICE
            why = f"{self.sides(probe)}: look at CUDA_VISIBLE_DEVICES and the container's devices"
            return _refusal(probe, reason, why)
        start, what = probe.memory.base_offset_bytes, f"the probe of writer {probe.writer_id}"
        base = memory.open(probe.memory.handle, device=device)
        try:
            there = memory.locate(base).allocation_bytes
            if start + PROBE_BYTES > there:
                raise outside_allocation(what, probe.memory, PROBE_BYTES, there)
            challenge = bytearray(PROBE_BYTES)
            memory.copy_to_host(memoryview(challenge), base + start, device=device)
            return bytes(challenge)
        finally:
            memory.close(base, device=device)

    def _failed(self, probe: DeviceProbe, error: DeviceError) -> Refusal:
        device = self._device_of(probe)
        reason, hint = RefusalReason.DRIVER_FAILED, ""
        if (device is not None and device.is_mig) or probe.memory.device_uuid.startswith("MIG-"):
            reason, hint = RefusalReason.MIG, ": a MIG device hands no memory to another process"
        elif error.number in _NO_PEER:
            reason, hint = RefusalReason.NO_PEER_ACCESS, ": the devices have no way to each other"
        elif error.number == _NO_DEVICE:
            reason = RefusalReason.NO_DEVICE
        elif error.number == _SELF_OPENED:
            hint = (
                f": said of a writer in another PID namespace ({probe.pid_namespace} said the "
                f"writer, this process is in {self._hints.namespaces.get('pid', 0)}), and of one "
                "that is dead"
            )
        why = f"the driver refused {error.call} with {error.number} ({error.name}){hint}"
        return _refusal(probe, reason, f"{why}; {self.sides(probe)}")

    def _device_of(self, probe: DeviceProbe) -> Device | None:
        uuid = probe.memory.device_uuid
        return next((each for each in self._visible or () if each.uuid == uuid), None)


def _refusal(probe: DeviceProbe, reason: RefusalReason, message: str) -> Refusal:
    return Refusal(
        transport=Transport.CUDA_IPC, reason=reason, message=message, writer_id=probe.writer_id
    )
