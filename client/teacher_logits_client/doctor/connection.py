"""A visit to one server: is it there, does it admit us, and how would its payloads come?

The handshake is a real one, with a profile that fits every teacher (one rank, one entry a
position), and its session is closed at once. A teacher that is not there is not waited for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from teacher_logits.errors import NotAllowedError, TeacherLogitsError, UnknownTeacherError
from teacher_logits.grid import BatchGrid
from teacher_logits.profiles import StudentProfile
from teacher_logits.terms import Verdict as CheckVerdict
from teacher_logits.transport import Locality, RefusalReason, Transport
from teacher_logits_client.calls.inspection import inspect_server
from teacher_logits_client.connecting import connect_to
from teacher_logits_client.doctor.cures import OF_REASON, cure_of_error, finer_reason
from teacher_logits_client.doctor.findings import Finding, Verdict
from teacher_logits_client.doctor.namespaces import (
    look_at_server,
    namespaces_of,
    server_namespaces_finding,
)
from teacher_logits_client.doctor.reach import reach, reach_findings
from teacher_logits_client.doctor.sockets import look_at_way, way_finding
from teacher_logits_client.units import size_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from teacher_logits.errors import Fact
    from teacher_logits.pool import PoolUsage
    from teacher_logits.profiles import TeacherProfile
    from teacher_logits.transport import Refusal
    from teacher_logits.views import ServerView
    from teacher_logits_client.client import Client
    from teacher_logits_client.config import Connection
    from teacher_logits_client.student import Session

_FULL = 20
"""A pool is full where no more than this part of it is free."""
#: What a session over shared memory cannot have and does not miss.
_NOT_MISSED = frozenset({Transport.LOCAL, Transport.CUDA_IPC, Transport.RAY_OBJECT})


@dataclass(frozen=True, kw_only=True)
class Visit:
    """Which server to visit, and what to insist on."""

    connection: Connection
    timeout: float
    teacher_id: str = ""
    locality: Locality = Locality.PREFER


@dataclass(frozen=True, kw_only=True)
class Visited:
    """What a visit came to. ``pool`` is the server's, where it is on this machine and told it."""

    findings: tuple[Finding, ...]
    pool: PoolUsage | None = None


def visit_server(visit: Visit, *, knows_peers: bool, has_gpu: bool) -> Visited:
    """Visit a server: the way to it, itself, and a handshake. What fails ends the visit.

    Args:
        knows_peers, has_gpu: of this process; see ``server_namespaces_finding``.
    """
    found = _way(visit, knows_peers=knows_peers, has_gpu=has_gpu)
    if any(each.verdict is Verdict.FAIL for each in found):
        return Visited(findings=tuple(found))
    try:
        client = connect_to(visit.connection, timeout=visit.timeout)
    except TeacherLogitsError as error:
        return Visited(findings=(*found, _failed("server", error)))
    with client:
        found.append(
            Finding(
                name="server",
                verdict=Verdict.OK,
                message=f"a server answers and serves at {client.address}",
                facts={"address": str(client.address)},
            )
        )
        try:
            seen, view = _look_inside(client, visit)
            found += seen
            teachers = None if view is None else view.teachers
            found += _shake_hands(client, visit, teachers, has_gpu=has_gpu)
        except TeacherLogitsError as error:
            return Visited(findings=(*found, _failed("handshake", error)))
    is_here = visit.connection.address.is_loopback
    pool = view.pool if view is not None and is_here else None
    return Visited(findings=tuple(found), pool=pool)


def _way(visit: Visit, *, knows_peers: bool, has_gpu: bool) -> list[Finding]:
    """Look at the way to the server, as far as it goes."""
    address = visit.connection.address
    if not address.is_unix:
        return reach_findings(reach(visit.connection, timeout=visit.timeout))
    found = [way_finding(look_at_way(address.path))]
    server = look_at_server(address.path)
    if server is not None:
        own = namespaces_of("self")
        found.append(
            server_namespaces_finding(own, server, knows_peers=knows_peers, has_gpu=has_gpu)
        )
    return found


