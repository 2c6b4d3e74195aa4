"""The handshake: from a student's profile to a settled session.

    1  OpenSession      admitted, or every broken rule        -> terms, nonce, broker's path
    2  broker line      hello with the nonce                  -> a page with a challenge
       this process     is it the server's own?               -> a secret of its table
    3  ProveLocality    what was read, and what could not be  -> the settled transport

What fails in step 2 is no error: it is a refusal of one transport, with its reason, and the
server's settlement says what that leaves.
"""

from __future__ import annotations

import os
import platform
import secrets
import socket
import time
from dataclasses import dataclass, field, replace
from importlib import metadata
from typing import TYPE_CHECKING

from teacher_logits import __version__, inprocess
from teacher_logits.errors import NotAvailable, TeacherLogitsError, TransportFailure
from teacher_logits.profiles import NodeHints
from teacher_logits.transport import Refusal, RefusalReason, Transport, proof_of
from teacher_logits_client.line import Line

if TYPE_CHECKING:
    from collections.abc import Callable

    from teacher_logits.inprocess import Resident
    from teacher_logits.profiles import StudentProfile
    from teacher_logits.terms import SessionTerms
    from teacher_logits_client.calls import Calls, OpenedSession

OPENABLE = frozenset({Transport.LOCAL, Transport.SHARED_MEMORY, Transport.STREAM})
"""Transports that this release of the client has an opener for."""

_NAMESPACES = ("pid", "ipc", "net", "mnt")
_BOOT_ID = "/proc/sys/kernel/random/boot_id"


@dataclass(frozen=True, kw_only=True)
class Agreed:
    """What a handshake came to. ``line`` is set for sessions that live by one."""

    terms: SessionTerms
    profile: StudentProfile
    refusals: tuple[Refusal, ...]
    line: Line | None
    resident: Resident | None


@dataclass
class _Evidence:
    proofs: dict[Transport, bytes] = field(default_factory=dict)
    failures: list[Refusal] = field(default_factory=list)
    line: Line | None = None
    resident: Resident | None = None

    def fail(self, transport: Transport, reason: RefusalReason, message: str) -> None:
        self.failures.append(Refusal(transport=transport, reason=reason, message=message))


def shake_hands(
    calls: Calls,
    profile: StudentProfile,
    *,
    timeout: float,
    late_lease: Callable[[str], None],
) -> Agreed:
    """Open a session for a profile and settle its transports.

    ``late_lease`` is told of leases whose acquisition had been given up when they came.

    Raises:
        SessionRefusedError: with every rule that the profile breaks.
        NoCommonTransportError: with every refusal.
        NotAvailable: the server did not answer within ``timeout`` seconds.
    """
    until = time.monotonic() + timeout
    asked = _asked(profile)
    request_id = secrets.token_hex(12)
    opened = calls.open_session(asked, request_id=request_id, timeout=timeout)
    evidence = _gather(opened, asked, calls.address.path, late_lease, until)
    try:
        terms = calls.prove_locality(
            opened.terms.session_id,
            proofs=evidence.proofs,
            failures=evidence.failures,
            timeout=until - time.monotonic(),
        )
    except BaseException:
        if evidence.line is not None:
            evidence.line.close()
        raise
    settled = {settlement.transport for settlement in terms.settlements}
    line = evidence.line
    if line is not None and not settled & {Transport.SHARED_MEMORY, Transport.LOCAL}:
        line.close()  # a streamed session lives by its TTL
        line = None
    return Agreed(
        terms=terms,
        profile=asked,
        refusals=_refusals(profile, terms),
        line=line,
        resident=evidence.resident,
    )


def _asked(profile: StudentProfile) -> StudentProfile:
    """Fill in the hints, and leave out what would be settled on and could not be opened.

    A transport that needs proof stays: without one it is refused, with its reason.
    """
    hints = profile.hints if profile.hints != NodeHints() else node_hints()
    transports = tuple(t for t in profile.transports if t in OPENABLE or t.is_local)
    return replace(profile, hints=hints, transports=transports)


