"""A payload that is never put into the store leaves time for another way, if there is one."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, cast

import pytest

from teacher_logits.errors import DeadlinePassedError, ObjectLostError
from teacher_logits_client.openers.ray_object import PUT_SECONDS, RayObjectOpener

if TYPE_CHECKING:
    from teacher_logits.terms import LeaseTerms, ObjectTicket
    from teacher_logits_client.openers.buffers import BufferPool


class Lease:
    lease_id = "l"


class Hanging:
    """Has nothing put; ``given`` is how long it was given for that, and for room."""

    def __init__(self) -> None:
        self.given: list[tuple[float, float]] = []

    def __call__(self, lease_id: str, *, timeout: float, room_wait: float) -> ObjectTicket:
        self.given.append((timeout, room_wait))
        raise DeadlinePassedError("it did not come")


def open_by(put: Hanging, *, may_stream: bool, seconds: float) -> None:
    opener = RayObjectOpener(put, cast("BufferPool", None), as_views=False, may_stream=may_stream)
    opener.open(cast("LeaseTerms", Lease()), until=time.monotonic() + seconds)


@pytest.mark.parametrize(("seconds", "most"), [(8.0, 4.0), (3600.0, PUT_SECONDS), (0.5, 0.25)])
def test_who_may_be_streamed_to_gives_up_in_time(seconds: float, most: float) -> None:
    put = Hanging()
    with pytest.raises(ObjectLostError, match="hangs"):
        open_by(put, may_stream=True, seconds=seconds)
    [(timeout, room_wait)] = put.given
    assert 0 < room_wait <= timeout <= most


def test_another_waits_for_as_long_as_it_was_told_to() -> None:
    put = Hanging()
    with pytest.raises(DeadlinePassedError):
        open_by(put, may_stream=False, seconds=3600.0)
    [(timeout, room_wait)] = put.given
    assert room_wait == timeout > 1000
