"""Amid a call into the driver: a process is killed while it, or another, is inside one.

Whoever lives goes on, what the dead one had is free once nobody has it open, and what is open is
never freed. A call is held at a gate, and let go after the other's end.
"""

from __future__ import annotations

import itertools
import os
import signal
from typing import TYPE_CHECKING, Any, cast

import pytest
from tests.cuda.censuses import await_mapped
from tests.cuda.node import Node, Terms
from tests.cuda.workers import WorkerError
from tests.fake_cuda.faulty import Fault, gate, is_held, let_go
from tests.fake_cuda.log import leaked, still_open
from tests.processes.test_fifty_steps import await_true
from tests.stopping import stop

import teacher_logits_client as tl

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cuda.workers import Crew, Worker

ONLY_DEVICE: dict[str, Any] = {"transports": ("cuda_ipc",), "settings": {"prefetch": 0}}
AT_THE_PROBE, AT_THE_SLAB = 0, 1


@pytest.fixture
def shut(tmp_path: Path) -> str:
    return gate(tmp_path / "gate")


def impatient_publisher(node: Node) -> Worker:
    """A publisher whose close waits a moment alone for those that read."""
    publisher = node.crew["doomed"]
    publisher.ask("connect", node.address, node.spec().dumps(), timeout=0.5)
    publisher.ask("open_publisher", node.teaching)
    return publisher


def held_reader(node: Node, shut: str, call: str, *, after: int) -> Worker:
    """A student whose driver will be held in its call."""
    fault = Fault(call=call, hang=shut, after=after, times=1)
    return node.worker("held", node.spec(faults=(fault,)))


def refused_with(worker: Worker) -> str:
    """The kind of error that a worker answers with."""
    with pytest.raises(WorkerError) as caught:
        worker.answer()
    return caught.value.told.kind


def refused_amid_the_open(student: Worker, shut: str) -> bool:
    """Whether a deadline has passed while the driver was at it, and not on the way there."""
    student.start("acquire_within", 0, 1.0)
    assert refused_with(student) == "DeadlinePassedError"
    return is_held(shut)


def refused_amid_the_reserve(publisher: Worker, step: int, shut: str) -> bool:
    """The same of a publisher's room."""
    publisher.start("reserve_within", step, 0.5)
    assert refused_with(publisher) in ("PoolFullError", "DeadlinePassedError")
    return is_held(shut)


class TestAPublisherThatIsKilled:
    def test_under_a_trial_has_the_student_wait_for_its_successor(
        self, node: Node, shut: str
    ) -> None:
        """It has proven that it shares memory with the node, and is not streamed to for good."""
        publisher = node.publisher(name="doomed")
        student = held_reader(node, shut, "open", after=AT_THE_PROBE)
        student.start("open_session", node.teaching)
        await_true(lambda: is_held(shut))
        publisher.kill()
        await_true(lambda: {each.kind for each in node.inspect().sessions} == {"student"})
        let_go(shut)
        successor = node.publisher()
        terms = Terms(cast("dict[str, object]", student.answer()))
        assert list(terms.transports.values()) != ["stream"]
        successor.ask("publish", 0)
        assert student.ask("read", 0) != ["stream"]

    def test_under_a_trial_is_named_where_nobody_comes_in_its_place(
        self, node: Node, shut: str
    ) -> None:
        publisher = node.publisher(name="doomed")
        student = held_reader(node, shut, "open", after=AT_THE_PROBE)
        student.start("open_session", node.teaching, settings={"timeout": 2.0})
        await_true(lambda: is_held(shut))
        publisher.kill()
        await_true(lambda: {each.kind for each in node.inspect().sessions} == {"student"})
        let_go(shut)
        with pytest.raises(WorkerError, match="died while it was being admitted"):
            student.answer()

    @pytest.mark.parametrize("call", ["export", "record", "copy_to_host"])
    def test_amid_a_step_leaves_it_to_its_successor(self, node: Node, shut: str, call: str) -> None:
        """While it exports a slab, waits for its stream, or copies to the host."""
        after = AT_THE_SLAB if call == "export" else 0
        spec = node.spec(faults=(Fault(call=call, hang=shut, after=after, times=1),))
        publisher = node.publisher(name="doomed", spec=spec, host_copies="always")
        student, _ = node.student(**ONLY_DEVICE)
        publisher.start("publish", 0)
        await_true(lambda: is_held(shut))
        publisher.kill()
        node.publisher().ask("publish", 0)
        assert student.ask("read", 0) == ["cuda_ipc"]

    def test_under_an_open_loses_its_step_to_the_reader_alone(self, node: Node, shut: str) -> None:
        publisher = node.publisher(name="doomed")
        student = held_reader(node, shut, "open", after=AT_THE_SLAB)
        student.ask("open_session", node.teaching, **ONLY_DEVICE)
        publisher.ask("publish", 0)
        student.start("hold", 0)
        await_true(lambda: is_held(shut))
        publisher.kill()
        let_go(shut)
        assert refused_with(student) == "SlabOpenError"