def _refusals(profile: StudentProfile, terms: SessionTerms) -> tuple[Refusal, ...]:
    """Return the server's refusals, and ours, in the order in which the student wanted them."""
    found = {refusal.transport: refusal for s in terms.settlements for refusal in s.refusals}
    settled = {settlement.transport for settlement in terms.settlements}
    for transport in profile.transports:
        if transport in settled:
            break
        found.setdefault(transport, _not_openable(transport))
    return tuple(found[t] for t in profile.transports if t in found)


def _not_openable(transport: Transport) -> Refusal:
    return Refusal(
        transport=transport,
        reason=RefusalReason.PLATFORM,
        message=f"this client (release {__version__}) cannot open it",
    )


def _gather(
    opened: OpenedSession,
    profile: StudentProfile,
    socket_path: str,
    late_lease: Callable[[str], None],
    until: float,
) -> _Evidence:
    """Read what proves that this process shares memory with the server."""
    evidence = _Evidence()
    nonce = opened.nonce
    for transport in profile.transports:
        if transport is Transport.LOCAL:
            evidence.resident = inprocess.find(opened.terms.epoch)
            if evidence.resident is None:
                evidence.fail(
                    transport,
                    RefusalReason.OTHER_PROCESS,
                    f"the server does not live in process {os.getpid()}",
                )
            else:
                secret = evidence.resident.secret
                evidence.proofs[transport] = proof_of(secret, nonce=nonce, transport=transport)
        elif transport is Transport.SHARED_MEMORY:
            challenge = _read_challenge(opened, socket_path, evidence, late_lease, until)
            if challenge is not None:
                evidence.proofs[transport] = proof_of(challenge, nonce=nonce, transport=transport)
        elif transport not in OPENABLE:
            evidence.failures.append(_not_openable(transport))
    return evidence


def _read_challenge(
    opened: OpenedSession,
    socket_path: str,
    evidence: _Evidence,
    late_lease: Callable[[str], None],
    until: float,
) -> bytes | None:
    """Open the line and read the page that came over it; None where either failed."""
    transport = Transport.SHARED_MEMORY
    if not opened.broker_path:
        evidence.fail(transport, RefusalReason.BROKER_UNREACHABLE, "the server has no broker")
        return None
    try:
        line = _connect(opened.broker_path, socket_path, late_lease, until)
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
    evidence.line = line
    return challenge


def _connect(
    broker_path: str, socket_path: str, late_lease: Callable[[str], None], until: float
) -> Line:
    """Connect to the broker where the server sees it, or beside the socket that we came by.

    Containers often have one folder under two names.
    """
    left = max(0.001, until - time.monotonic())
    try:
        return Line(broker_path, timeout=left, late_lease=late_lease)
    except OSError:
        beside = os.path.join(os.path.dirname(socket_path), os.path.basename(broker_path))
        if not socket_path or beside == broker_path:
            raise
        try:
            return Line(beside, timeout=left, late_lease=late_lease)
        except OSError:
            pass  # the name that the server gave is the one to speak of
        raise


def _why(error: TeacherLogitsError) -> RefusalReason:
    if isinstance(error, TransportFailure):
        return RefusalReason.SLAB_NOT_MAPPABLE
    if isinstance(error, NotAvailable):
        return RefusalReason.BROKER_UNREACHABLE
    return RefusalReason.BROKER_REFUSED


def node_hints() -> NodeHints:
    """Return what this process can say of where it runs; nothing of it is believed."""
    versions = {"python": platform.python_version(), "teacher-logits": __version__}
    for name in ("torch", "grpcio", "protobuf"):
        versions[name] = metadata.version(name)
    return NodeHints(
        host_name=socket.gethostname(),
        boot_id=_first_line(_BOOT_ID),
        pid=os.getpid(),
        namespaces={name: inode for name in _NAMESPACES if (inode := _namespace(name))},
        versions=versions,
    )


def _namespace(name: str) -> int:
    try:
        return os.stat(f"/proc/self/ns/{name}").st_ino
    except OSError:
        return 0


def _first_line(path: str) -> str:
    try:
        with open(path, encoding="ascii") as file:
            return file.readline().strip()
    except OSError:
        return ""
