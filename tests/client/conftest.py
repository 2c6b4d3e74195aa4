"""Servers: in a thread of the tests' own process, with a teacher that tests can hold up, and one
in a process of its own, for all tests of trainers."""

import gc
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, cast

import grpc
import pytest
import torch

import teacher_logits_client as tl
from teacher_logits import inprocess
from teacher_logits.slab import WriterSlab
from teacher_logits.v1 import operator_service_pb2, operator_service_pb2_grpc
from teacher_logits_client import testing
from teacher_logits_client.testing import ToyRow, ToyTeacher
from teacher_logits_server.app import serve_in_thread
from teacher_logits_server.config import ServerConfig

if TYPE_CHECKING:
    from teacher_logits_server.engines import Engine

LOCAL = (tl.Transport.LOCAL,)
SHARED_MEMORY = (tl.Transport.SHARED_MEMORY,)
STREAM = (tl.Transport.STREAM,)


@dataclass
class Teacher(ToyTeacher):
    """The toy, which waits at a gate before it computes, and can be spoilt."""

    gate: threading.Event = field(default_factory=threading.Event)
    spoil: Callable[[torch.Tensor], torch.Tensor] | None = None

    def __post_init__(self) -> None:
        super().__init__()
        self.gate.set()

    def logits(self, rows: Sequence[ToyRow]) -> Iterator[torch.Tensor]:
        self.gate.wait(30)
        for chunk in super().logits(rows):
            yield chunk if self.spoil is None else self.spoil(chunk)


@dataclass(frozen=True)
class Service:
    """A server and its teacher."""

    address: str
    addresses: tuple[str, ...]
    epoch: str
    teacher: Teacher

    def inspect(self) -> operator_service_pb2.InspectResponse:
        """What the server itself says that it holds."""
        with grpc.insecure_channel(self.address) as channel:
            stub = operator_service_pb2_grpc.OperatorServiceStub(channel)
            return stub.Inspect(operator_service_pb2.InspectRequest(), timeout=30)

    def await_that(self, holds: Callable[[operator_service_pb2.InspectResponse], bool]) -> None:
        """Ask until something is so; sessions, for one, end a moment after their close."""
        until = time.monotonic() + 30
        while not holds(self.inspect()):
            assert time.monotonic() < until

    def lease_count(self, client: tl.Client) -> int:
        """Leases that the server has out, once all that the client let go of has come back."""
        assert client._returner.wait(30)
        return len(self.inspect().leases)

    def slab_of(self, payload: tl.LeasedPayload) -> tuple[WriterSlab, int]:
        """The writer's slab of an open payload, and its slot."""
        resident = inprocess.find(self.epoch)
        assert resident is not None
        extent = payload._opened._extent  # type: ignore[attr-defined]
        return resident.find_slab(extent.slab_id), extent.slot

    @contextmanager
    def session(
        self,
        transports: tuple[tl.Transport, ...] = SHARED_MEMORY,
        *,
        mode: tl.MapMode = tl.MapMode.COW,
        check_digest: bool = False,
        **profile: object,
    ) -> Iterator[tuple[tl.Client, tl.Session]]:
        """A client with one session."""
        with (
            tl.connect(self.address) as client,
            client.open_session(
                a_profile(transports=transports, **profile), mode=mode, check_digest=check_digest
            ) as session,
        ):
            yield client, session


def a_profile(**given: object) -> tl.StudentProfile:
    """A student of four rows on one rank."""
    grid = tl.BatchGrid(global_batch_size=4, data_parallel_size=1, micro_batch_size=1)
    return tl.StudentProfile(**{"batch_grid": grid, "top_k": 8, **given})  # type: ignore[arg-type]


@contextmanager
def serve(folder: Path, **settings: object) -> Iterator[Service]:
    """Run a server in a thread."""
    teacher = Teacher()
    values = {
        "listen": (f"unix:{folder / 's'}", "127.0.0.1:0"),
        "insecure": True,
        "pool_size_bytes": 1 << 20,
        "slab_size_bytes": 1 << 20,
        **settings,
    }
    config = ServerConfig(**values)  # type: ignore[arg-type]
    with serve_in_thread(config, cast("Engine", teacher)) as server:
        ready = server.readiness
        yield Service(ready.address, ready.addresses, ready.epoch, teacher)


@pytest.fixture(scope="session")
def teacher() -> Iterator[str]:
    """The address of a server whose teacher scores each row by itself, to the same bits.

    It takes seconds to start, and whoever asks it leaves nothing behind.
    """
    with testing.serve() as server:
        yield server.address


@pytest.fixture(scope="module")
def shared_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with serve(tmp_path_factory.mktemp("server")) as service:
        yield service


@pytest.fixture
def service(shared_service: Service) -> Iterator[Service]:
    """The module's server, with its teacher as it should be."""
    yield shared_service
    shared_service.teacher.gate.set()
    shared_service.teacher.spoil = None


@pytest.fixture
def quick_collections() -> Iterator[None]:
    """Have `gc.collect` look at nothing that was there before, of which a whole run has much."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
