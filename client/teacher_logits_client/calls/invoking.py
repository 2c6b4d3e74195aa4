"""One call over gRPC: made while the channels are open, with a deadline; fails with our errors."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

import grpc

from teacher_logits.errors import ServerUnreachableError
from teacher_logits_client.calls.failures import Waiting, error_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from google.protobuf.message import Message

    from teacher_logits.addresses import Address
    from teacher_logits_client.calls.channels import Channels
    from teacher_logits_client.calls.told import Unary

Request = TypeVar("Request", bound="Message")
Reply = TypeVar("Reply", bound="Message")

LEAST_SECONDS = 0.001
"""Shortest deadline that a call is given."""


class Invoker:
    """Makes the calls of one client that are answered once."""

    def __init__(self, channels: Channels, *, address: Address) -> None:
        self._channels = channels
        self._address = address
        self._metadata = channels.shown.metadata

    def __call__(
        self,
        method: Unary[Request, Reply],
        request: Request,
        *,
        what: str,
        timeout: float,
    ) -> Reply:
        """Return the reply to a call within ``timeout`` seconds; ``what`` names it in an error.

        Raises:
            TeacherLogitsError: what the server refused it for, or that it did not answer.
        """
        try:
            with self.open():
                shown = self._metadata(getattr(request, "session_id", ""))
                return method(request, timeout=max(LEAST_SECONDS, timeout), metadata=shown)
        except grpc.RpcError as error:
            waiting = Waiting(what=what, address=self._address, seconds=timeout)
            raise error_of(error, waiting, is_closed=self._channels.is_closed) from None

    @contextmanager
    def open(self) -> Iterator[None]:
        """Have a call made while the channels are open.

        Raises:
            ServerUnreachableError: they are closed, by another thread meanwhile perhaps.
        """
        self._check_open()
        try:
            yield
        except ValueError:
            self._check_open()  # another thread closed them after we had looked
            raise

    def _check_open(self) -> None:
        if self._channels.is_closed:
            raise ServerUnreachableError(
                f"the client of {self._address} is closed; connect anew",
                facts={"address": str(self._address)},
            )