def _pool(pool: PoolUsage) -> Finding:
    """Judge whether the server's pool has room."""
    is_full = pool.free_bytes <= pool.budget_bytes // _FULL
    return Finding(
        name="pool",
        verdict=Verdict.WARN if is_full else Verdict.OK,
        message=f"the server's pool has {size_text(pool.free_bytes)} free of "
        f"{size_text(pool.budget_bytes)}, with {size_text(pool.used_bytes)} used and "
        f"{size_text(pool.quarantined_bytes)} in quarantine",
        cure="see who holds room: teacher-logits inspect" if is_full else "",
        facts={
            "budget_bytes": pool.budget_bytes,
            "used_bytes": pool.used_bytes,
            "quarantined_bytes": pool.quarantined_bytes,
            "free_bytes": pool.free_bytes,
        },
    )


def _look_inside(client: Client, visit: Visit) -> tuple[list[Finding], ServerView | None]:
    """Ask what the server holds; a student's token does not let one see that."""
    try:
        view = inspect_server(client.address, credentials=client.credentials, timeout=visit.timeout)
    except NotAllowedError as error:
        return [
            Finding(
                name="pool",
                verdict=Verdict.OK,
                message="the server shows what it holds to operators alone, and no operator's "
                "token was shown: where it has several teachers, name one (--teacher-id)",
                facts=_reasons(error),
            )
        ], None
    return [_pool(view.pool)], view


def _shake_hands(
    client: Client, visit: Visit, teachers: Sequence[TeacherProfile] | None, *, has_gpu: bool
) -> list[Finding]:
    """Open a session that fits the teacher, and close it. ``teachers`` is None where unseen.

    Raises:
        UnknownTeacherError: there is none, or none of that name.
    """
    found = None if teachers is None else _teachers(teachers, visit.teacher_id)
    grid = None if found is None else found[0].batch_grid
    named = [] if found is None or len(found) == 1 else [_several(found)]
    profile = StudentProfile(
        batch_grid=BatchGrid(
            global_batch_size=1 if grid is None else grid.global_batch_size,
            data_parallel_size=1,
            micro_batch_size=1,
        ),
        teacher_id=visit.teacher_id if found is None else found[0].teacher_id,
        top_k=1,
        student_id="doctor",
        locality=visit.locality,
    )
    try:
        session = client.open_session(profile)
    except TeacherLogitsError as error:
        return [*named, _failed("handshake", error)]
    with session:
        refused = (_refused(each, has_gpu=has_gpu) for each in session.refusals)
        return [*named, _handshake(session), _settled(session), *refused]


def _teachers(teachers: Sequence[TeacherProfile], teacher_id: str) -> list[TeacherProfile]:
    """Return the teacher to be visited, as the server says right now; all where none is named."""
    found = [each for each in teachers if teacher_id in ("", each.teacher_id)]
    if not found:
        names = ", ".join(sorted(each.teacher_id for each in teachers)) or "none"
        what = f"no teacher {teacher_id!r}" if teacher_id else "no teacher"
        raise UnknownTeacherError(
            f"there is {what} here right now (asked, and not waited for); there are: {names}",
            facts={"teacher_id": teacher_id, "teachers": names},
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


def _refused(refusal: Refusal, *, has_gpu: bool) -> Finding:
    """Judge a refusal; that of device memory matters where there is a GPU and a teacher on one."""
    is_device = refusal.transport is Transport.CUDA_IPC
    missed = is_device and has_gpu and refusal.reason is not RefusalReason.NOT_OFFERED
    matters = missed or refusal.transport not in _NOT_MISSED
    return Finding(
        name=f"refused_{refusal.transport.value}",
        verdict=Verdict.WARN if matters else Verdict.OK,
        message=f"{refusal.reason.value}: {refusal.message}",
        cure=OF_REASON[refusal.reason] if matters else "",
        facts={"transport": refusal.transport.value, "reason": refusal.reason.value},
    )


def _failed(name: str, error: TeacherLogitsError) -> Finding:
    rules = ",".join(each.rule for each in getattr(error, "violations", ()))
    return Finding(
        name=name,
        verdict=Verdict.FAIL,
        message=f"{error.reason}: {error.message}",
        cure=cure_of_error(error),
        facts={**error.facts, **_reasons(error), **({"rules": rules} if rules else {})},
    )


def _reasons(error: TeacherLogitsError) -> dict[str, Fact]:
    finer = finer_reason(error)
    return {"reason": error.reason, **({"finer_reason": finer} if finer else {})}
