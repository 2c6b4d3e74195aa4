"""The handshake: from a profile to a settled session, a student's or a publisher's.

    1  OpenSession      admitted, or every broken rule        -> terms, nonce, broker's path
    2  broker line      hello with the nonce                  -> a page with a challenge
       writers' devices memory of theirs, opened on trial     -> a challenge each
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
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib import metadata
from typing import TYPE_CHECKING

from teacher_logits import __version__
from teacher_logits.device_memory import DeviceProbe
from teacher_logits.errors import (
    NoCommonTransportError,
    SessionRefusedError,
    TeacherLogitsError,
)
from teacher_logits.profiles import NodeHints
from teacher_logits.transport import RefusalReason, Transport
from teacher_logits_client.openers.codec_terms import check_settled
from teacher_logits_client.openers.ray_cluster import node_here
from teacher_logits_client.sessions.device_evidence import note_exported
from teacher_logits_client.sessions.evidence import DeviceSide, gather

if TYPE_CHECKING:
    from collections.abc import Sequence

    from teacher_logits.devices.probe import Probe
    from teacher_logits.inprocess import Resident
    from teacher_logits.profiles import StudentProfile, TeacherProfile
    from teacher_logits.terms import SessionTerms
    from teacher_logits.transport import Refusal
    from teacher_logits_client.calls import Calls
    from teacher_logits_client.calls.opened import OpenedSession
    from teacher_logits_client.line import Line
    from teacher_logits_client.openers.devices import Devices
    from teacher_logits_client.sessions.evidence import Evidence, MakeLine

_NAMESPACES = ("pid", "ipc", "net", "mnt")
_BOOT_ID = "/proc/sys/kernel/random/boot_id"


@dataclass(frozen=True, kw_only=True)
class Agreed:
    """What a handshake came to. ``line`` is set for sessions that live by one.

    ``nonce`` is what later proofs are made under.
    """

    terms: SessionTerms
    profile: StudentProfile
    refusals: tuple[Refusal, ...]
    line: Line | None
    resident: Resident | None
    nonce: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, kw_only=True)
class AgreedPublisher:
    """What a publisher's handshake came to. ``line`` is set where it writes slabs of its own."""

    terms: SessionTerms
    profile: TeacherProfile
    transport: Transport
    refusals: tuple[Refusal, ...]
    line: Line | None


def shake_hands(
    calls: Calls,
    profile: StudentProfile,
    *,
    timeout: float,
    make_line: MakeLine,
    devices: Devices,
) -> Agreed:
    """Open a session for a profile and settle its transports.

    ``make_line`` connects to the broker at a path, within some seconds; ``devices`` is what device
    memory is opened with.

    Raises:
        SessionRefusedError: with every rule that the profile breaks; or the server knows none of
            the codecs that it asks for.
        NoCommonTransportError: with every refusal.
        NotAvailable: the server did not answer within ``timeout`` seconds.
    """
    until = time.monotonic() + timeout
    asked = _asked(profile, devices)
    request_id = secrets.token_hex(12)
    opened = calls.open_session(asked, request_id=request_id, timeout=timeout)
    try:
        check_settled(asked, opened.terms)
    except SessionRefusedError:
        with suppress(TeacherLogitsError):  # its TTL will end it
            calls.close_session(opened.terms.session_id, timeout=until - time.monotonic())
        raise
    side = DeviceSide(devices=devices, hints=asked.hints)
    evidence = gather(
        opened, asked.transports, calls.address.path, make_line, until=until, devices=side
    )
    terms, line = _prove(calls, opened, evidence, until)
    return Agreed(
        terms=terms,
        profile=asked,
        refusals=_refusals(asked, terms),
        line=line,
        resident=evidence.resident,
        nonce=opened.nonce,
    )


