"""Censuses of workers: what each has open and mapped, looked at until it is settled.

What a worker gives back, and what its driver's log writes, it does on threads of its own: a look at
the wrong moment finds a descriptor more. So a census is compared by waiting, never by one look.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from tests.processes.test_fifty_steps import await_true

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tests.cuda.workers import Worker

_SAME_LOOKS = 3

Census = dict[str, int]


def census(worker: Worker) -> Census:
    """Return what a worker has open and mapped in this moment."""
    return cast("Census", worker.ask("census"))


def settled_census(worker: Worker) -> Census:
    """Return a census that came out the same several times in a row."""
    looks = [census(worker)]

    def is_settled() -> bool:
        looks.append(census(worker))
        last = looks[-_SAME_LOOKS:]
        return len(last) == _SAME_LOOKS and all(each == last[0] for each in last)

    await_true(is_settled)
    return looks[-1]


def await_no_more_than(workers: Sequence[Worker], before: Sequence[Mapping[str, int]]) -> None:
    """Wait until no worker has more of anything than it had before."""
    for worker, had in zip(workers, before, strict=True):
        await_true(
            lambda worker=worker, had=had: all(  # type: ignore[misc]
                count <= had[name] for name, count in census(worker).items()
            )
        )


def await_mapped(worker: Worker, count: int) -> None:
    """Wait until a worker has so many allocations of devices mapped."""
    await_true(lambda: census(worker)["device"] == count)