class TestAPublisherThatEnds:
    def test_under_an_open_keeps_its_memory_for_the_reader(self, node: Node, shut: str) -> None:
        publisher = impatient_publisher(node)
        student = held_reader(node, shut, "open", after=AT_THE_SLAB)
        student.ask("open_session", node.teaching, **ONLY_DEVICE)
        publisher.ask("publish", 0)
        student.start("hold", 0)
        await_true(lambda: is_held(shut))
        publisher.ask("close_publisher")
        let_go(shut)
        assert student.answer() == ["cuda_ipc"]
        student.ask("check", 0)
        student.ask("stop_reading")
        publisher.kill()  # its memory was somebody's to read: it keeps it to its end

    @pytest.mark.parametrize("call", ["synchronise", "close"])
    @pytest.mark.parametrize("end", ["let go", "killed"])
    def test_under_a_close_is_given_its_memory_back_behind_it(
        self, node: Node, shut: str, call: str, end: str
    ) -> None:
        publisher = node.publisher()
        after = AT_THE_SLAB if call == "close" else 0
        student = held_reader(node, shut, call, after=after)
        student.ask("open_session", node.teaching, **ONLY_DEVICE)
        publisher.ask("publish", 0)
        assert student.ask("read", 0) == ["cuda_ipc"]
        publisher.ask("close_publisher")
        await_true(lambda: is_held(shut))
        assert publisher.ask("left_over") == 1
        if end == "let go":
            let_go(shut)
        else:
            student.kill()
        await_true(lambda: publisher.ask("left_over") == 0)


class TestAReaderThatIsKilled:
    def test_in_a_trial_keeps_nobody_waiting(self, node: Node, shut: str) -> None:
        publisher = node.publisher()
        student = held_reader(node, shut, "open", after=AT_THE_PROBE)
        student.start("open_session", node.teaching)
        await_true(lambda: is_held(shut))
        student.kill()
        other, _ = node.student(**ONLY_DEVICE)
        publisher.ask("publish", 0)
        assert other.ask("read", 0) == ["cuda_ipc"]

    @pytest.mark.parametrize(("call", "after"), [("open", AT_THE_SLAB), ("record", 0)])
    def test_in_a_call_gives_its_room_back(
        self, node: Node, shut: str, call: str, after: int
    ) -> None:
        """The pool holds one step, which the doomed one opens, or has read."""
        publisher = node.publisher(pool_size_bytes=4096, slab_size_bytes=4096)
        student = held_reader(node, shut, call, after=after)
        student.ask("open_session", node.teaching, **ONLY_DEVICE)
        other, _ = node.student(student_id="other", **ONLY_DEVICE)
        publisher.ask("publish", 0)
        student.start("read", 0)
        await_true(lambda: is_held(shut))
        other.ask("read", 0)
        publisher.start("publish", 1)
        student.kill()
        publisher.answer()
        assert other.ask("read", 1) == ["cuda_ipc"]


