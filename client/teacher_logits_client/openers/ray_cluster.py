"""The Ray cluster that this process is of, if it is of one: its holder is found and asked here.

Ray is never started, and not even imported where the process has not done so itself. Every wait
has a deadline. What Ray says of lost objects and actors becomes an ``ObjectLostError``.
"""

from __future__ import annotations

import importlib.util
import queue
import sys
import threading
import time
from typing import TYPE_CHECKING, Protocol, cast

from teacher_logits.clock import span_text
from teacher_logits.errors import DeadlinePassedError, ObjectLostError
from teacher_logits.transport import Refusal, RefusalReason, Transport

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ray import ObjectRef

    from teacher_logits.errors import Fact
    from teacher_logits.terms import ObjectTicket, RayHolder

_PROOF_SECONDS = 5.0
"""How long a holder may take to say its challenge, while a session opens."""


def read_challenge(holder: RayHolder, *, until: float) -> bytes | Refusal:
    """Return what a server's holder says to processes of its cluster, or why it cannot be asked.

    Waits until ``until`` (``time.monotonic`` seconds), and never long.
    """
    refusal = _not_in_ray()
    if refusal is not None:
        return refusal
    import ray

    here = str(ray.get_runtime_context().gcs_address)
    until = min(until, time.monotonic() + _PROOF_SECONDS)
    try:
        actor = _holders.find(holder, until)
        challenge = _get(actor.challenge.remote(), until, what="its challenge")
    except ValueError:
        return _absent(holder, here)
    except (ObjectLostError, DeadlinePassedError) as error:
        _holders.forget(holder)
        return _refuse(RefusalReason.HOLDER_GONE, f"actor {holder.name}: {error.message}")
    return challenge if isinstance(challenge, bytes) else b""


def node_here() -> str:
    """Return this process's node of its Ray cluster; empty where it is of none."""
    if "ray" not in sys.modules or _not_in_ray() is not None:
        return ""
    import ray

    return str(ray.get_runtime_context().get_node_id())


def fetch_all(tickets: Sequence[ObjectTicket], lease_id: str, *, until: float) -> list[memoryview]:
    """Return the objects of a lease's tickets: bytes that lie in the node's store, read-only.

    They come side by side, and are there while anything views them.

    Raises:
        ObjectLostError: a holder or an object is gone, or a ticket is not good any more.
        DeadlinePassedError: it took too long.
    """
    asked = [(each, _ask(each, lease_id, until)) for each in tickets]
    references = [_taken(each, answer, until) for each, answer in asked]
    names = ", ".join(each.object_id for each in tickets)
    found = _get(references, until, what=f"object {names}")
    return [memoryview(each) for each in found]  # type: ignore[attr-defined]


def _ask(ticket: ObjectTicket, lease_id: str, until: float) -> ObjectRef[object]:
    """Show a ticket to its holder; return what that will answer."""
    try:
        actor = _holders.find(ticket.holder, until)
    except ValueError:
        raise ObjectLostError(
            f"holder {ticket.holder.name} is gone: the server starts another for the next lease",
            facts=_facts(ticket),
        ) from None
    return actor.take.remote(ticket.object_id, lease_id, ticket.token)


def _taken(ticket: ObjectTicket, answer: ObjectRef[object], until: float) -> object:
    """Return the reference that a holder hands out."""
    try:
        taken = _get(answer, until, what="the reference")
    except ObjectLostError:
        _holders.forget(ticket.holder)
        raise
    if not isinstance(taken, list) or not taken:
        raise ObjectLostError(
            f"the holder does not hand out object {ticket.object_id} to this lease: it has ended",
            facts=_facts(ticket),
        )
    return taken[0]


def _facts(ticket: ObjectTicket) -> dict[str, Fact]:
    return {"object_id": ticket.object_id, "holder": ticket.holder.name}


def copy(found: memoryview, room: memoryview) -> None:
    """Copy bytes of the store; other threads run meanwhile."""
    import numpy  # Ray has brought it

    numpy.copyto(numpy.frombuffer(room, numpy.uint8), numpy.frombuffer(found, numpy.uint8))


class _Method(Protocol):
    """A method of an actor, as its callers have it."""

    def remote(self, *given: object) -> ObjectRef[object]:
        """Call it; return the reference of what it will answer."""


