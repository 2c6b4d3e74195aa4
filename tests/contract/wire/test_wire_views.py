"""What a server holds crosses the wire whole, and no field of a view is forgotten."""

from __future__ import annotations

import dataclasses
from datetime import timedelta
from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st
from tests.full_view import FULL

from teacher_logits.v1 import operator_service_pb2 as messages
from teacher_logits.views import LeaseView, QueueView, Reclaimed, ServerView
from teacher_logits.wire.views import (
    reclaimed_from_wire,
    reclaimed_to_wire,
    server_view_from_wire,
    server_view_to_wire,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from google.protobuf.message import Message

counts = st.integers(0, 2**63 - 1)
spans = st.timedeltas(timedelta(0), timedelta(days=9999))


def sent(view: ServerView) -> ServerView:
    """A view after its bytes have crossed."""
    data = server_view_to_wire(view).SerializeToString()
    return server_view_from_wire(messages.InspectResponse.FromString(data))


def unset(message: Message) -> Iterator[str]:
    """Fields of the inspection's own messages that were left at their defaults."""
    there = {field.name for field, _ in message.ListFields()}
    for field in message.DESCRIPTOR.fields:
        if field.name not in there:
            yield f"{message.DESCRIPTOR.name}.{field.name}"


def test_a_view_crosses_whole() -> None:
    assert sent(FULL) == FULL


def test_every_field_of_the_messages_is_filled() -> None:
    message = server_view_to_wire(FULL)
    parts = (
        message,
        *message.sessions,
        *message.leases,
        message.pool,
        *message.queues,
        *message.steps,
        message.registered,
        *message.registered.device_slabs,
        message.object_store,
        *message.metrics,
    )

    assert [name for part in parts for name in unset(part)] == []


QUEUE_COUNTS = [each.name for each in dataclasses.fields(QueueView) if each.type == "int"]


@given(
    uptime=spans,
    queue=st.builds(QueueView, **dict.fromkeys(QUEUE_COUNTS, counts), teacher_id=st.text()),
    lease=st.builds(
        LeaseView,
        lease_id=st.text(),
        session_id=st.text(),
        payload_id=st.text(),
        size_bytes=counts,
        age=spans,
        quarantined=st.booleans(),
        doubt=st.text(),
    ),
)
def test_any_numbers_cross(uptime: timedelta, queue: QueueView, lease: LeaseView) -> None:
    view = dataclasses.replace(FULL, uptime=uptime, queue=queue, leases=(lease, lease))

    assert sent(view) == view


@given(reclaimed=st.builds(Reclaimed, freed_bytes=counts, lease_count=counts, session_count=counts))
def test_what_a_reclaim_came_to_crosses_whole(reclaimed: Reclaimed) -> None:
    data = reclaimed_to_wire(reclaimed).SerializeToString()

    assert reclaimed_from_wire(messages.ReclaimResponse.FromString(data)) == reclaimed


def test_a_server_that_has_joined_no_cluster_has_no_store() -> None:
    assert sent(dataclasses.replace(FULL, object_store=None)).object_store is None


def test_a_session_that_still_opens_has_settled_nothing() -> None:
    opening = dataclasses.replace(FULL.sessions[0], settlements=(), pid=0)
    view = dataclasses.replace(FULL, sessions=(opening,))

    assert sent(view).sessions == (opening,)


def test_clients_of_others_are_told_the_free_bytes() -> None:
    assert server_view_to_wire(FULL).pool.free_bytes == FULL.pool.free_bytes == 70
