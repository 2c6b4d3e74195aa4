"""A mailbox tells of writers that came and slabs that are gone, to a listener while that lives."""

from __future__ import annotations

from typing import TYPE_CHECKING

from teacher_logits.device_memory import DeviceProbe, ExportedMemory
from teacher_logits.terms import SlabsGone, WritersCame
from teacher_logits_client.steps.mailbox import Mailbox

if TYPE_CHECKING:
    from collections.abc import Sequence


class Listener:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.told: list[DeviceProbe] = []

    def hear(self, probes: Sequence[DeviceProbe]) -> None:
        self.told += probes


class Gone:
    """Notes which slabs it is told of."""

    def __init__(self) -> None:
        self.slab_ids: list[str] = []

    def hear(self, slab_ids: Sequence[str]) -> None:
        self.slab_ids += slab_ids


def a_probe(writer_id: str) -> DeviceProbe:
    memory = ExportedMemory(
        handle=bytes(64), device_uuid="GPU-0", base_offset_bytes=0, allocation_bytes=4096
    )
    return DeviceProbe(writer_id=writer_id, memory=memory)


def came(*writers: str) -> WritersCame:
    return WritersCame(probes=tuple(map(a_probe, writers)))


def test_what_came_before_anybody_listened_is_told_then_and_once() -> None:
    mailbox, first, second = Mailbox(), Listener(), Listener()
    mailbox.put(came("one"))
    mailbox.put(came("two"))
    mailbox.hear_of_writers(first.hear)
    mailbox.hear_of_writers(second.hear)

    assert [probe.writer_id for probe in first.told] == ["one", "two"]
    assert second.told == []


def test_what_comes_later_is_told_as_it_comes() -> None:
    mailbox, listener = Mailbox(), Listener()
    mailbox.hear_of_writers(listener.hear)
    mailbox.put(came("one"))

    assert [probe.writer_id for probe in listener.told] == ["one"]


def test_a_listener_is_not_kept_alive() -> None:
    mailbox, listener = Mailbox(), Listener()
    told = listener.told
    mailbox.hear_of_writers(listener.hear)
    del listener
    mailbox.put(came("one"))

    assert told == []


def test_slabs_that_are_gone_are_told_once() -> None:
    mailbox, told = Mailbox(), Gone()
    mailbox.put(SlabsGone(slab_ids=("one",)))
    mailbox.hear_of_gone_slabs(told.hear)
    mailbox.put(SlabsGone(slab_ids=("two", "three")))

    assert told.slab_ids == ["one", "two", "three"]
