"""TransferQueue as a store of rows: PyPI's ``TransferQueue``, by the extra of its name.

    teacher-logits[transfer-queue]

The driver starts it (``transfer_queue.init()``), and every process of its Ray cluster attaches to
it. Rows are written and read by keys: that moves no cursor, and a field that is there is the only
sign that it was written. What TransferQueue leaves out without a word is an error here
(``transfer_queue_rows``), and every call has a deadline (``transfer_queue_calls``).
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import TYPE_CHECKING

import torch

from teacher_logits.errors import ConfigError, ServerUnreachableError
from teacher_logits_client import threads
from teacher_logits_client.data_plane import transfer_queue_rows as rows
from teacher_logits_client.data_plane.jagged import nest
from teacher_logits_client.data_plane.padded import make_dense
from teacher_logits_client.data_plane.row_meta import RowMeta
from teacher_logits_client.data_plane.row_store import DEFAULT_TIMEOUT_SECONDS, cleared_at_end
from teacher_logits_client.data_plane.transfer_queue_calls import Calls, result_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

    from teacher_logits_client.data_plane.fields import FieldSpec
    from teacher_logits_client.data_plane.transfer_queue_calls import Queue

_CONTROLLER, _NAMESPACE = "TransferQueueController", "transfer_queue"
_PLACEHOLDER = "teacher-logits-schema"


def attach(*, timeout: float = DEFAULT_TIMEOUT_SECONDS) -> TransferQueueStore:
    """Return the cluster's TransferQueue as a store, for this process. It starts none.

    Raises:
        ConfigError: the extra is not installed, or this process is connected to no Ray cluster.
        ServerUnreachableError: nobody has started a TransferQueue there.
        DeadlinePassedError: it did not answer in time.
        TransportFailure: it answered with an error.
    """
    try:
        import ray
        import transfer_queue
    except ImportError as error:
        raise ConfigError(
            f"data_plane.transfer_queue needs {error.name}, which is not here ({error}): pip "
            "install 'teacher-logits[transfer-queue]'",
            facts={"package": str(error.name), "extra": "transfer-queue"},
        ) from error
    if not ray.is_initialized():
        raise ConfigError("this process is connected to no Ray cluster: ray.init(address=...)")
    try:
        ray.get_actor(_CONTROLLER, namespace=_NAMESPACE)
    except ValueError as error:
        raise ServerUnreachableError(
            "no TransferQueue runs in this Ray cluster: the driver calls transfer_queue.init() "
            "before anybody attaches",
            facts={"actor": _CONTROLLER},
        ) from error
    connected: Future[Queue] = Future()
    connected.set_running_or_notify_cancel()  # giving it up does not stop it

    def connect() -> None:
        try:
            transfer_queue.init()  # it finds the controller, and makes this process's client
            connected.set_result(transfer_queue.get_client())
        except Exception as error:
            connected.set_exception(error)

    threads.start(connect, name="transfer-queue-attach")
    return TransferQueueStore(result_of(connected, what="let this process in", timeout=timeout))


class TransferQueueStore:
    """A ``row_store.RowStore``; ``attach`` makes one. A context manager; threads may share it.

    ``close`` ends this process's use of it, and leaves TransferQueue and its rows alone.
    """

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self._calls = Calls()

    def register(
        self,
        partition_id: str,
        specs: Sequence[FieldSpec],
        *,
        timeout: float = DEFAULT_TIMEOUT_SECONDS,
    ) -> None:
        """Make a partition's columns known, at the start of a step, from one thread.

        A placeholder row is written and cleared: TransferQueue has no call for it, and would add
        columns to its table while workers write. Again is fine.

        Raises:
            PayloadInvalidError: rows are there with another element type of one of the fields.
            DeadlinePassedError, TransportFailure: see ``row_store.RowStore``.
        """
        one = torch.ones(1, dtype=torch.int64)
        row = {}
        for spec in specs:
            value = torch.zeros(1, *spec.shape, dtype=spec.element_type)
            row[spec.name] = nest(value, one) if spec.token_aligned else value
        meta = RowMeta(partition_id=partition_id, sample_ids=(_PLACEHOLDER,), sequence_lengths=(1,))
        what = f"register partition {partition_id}"
        with cleared_at_end(self, meta, timeout=timeout):
            self._calls.run(rows.put(self._queue, meta, row), what=what, timeout=timeout)

    def add_rows(
        self,
        meta: RowMeta,
        fields: Mapping[str, torch.Tensor],
        *,
        timeout: float = DEFAULT_TIMEOUT_SECONDS,
    ) -> None:
        """Write rows that are not there yet, with their tags: the producer's first write.

        Raises:
            PayloadConflictError: some are there already.
            PayloadInvalidError: see ``register``.
            DeadlinePassedError, TransportFailure: see ``row_store.RowStore``.
        """
        call = rows.put_new(self._queue, meta, fields)
        self._calls.run(call, what=f"write {len(meta)} rows", timeout=timeout)

    def add_fields(
        self,
        meta: RowMeta,
        fields: Mapping[str, torch.Tensor],
        *,
        timeout: float = DEFAULT_TIMEOUT_SECONDS,
    ) -> None:
        """Add fields to rows that are there; see ``row_store.RowStore`` and ``register``."""
        call = rows.put_beside(self._queue, meta, fields)
        what = f"add {len(fields)} fields to {len(meta)} rows"
        self._calls.run(call, what=what, timeout=timeout)

    def read(
        self,
        meta: RowMeta,
        select_fields: Sequence[str],
        *,
        timeout: float = DEFAULT_TIMEOUT_SECONDS,
    ) -> dict[str, torch.Tensor]:
        """Return fields of rows, by their keys; see ``row_store.RowStore``."""
        names = list(dict.fromkeys(select_fields))
        call = rows.get(self._queue, meta, names)
        what = f"read {len(names)} fields of {len(meta)} rows"
        return make_dense(self._calls.run(call, what=what, timeout=timeout))

    def clear(
        self,
        partition_id: str,
        sample_ids: Sequence[str],
        *,
        timeout: float = DEFAULT_TIMEOUT_SECONDS,
    ) -> None:
        """Let go of rows; see ``row_store.RowStore``."""
        call = rows.let_go(self._queue, partition_id, sample_ids)
        self._calls.run(call, what=f"clear {len(sample_ids)} rows", timeout=timeout)

    def sample_ids(
        self, partition_id: str, *, timeout: float = DEFAULT_TIMEOUT_SECONDS
    ) -> tuple[str, ...]:
        """Return the keys of all rows of a partition; none of one that is not there."""
        call = rows.keys_of(self._queue, partition_id)
        return self._calls.run(call, what=f"list partition {partition_id}", timeout=timeout)

    def close(self) -> None:
        """End this process's use of it; twice is fine."""
        self._calls.close()

    def __enter__(self) -> TransferQueueStore:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
