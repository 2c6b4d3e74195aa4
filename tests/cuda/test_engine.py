"""The server's engine on a device: what it scores is read there, and nothing else changes.

The server is a process with a driver of its own. What its engine's scores become on the device is
given to a stream, which does it only when somebody waits: a wait that is left out shows in the
bytes. Sessions that read host memory say what is right.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from typing import TYPE_CHECKING, cast

import pytest
from tests.cuda.engine_server import serve_engine
from tests.cuda.node import Terms
from tests.cuda.workers import WorkerError
from tests.fake_cuda.faulty import Fault
from tests.fake_cuda.log import done, faults, holders, read_log
from tests.fake_cuda.spec import Spec
from tests.fake_cuda.visible import OTHER_GPU
from tests.processes.test_fifty_steps import await_true
from tests.reports.raw import connect_raw

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from tests.cuda.workers import Crew, Worker
    from tests.fake_cuda.log import Operation

    from teacher_logits_client.testing import ServerProcess

PAGE = 4096
WAYS = ("cuda_ipc", "shared_memory", "stream")
ROWS = ([5, 9, 2, 6, 5], [3], [1, 4, 1, 5, 9, 2, 6, 5, 3, 5])
PATIENCE_SECONDS = 30

pytestmark = pytest.mark.usefixtures("workers")  # of which none is left with something open


class Service:
    """One server, and workers that are its students."""

    def __init__(self, server: ServerProcess, folder: Path, crew: Crew) -> None:
        self.server = server
        self.folder = folder
        self.crew = crew

    def student(
        self, name: str, *, spec: Spec | None = None, driver: bool = True, **wishes: object
    ) -> tuple[Worker, Terms]:
        """Return a worker that is admitted, and what its session came to."""
        worker = self.crew[name]
        made = spec or Spec(folder=str(self.folder))
        worker.ask("connect", self.server.address, made.dumps() if driver else None)
        told = worker.ask("open_scoring", **wishes)
        return worker, Terms(cast("dict[str, object]", told))

    def done(self, call: str, pid: int) -> list[Operation]:
        """Return a process's calls of a name that were not refused."""
        return [each for each in done(read_log(self.folder), call) if each.pid == pid]

    def end(self) -> None:
        """Stop the server in good order; nothing is left of what any process had."""
        self.crew.reset()
        os.kill(self.server.pid, signal.SIGTERM)
        assert self.server.wait(PATIENCE_SECONDS) == 0, self.server.log_text()
        await_true(lambda: holders(read_log(self.folder)) <= set(self.crew.dead))
        assert faults(read_log(self.folder)) == []


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, all_workers: Crew) -> Iterator[Service]:
    """A server with room for many payloads."""
    folder = tmp_path_factory.mktemp("engine")
    spec = Spec(folder=str(folder))
    sizes = {"device_pool_size": "256KiB", "slab_size": "64KiB", "pool_size": "1MiB"}
    with serve_engine(spec, late=True, **sizes) as server:
        made = Service(server, folder, all_workers)
        yield made
        made.end()


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory, all_workers: Crew) -> Iterator[Service]:
    """A server whose device has room for one payload."""
    folder = tmp_path_factory.mktemp("narrow")
    sizes = {"device_pool_size": PAGE, "slab_size": PAGE, "pool_size": "1MiB"}
    with serve_engine(Spec(folder=str(folder)), late=True, **sizes) as server:
        made = Service(server, folder, all_workers)
        yield made
        made.end()


def score(
    worker: Worker, rows: Sequence[Sequence[int]] = ROWS, **given: object
) -> dict[str, object]:
    return cast("dict[str, object]", worker.ask("score", rows, **given))


def test_each_session_reads_the_same_bits_over_its_own_transport(service: Service) -> None:
    found = {}
    for way in WAYS:
        worker, terms = service.student(way, transports=(way,), temperatures=(2.0,))
        assert terms.transports == {"server": way}
        told = score(worker)
        assert told["transport"] == way
        found[way] = told["columns"]
    assert found["cuda_ipc"] == found["shared_memory"] == found["stream"]
    assert service.done("copy_to_host", service.server.pid) == []


@pytest.mark.parametrize("value_type", ["bfloat16", "float16", "float32"])
def test_whatever_is_written_late_is_there_before_the_lease(
    service: Service, value_type: str
) -> None:
    """Room is used again, so that what is not waited for is another payload's."""
    wishes: dict[str, object] = {"value_type": value_type, "top_k": 256}
    right, _ = service.student("right", transports=("shared_memory",), **wishes)  # type: ignore[arg-type]
    reader, _ = service.student("reader", **wishes)  # type: ignore[arg-type]
    for turn in range(4):
        rows = [[(token + turn) % 256 for token in row] for row in ROWS]
        wanted, told = score(right, rows), score(reader, rows)
        assert told["transport"] == "cuda_ipc"
        assert told["columns"] == wanted["columns"]
        for worker in (right, reader):
            worker.ask("close_scored")


