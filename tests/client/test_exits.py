"""The end of a program that closed nothing: our threads end before the interpreter does."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tests.client.conftest import serve

from teacher_logits_client import exits

FORGETFUL = """
import gc, os, sys, torch
import teacher_logits_client as tl
from teacher_logits_client.openers import pages

torch.set_num_threads(1)
find_pages = pages.own_pages

def at_length(address, size_bytes):
    # As if a lease had many pages: torch works for some time on the thread of the returns.
    for _ in range(500):
        torch.ones(8).add_(1)
    return find_pages(address, size_bytes)

pages.own_pages = at_length

def leave(address, way):
    client = tl.connect(address)
    grid = tl.BatchGrid(global_batch_size=4, data_parallel_size=1, micro_batch_size=1)
    sessions = [
        client.open_session(tl.StudentProfile(batch_grid=grid, top_k=8, transports=each))
        for each in (("shared_memory", "stream"), ("stream",))
    ]
    ids = torch.arange(40).view(4, 10)
    payloads = [each.score(ids).result() for each in sessions for _ in range(3)]
    for payload in payloads:
        payload.columns["topk_logprobs"].add_(1)
    globals().update(locals())
    sessions[1].score(ids)
    for payload in payloads[1:]:
        payload.close()
    if way == "raise":
        raise ValueError("on purpose")
    if way == "interrupt":
        raise KeyboardInterrupt
    if way == "fork":
        child = os.fork()
        if child:
            sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

gc.freeze()  # or the end of each goes through all that torch consists of
codes = {"end": 0, "raise": 1, "interrupt": -2, "fork": 0}
for way in list(codes) * 2:
    # One program after the other, all of one import.
    child = os.fork()
    if not child:
        break
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code != codes[way]:
        sys.stderr.write(f"{way} ended with {code}")
        os._exit(3)
else:
    os._exit(0)
leave(sys.argv[1], way)
"""


def test_a_program_that_closes_nothing_ends_as_it_would(tmp_path: Path) -> None:
    with serve(tmp_path, pool_size_bytes=16 << 20, slab_size_bytes=4 << 20) as service:
        ended = subprocess.run(
            [sys.executable, "-c", FORGETFUL, service.address],
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
            check=False,
        )

    assert ended.returncode == 0, ended.stderr
    assert "terminate called" not in ended.stderr
    assert "a return failed" not in ended.stderr


CARELESS = """
import sys, threading, types
import teacher_logits_client as tl
import teacher_logits_client.forks

# A module loses its names at the very end, the latest import first. What this one keeps is told
# of its end when most of ours have lost theirs, and `forks` has not.
keeper = sys.modules["keeper"] = threading.keeper = types.ModuleType("keeper")
from tests.client.publishing.a_publisher import a_student, a_teacher, some_rows

def leave(address):
    client = tl.connect(address)
    grid = tl.BatchGrid(global_batch_size=4, data_parallel_size=1, micro_batch_size=1)
    scoring = client.open_session(tl.StudentProfile(batch_grid=grid, top_k=8))
    publisher = client.open_publisher(a_teacher("dropped"))
    session = client.open_session(a_student("dropped"))
    ids, lengths, logits = some_rows(0)
    draft = publisher.reserve(0, input_ids=ids, lengths=lengths)
    tl.select_top_k(logits, out=draft)
    draft.seal()
    batch = session.acquire(step=0, input_ids=ids, lengths=lengths)
    other = publisher.reserve(1, input_ids=ids, lengths=lengths)
    return client, publisher, session, batch, other, scoring.score(ids).result(), scoring.score(ids)

held = leave(sys.argv[1])
if sys.argv[2] == "between":
    keeper.held = held
    del held
"""


@pytest.mark.parametrize("where", ["last", "between"])
def test_a_program_that_holds_everything_to_its_end_ends_in_silence(
    tmp_path: Path, where: str
) -> None:
    with serve(tmp_path, pool_size_bytes=16 << 20, slab_size_bytes=4 << 20) as service:
        ended = subprocess.run(
            [sys.executable, "-c", CARELESS, service.address, where],
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
            check=False,
        )

    assert (ended.returncode, ended.stderr) == (0, "")


class Thread:
    """A thread of ours that ends when it is told to, or only when it is torn loose."""

    is_here = True

    def __init__(self, *, obeys: bool) -> None:
        self.said: list[str] = []
        self._obeys = obeys
        self._ended = threading.Event()

    def stop_at_exit(self) -> None:
        self.said.append("stop")
        if self._obeys:
            self._ended.set()

    def tear_loose(self) -> None:
        self.said.append("tear loose")
        self._ended.set()

    def join(self, timeout: float) -> None:
        self.said.append("ended" if self._ended.is_set() else "still there")


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of the threads that other tests left are stopped here."""
    monkeypatch.setattr(exits, "_watched", [])


@pytest.mark.usefixtures("alone")
def test_all_are_asked_before_any_is_waited_for_and_then_torn_loose() -> None:
    willing, stuck = Thread(obeys=True), Thread(obeys=False)
    exits._watched[:] = [willing, stuck]  # type: ignore[index]

    exits.stop_all()

    assert willing.said == ["stop", "ended", "tear loose", "ended"]
    assert stuck.said == ["stop", "still there", "tear loose", "ended"]


@pytest.mark.usefixtures("alone")
def test_a_forked_child_stops_nothing() -> None:
    inherited = Thread(obeys=True)
    inherited.is_here = False
    exits._watched[:] = [inherited]  # type: ignore[index]

    exits.stop_all()

    assert inherited.said == []


@pytest.mark.usefixtures("alone")
def test_an_interrupt_of_the_wait_tears_all_loose() -> None:
    class Interrupted(Thread):
        def join(self, timeout: float) -> None:
            if "tear loose" not in self.said:
                raise KeyboardInterrupt
            super().join(timeout)

    each = Interrupted(obeys=False)
    exits._watched[:] = [each]  # type: ignore[index]

    with pytest.raises(KeyboardInterrupt):
        exits.stop_all()

    assert each.said == ["stop", "tear loose"]
