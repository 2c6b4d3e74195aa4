"""Evidence: what a client can show of where it lives, read as its session opens.

What cannot be read is no error: it is a refusal of one transport, with its reason.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from teacher_logits import inprocess
from teacher_logits.errors import NotAvailable, TeacherLogitsError, TransportFailure
from teacher_logits.terms import SERVER_WRITER
from teacher_logits.transport import Refusal, RefusalReason, Transport, proof_of
from teacher_logits_client.openers.ray_cluster import read_challenge
from teacher_logits_client.sessions.device_evidence import note_exported, try_devices

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from teacher_logits.inprocess import Resident
    from teacher_logits.profiles import NodeHints
    from teacher_logits.terms import RayHolder
    from teacher_logits_client.calls.opened import OpenedSession
    from teacher_logits_client.line import Line
    from teacher_logits_client.openers.devices import Devices

    MakeLine = Callable[[str, float], Line]


@dataclass
class Evidence:
    """What was read for each transport, and what could not be. Whoever has it owns the line."""

    #: By transport and writer; an empty one is the server.
    proofs: dict[tuple[Transport, str], bytes] = field(default_factory=dict)
    failures: list[Refusal] = field(default_factory=list)
    line: Line | None = None
    #: What came over the line for the session's calls to show, though the line be gone.
    secret: str = field(default="", repr=False)
    resident: Resident | None = None

    def fail(self, transport: Transport, reason: RefusalReason, message: str) -> None:
        """Note why a transport could not be proven."""
        self.failures.append(Refusal(transport=transport, reason=reason, message=message))


def gather(
    opened: OpenedSession,
    wanted: Sequence[Transport],
    socket_path: str,
    make_line: MakeLine,
    *,
    until: float,
    devices: DeviceSide | None = None,
) -> Evidence:
    """Read what proves that this process shares memory with the server, and with writers.

    ``wanted`` are the transports that it matters for; ``make_line`` connects to the broker at a
    path, within some seconds; ``devices`` is what device memory is opened with.
    """
    evidence = Evidence()
    nonce = opened.nonce
    if Transport.LOCAL in wanted:
        _look_in_here(opened, evidence)
    if not {Transport.SHARED_MEMORY, Transport.CUDA_IPC}.isdisjoint(wanted):
        challenge = _read_challenge(opened, socket_path, evidence, make_line, until)
        if challenge is not None:
            transport = Transport.SHARED_MEMORY
            mac = proof_of(challenge, nonce=nonce, transport=transport)
            evidence.proofs[transport, ""] = mac
        if devices is not None and Transport.CUDA_IPC in wanted and opened.device_probes:
            _open_probes(opened, evidence, devices, until)
    if Transport.RAY_OBJECT in wanted and opened.ray_holder is not None:
        _ask_holder(opened.ray_holder, nonce, wanted, evidence, until)
    return evidence


def _ask_holder(
    holder: RayHolder,
    nonce: bytes,
    wanted: Sequence[Transport],
    evidence: Evidence,
    until: float,
) -> None:
    """Ask the server's holder for its challenge, where nothing that is wanted more will do."""
    transport = Transport.RAY_OBJECT
    before = wanted[: wanted.index(transport)]
    if any((each, "") in evidence.proofs for each in before):
        return
    found = read_challenge(holder, until=until)
    if isinstance(found, Refusal):
        evidence.failures.append(found)
    else:
        evidence.proofs[transport, ""] = proof_of(found, nonce=nonce, transport=transport)


def _look_in_here(opened: OpenedSession, evidence: Evidence) -> None:
    """Look for the server in this process's table."""
    transport = Transport.LOCAL
    evidence.resident = inprocess.find(opened.terms.epoch)
    if evidence.resident is None:
        message = f"the server does not live in process {os.getpid()}"
        evidence.fail(transport, RefusalReason.OTHER_PROCESS, message)
        return
    secret = evidence.resident.secret
    evidence.proofs[transport, ""] = proof_of(secret, nonce=opened.nonce, transport=transport)


@dataclass(frozen=True, kw_only=True)
class DeviceSide:
    """What a client opens device memory with, and what it says of where it lives."""

    devices: Devices
    hints: NodeHints


def _open_probes(opened: OpenedSession, evidence: Evidence, side: DeviceSide, until: float) -> None:
    """Open device memory of writers on trial, where its host part is to be had."""
    if evidence.line is None:
        why = evidence.failures[-1]
        message = f"the host part of device memory comes over the broker line, and {why.message}"
        evidence.fail(Transport.CUDA_IPC, why.reason, message)
        return
    if inprocess.find(opened.terms.epoch) is not None:
        for probe in opened.device_probes:
            if probe.writer_id == SERVER_WRITER:
                note_exported(probe.memory.handle)
    found = try_devices(
        opened.device_probes, side.devices, nonce=opened.nonce, hints=side.hints, until=until
    )
    evidence.proofs |= found.proofs
    evidence.failures += found.failures


def _read_challenge(
    opened: OpenedSession,
    socket_path: str,
    evidence: Evidence,
    make_line: MakeLine,
    until: float,
) -> bytes | None:
    """Open the line and read the page that came over it; None where either failed."""
    transport = Transport.SHARED_MEMORY
    if not opened.broker_path:
        evidence.fail(transport, RefusalReason.BROKER_UNREACHABLE, "the server has no broker")
        return None
    try:
        line = _connect(opened.broker_path, socket_path, make_line, until)
    except OSError as error:
        evidence.fail(
            transport,
            RefusalReason.BROKER_UNREACHABLE,
            f"connect {opened.broker_path}: {error.strerror or error}; on one node, give both "
            "sides the folder of this socket",
        )
        return None
    try:
        challenge = line.hello(
            opened.terms.session_id, opened.nonce, timeout=until - time.monotonic()
        )
    except TeacherLogitsError as error:
        line.close()
        evidence.fail(transport, _why(error), error.message)
        return None
    finally:
        evidence.secret = line.secret
    evidence.line = line
    return challenge


def _connect(broker_path: str, socket_path: str, make_line: MakeLine, until: float) -> Line:
    """Connect to the broker where the server sees it, or beside the socket that we came by.

    Containers often have one folder under two names.
    """
    left = max(0.001, until - time.monotonic())
    try:
        return make_line(broker_path, left)
    except OSError:
        beside = os.path.join(os.path.dirname(socket_path), os.path.basename(broker_path))
        if not socket_path or beside == broker_path:
            raise
        try:
            return make_line(beside, left)
        except OSError:
            pass  # the name that the server gave is the one to speak of
        raise


def _why(error: TeacherLogitsError) -> RefusalReason:
    if isinstance(error, TransportFailure):
        return RefusalReason.SLAB_NOT_MAPPABLE
    if isinstance(error, NotAvailable):
        return RefusalReason.BROKER_UNREACHABLE
    return RefusalReason.BROKER_REFUSED
