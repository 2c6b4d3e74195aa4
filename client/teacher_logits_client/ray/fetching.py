"""What Ray says, in our errors: within a deadline, and by kind.

    the owner, its actor or its node is gone    ProducerLostError
    an object is gone for another reason        ObjectLostError
    it takes longer than the deadline           DeadlinePassedError
    the object store or its disk is full        PoolFullError

Whatever a worker raised itself comes through as it is: Ray makes it an error of its own class that
is one of the worker's class too, with its facts.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from teacher_logits.errors import (
    DeadlinePassedError,
    Fact,
    ObjectLostError,
    PoolFullError,
    ProducerLostError,
    RequestInvalidError,
    TeacherLogitsError,
)
from teacher_logits_client.config import check_timeout

if TYPE_CHECKING:
    from collections.abc import Iterator

DEADLINE_SECONDS = 600.0
"""How long a fetch waits, where nothing else is said: a teacher's step."""
_LAST_LINE_CHARS = 300


def fetch(
    things: Sequence[object], *, timeout: float = DEADLINE_SECONDS, what: str
) -> list[object]:
    """Return what references refer to, in their order; what is no reference is returned as it is.

    All of them are waited for; the first that failed is raised, before any is returned.

    Raises:
        RequestInvalidError: one reference in place of a list of them, or this process is of no
            cluster.
        ConfigError: ``timeout`` is none: more than 0 seconds, and at most a day.
        ProducerLostError, ObjectLostError, DeadlinePassedError, PoolFullError: see the module.
    """
    import ray

    if isinstance(things, ray.ObjectRef):
        message = f"{what}: a single reference is given: give a list, fetch([reference], ...)"
        raise RequestInvalidError(message, facts={"what": what})
    timeout = check_timeout(timeout, what=what)
    if not isinstance(things, Sequence) or isinstance(things, str | bytes):
        message = f"{what}: a {type(things).__name__} is given: give a list of references"
        raise RequestInvalidError(message, facts={"what": what})
    found = list(things)
    references: dict[int, ray.ObjectRef[object]] = {
        at: each for at, each in enumerate(things) if isinstance(each, ray.ObjectRef)
    }
    if not references:
        return found
    check_in_cluster(what)
    with typed_errors(what, timeout=timeout):
        values = ray.get(list(references.values()), timeout=timeout)
    for at, value in zip(references, values, strict=True):
        found[at] = value
    return found


def check_in_cluster(what: str) -> None:
    """Refuse a process of no cluster, in which Ray would start one, or look for one, of its own.

    Raises:
        RequestInvalidError: it has not called ``ray.init``, and is no worker.
    """
    import ray

    if not ray.is_initialized():
        raise RequestInvalidError(
            f"{what}: this process is no worker and no driver of a Ray cluster: call "
            "ray.init(address=...) first, which this library never does",
            facts={"what": what},
        )


@contextmanager
def typed_errors(what: str, *, timeout: float | None = None) -> Iterator[None]:
    """Raise ours for Ray's errors in the block; ``what`` is what was waited for."""
    from ray import exceptions

    try:
        yield
    except TeacherLogitsError:
        raise
    except exceptions.GetTimeoutError as error:
        if isinstance(error, exceptions.RayTaskError):
            raise  # a worker's own
        facts: dict[str, Fact] = {"what": what, "timeout_seconds": timeout or 0.0}
        message = f"{what}: not there within {timeout} s; give a longer timeout, or look at why"
        raise DeadlinePassedError(message, facts=facts) from error
    except (exceptions.ObjectStoreFullError, exceptions.OutOfDiskError) as error:
        message = f"{what}: no room; give ray.init more object_store_memory, or fewer rows a step"
        raise PoolFullError(message, facts={"what": what}) from error
    except (
        exceptions.OwnerDiedError,
        exceptions.RayActorError,
        exceptions.NodeDiedError,
        exceptions.WorkerCrashedError,
    ) as error:
        message = f"{what}: the process that made it is gone ({_last_words(error)})"
        raise ProducerLostError(message, facts={"what": what}) from error
    except exceptions.ObjectLostError as error:
        message = f"{what}: Ray has lost the object ({type(error).__name__})"
        raise ObjectLostError(message, facts={"what": what}) from error


def _last_words(error: BaseException) -> str:
    """Return an error's kind and the last line of what Ray says, which has the cause: why an
    actor could not be made, or how its process ended."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return ": ".join([type(error).__name__, *(line[:_LAST_LINE_CHARS] for line in lines[-1:])])
