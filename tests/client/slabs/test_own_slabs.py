"""A publisher's own slabs, against a broker that does as the test tells it."""

import os
import select
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, cast

import pytest
from tests.client.line.test_line import Broker, a_line
from tests.client.line.test_line_mail import a_shard

from teacher_logits.devices.probe import Probe
from teacher_logits.errors import (
    DeadlinePassedError,
    HostCopyNeededError,
    PayloadConflictError,
    PoolFullError,
    ReservationLapsedError,
    ServerUnreachableError,
)
from teacher_logits.keys import PayloadKey
from teacher_logits.payload import Extent, Payload
from teacher_logits.payload_room import HostRoom
from teacher_logits.pool import PAGE_BYTES
from teacher_logits.slab import CONTROL_BYTES, is_retired
from teacher_logits.terms import Reservation, RoomFreed
from teacher_logits.v1 import line_pb2
from teacher_logits.wire.errors import to_status
from teacher_logits.wire.steps import mail_to_wire, reservation_to_wire
from teacher_logits_client import line
from teacher_logits_client.config import HostCopies
from teacher_logits_client.line.file_watch import FileWatch
from teacher_logits_client.openers.driver_threads import DriverThreads
from teacher_logits_client.slabs.claims import Claim, Sealing
from teacher_logits_client.slabs.device_slab_maker import DeviceSlabMaker
from teacher_logits_client.slabs.freed_mail import FreedMail
from teacher_logits_client.slabs.own_slabs import OwnSlabs
from teacher_logits_client.slabs.publisher_room import PublisherRoom
from teacher_logits_client.slabs.slab_maker import HostSlab, SlabMaker

if TYPE_CHECKING:
    from teacher_logits_client.calls.registry import RegistryCalls

SOON, LONG = 0.1, 30.0
ANSWERED = 1.0
"""A wait for room that is in vain, behind a claim that was answered."""
GOOD = Sealing(columns=(), bad_row_count=0, valid_count=None, digest="")


@dataclass
class Desk:
    """Answers a publisher's requests on a thread, but for those that it is told to leave out."""

    broker: Broker
    unanswered: set[str] = field(default_factory=set)
    #: Payloads that were sealed, as an abandon is answered.
    sealed: set[str] = field(default_factory=set)
    refused: dict[str, Exception] = field(default_factory=dict)
    #: What a reserve says of it; the step itself where None.
    lowest_open: int | None = None
    holders: str = ""
    asked: list[str] = field(default_factory=list)
    slab_sizes: dict[str, int] = field(default_factory=dict)
    #: What a reserve says of copies on the host, and what seals must say of them.
    hints_copy: bool = False
    needs_copy: bool = False
    seals: list[bool] = field(default_factory=list)
    handles: dict[str, bytes] = field(default_factory=dict)

    def run(self) -> None:
        while True:
            try:
                packet = self.broker.socket.recv(65536)
                if not packet:
                    return
                self._answer(line_pb2.LineRequest.FromString(packet))
            except OSError:
                return

    def _answer(self, request: line_pb2.LineRequest) -> None:
        kind = request.WhichOneof("body") or ""
        self.asked.append(kind)
        if kind in self.unanswered:
            return
        reply = line_pb2.LineReply(call_id=request.call_id)
        if kind == "seal":
            self.seals.append(request.seal.host_copy)
        if kind == "seal" and self.needs_copy and not request.seal.host_copy:
            reply.status = to_status(HostCopyNeededError("copy it")).SerializeToString()
        elif kind in self.refused:
            reply.status = to_status(self.refused[kind]).SerializeToString()
        elif kind == "reserve":
            step = request.reserve.payload.key.step
            reservation = Reservation(
                payload_id=f"p-{step}",
                is_repeat=False,
                lowest_open_step=step if self.lowest_open is None else self.lowest_open,
                host_copy=self.hints_copy,
            )
            reply.reserve.CopyFrom(reservation_to_wire(reservation))
        else:
            getattr(reply, kind).SetInParent()
            if kind == "want_steps":
                reply.want_steps.lacking = self.holders
            elif kind == "abandon":
                reply.abandon.is_sealed = request.abandon.payload_id in self.sealed
            elif kind == "put_slab":
                self.slab_sizes[request.put_slab.slab_id] = request.put_slab.size_bytes
                self.handles[request.put_slab.slab_id] = request.put_slab.device.handle
        self.broker.answer(reply)

    def free(self, *steps: int) -> None:
        names = tuple(f"p-{step}" for step in steps)
        mail = RoomFreed(payload_ids=names, lowest_open_step=max(steps) + 1)
        self.broker.answer(mail_to_wire(mail))


