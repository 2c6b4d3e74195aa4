"""Calls into TransferQueue, each with a deadline, from one event loop of our own.

TransferQueue's own blocking calls wait without one: a controller that is gone would hold a trainer
up for good. A call that is given up is cancelled, and its connection with it, so that a late answer
is nobody else's. Whether a write that was given up came through is not known.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import wait
from typing import TYPE_CHECKING, Protocol, TypeVar

from teacher_logits.clock import span_text
from teacher_logits.errors import (
    ConfigError,
    DeadlinePassedError,
    ObjectLostError,
    TeacherLogitsError,
    TransportFailure,
)
from teacher_logits_client import threads

if TYPE_CHECKING:
    from collections.abc import Coroutine, Mapping, Sequence
    from concurrent.futures import Future

    import torch

T = TypeVar("T")


class Metadata(Protocol):
    """What TransferQueue's controller knows of some rows: its ``BatchMeta``, as far as is used."""

    size: int
    is_ready: bool
    field_names: Sequence[str]
    field_schema: Mapping[str, Mapping[str, object]]
    global_indexes: Sequence[int]

    def select_fields(self, field_names: list[str]) -> Metadata:
        """Return it with these fields alone; those that are not there are left out."""


class Queue(Protocol):
    """A process's ``TransferQueueClient``, as far as is used."""

    async def async_kv_retrieve_meta(
        self, keys: list[str], partition_id: str, create: bool
    ) -> Metadata:
        """Return what is known of these rows; those that are not there are left out."""

    async def async_kv_list(self, partition_id: str) -> Mapping[str, Mapping[str, object]]:
        """Return the keys of a partition, below its name."""

    async def async_get_production_status(
        self, data_fields: list[str], partition_id: str
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return a partition's indexes, and which of them have which field."""

    async def async_get_data(self, metadata: Metadata) -> Mapping[str, object]:
        """Return the data of rows."""

    async def async_clear_samples(self, metadata: Metadata) -> None:
        """Let go of rows."""


class Calls:
    """An event loop on a thread of its own, on which calls run; ``close`` ends it."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threads.start(self._loop.run_forever, name="transfer-queue")

    def run(self, call: Coroutine[object, object, T], *, what: str, timeout: float) -> T:
        """Return what a call gives, within ``timeout`` seconds.

        Raises:
            ConfigError: this store is closed.
            TeacherLogitsError: see ``result_of``.
        """
        if self._loop.is_closed():
            call.close()
            raise ConfigError("this store is closed: attach again")
        running = asyncio.run_coroutine_threadsafe(call, self._loop)
        return result_of(running, what=what, timeout=timeout)

    def close(self) -> None:
        """Stop the loop; twice is fine. What is under way is cancelled."""
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def result_of(running: Future[T], *, what: str, timeout: float) -> T:
    """Return what is under way, within ``timeout`` seconds; past them it is cancelled.

    Raises:
        DeadlinePassedError: it gave nothing in time.
        ObjectLostError: the storage does not have what the controller knows of.
        TransportFailure: whatever else TransferQueue raised, with its words.
        TeacherLogitsError: what the call itself raised.
    """
    done, _ = wait([running], timeout)
    if not done:
        running.cancel()
        raise DeadlinePassedError(
            f"waited {span_text(timeout)} for TransferQueue to {what}: it is overloaded, or its "
            "controller or a storage unit is gone; a write may have come through or not",
            facts={"deadline_seconds": timeout},
        )
    try:
        return running.result()
    except TeacherLogitsError:
        raise
    except Exception as error:
        raise _failed(what, error) from error


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


def _failed(what: str, error: Exception) -> TransportFailure:
    # By its name: the class is TransferQueue's, which this module does without.
    lost = type(error).__name__ == "StorageKeyNotFoundError"
    kind = ObjectLostError if lost else TransportFailure
    return kind(
        f"TransferQueue could not {what}: {type(error).__name__}: {error}",
        facts={"error": type(error).__name__},
    )
