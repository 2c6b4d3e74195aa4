"""A line that is watched: mail comes in although nobody waits for anything."""

from __future__ import annotations

import errno
import os
import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from tests.client.line.test_line import LONG, a_line, released
from tests.client.line.test_line_mail import send

from teacher_logits.errors import NotAvailable
from teacher_logits.terms import Mail, SlabsGone
from teacher_logits_client.sessions.line_watch import LineWatch

if TYPE_CHECKING:
    from pathlib import Path

    from teacher_logits_client.sessions.step_thread import StepThread


def gone(slab_id: str) -> SlabsGone:
    return SlabsGone(slab_ids=(slab_id,))


def thread_of(watch: LineWatch) -> StepThread:
    assert watch._thread is not None
    return watch._thread


class Owner:
    """Who is told of the end."""

    def __init__(self) -> None:
        self.told: queue.SimpleQueue[None] = queue.SimpleQueue()

    def note_end(self) -> None:
        self.told.put(None)


def test_mail_is_handed_on_while_nobody_calls(tmp_path: Path) -> None:
    got: queue.SimpleQueue[Mail] = queue.SimpleQueue()
    with a_line(tmp_path, on_mail=got.put) as (line, broker):
        watch = LineWatch(line, when_ended=Owner().note_end)
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
        watch = LineWatch(line, when_ended=Owner().note_end)
        watch.start()
        for number in range(20):
            call = threads.submit(line.release, "s-1", "l-1", timeout=LONG)
            request = broker.take()
            send(broker, gone(str(number)))
            broker.answer(released(request.call_id))
            call.result(LONG)
            assert got.get(timeout=LONG) == gone(str(number))
        watch.stop()


def test_it_ends_with_the_line_and_tells_of_that(tmp_path: Path) -> None:
    owner = Owner()
    with a_line(tmp_path) as (line, broker):
        watch = LineWatch(line, when_ended=owner.note_end)
        watch.start()
        broker.socket.close()
        owner.told.get(timeout=LONG)
        thread_of(watch).join(LONG)

        assert not thread_of(watch)._thread.is_alive()


def test_it_keeps_nobody_alive_who_would_be_told(tmp_path: Path) -> None:
    owner = Owner()
    told = owner.told
    with a_line(tmp_path) as (line, broker):
        watch = LineWatch(line, when_ended=owner.note_end)
        watch.start()
        del owner
        broker.socket.close()
        thread_of(watch).join(LONG)

        assert not thread_of(watch)._thread.is_alive()
        assert told.empty()


def test_stopped_it_tells_of_no_end(tmp_path: Path) -> None:
    owner = Owner()
    with a_line(tmp_path) as (line, _):
        watch = LineWatch(line, when_ended=owner.note_end)
        watch.start()
        watch.stop()
        thread_of(watch).join(LONG)
        line.close()

        assert owner.told.empty()


def test_stopped_before_its_start_it_never_begins(tmp_path: Path) -> None:
    with a_line(tmp_path) as (line, _):
        watch = LineWatch(line, when_ended=Owner().note_end)
        watch.stop()
        watch.start()

        assert watch._thread is None


@pytest.mark.parametrize("lacks", ["a descriptor", "a thread"])
def test_one_that_cannot_begin_says_which_limit_and_may_begin_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacks: str
) -> None:
    def refuse(*_: object) -> int:
        raise (
            OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            if lacks == "a descriptor"
            else RuntimeError("can't start new thread")
        )

    got: queue.SimpleQueue[Mail] = queue.SimpleQueue()
    with a_line(tmp_path, on_mail=got.put) as (line, broker):
        watch = LineWatch(line, when_ended=Owner().note_end)
        with monkeypatch.context() as patched:
            if lacks == "a descriptor":
                patched.setattr(os, "eventfd", refuse)
            else:
                patched.setattr(threading.Thread, "start", refuse)
            with pytest.raises(NotAvailable, match="raise the limit"):
                watch.start()
        watch.start()
        send(broker, gone("one"))
        assert got.get(timeout=LONG) == gone("one")
        watch.stop()
