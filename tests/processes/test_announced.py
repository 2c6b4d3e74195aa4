"""Announced steps over processes: a seal reaches its reader though the server stands still."""

import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests import forked
from tests.client.publishing.a_publisher import a_student, a_teacher, expected, some_rows
from tests.client.publishing.test_publisher import same
from tests.processes.running import PATIENCE_SECONDS, line_of
from tests.stopping import stopped

import teacher_logits_client as tl
from teacher_logits.errors import SlabOpenError
from teacher_logits.terms import StepGrant
from teacher_logits_client.line.file_watch import FileWatch
from teacher_logits_client.steps.mailbox import Mailbox, Opened
from teacher_logits_client.steps.opened_ahead import OpenedAhead

ROOT = Path(__file__).parents[2]
NAME = "announced"

_PUBLISHER = """
import sys
import teacher_logits_client as tl
from tests.client.publishing.a_publisher import a_teacher, some_rows

with tl.connect(sys.argv[1]) as client, client.open_publisher(a_teacher("announced")) as publisher:
    print("open", flush=True)
    for step in range(2):
        sys.stdin.readline()
        ids, lengths, logits = some_rows(step)
        with publisher.reserve(step, input_ids=ids, lengths=lengths) as draft:
            tl.select_top_k(logits, out=draft)
            print("written", flush=True)
            sys.stdin.readline()
        print("sealed", flush=True)
"""


# Ends at its slot's store, before the touch of the file that wakes who waits for it.
_DYING = """
import os, signal, sys
import teacher_logits_client as tl
from tests.client.publishing.a_publisher import a_teacher, some_rows

def die(fd):
    child = os.fork() if sys.argv[2] == "leaves_a_child" else os.getpid()
    if not child:
        while True:  # it holds the line until it is ended
            signal.pause()
    print(child, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

with tl.connect(sys.argv[1]) as client, client.open_publisher(a_teacher("announced")) as publisher:
    print("open", flush=True)
    sys.stdin.readline()
    ids, lengths, logits = some_rows(0)
    with publisher.reserve(0, input_ids=ids, lengths=lengths) as draft:
        tl.select_top_k(logits, out=draft)
        print("written", flush=True)
        sys.stdin.readline()
        is_at_the_slot = iter((False, True))  # it is touched ahead of the seal, too
        os.utime = lambda fd: next(is_at_the_slot) and die(fd)
"""


def tell(process: "subprocess.Popen[str]") -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def test_a_reader_has_a_step_from_its_publisher_s_hand_while_the_server_is_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    is_open = {step: threading.Event() for step in range(2)}
    honest = Mailbox.put_opened

    def put_opened(mailbox: Mailbox, opened: Opened) -> bool:
        is_here = honest(mailbox, opened)
        is_open[opened.grant.step].set()
        return is_here

    monkeypatch.setattr(Mailbox, "put_opened", put_opened)
    with (
        tl.testing.serve(pool_size="16MiB") as server,
        forked.Popen(
            [sys.executable, "-c", _PUBLISHER, server.address],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as publisher,
        tl.connect(server.address) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        assert line_of(publisher) == "open"
        with client.open_session(a_student(NAME)) as session:
            for step in range(2):
                ids, lengths, logits = some_rows(step)
                waiting = pool.submit(
                    session.acquire,
                    step=step,
                    input_ids=ids,
                    lengths=lengths,
                    timeout=PATIENCE_SECONDS,
                )
                tell(publisher)
                assert line_of(publisher) == "written"
                assert is_open[step].wait(PATIENCE_SECONDS)
                with stopped(server.pid):
                    tell(publisher)
                    batch = waiting.result(PATIENCE_SECONDS)
                    assert same(batch.columns, expected(ids, lengths, logits))
                assert line_of(publisher) == "sealed"
                batch.close()
        assert publisher.wait(PATIENCE_SECONDS) == 0


@pytest.mark.parametrize("end", ["leaves_a_child", "leaves_nobody"])
def test_a_publisher_that_dies_at_its_slot_has_sealed_for_who_waits_and_who_comes(end: str) -> None:
    ids, lengths, logits = some_rows(0)
    with (
        tl.testing.serve(pool_size="16MiB") as server,
        forked.Popen(
            [sys.executable, "-c", _DYING, server.address, end],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as publisher,
        tl.connect(server.address) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        assert line_of(publisher) == "open"
        with (
            client.open_session(a_student(NAME, student_id="waits")) as early,
            client.open_session(a_student(NAME, student_id="comes")) as late,
        ):
            waiting = pool.submit(
                early.acquire, step=0, input_ids=ids, lengths=lengths, timeout=2 * PATIENCE_SECONDS
            )
            tell(publisher)
            assert line_of(publisher) == "written"
            tell(publisher)
            holder = int(line_of(publisher))
            assert publisher.wait(PATIENCE_SECONDS) == -signal.SIGKILL
            with (
                waiting.result(PATIENCE_SECONDS) as held,
                late.acquire(step=0, timeout=PATIENCE_SECONDS) as other,
            ):
                for batch in (held, other):
                    assert same(batch.columns, expected(ids, lengths, logits))
        if holder != publisher.pid:
            os.kill(holder, signal.SIGKILL)


def test_a_reader_that_can_watch_no_file_has_its_steps_from_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given_up: list[int] = []
    has_given_up = threading.Event()
    honest = OpenedAhead._give_up

    def refuse(watch: FileWatch) -> None:
        raise SlabOpenError("no watch is left")

    def give_up(ahead: OpenedAhead, grant: StepGrant) -> None:
        honest(ahead, grant)
        given_up.append(grant.step)
        has_given_up.set()

    monkeypatch.setattr(FileWatch, "__init__", refuse)
    monkeypatch.setattr(OpenedAhead, "_give_up", give_up)
    with (
        tl.testing.serve(pool_size="16MiB") as server,
        tl.connect(server.address) as here,
        tl.connect(server.address) as there,
        here.open_publisher(a_teacher(NAME)) as publisher,
        there.open_session(a_student(NAME)) as session,
        ThreadPoolExecutor(1) as pool,
    ):
        assert session.transport is tl.Transport.SHARED_MEMORY
        for step in range(3):
            ids, lengths, logits = some_rows(step)
            waiting = pool.submit(session.acquire, step=step, input_ids=ids, lengths=lengths)
            with publisher.reserve(step, input_ids=ids, lengths=lengths) as draft:
                tl.select_top_k(logits, out=draft)
                assert has_given_up.wait(PATIENCE_SECONDS)
                has_given_up.clear()
            with waiting.result(PATIENCE_SECONDS) as batch:
                assert same(batch.columns, expected(ids, lengths, logits))
        assert given_up == [0, 1, 2]
