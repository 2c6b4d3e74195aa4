"""Device memory that a reader cannot open: why not, by both sides' names, and what becomes of it.

Under `prefer` the rank is streamed to, visibly; under `require` it is refused before its first
step. Either way the cause is named, with the driver's own number where it is the driver's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import pytest
from tests.cuda.node import Node, Terms
from tests.cuda.workers import Stranger, WorkerError, can_unshare
from tests.fake_cuda.faulty import Fault, gate, let_go
from tests.fake_cuda.visible import MIG_GPU, ONE_GPU, OTHER_GPU

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.cuda.workers import Worker

WISHES = ("cuda_ipc", "stream")
WRITERS, READERS = ONE_GPU[0], OTHER_GPU[0]


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is wrong with the reader's side, the reason that it has, and what the words name."""

    spec: dict[str, object]
    reason: str
    names: tuple[str, ...]


def _failing(number: int, name: str, reason: str = "DRIVER_FAILED") -> Case:
    fault = Fault(call="open", error=number)
    return Case(spec={"faults": (fault,)}, reason=reason, names=(str(number), name))


CASES = {
    "no device": Case(spec={"devices": ()}, reason="NO_DEVICE", names=(WRITERS,)),
    "another device": Case(
        spec={"devices": (OTHER_GPU,)}, reason="OTHER_DEVICE", names=(WRITERS, READERS)
    ),
    "a MIG device": Case(
        spec={"devices": ((WRITERS, "Fake H200 MIG 1g", True),)}, reason="MIG", names=(WRITERS,)
    ),
    "error 1": _failing(1, "CUDA_ERROR_INVALID_VALUE"),
    "error 101": _failing(101, "CUDA_ERROR_INVALID_DEVICE", "NO_PEER_ACCESS"),
    "error 201": _failing(201, "CUDA_ERROR_INVALID_CONTEXT"),
    "error 217": _failing(217, "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED", "NO_PEER_ACCESS"),
    "error 801": _failing(801, "CUDA_ERROR_NOT_SUPPORTED"),
    "error 999": _failing(999, "CUDA_ERROR_UNKNOWN"),
    "other bytes": Case(
        spec={"faults": (Fault(call="copy_to_host", flip=True),)},
        reason="DATA_DIFFERS",
        names=(WRITERS,),
    ),
}


@pytest.fixture(params=list(CASES.values()), ids=list(CASES))
def case(request: pytest.FixtureRequest) -> Case:
    found: Case = request.param
    return found


def test_under_prefer_the_rank_is_streamed_to_and_told_why(node: Node, case: Case) -> None:
    publisher = node.publisher()
    student, terms = node.student(spec=node.spec(**case.spec), transports=WISHES)
    assert terms.transport == "stream"
    refusal = terms.refusal()
    assert refusal["reason"] == case.reason
    assert [name for name in case.names if name not in refusal["message"]] == []
    publisher.ask("publish", 0)
    assert student.ask("read", 0) == ["stream"]
    assert streamed_bytes(student) > 0


def test_under_require_the_rank_is_refused_with_the_same_facts(node: Node, case: Case) -> None:
    node.publisher()
    with pytest.raises(WorkerError) as caught:
        node.student(spec=node.spec(**case.spec), transports=WISHES, locality="require")
    told = caught.value.told
    assert (told.kind, told.rules) == ("SessionRefusedError", ("not_proven_local",))
    assert told.facts["cuda_ipc"] == case.reason
    assert [name for name in case.names if name not in told.message] == []


def test_through_host_copies_it_is_local_all_the_same(node: Node, case: Case) -> None:
    """A rank that also takes shared memory reads copies on the host, and `require` is content."""
    publisher = node.publisher()
    student, terms = node.student(spec=node.spec(**case.spec), locality="require")
    assert terms.transport == "shared_memory"
    assert terms.refusal()["reason"] == case.reason
    publisher.ask("publish", 0)
    assert student.ask("read", 0) == ["shared_memory"]


def test_a_process_without_a_driver_is_told_so(node: Node) -> None:
    publisher = node.publisher()
    worker = node.worker("student", driver=False)
    terms = Terms(
        cast("dict[str, object]", worker.ask("open_session", node.teaching, transports=WISHES))
    )
    assert (terms.transport, terms.refusal()["reason"]) == ("stream", "NO_DEVICE")
    publisher.ask("publish", 0)
    assert worker.ask("read", 0) == ["stream"]


def test_a_reader_that_sees_the_writers_device_under_another_number_opens_it(node: Node) -> None:
    publisher = node.publisher(spec=node.spec(devices=(OTHER_GPU, ONE_GPU)), device="cuda:1")
    student, terms = node.student(transports=("cuda_ipc",))
    assert terms.transport == "cuda_ipc"
    publisher.ask("publish", 0)
    assert student.ask("read", 0) == ["cuda_ipc"]


def test_no_process_opens_a_handle_of_its_own(node: Node) -> None:
    publisher = node.publisher()
    told = publisher.ask("open_session", node.teaching, transports=WISHES)
    terms = Terms(cast("dict[str, object]", told))
    assert (terms.transport, terms.refusal()["reason"]) == ("stream", "OWN_HANDLE")
    publisher.ask("publish", 0)
    assert publisher.ask("read", 0) == ["stream"]


@pytest.fixture
def stranger() -> Iterator[Worker]:
    """A worker in another PID namespace."""
    if not can_unshare():
        pytest.skip("this system lets nobody make namespaces")
    worker = Stranger()
    yield worker
    worker.ask("reset")
    worker.kill()


def test_another_pid_namespace_is_named_and_streamed_to_or_refused(
    node: Node, stranger: Worker
) -> None:
    publisher = node.publisher()
    stranger.ask("connect", node.address, node.spec().dumps())
    terms = Terms(
        cast("dict[str, object]", stranger.ask("open_session", node.teaching, transports=WISHES))
    )
    assert (terms.transport, terms.refusal()["reason"]) == ("stream", "OTHER_PID_NAMESPACE")
    assert "namespace" in terms.refusal()["message"]
    publisher.ask("publish", 0)
    assert stranger.ask("read", 0) == ["stream"]
    with pytest.raises(WorkerError) as caught:
        stranger.ask(
            "open_session",
            node.teaching,
            student_id="strict",
            transports=("cuda_ipc",),
            locality="require",
        )
    told = caught.value.told
    assert told.facts["cuda_ipc"] == "OTHER_PID_NAMESPACE"
    assert "namespace" in told.message


def test_a_driver_that_hangs_is_given_up_at_a_deadline(node: Node, tmp_path: Path) -> None:
    shut = gate(tmp_path / "gate")
    publisher = node.publisher()
    spec = node.spec(faults=(Fault(call="open", hang=shut),))
    settings = {"timeout": 4.0}  # of which half may go to trials
    student, terms = node.student(spec=spec, transports=WISHES, settings=settings)
    assert (terms.transport, terms.refusal()["reason"]) == ("stream", "DRIVER_SLOW")
    publisher.ask("publish", 0)
    assert student.ask("read", 0) == ["stream"]
    let_go(shut)  # what it opens too late is closed again


def streamed_bytes(worker: Worker) -> int:
    """Bytes that were streamed to a worker."""
    return cast("dict[str, int]", worker.ask("statistics"))["streamed_bytes"]


def test_a_mig_devices_publisher_is_told_so(node: Node) -> None:
    with pytest.raises(WorkerError) as caught:
        node.publisher(spec=node.spec(devices=(MIG_GPU,)))
    assert "MIG" in caught.value.told.message
    assert "801" in caught.value.told.message