class TestAReaderThatIsStopped:
    def test_in_a_trial_keeps_nobody_waiting_and_is_let_in_when_it_goes_on(
        self, node: Node, shut: str
    ) -> None:
        publisher = node.publisher()
        student = held_reader(node, shut, "open", after=AT_THE_PROBE)
        student.start("open_session", node.teaching)
        await_true(lambda: is_held(shut))
        student.stop()
        try:
            other, _ = node.student(student_id="other", **ONLY_DEVICE)
            publisher.ask("publish", 0)
            assert other.ask("read", 0) == ["cuda_ipc"]
        finally:
            student.go_on()
        let_go(shut)
        assert Terms(cast("dict[str, object]", student.answer())).transport == "cuda_ipc"
        publisher.ask("publish", 1)
        assert student.ask("read", 0, 1) == ["cuda_ipc"]  # step 0 came behind its admission
        assert other.ask("read", 1) == ["cuda_ipc"]


class TestAPublisherThatIsStopped:
    def test_amid_an_export_has_its_readers_wait_and_goes_on(self, node: Node, shut: str) -> None:
        fault = Fault(call="export", hang=shut, after=AT_THE_SLAB, times=1)
        publisher = node.publisher(spec=node.spec(faults=(fault,)))
        student, _ = node.student(**ONLY_DEVICE)
        publisher.start("publish", 0)
        await_true(lambda: is_held(shut))
        publisher.stop()
        try:
            with pytest.raises(WorkerError, match="being written: shard 0"):
                student.ask("acquire_within", 0, 0.5)
        finally:
            publisher.go_on()
        let_go(shut)
        publisher.answer()
        assert student.ask("read", 0) == ["cuda_ipc"]


class TestAnOpenThatIsSlow:
    def test_is_given_up_at_the_deadline_and_undone_when_it_comes(
        self, node: Node, shut: str
    ) -> None:
        publisher = node.publisher()
        student = held_reader(node, shut, "open", after=AT_THE_SLAB)
        student.ask("open_session", node.teaching, **ONLY_DEVICE)
        publisher.ask("publish", 0)
        await_true(lambda: refused_amid_the_open(student, shut))
        let_go(shut)
        await_true(lambda: not still_open(node.log()))
        assert student.ask("read", 0) == ["cuda_ipc"]


class TestACopyThatIsSlow:
    def test_is_given_up_at_the_deadline_and_made_when_the_driver_has_come_back(
        self, node: Node, shut: str
    ) -> None:
        publisher = node.publisher()
        student = held_reader(node, shut, "record", after=0)
        settings = {"prefetch": 0, "mode": "copy"}
        student.ask("open_session", node.teaching, transports=("cuda_ipc",), settings=settings)
        publisher.ask("publish", 0)
        await_true(lambda: refused_amid_the_open(student, shut))
        let_go(shut)
        assert student.ask("read", 0) == ["cuda_ipc"]
        await_true(lambda: not node.inspect().leases)


class TestAPublishersDriver:
    @pytest.mark.parametrize("call", ["allocate", "copy_to_device", "export"])
    def test_that_hangs_costs_the_deadline_and_serves_who_comes_again(
        self, node: Node, shut: str, call: str
    ) -> None:
        publisher = node.worker(
            "publisher", node.spec(faults=(Fault(call=call, hang=shut, times=1),))
        )
        with pytest.raises(WorkerError, match="publisher's probe") as caught:
            publisher.ask("open_publisher", node.teaching, timeout=0.5)
        assert caught.value.told.kind == "DeadlinePassedError"
        await_true(lambda: is_held(shut))
        let_go(shut)
        publisher.ask("open_publisher", node.teaching)
        student, _ = node.student(**ONLY_DEVICE)
        publisher.ask("publish", 0)
        assert student.ask("read", 0) == ["cuda_ipc"]

    @pytest.mark.parametrize("call", ["allocate", "export"])
    def test_that_hangs_over_a_slab_costs_the_deadline_and_the_slab_is_given_back(
        self, node: Node, shut: str, call: str
    ) -> None:
        fault = Fault(call=call, hang=shut, after=AT_THE_SLAB, times=1)
        publisher = node.publisher(spec=node.spec(faults=(fault,)))
        steps = itertools.count()
        await_true(lambda: refused_amid_the_reserve(publisher, next(steps), shut))
        assert refused_amid_the_reserve(publisher, next(steps), shut)
        let_go(shut)
        await_true(lambda: len(leaked(node.log())) == 0)
        student, _ = node.student(**ONLY_DEVICE)
        publisher.ask("publish", last := next(steps))
        assert student.ask("read", last) == ["cuda_ipc"]

    def test_that_answers_late_with_an_error_is_told_of(self, node: Node, shut: str) -> None:
        late = Fault(call="export", hang=shut, error=999, times=1)
        publisher = node.worker("publisher", node.spec(faults=(late,)))
        publisher.start("open_publisher", node.teaching)
        await_true(lambda: is_held(shut))
        let_go(shut)
        with pytest.raises(WorkerError, match="999") as caught:
            publisher.answer()
        assert caught.value.told.kind == "DeviceError"