def shake_hands_as_publisher(
    calls: Calls,
    profile: TeacherProfile,
    transports: Sequence[Transport],
    *,
    timeout: float,
    make_line: MakeLine,
    probe: Probe | None = None,
) -> AgreedPublisher:
    """Open a publisher's session and settle where it writes.

    ``probe`` is what its readers open on trial, where it writes to a device.

    Raises:
        SessionRefusedError: with every rule that the profile breaks.
        NoCommonTransportError: it is settled on none of ``transports``, with the refusals.
        NotAvailable: the server did not answer within ``timeout`` seconds.
    """
    until = time.monotonic() + timeout
    if profile.hints == NodeHints():
        profile = replace(profile, hints=node_hints())
    opened = calls.registry.open_publisher(
        profile,
        request_id=secrets.token_hex(12),
        timeout=timeout,
        probe=None if probe is None else _shown(probe, profile.hints),
        challenge=b"" if probe is None else probe.challenge,
    )
    evidence = gather(opened, transports, calls.address.path, make_line, until=until)
    terms, line = _prove(calls, opened, evidence, until)
    settled = {settlement.transport for settlement in terms.settlements}
    refusals = tuple(
        refusal
        for s in terms.settlements
        for refusal in s.refusals
        if refusal.transport in transports
    )
    for transport in transports:
        if transport in settled:
            return AgreedPublisher(
                terms=terms, profile=profile, transport=transport, refusals=refusals, line=line
            )
    if line is not None:
        line.close()
    with suppress(TeacherLogitsError):  # its TTL will end it
        calls.close_session(terms.session_id, timeout=until - time.monotonic())
    raise _no_way(transports, refusals)


def _no_way(transports: Sequence[Transport], refusals: Sequence[Refusal]) -> NoCommonTransportError:
    """Return the error for a publisher that could be settled on nothing it wants."""
    wanted = ", ".join(t.value for t in transports) or "nothing"
    said = "; ".join(f"{each.transport.value}: {each.message}" for each in refusals)
    return NoCommonTransportError(
        f"the publisher wants {wanted}, and that is not to be had ({said or 'no reason given'}): "
        "allow 'stream', or mend what stands in the way",
        facts={each.transport.value: each.reason.value for each in refusals},
    )


def _shown(probe: Probe, hints: NodeHints) -> DeviceProbe:
    note_exported(probe.exported.handle)
    return DeviceProbe(
        writer_id="",
        memory=probe.exported,
        pid_namespace=hints.namespaces.get("pid", 0),
        host=hints.host_name,
    )


def _prove(
    calls: Calls, opened: OpenedSession, evidence: Evidence, until: float
) -> tuple[SessionTerms, Line | None]:
    """Show what was read; return the settled terms, and the line if the session lives by it."""
    if evidence.secret:
        calls.keep_secret(opened.terms.session_id, evidence.secret)
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
    if line is not None and not any(each is not None and each.is_local for each in settled):
        line.close()  # a streamed session lives by its TTL
        line = None
    return terms, line


def _asked(profile: StudentProfile, devices: Devices) -> StudentProfile:
    """Fill in the hints.

    A transport that needs proof stays: without one it is refused, with its reason.
    """
    hints = profile.hints if profile.hints != NodeHints() else node_hints(devices.seen())
    return replace(profile, hints=hints)


def _refusals(asked: StudentProfile, terms: SessionTerms) -> tuple[Refusal, ...]:
    """Return the server's refusals in the order in which the student wanted the transports.

    Where no writer is there any more nothing was settled, and of what was asked nothing refused.
    """
    # What one writer does not offer says less than why another's was not to be had.
    refusals = [refusal for s in terms.settlements for refusal in s.refusals]
    refusals.sort(key=lambda refusal: refusal.reason is not RefusalReason.NOT_OFFERED)
    found = {refusal.transport: refusal for refusal in refusals}
    return tuple(found[t] for t in asked.transports if t in found)


def node_hints(device_uuids: tuple[str, ...] = ()) -> NodeHints:
    """Return what this process can say of where it runs; nothing of it is believed."""
    versions = {"python": platform.python_version(), "teacher-logits": __version__}
    for name in ("torch", "grpcio", "protobuf"):
        with suppress(metadata.PackageNotFoundError):  # built by hand: it works, and has no name
            versions[name] = metadata.version(name)
    return NodeHints(
        host_name=socket.gethostname(),
        boot_id=_first_line(_BOOT_ID),
        pid=os.getpid(),
        namespaces={name: inode for name in _NAMESPACES if (inode := _namespace(name))},
        device_uuids=device_uuids,
        versions=versions,
        ray_node_id=node_here(),
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