def test_slabs_are_exported_once_and_opened_once_a_session(service: Service) -> None:
    before = {each.serial for each in service.done("export", service.server.pid)}
    readers = [service.student(name, transports=("cuda_ipc",))[0] for name in ("one", "other")]
    started = {reader.pid: len(service.done("open", reader.pid)) for reader in readers}
    for _ in range(6):
        for reader in readers:
            score(reader)
            reader.ask("close_scored")
    exports = Counter(each.serial for each in service.done("export", service.server.pid))
    assert set(exports.values()) == {1}
    assert len(exports.keys() - before) <= 1
    assert [len(service.done("open", each.pid)) - started[each.pid] for each in readers] == [1, 1]
    with connect_raw(service.server.address) as raw:
        slabs = raw.inspect().registered.device_slabs
    assert {each.writer_id for each in slabs} == {"server"}
    for reader in readers:
        reader.ask("stop_reading")
        log = service.done("open", reader.pid), service.done("close", reader.pid)
        assert len(log[0]) == len(log[1])


def test_a_student_without_a_device_reads_host_memory_and_sees_why(service: Service) -> None:
    worker, terms = service.student("blind", driver=False)
    assert terms.transport == "shared_memory"
    assert terms.refusal()["reason"] == "NO_DEVICE"
    assert score(worker)["transport"] == "shared_memory"


def test_a_student_on_another_device_sees_both_sides(service: Service) -> None:
    spec = Spec(folder=str(service.folder), devices=(OTHER_GPU,))
    worker, terms = service.student("elsewhere", spec=spec)
    assert terms.transport == "shared_memory"
    refusal = terms.refusal()
    assert refusal["reason"] == "OTHER_DEVICE"
    assert OTHER_GPU[0] in refusal["message"]
    assert score(worker)["transport"] == "shared_memory"


def test_one_that_insists_on_its_device_is_refused_where_it_sees_none(service: Service) -> None:
    with pytest.raises(WorkerError) as caught:
        service.student("blind", driver=False, transports=("cuda_ipc",), locality="require")
    assert caught.value.told.kind == "SessionRefusedError"
    assert caught.value.told.facts["cuda_ipc"] == "NO_DEVICE"


def test_one_whose_device_breaks_later_is_told_and_then_reads_host_memory(
    service: Service,
) -> None:
    """The trial open was fine, and the slab's is not."""
    spec = Spec(folder=str(service.folder), faults=(Fault(call="open", error=999, after=1),))
    worker, terms = service.student("breaking", spec=spec)
    assert terms.transport == "cuda_ipc"
    with pytest.raises(WorkerError) as caught:
        score(worker)
    assert caught.value.told.kind == "SlabOpenError"
    right, _ = service.student("right", transports=("shared_memory",))
    told = score(worker)
    assert told["transport"] == "shared_memory"
    assert told["columns"] == score(right)["columns"]


def test_a_full_device_pool_waits_and_says_what_it_waits_for(narrow: Service) -> None:
    holder, _ = narrow.student("holder")
    waiter, _ = narrow.student("waiter")
    score(holder)
    with pytest.raises(WorkerError) as caught:
        score(waiter, timeout=2.5)  # an answer leaves a quarter of a second for its way
    assert caught.value.told.kind == "PoolFullError"
    assert caught.value.told.facts["budget_bytes"] == PAGE
    assert "--device-pool-size" in caught.value.told.message


def test_who_waits_for_the_device_stands_in_nobodys_way(narrow: Service) -> None:
    """Host memory is another pool: a larger payload there passes the one that waits."""
    holder, _ = narrow.student("holder")
    waiter, _ = narrow.student("waiter")
    other, _ = narrow.student("other", transports=("shared_memory",))
    first = score(holder)
    waiter.start("score", ROWS)
    for _ in range(3):
        score(other, [[7] * 40] * 8)
        other.ask("close_scored")
    assert holder.ask("scored") == first
    holder.ask("close_scored")
    assert waiter.answer() == first


def test_what_never_fits_the_device_is_refused_at_once(narrow: Service) -> None:
    reader, _ = narrow.student("reader")
    with pytest.raises(WorkerError) as caught:
        score(reader, [[7] * 400])
    assert caught.value.told.kind == "PayloadInvalidError"
    assert "--device-pool-size" in caught.value.told.message


def test_a_killed_readers_room_is_written_anew(narrow: Service) -> None:
    doomed, _ = narrow.student("doomed")
    waiter, _ = narrow.student("waiter")
    score(doomed)
    waiter.start("score", ROWS)
    doomed.kill()
    assert cast("dict[str, object]", waiter.answer())["transport"] == "cuda_ipc"