class _Actor(Protocol):
    """A holder, as its callers have it; see the server's ``ray_holder``."""

    challenge: _Method
    take: _Method


class _Holders:
    """Handles of holders that were found; to find one takes a call of the cluster's head."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, RayHolder], _Actor] = {}

    def find(self, holder: RayHolder, until: float) -> _Actor:
        """Return the handle of a holder in this process's cluster; ValueError without one.

        A head that is gone is waited for by Ray itself, for minutes, and by nobody here.

        Raises:
            DeadlinePassedError: the head did not answer.
            ObjectLostError: Ray says that it cannot be asked.
        """
        import ray

        place = (ray.get_runtime_context().get_job_id(), holder)
        if place in self._found:
            return self._found[place]
        answers: queue.SimpleQueue[_Actor | Exception] = queue.SimpleQueue()

        def look() -> None:
            try:
                found = ray.get_actor(holder.name, namespace=holder.namespace)
                answers.put(cast("_Actor", found))
            except Exception as error:
                answers.put(error)

        threading.Thread(target=look, name="teacher-logits-holder", daemon=True).start()
        left = max(0.0, until - time.monotonic())
        try:
            answer = answers.get(timeout=left)
        except queue.Empty:
            raise _late(f"the handle of {holder.name}", left) from None
        if isinstance(answer, ValueError):
            raise answer
        if isinstance(answer, Exception):
            raise _lost(f"the handle of {holder.name}", answer) from answer
        self._found[place] = answer
        return answer

    def forget(self, holder: RayHolder) -> None:
        """Look for a holder anew, should it be asked for again."""
        for place in [each for each in self._found if each[1] == holder]:
            self._found.pop(place, None)


_holders = _Holders()


def _get(reference: object, until: float, *, what: str) -> object:
    """Return what a reference is of, or a list of them, once it is here."""
    import ray
    from ray.exceptions import GetTimeoutError, RayError

    left = max(0.0, until - time.monotonic())
    try:
        found: object = ray.get(reference, timeout=left)  # type: ignore[call-overload]
    except GetTimeoutError:
        raise _late(what, left) from None
    except RayError as error:
        # Without its frames, which it would keep in a cycle, and with them the references here.
        raise _lost(what, error) from error.with_traceback(None)
    return found


def _lost(what: str, error: Exception) -> ObjectLostError:
    said = (str(error).splitlines() or [""])[0][:300]
    return ObjectLostError(
        f"{what} is lost to the Ray cluster ({type(error).__name__}: {said})",
        facts={"error": type(error).__name__},
    )


def _late(what: str, waited: float) -> DeadlinePassedError:
    return DeadlinePassedError(
        f"{what} did not come from the Ray cluster within {span_text(waited)}",
        facts={"waited_seconds": waited},
    )


def _not_in_ray() -> Refusal | None:
    """Return why this process is of no cluster; None where it is of one."""
    if "ray" not in sys.modules:
        if importlib.util.find_spec("ray") is None:
            return _refuse(
                RefusalReason.NO_RAY, "Ray is not installed here: pip install 'teacher-logits[ray]'"
            )
        return _refuse(RefusalReason.NOT_IN_RAY, _NOWHERE)
    import ray
    from ray.util.client import ray as remote

    if remote.is_connected():
        return _refuse(
            RefusalReason.NOT_IN_RAY,
            "this process reaches its cluster over Ray Client (ray://), which has no store here",
        )
    return None if ray.is_initialized() else _refuse(RefusalReason.NOT_IN_RAY, _NOWHERE)


_NOWHERE = (
    "this process is no worker and no driver of a Ray cluster: open the session in a Ray task or "
    "actor, or behind ray.init(address=...)"
)


def _absent(holder: RayHolder, here: str) -> Refusal:
    """Return why the cluster at an address has no such holder."""
    if here != holder.cluster_address:
        return _refuse(
            RefusalReason.OTHER_CLUSTER,
            f"this process is of the Ray cluster at {here}, and the server of that at "
            f"{holder.cluster_address}",
        )
    return _refuse(
        RefusalReason.HOLDER_GONE,
        f"the Ray cluster at {here} has no actor {holder.name} in namespace "
        f"{holder.namespace!r} now",
    )


def _refuse(reason: RefusalReason, message: str) -> Refusal:
    return Refusal(transport=Transport.RAY_OBJECT, reason=reason, message=message)