class TestADriverThatFailsToClose:
    @pytest.mark.parametrize("call", ["synchronise", "close"])
    def test_keeps_the_memory_from_being_freed_until_its_process_ends(
        self, node: Node, call: str
    ) -> None:
        publisher = node.publisher()
        after = AT_THE_SLAB if call == "close" else 0
        spec = node.spec(faults=(Fault(call=call, error=999, after=after),))
        student, _ = node.student(name="broken", spec=spec, **ONLY_DEVICE)
        publisher.ask("publish", 0)
        student.ask("read", 0)
        student.ask("close_session")
        publisher.ask("close_publisher")
        assert publisher.ask("left_over") == 1
        student.kill()
        await_true(lambda: publisher.ask("left_over") == 0)


class TestADriverThatBreaksAmidAStep:
    def test_gives_back_what_of_it_was_opened_and_read_by_nobody(self, node: Node) -> None:
        """The first writer's slab is open, the second's is refused, and then nothing works."""
        teaching = node.teach(ranks=2)
        writers = [
            node.publisher(teaching, name=name, rank=rank)
            for rank, name in enumerate(("publisher", "second"))
        ]
        broken = (
            Fault(call="open", error=999, after=3),
            Fault(call="synchronise", error=999, times=1),
        )
        student, _ = node.student(teaching, spec=node.spec(faults=broken), **ONLY_DEVICE)
        for writer in writers:
            writer.ask("publish", 0)
        with pytest.raises(WorkerError, match="999") as caught:
            student.ask("read", 0)
        assert caught.value.told.kind == "SlabOpenError"
        await_true(lambda: not node.inspect().leases)
        student.ask("close_session")
        await_true(lambda: {each.kind for each in node.inspect().sessions} == {"publisher"})
        student.kill()  # the handle that it could not close is open until then
        for writer in writers:
            writer.kill()  # what nobody will read goes with it


class TestAServer:
    @pytest.mark.parametrize("end", ["killed", "stopped"])
    def test_that_ends_under_an_open_takes_nothing_from_the_reader(
        self, workers: Crew, tmp_path: Path, shut: str, end: str
    ) -> None:
        with tl.testing.serve(pool_size="1MiB") as server:
            node = Node(address=server.address, crew=workers, folder=tmp_path)
            publisher = node.publisher(name="orphan")
            student = held_reader(node, shut, "open", after=AT_THE_SLAB)
            student.ask("open_session", node.teaching, **ONLY_DEVICE)
            publisher.ask("publish", 0)
            student.start("hold", 0)
            await_true(lambda: is_held(shut))
            if end == "killed":
                os.kill(server.pid, signal.SIGKILL)
            else:
                stop(server.pid)
            let_go(shut)
            assert student.answer() == ["cuda_ipc"]
            student.ask("check", 0)
            student.ask("release", 0)
            if end == "stopped":
                os.kill(server.pid, signal.SIGCONT)
                publisher.ask("close_publisher")
                await_true(lambda: publisher.ask("left_over") == 0)
        await_mapped(student, 0)
        for worker in (student, publisher):
            worker.kill()
        node.assert_nothing_is_left(student.pid, publisher.pid)