@contextmanager
def slabs(
    folder: Path,
    *,
    pages: int = 1,
    slab_pages: int | None = None,
    check_memory: Callable[[int], None] = lambda size: None,
    probe: Probe | None = None,
    host_copies: HostCopies = HostCopies.AS_NEEDED,
) -> Iterator[tuple[OwnSlabs, Desk]]:
    mail = FreedMail()
    with a_line(folder, on_mail=mail.put) as (line, broker), ThreadPoolExecutor(1) as pool:
        desk = Desk(broker)
        broker.socket.settimeout(LONG)
        running = pool.submit(desk.run)
        way = OwnSlabs(
            "session",
            line=line,
            registry=cast("RegistryCalls", None),
            mail=mail,
            room=PublisherRoom(
                pool_size_bytes=pages * PAGE_BYTES,
                slab_size_bytes=(slab_pages or pages) * PAGE_BYTES,
            ),
            maker=(
                SlabMaker(check_memory=check_memory)
                if probe is None
                else DeviceSlabMaker(
                    probe.memory,
                    probe.device,
                    calls=DriverThreads(),
                    pool_size_bytes=pages * PAGE_BYTES,
                )
            ),
            host_copies=host_copies,
            probe=probe,
        )
        try:
            yield way, desk
        finally:
            way.close()
            running.result(LONG)


def a_claim(step: int, size_bytes: int = 100) -> Claim:
    shard = a_shard()
    payload = Payload(
        **{
            **vars(shard),
            "size_bytes": size_bytes,
            "key": PayloadKey(teacher_id="teacher", step=step, shard=1),
        }
    )
    return Claim(request_id=f"r-{step}", payload=payload, row_positions=(2, 3), real_rows=0)


def slot_of(way: OwnSlabs, payload_id: str) -> int:
    """What the control page says of a payload's room."""
    held = way.room.table.find(payload_id)
    assert held is not None
    return way.room.shelf[held.extent.slab_id].generation(held.extent.slot)


def test_readers_are_let_in_by_the_seal_and_kept_out_before_and_after(tmp_path: Path) -> None:
    with slabs(tmp_path) as (way, desk):
        granted = way.reserve(a_claim(0), until=monotonic() + LONG)
        assert isinstance(granted.room, HostRoom)
        granted.room.view[:3] = b"abc"
        assert slot_of(way, "p-0") == 1
        way.seal("p-0", GOOD, until=monotonic() + LONG)
        assert slot_of(way, "p-0") == 2
        held = way.room.table.find("p-0")
        assert held is not None
        desk.free(0)
        way.reserve(a_claim(1), until=monotonic() + LONG)
        assert slot_of(way, "p-1") == 3
        assert list(desk.slab_sizes.values()) == [PAGE_BYTES + CONTROL_BYTES]


def test_a_full_pool_waits_for_mail(tmp_path: Path) -> None:
    with slabs(tmp_path) as (way, desk), ThreadPoolExecutor(1) as pool:
        way.reserve(a_claim(0), until=monotonic() + LONG)
        way.seal("p-0", GOOD, until=monotonic() + LONG)
        waiting = pool.submit(way.reserve, a_claim(1), until=monotonic() + LONG)
        desk.free(0)
        assert waiting.result(LONG).reservation.payload_id == "p-1"


def test_a_draft_that_is_abandoned_lets_another_thread_go_on(tmp_path: Path) -> None:
    with slabs(tmp_path) as (way, desk), ThreadPoolExecutor(1) as pool:
        way.reserve(a_claim(0), until=monotonic() + LONG)
        waiting = pool.submit(way.reserve, a_claim(1), until=monotonic() + LONG)
        way.abandon("p-0", until=monotonic() + LONG)
        assert waiting.result(LONG).reservation.payload_id == "p-1"
        assert desk.asked.count("abandon") == 1


