"""A line that is watched: mail comes in although nobody waits for anything."""

from __future__ import annotations

import queue
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from tests.client.test_line import LONG, a_line, released
from tests.client.test_line_mail import send

from teacher_logits.terms import Mail, SlabsGone
from teacher_logits_client.line_watch import LineWatch

if TYPE_CHECKING:
    from pathlib import Path

    from teacher_logits_client.step_thread import StepThread


def gone(slab_id: str) -> SlabsGone:
    return SlabsGone(slab_ids=(slab_id,))


def thread_of(watch: LineWatch) -> StepThread:
    assert watch._thread is not None
    return watch._thread


def test_mail_is_handed_on_while_nobody_calls(tmp_path: Path) -> None:
    got: queue.SimpleQueue[Mail] = queue.SimpleQueue()
    with a_line(tmp_path, on_mail=got.put) as (line, broker):
        watch = LineWatch(line)
        watch.start()
        watch.start()
        for slab_id in ("one", "other"):
            send(broker, gone(slab_id))
            assert got.get(timeout=LONG) == gone(slab_id)
        watch.stop()
        thread_of(watch).join(LONG)
        assert not thread_of(watch)._thread.is_alive()


def test_calls_are_answered_beside_it(tmp_path: Path) -> None:
    got: queue.SimpleQueue[Mail] = queue.SimpleQueue()
    with a_line(tmp_path, on_mail=got.put) as (line, broker), ThreadPoolExecutor() as threads:
        watch = LineWatch(line)
        watch.start()
        for number in range(20):
            call = threads.submit(line.release, "s-1", "l-1", timeout=LONG)
            request = broker.take()
            send(broker, gone(str(number)))
            broker.answer(released(request.call_id))
            call.result(LONG)
            assert got.get(timeout=LONG) == gone(str(number))
        watch.stop()


def test_it_ends_with_the_line(tmp_path: Path) -> None:
    with a_line(tmp_path) as (line, broker):
        watch = LineWatch(line)
        watch.start()
        broker.socket.close()
        thread_of(watch).join(LONG)

        assert not thread_of(watch)._thread.is_alive()


def test_stopped_before_its_start_it_never_begins(tmp_path: Path) -> None:
    with a_line(tmp_path) as (line, _):
        watch = LineWatch(line)
        watch.stop()
        watch.start()

        assert watch._thread is None
