"""Announced steps over processes: a seal reaches its reader though the server stands still."""

import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.client.publishing import a_student, expected, some_rows
from tests.client.test_publisher import same
from tests.processes.running import PATIENCE_SECONDS, line_of

import teacher_logits_client as tl
from teacher_logits_client.opened_ahead import OpenedAhead

ROOT = Path(__file__).parents[2]
NAME = "announced"

_PUBLISHER = """
import sys
import teacher_logits_client as tl
from tests.client.publishing import a_teacher, some_rows

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


def tell(process: "subprocess.Popen[str]") -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def test_a_reader_has_a_step_from_its_publisher_s_hand_while_the_server_is_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    is_open = threading.Event()
    honest = OpenedAhead.open_announced

    def open_announced(ahead: OpenedAhead, step: int, *, until: float) -> None:
        honest(ahead, step, until=until)
        is_open.set()

    monkeypatch.setattr(OpenedAhead, "open_announced", open_announced)
    with (
        tl.testing.serve(pool_size="16MiB") as server,
        subprocess.Popen(
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
                assert is_open.wait(PATIENCE_SECONDS)
                is_open.clear()
                os.kill(server.pid, signal.SIGSTOP)
                tell(publisher)
                batch = waiting.result(PATIENCE_SECONDS)
                assert same(batch.columns, expected(ids, lengths, logits))
                os.kill(server.pid, signal.SIGCONT)
                assert line_of(publisher) == "sealed"
                batch.close()
        assert publisher.wait(PATIENCE_SECONDS) == 0