def test_a_claim_that_finds_no_room_in_time_is_given_up(tmp_path: Path) -> None:
    with slabs(tmp_path) as (way, desk):
        way.reserve(a_claim(0), until=monotonic() + LONG)
        with pytest.raises(PoolFullError, match="step 0 is being written"):
            way.reserve(a_claim(1), until=monotonic() + ANSWERED)
        assert desk.asked[-1] == "abandon"


def test_a_full_pool_names_whom_the_server_says_it_waits_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with slabs(tmp_path) as (way, desk):
        way.reserve(a_claim(0), until=monotonic() + LONG)
        desk.holders = "step 0 waits for student:3"
        with monkeypatch.context() as patient:
            patient.setattr(line, "SAY_WHY_SECONDS", LONG)
            with pytest.raises(PoolFullError, match=r"\(step 0 waits for student:3\)$") as raised:
                way.reserve(a_claim(1), until=monotonic() + ANSWERED)
        assert raised.value.facts["need_bytes"] == 100
        desk.unanswered = {"want_steps"}
        with pytest.raises(PoolFullError, match=r"raise pool_size_bytes of open_publisher$"):
            way.reserve(a_claim(1), until=monotonic() + ANSWERED)


def test_a_seal_that_was_not_answered_leaves_its_room_in_doubt(tmp_path: Path) -> None:
    with slabs(tmp_path) as (way, desk):
        way.reserve(a_claim(0), until=monotonic() + LONG)
        desk.unanswered = {"seal"}
        with pytest.raises(DeadlinePassedError):
            way.seal("p-0", GOOD, until=monotonic() + SOON)
        assert way.usage().quarantined_bytes == PAGE_BYTES
        desk.unanswered = {"abandon"}
        with pytest.raises(DeadlinePassedError):
            way.abandon("p-0", until=monotonic() + SOON)
        with pytest.raises(PoolFullError, match="sealed, as far as is known"):
            way.reserve(a_claim(1), until=monotonic() + ANSWERED)
        desk.free(0)
        way.reserve(a_claim(1), until=monotonic() + LONG)


def test_a_seal_that_was_interrupted_leaves_its_room_in_doubt_until_it_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*given: object, **more: object) -> None:
        raise KeyboardInterrupt

    with slabs(tmp_path) as (way, desk):
        way.reserve(a_claim(0), until=monotonic() + LONG)
        with monkeypatch.context() as patched:
            patched.setattr(way._line, "seal", interrupt)
            with pytest.raises(KeyboardInterrupt):
                way.seal("p-0", GOOD, until=monotonic() + LONG)
        assert way.usage().quarantined_bytes == PAGE_BYTES
        way.seal("p-0", GOOD, until=monotonic() + LONG)
        usage = way.usage()
        assert (usage.quarantined_bytes, usage.used_bytes) == (0, PAGE_BYTES)
        assert desk.seals == [False]


def test_the_answer_to_an_abandon_says_whether_a_seal_was_taken(tmp_path: Path) -> None:
    with slabs(tmp_path) as (way, desk):
        desk.unanswered = {"seal"}
        for step, is_sealed in ((0, False), (1, True)):
            way.reserve(a_claim(step), until=monotonic() + LONG)
            with pytest.raises(DeadlinePassedError):
                way.seal(f"p-{step}", GOOD, until=monotonic() + SOON)
            desk.sealed = {"p-1"}
            assert way.abandon(f"p-{step}", until=monotonic() + LONG) is is_sealed
        with pytest.raises(PoolFullError, match="step 1 is not read by all yet"):
            way.reserve(a_claim(2), until=monotonic() + ANSWERED)
        desk.free(1)
        way.reserve(a_claim(2), until=monotonic() + LONG)


def test_a_seal_may_be_tried_again_and_was_heard_if_its_room_is_free_meanwhile(
    tmp_path: Path,
) -> None:
    with slabs(tmp_path, pages=2) as (way, desk):
        for step in range(2):
            way.reserve(a_claim(step), until=monotonic() + LONG)
        desk.unanswered = {"seal"}
        for name in ("p-0", "p-1"):
            with pytest.raises(DeadlinePassedError):
                way.seal(name, GOOD, until=monotonic() + SOON)
        desk.unanswered = set()
        way.seal("p-0", GOOD, until=monotonic() + LONG)
        assert slot_of(way, "p-0") == 2
        desk.free(1)
        asked = len(desk.asked)
        way._line.drain()
        way.seal("p-1", GOOD, until=monotonic() + LONG)
        assert len(desk.asked) == asked


