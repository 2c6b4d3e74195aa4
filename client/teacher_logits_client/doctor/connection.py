"""A visit to one server: is it there, does it admit us, and how would its payloads come?

The handshake is a real one, with a profile that fits every teacher (one rank, one entry a
position), and its session is closed at once. A teacher that is not there is not waited for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from teacher_logits.errors import ContractViolation, TeacherLogitsError, UnknownTeacherError
from teacher_logits.grid import BatchGrid
from teacher_logits.profiles import StudentProfile
from teacher_logits.terms import Verdict as CheckVerdict
from teacher_logits.transport import Locality, RefusalReason, Transport
from teacher_logits_client.calls.inspection import inspect_server
from teacher_logits_client.connecting import connect
from teacher_logits_client.doctor.findings import Finding, Verdict

if TYPE_CHECKING:
    from collections.abc import Sequence

    from teacher_logits.profiles import TeacherProfile
    from teacher_logits.transport import Refusal
    from teacher_logits_client.client import Client
    from teacher_logits_client.student import Session

_CURES = {
    RefusalReason.NOT_OFFERED: "have the server offer it: teacher-logits serve --transports "
    "local,shared_memory,stream",
    RefusalReason.BROKER_UNREACHABLE: "run on the server's machine, and give both sides the "
    "folder of the broker's socket under one path (in containers: one volume mounted in both)",
    RefusalReason.BROKER_REFUSED: "run as the server's user or root, or start the server with "
    "--allow-uid and this user's uid",
    RefusalReason.PEER_UNPROVEN: "use Linux 6.5 or newer on the server's machine, or let both "
    "sides share one PID namespace",
    RefusalReason.PROOF_MISSING: "use the same release on both sides",
    RefusalReason.PROOF_WRONG: "connect to the server itself: something between it and this "
    "process answers in its place",
    RefusalReason.SLAB_NOT_MAPPABLE: "allow passing descriptors and mapping them (a sandbox or "
    "seccomp profile forbids it); see the findings about slabs above",
    RefusalReason.PLATFORM: "run on Linux, with a release that has this transport",
}
#: What a session over shared memory cannot have and does not miss.
_NOT_MISSED = frozenset({Transport.LOCAL, Transport.CUDA_IPC, Transport.RAY_OBJECT})


@dataclass(frozen=True, kw_only=True)
class Visit:
    """Which server to visit, and what to insist on."""

    address: str
    timeout: float
    insecure: bool = False
    teacher_id: str = ""
    locality: Locality = Locality.PREFER


def connection_findings(visit: Visit) -> list[Finding]:
    """Visit a server.

    Raises:
        ConfigError: the address is none, or is on another host and ``insecure`` was not said.
    """
    try:
        client = connect(visit.address, timeout=visit.timeout, insecure=visit.insecure)
    except ContractViolation as error:
        if error.reason == "CONFIG":
            raise
        return [_failed("server", error, "give the address of a teacher-logits server")]
    except TeacherLogitsError as error:
        cure = "start the server or mend the address; a socket's folder must be visible here"
        return [_failed("server", error, cure)]
    with client:
        serves = Finding(
            name="server",
            verdict=Verdict.OK,
            message=f"a server answers and serves at {client.address}",
            facts={"address": str(client.address)},
        )
        return [serves, *_shake_hands(client, visit)]


def _shake_hands(client: Client, visit: Visit) -> list[Finding]:
    try:
        found = _teachers(client, visit)
    except TeacherLogitsError as error:
        return [_failed("handshake", error, _cure_of_refusal(error))]
    grid, teacher_id = found[0].batch_grid, found[0].teacher_id
    named = [] if len(found) == 1 else [_several(found)]
    profile = StudentProfile(
        batch_grid=BatchGrid(
            global_batch_size=1 if grid is None else grid.global_batch_size,
            data_parallel_size=1,
            micro_batch_size=1,
        ),
        teacher_id=teacher_id,
        top_k=1,
        student_id="doctor",
        locality=visit.locality,
    )
    try:
        session = client.open_session(profile)
    except TeacherLogitsError as error:
        return [*named, _failed("handshake", error, _cure_of_refusal(error))]
    with session:
        refused = map(_refused, session.refusals)
        return [*named, _handshake(session), _settled(session), *refused]


def _teachers(client: Client, visit: Visit) -> list[TeacherProfile]:
    """Return the teacher to be visited, as the server says right now; all where none is named."""
    teachers = inspect_server(client.address, timeout=visit.timeout).teachers
    found = [each for each in teachers if visit.teacher_id in ("", each.teacher_id)]
    if not found:
        names = ", ".join(sorted(each.teacher_id for each in teachers)) or "none"
        what = f"no teacher {visit.teacher_id!r}" if visit.teacher_id else "no teacher"
        raise UnknownTeacherError(
            f"there is {what} here right now (asked, and not waited for); there are: {names}",
            facts={"teacher_id": visit.teacher_id, "teachers": names},
        )
    return found


def _several(teachers: Sequence[TeacherProfile]) -> Finding:
    names = ", ".join(each.teacher_id for each in teachers)
    return Finding(
        name="teachers",
        verdict=Verdict.OK,
        message=f"there are {len(teachers)} teachers: {names}; the first is visited here "
        "(--teacher-id visits another), and a student has to name one",
        facts={"teachers": names},
    )


def _handshake(session: Session) -> Finding:
    teacher = session.teacher
    by = {v: [c.name for c in session.checks if c.verdict is v] for v in CheckVerdict}
    unchecked = ", ".join(by[CheckVerdict.UNCHECKED]) or "nothing"
    return Finding(
        name="handshake",
        verdict=Verdict.OK,
        message=f"teacher {teacher.teacher_id!r} admits a student: {teacher.vocabulary_size} ids, "
        f"top-k up to {teacher.top_k}, rows up to {teacher.max_row_tokens} tokens; checks passed: "
        f"{', '.join(by[CheckVerdict.PASSED]) or 'none'}; unchecked, since a doctor is no student: "
        f"{unchecked}",
        facts={
            "teacher_id": teacher.teacher_id,
            "vocabulary_size": teacher.vocabulary_size,
            "top_k": teacher.top_k,
            "max_row_tokens": teacher.max_row_tokens,
            "epoch": session.terms.epoch,
            "protocol_version": session.terms.protocol_version,
        },
    )


def _settled(session: Session) -> Finding:
    transport = session.transport
    name = transport.value if transport else "none"
    is_shared = transport is not None and transport.is_local
    return Finding(
        name="transport",
        verdict=Verdict.OK if is_shared else Verdict.WARN,
        message=f"payloads come over {name}: "
        + ("nothing is copied" if is_shared else "their bytes are sent, and none are shared"),
        cure=""
        if is_shared
        else "if both sides are on one node, mend what refused shared_memory (below)",
        facts={"transport": name},
    )


def _refused(refusal: Refusal) -> Finding:
    matters = refusal.transport not in _NOT_MISSED
    return Finding(
        name=f"refused_{refusal.transport.value}",
        verdict=Verdict.WARN if matters else Verdict.OK,
        message=f"{refusal.reason.value}: {refusal.message}",
        cure=_CURES.get(refusal.reason, "") if matters else "",
        facts={"transport": refusal.transport.value, "reason": refusal.reason.value},
    )


def _failed(name: str, error: TeacherLogitsError, cure: str) -> Finding:
    return Finding(
        name=name,
        verdict=Verdict.FAIL,
        message=f"{error.reason}: {error.message}",
        cure=cure,
        facts={**error.facts, "reason": error.reason},
    )


def _cure_of_refusal(error: TeacherLogitsError) -> str:
    """Return what the reasons in a refusal call for; they are named in its message."""
    cures = [cure for reason, cure in _CURES.items() if reason.value in error.message]
    if cures:
        return "; ".join(cures)
    if error.reason == "UNKNOWN_TEACHER":
        return "start its publishers, or name one of its teachers with --teacher-id"
    return "the message says which rule was broken and by which number"
