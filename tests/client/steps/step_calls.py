"""The server's end of gRPC as far as steps go: what is granted is there, and the rest waits."""

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TYPE_CHECKING, cast

import crc32c

from teacher_logits.errors import DeadlinePassedError
from teacher_logits.terms import StepGrant
from teacher_logits.v1 import bulk_service_pb2

if TYPE_CHECKING:
    from teacher_logits_client.calls.steps import PendingStep

LONG = 30.0


class StepCalls:
    """The server's end of gRPC: steps that are there, and the rest waits."""

    is_closed = False

    def __init__(self) -> None:
        self.asked: queue.Queue[tuple[int, str]] = queue.Queue()
        self.released: list[str] = []
        self.unread: list[str] = []
        self.given_up: queue.Queue[str] = queue.Queue()
        self.ended = threading.Event()
        self.streamed: list[str] = []
        self.begun: queue.Queue[str] = queue.Queue()
        self.data: dict[str, bytes] = {}
        self.gate = threading.Event()
        self.gate.set()
        self._futures: dict[int, Future[StepGrant]] = {}
        self._lock = threading.Lock()

    def future(self, step: int) -> "Future[StepGrant]":
        with self._lock:
            return self._futures.setdefault(step, Future())

    def grant(self, grant: StepGrant) -> None:
        """Have a step ready, for whoever asks or has asked."""
        self.future(grant.step).set_result(grant)

    def fail(self, step: int, error: Exception) -> None:
        """Fail whoever has asked for a step; who asks next waits anew."""
        future = self.future(step)
        with self._lock:
            del self._futures[step]
        future.set_exception(error)

    def acquire_step(
        self, session_id: str, *, request_id: str, step: int, timeout: float
    ) -> "PendingStep":
        pending = _Pending(self.future(step))
        self.asked.put((step, request_id))
        return cast("PendingStep", pending)

    def read_payload(
        self, session_id: str, lease_id: str, offset_bytes: int, *, timeout: float
    ) -> Iterator[bytes]:
        self.streamed.append(lease_id)
        self.begun.put(lease_id)
        self.gate.wait(LONG)
        data = self.data[lease_id]
        for at in range(offset_bytes, len(data), 1000):
            piece = data[at : at + 1000]
            yield bulk_service_pb2.ReadPayloadResponse(
                offset_bytes=at, crc32c=crc32c.crc32c(piece), data=piece
            ).SerializeToString()

    def release(
        self,
        session_id: str,
        lease_id: str,
        *,
        timeout: float,
        request_id: str = "",
        unread: bool = False,
    ) -> None:
        if request_id:
            self.given_up.put(request_id)
            return
        self.released.append(lease_id)
        self.unread += [lease_id] if unread else []

    def renew(self, session_id: str, *, timeout: float) -> bool:
        return False

    def close_session(self, session_id: str, *, timeout: float) -> None:
        self.ended.set()


class _Pending:
    def __init__(self, granted: "Future[StepGrant]") -> None:
        self._own: Future[StepGrant] = Future()
        self._lock = threading.Lock()
        granted.add_done_callback(self._take)

    def _take(self, granted: "Future[StepGrant]") -> None:
        with self._lock:
            if not self._own.done():
                error = granted.exception()
                if error is not None:
                    self._own.set_exception(error)
                else:
                    self._own.set_result(granted.result())

    def result(self, timeout: float) -> StepGrant:
        try:
            return self._own.result(timeout)
        except FutureTimeoutError:
            raise DeadlinePassedError("too late") from None

    def when_done(self, callback: Callable[[], None]) -> None:
        self._own.add_done_callback(lambda _: callback())

    def cancel(self) -> None:
        with self._lock:
            if not self._own.done():
                self._own.set_exception(CancelledError())