def test_a_copy_whose_room_is_freed_meanwhile_lets_nobody_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with slabs(tmp_path) as (way, desk):
        way.reserve(a_claim(0), until=monotonic() + LONG)
        desk.unanswered = {"seal"}
        with pytest.raises(DeadlinePassedError):
            way.seal("p-0", GOOD, until=monotonic() + SOON)
        held = way.room.table.find("p-0")
        assert held is not None
        held.wants_copy = True
        asked = list(desk.asked)

        def is_read_by_all(slab: HostSlab, extent: Extent, columns: object) -> None:
            del slab, extent, columns
            with way.room.lock:
                way.room.free("p-0")

        monkeypatch.setattr(HostSlab, "copy_to_host", is_read_by_all)
        way.seal("p-0", GOOD, until=monotonic() + LONG)
        assert way.room.shelf[held.extent.slab_id].generation(held.extent.slot) == 3
        assert desk.asked == asked


def test_a_refused_seal_frees_its_room_and_keeps_readers_out(tmp_path: Path) -> None:
    with slabs(tmp_path) as (way, desk):
        way.reserve(a_claim(0), until=monotonic() + LONG)
        held = way.room.table.find("p-0")
        assert held is not None
        desk.refused = {"seal": PayloadConflictError("other bytes")}
        with pytest.raises(PayloadConflictError):
            way.seal("p-0", GOOD, until=monotonic() + LONG)
        assert way.room.shelf[held.extent.slab_id].generation(held.extent.slot) == 3
        assert way.usage().free_bytes == PAGE_BYTES


def test_a_seal_that_its_slot_told_of_first_was_taken_where_all_have_read_it(
    tmp_path: Path,
) -> None:
    with slabs(tmp_path) as (way, desk):
        way.reserve(a_claim(0), until=monotonic() + LONG)
        desk.free(0)
        desk.refused = {"seal": ReservationLapsedError("its step is over")}
        way.seal("p-0", GOOD, until=monotonic() + LONG)
        assert way.usage().free_bytes == PAGE_BYTES


def test_a_place_is_announced_with_its_count_and_waited_for_by_nobody(tmp_path: Path) -> None:
    with slabs(tmp_path) as (way, desk):
        way.reserve(a_claim(0), until=monotonic() + LONG)
        desk.unanswered = {"announce"}
        way.announce("p-0", 3)
        way.seal("p-0", GOOD, until=monotonic() + LONG)
        assert desk.asked == ["reserve", "put_slab", "announce", "seal"]


def test_who_watches_a_slab_is_roused_ahead_of_a_seal_that_changes_nothing(tmp_path: Path) -> None:
    with slabs(tmp_path) as (way, desk):
        granted = way.reserve(a_claim(0), until=monotonic() + LONG)
        held = way.room.table.find("p-0")
        assert held is not None
        assert granted.rouse is not None
        slab = way.room.shelf[held.extent.slab_id]
        watch = FileWatch()
        with closing(watch):
            watch.add(slab.fd)
            assert not is_readable(watch.fd)
            granted.rouse()
            assert is_readable(watch.fd)
        assert slab.generation(held.extent.slot) == 1
        assert desk.asked == ["reserve", "put_slab"]
        way.room.shelf.close()
        granted.rouse()


def is_readable(fd: int) -> bool:
    return bool(select.select([fd], [], [], 0)[0])


def test_an_idle_slab_makes_way_for_a_payload_of_another_size(tmp_path: Path) -> None:
    with slabs(tmp_path, pages=4, slab_pages=1) as (way, desk):
        for step in range(2):
            way.reserve(a_claim(step), until=monotonic() + LONG)
            way.abandon(f"p-{step}", until=monotonic() + LONG)
        way.reserve(a_claim(2, 4 * PAGE_BYTES), until=monotonic() + LONG)
        assert "drop_slab" in desk.asked
        assert way.usage().slab_count == 1


