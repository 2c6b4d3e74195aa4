"""Roles: which calls whom are for. The one table of it; an RPC that is not here is for nobody.

Health is for all, tokens or none, so that probes need no secret. What a session may do beyond
this, the session says itself: a student's writes nothing, a publisher's reads nothing.
"""

from __future__ import annotations

import enum

_PACKAGE = "teacher_logits.v1"


class Role(enum.Enum):
    """What a caller is allowed to be."""

    STUDENT = "student"
    PUBLISHER = "publisher"
    OPERATOR = "operator"


EVERY_ROLE = frozenset(Role)
_STUDENTS = frozenset({Role.STUDENT})
_PUBLISHERS = frozenset({Role.PUBLISHER})
_OPERATORS = frozenset({Role.OPERATOR})
_SESSIONS = _STUDENTS | _PUBLISHERS

OPEN_TO_ALL = frozenset(
    {
        "/grpc.health.v1.Health/Check",
        "/grpc.health.v1.Health/List",
        "/grpc.health.v1.Health/Watch",
    }
)

ROLES: dict[str, frozenset[Role]] = {
    f"/{_PACKAGE}.TeacherLogitsService/OpenSession": _STUDENTS,
    f"/{_PACKAGE}.TeacherLogitsService/ProveLocality": _SESSIONS,
    f"/{_PACKAGE}.TeacherLogitsService/RenewSession": _SESSIONS,
    f"/{_PACKAGE}.TeacherLogitsService/CloseSession": _SESSIONS,
    f"/{_PACKAGE}.TeacherLogitsService/AcquirePayload": _STUDENTS,
    f"/{_PACKAGE}.TeacherLogitsService/AcquireStep": _STUDENTS,
    f"/{_PACKAGE}.TeacherLogitsService/ReleasePayload": _STUDENTS,
    f"/{_PACKAGE}.ScoringService/Score": _STUDENTS,
    f"/{_PACKAGE}.ScoringService/ScoredIds": _STUDENTS,
    f"/{_PACKAGE}.BulkService/ReadPayload": _STUDENTS,
    f"/{_PACKAGE}.ObjectService/PutObject": _STUDENTS,
    f"/{_PACKAGE}.RegistryService/OpenPublisher": _PUBLISHERS,
    f"/{_PACKAGE}.RegistryService/ReservePayload": _PUBLISHERS,
    f"/{_PACKAGE}.RegistryService/WritePayload": _PUBLISHERS,
    f"/{_PACKAGE}.RegistryService/SealPayload": _PUBLISHERS,
    f"/{_PACKAGE}.RegistryService/AbandonPayload": _PUBLISHERS,
    f"/{_PACKAGE}.OperatorService/Inspect": _OPERATORS,
    f"/{_PACKAGE}.OperatorService/Reclaim": _OPERATORS,
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo": EVERY_ROLE,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": EVERY_ROLE,
}
"""By the path of the method."""

NAMES_ITS_OWN_SESSION = frozenset(
    method for method, roles in ROLES.items() if roles.isdisjoint(_OPERATORS)
)
"""Calls whose ``session_id`` is the caller's own; an operator's names somebody else's."""


def roles_of(method: str) -> frozenset[Role]:
    """Return whom a call is for; nobody where it is none of ours."""
    return EVERY_ROLE if method in OPEN_TO_ALL else ROLES.get(method, frozenset())


def role_names(roles: frozenset[Role]) -> str:
    """Return roles as messages name them."""
    return " or ".join(sorted(role.value for role in roles)) or "nobody"