def test_a_claim_that_was_not_answered_is_given_up_by_its_request(tmp_path: Path) -> None:
    with slabs(tmp_path) as (way, desk):
        desk.unanswered = {"reserve"}
        with pytest.raises(DeadlinePassedError):
            way.reserve(a_claim(0), until=monotonic() + SOON)
        desk.unanswered = set()
        way.give_up(a_claim(0))
        assert desk.asked == ["reserve", "reserve", "abandon"]


def test_where_there_is_no_memory_it_waits_for_what_is_held_or_says_so(tmp_path: Path) -> None:
    def none_left(size: int) -> None:
        raise PoolFullError("no memory", facts={"need_bytes": size})

    with slabs(tmp_path, pages=2, slab_pages=1, check_memory=none_left) as (way, desk):
        with pytest.raises(PoolFullError, match="no memory"):
            way.reserve(a_claim(0), until=monotonic() + LONG)
        way.room.shelf.maker = SlabMaker(check_memory=lambda size: None)
        way.reserve(a_claim(0), until=monotonic() + LONG)
        way.seal("p-0", GOOD, until=monotonic() + LONG)
        way.room.shelf.maker = SlabMaker(check_memory=none_left)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(way.reserve, a_claim(1), until=monotonic() + LONG)
            desk.free(0)
            waiting.result(LONG)


def test_where_there_is_no_memory_for_more_room_is_kept_for_a_lower_step(tmp_path: Path) -> None:
    """Else the lower one waits for the higher, and whoever reads them for the lower one."""

    def none_left(size: int) -> None:
        raise PoolFullError("no memory", facts={"need_bytes": size})

    with slabs(tmp_path, pages=8, slab_pages=1) as (way, desk):
        way.reserve(a_claim(0), until=monotonic() + LONG)
        way.seal("p-0", GOOD, until=monotonic() + LONG)
        way.room.shelf.maker = SlabMaker(check_memory=none_left)
        with pytest.raises(PoolFullError, match="no memory"):
            way.reserve(a_claim(1), until=monotonic() + ANSWERED)
        way.room.table.want(1)  # a thread of its own waits for it
        desk.free(0)
        with pytest.raises(PoolFullError, match="room is kept for step 1"):
            way.reserve(a_claim(2), until=monotonic() + ANSWERED)
        way.reserve(a_claim(1), until=monotonic() + LONG)


def test_a_slab_with_sealed_payloads_is_left_as_it_is_when_its_publisher_closes(
    tmp_path: Path,
) -> None:
    with slabs(tmp_path, pages=2, slab_pages=1) as (way, desk):
        del desk
        for step in range(2):
            way.reserve(a_claim(step), until=monotonic() + LONG)
        way.seal("p-0", GOOD, until=monotonic() + LONG)
        kept = {slab_id: os.dup(slab.fd) for slab_id, slab in way.room.shelf._slabs.items()}
        sealed = way.room.table.find("p-0")
        assert sealed is not None
        way.close()
        for slab_id, fd in kept.items():
            assert is_retired(memoryview(os.pread(fd, 64, 0))) == (slab_id != sealed.extent.slab_id)
            os.close(fd)


def test_a_step_that_gives_up_its_wait_lets_the_one_go_on_that_left_room_for_it(
    tmp_path: Path,
) -> None:
    with slabs(tmp_path, pages=3) as (way, desk), ThreadPoolExecutor(1) as pool:
        desk.lowest_open = 2  # in whatever order the claims are answered
        way.reserve(a_claim(0, 2 * PAGE_BYTES), until=monotonic() + LONG)
        with way.room.lock:
            way.room.table.want(1)  # it waits already when the higher one comes
        higher = pool.submit(way.reserve, a_claim(2), until=monotonic() + 10 * LONG)
        with pytest.raises(PoolFullError, match="step 1"):
            way.reserve(a_claim(1, 2 * PAGE_BYTES), until=monotonic() + ANSWERED)
        higher.result(LONG)


def test_the_end_of_the_line_ends_a_wait_for_room(tmp_path: Path) -> None:
    with slabs(tmp_path) as (way, desk), ThreadPoolExecutor(1) as pool:
        way.reserve(a_claim(0), until=monotonic() + LONG)
        waiting = pool.submit(way.reserve, a_claim(1), until=monotonic() + LONG)
        desk.broker.socket.shutdown(2)
        with pytest.raises(ServerUnreachableError):
            waiting.result(LONG)
