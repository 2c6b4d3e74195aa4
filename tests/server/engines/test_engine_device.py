"""The engine's device: whether there is one, its slabs and its room, and what is scored there."""

from __future__ import annotations

import fcntl
import os
import random
from contextlib import contextmanager
from dataclasses import replace
from queue import SimpleQueue
from typing import TYPE_CHECKING

import pytest
import torch
from tests.fake_cuda.faulty import Fault
from tests.fake_cuda.log import faults, leaked, read_log, still_allocated
from tests.fake_cuda.spec import Spec
from tests.fake_cuda.visible import MIG_GPU, ONE_GPU, OTHER_GPU
from tests.server.test_scorer import HEAD_ROWS, PATIENCE, VOCABULARY, Teacher, flat

from teacher_logits import cuda_memory, keys
from teacher_logits.clock import ManualClock
from teacher_logits.devices.left_over import open_lock
from teacher_logits.errors import (
    ConfigError,
    EngineError,
    HostCopyNeededError,
    NotAllowedError,
    PayloadInvalidError,
    PoolFullError,
)
from teacher_logits.grid import BatchGrid
from teacher_logits.layout import ElementType, RowStatus, is_on_device
from teacher_logits.payload_room import DeviceRoom
from teacher_logits.profiles import PROTOCOL_VERSION, StudentProfile, TeacherProfile
from teacher_logits.tensors import column_tensors
from teacher_logits.terms import SERVER_WRITER, SlabsGone
from teacher_logits.transport import Refusal, RefusalReason, Transport, proof_of
from teacher_logits_server.config import ServerConfig
from teacher_logits_server.engines.device import EngineDevice, engine_device
from teacher_logits_server.ledger import Ledger
from teacher_logits_server.lending.own_device import OwnDevice
from teacher_logits_server.publishers.engines import EngineTeacher
from teacher_logits_server.scorer import BadRows, ScoreJob, Scorer
from teacher_logits_server.slabs import ServerSlabs

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from tests.server.test_scorer import Columns

    from teacher_logits.devices.slab import DeviceSlab
    from teacher_logits.terms import LeaseTerms
    from teacher_logits_server.scorer.queue import LeaseFuture

PAGE = 4096
LINE_CHALLENGE = b"what the broker wrote"
ROWS = [[1, 2, 3], [4], [5, 6, 7, 8]]


def config(**settings: object) -> ServerConfig:
    return ServerConfig(
        **{"device_pool_size_bytes": 16 * PAGE, "slab_size_bytes": 4 * PAGE, **settings}  # type: ignore[arg-type]
    )


def made(folder: Path, *, budget: int = 16 * PAGE, **spec: object) -> EngineDevice:
    memory = Spec(folder=str(folder), **spec).memory()  # type: ignore[arg-type]
    return EngineDevice(memory, memory.devices()[0], budget_bytes=budget)


class TestTheChoice:
    def test_is_none_where_no_pool_was_asked_for(self, tmp_path: Path) -> None:
        memory = Spec(folder=str(tmp_path)).memory()
        assert engine_device(config(device_pool_size_bytes=0), memory) is None
        assert read_log(tmp_path) == []

    @pytest.mark.parametrize(
        ("named", "uuid"),
        [
            ("auto", ONE_GPU[0]),
            ("cuda", ONE_GPU[0]),
            ("cuda:1", OTHER_GPU[0]),
            (OTHER_GPU[0], OTHER_GPU[0]),
        ],
    )
    def test_is_the_device_of_the_engine(self, tmp_path: Path, named: str, uuid: str) -> None:
        memory = Spec(folder=str(tmp_path), devices=(ONE_GPU, OTHER_GPU)).memory()
        device = engine_device(config(device=named), memory)
        assert device is not None
        assert device.offer.probe.memory.device_uuid == uuid
        assert leaked(read_log(tmp_path)) == set()

    def test_refuses_a_device_that_is_not_seen_and_names_those_that_are(
        self, tmp_path: Path
    ) -> None:
        memory = Spec(folder=str(tmp_path)).memory()
        with pytest.raises(ConfigError, match=f"cuda:7 .*{ONE_GPU[0]}"):
            engine_device(config(device="cuda:7"), memory)

    def test_refuses_a_machine_without_a_driver(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cuda_memory, "find_driver", lambda: None)
        with pytest.raises(ConfigError, match="no CUDA driver") as caught:
            engine_device(config(), None)
        assert caught.value.facts["flag"] == "--device-pool-size"

    def test_refuses_a_device_without_so_much_room_with_the_numbers(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="OUT_OF_MEMORY") as caught:
            made(tmp_path, memory_bytes=16 * PAGE - 1)
        assert caught.value.facts["need_bytes"] == 16 * PAGE
        assert caught.value.facts["device_uuid"] == ONE_GPU[0]
        assert leaked(read_log(tmp_path)) == set()

    def test_refuses_a_device_that_hands_nothing_over(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="MIG"):
            made(tmp_path, devices=(MIG_GPU,))
        assert still_allocated(read_log(tmp_path)) == set()


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"device": "cpu"}, "--device is cpu"),
        ({"transports": (Transport.SHARED_MEMORY,)}, "over cuda_ipc alone"),
        ({"device_pool_size_bytes": PAGE - 1}, f"or at least {PAGE}"),
    ],
)
def test_a_pool_that_makes_no_sense_is_refused_by_its_flag(
    settings: dict[str, object], why: str
) -> None:
    with pytest.raises(ConfigError, match=f"--device-pool-size .*{why}"):
        config(**settings)


def test_a_pool_is_written_in_messages_as_its_flag_takes_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^--device-pool-size 64MiB: ") as caught:
        config(device_pool_size_bytes=64 << 20, device="cpu")
    assert caught.value.facts["value"] == 64 << 20
    memory = Spec(folder=str(tmp_path)).memory()
    with pytest.raises(ConfigError, match=r"^--device-pool-size 64MiB: ") as caught:
        engine_device(config(device_pool_size_bytes=64 << 20, device="cuda:7"), memory)
    assert caught.value.facts["value"] == 64 << 20


def test_a_device_that_fills_up_later_is_a_full_pool_that_names_the_flags(tmp_path: Path) -> None:
    memory = Spec(folder=str(tmp_path), memory_bytes=5 * PAGE).memory()
    device = EngineDevice(memory, memory.devices()[0], budget_bytes=4 * PAGE)
    taken = device.make("taken", 2 * PAGE, PAGE)
    memory.allocate(2 * PAGE, device=device.device)  # as the teacher may
    with pytest.raises(PoolFullError, match=r"OUT_OF_MEMORY.*--device-pool-size") as caught:
        device.make("slab", 2 * PAGE, 2 * PAGE)
    assert caught.value.facts["need_bytes"] == 2 * PAGE
    taken.close()


class Service:
    """A scorer whose sessions read device memory, each proven as a client would prove it."""

    def __init__(self, folder: Path, spec: Spec, **settings: object) -> None:
        self.folder = folder
        self.fake = spec.fake()
        self.memory = spec.around(self.fake)
        self.teacher = Teacher()
        self.clock = ManualClock(1000.0)
        self.config = config(**{"pool_size_bytes": 64 * PAGE, **settings})
        device = engine_device(self.config, self.memory)
        assert device is not None
        self.device = device
        self.slabs = ServerSlabs(epoch="0123456789ab", device=device)
        self.ledger = Ledger(
            epoch=keys.new_epoch(),
            limits=self.config,
            engines=(
                EngineTeacher(
                    profile=TeacherProfile(
                        teacher_id="teacher",
                        vocabulary_size=VOCABULARY,
                        head_rows=HEAD_ROWS,
                        top_k=VOCABULARY,
                        max_row_tokens=self.teacher.profile.max_row_tokens,
                    )
                ),
            ),
            clock=self.clock,
            slots=self.slabs,
            offered=frozenset({Transport.CUDA_IPC, Transport.SHARED_MEMORY, Transport.STREAM}),
        )
        self.ledger.add_device(
            OwnDevice(
                offer=device.offer,
                budget_bytes=self.config.device_pool_size_bytes,
                slab_size_bytes=self.config.slab_size_bytes,
            )
        )
        device.on_freed(self.ledger.memory_freed)
        self.scorer = Scorer(
            engine=self.teacher,
            ledger=self.ledger,
            slabs=self.slabs,
            config=self.config,
            clock=self.clock,
        )

    def session(self, *transports: Transport) -> str:
        """Open a session that has a line, and prove all that it wants."""
        wanted = transports or (Transport.CUDA_IPC, Transport.SHARED_MEMORY, Transport.STREAM)
        opened = self.ledger.open_session(
            request_id=f"open-{random.random()}",
            protocol_version=PROTOCOL_VERSION,
            profile=StudentProfile(
                batch_grid=BatchGrid(global_batch_size=1, data_parallel_size=1, micro_batch_size=1),
                top_k=8,
                value_type=ElementType.FLOAT32,
                transports=wanted,
            ),
        )
        session_id, nonce = opened.terms.session_id, opened.nonce
        self.ledger.check_hello(session_id, nonce)
        self.ledger.line_opened(session_id, pid=7, challenge=LINE_CHALLENGE)
        line = proof_of(LINE_CHALLENGE, nonce=nonce, transport=Transport.SHARED_MEMORY)
        device = proof_of(self.device.offer.challenge, nonce=nonce, transport=Transport.CUDA_IPC)
        self.ledger.prove_locality(
            session_id,
            proofs={Transport.SHARED_MEMORY: line},
            failures=[],
            device_proofs={each.writer_id: device for each in opened.probes},
        )
        return session_id

    def lose_device(self, session_id: str) -> None:
        """Say that a session's client cannot open the device's memory any more."""
        failure = Refusal(
            transport=Transport.CUDA_IPC,
            reason=RefusalReason.DRIVER_FAILED,
            message="it broke",
            writer_id=SERVER_WRITER,
        )
        self.ledger.prove_locality(session_id, proofs={}, failures=[failure])

    def job(self, session_id: str, rows: Sequence[Sequence[int]], **more: object) -> ScoreJob:
        return replace(
            ScoreJob(
                session_id=session_id,
                request_id=f"score-{random.random()}",
                input_ids=flat(rows),
                row_lengths=tuple(len(row) for row in rows),
                deadline=self.clock.now() + 60.0,
            ),
            **more,  # type: ignore[arg-type]
        )

    def score(self, session_id: str, **more: object) -> LeaseTerms:
        return self.scorer.submit(self.job(session_id, ROWS, **more)).result(PATIENCE)

    def columns(self, lease: LeaseTerms) -> Columns:
        """Return a lease's columns, from where its reader finds them."""
        assert lease.extent is not None
        if lease.on_device:
            slab = self.slabs.find_on_device(lease.extent.slab_id)
            return DeviceRoom(slab, lease.extent).tensors(lease.payload.columns)
        return column_tensors(self.slabs.room(lease.extent), lease.payload.columns)


@contextmanager
def running(
    folder: Path, *, device_faults: tuple[Fault, ...] = (), **settings: object
) -> Iterator[Service]:
    spec = Spec(folder=str(folder), faults=device_faults)
    service = Service(folder, spec, **settings)
    service.scorer.start()
    try:
        yield service
    finally:
        service.teacher.gate.set()
        service.scorer.stop(patience_seconds=PATIENCE)
        service.slabs.close()


def same(one: Columns, other: Columns) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


class TestASessionThatReadsDeviceMemory:
    def test_is_scored_there_and_all_others_in_host_memory(self, tmp_path: Path) -> None:
        with running(tmp_path) as service:
            on_device = service.score(service.session())
            on_host = service.score(service.session(Transport.SHARED_MEMORY))
            assert (on_device.on_device, on_host.on_device) == (True, False)
            assert same(service.columns(on_device), service.columns(on_host))
            view = service.ledger.view()
            (slab,) = view.registered.device_slabs
            assert (slab.writer_id, slab.used_bytes) == (SERVER_WRITER, PAGE)
            assert view.pool.used_bytes == PAGE

    def test_takes_no_host_memory_but_for_what_is_said_of_rows(self, tmp_path: Path) -> None:
        with running(tmp_path) as service:
            lease = service.score(service.session(), bad_rows=BadRows.MASK)
            assert lease.extent is not None
            twin = service.slabs.room(lease.extent)
            for column in lease.payload.columns:
                there = twin[column.offset_bytes : column.end_bytes]
                assert any(there) is not is_on_device(column.kind) or column.size_bytes <= 3

    def test_gives_its_room_back_for_the_next(self, tmp_path: Path) -> None:
        with running(tmp_path, device_pool_size_bytes=PAGE, slab_size_bytes=PAGE) as service:
            session = service.session()
            first = service.score(session)
            waiting = service.scorer.submit(service.job(session, ROWS))
            service.ledger.release(session, first.lease_id)
            second = waiting.result(PATIENCE)
            assert second.extent is not None
            assert first.extent is not None
            assert second.extent.slab_id == first.extent.slab_id
            assert second.extent.generation == first.extent.generation + 2

    def test_has_slabs_of_another_size_made_way_for(self, tmp_path: Path) -> None:
        with running(tmp_path, device_pool_size_bytes=2 * PAGE, slab_size_bytes=PAGE) as service:
            session = service.session()
            first = service.score(session)
            service.ledger.release(session, first.lease_id)
            large = service.scorer.submit(service.job(session, [[1] * 60])).result(PATIENCE)
            assert large.extent is not None
            assert large.extent.size_bytes == 2 * PAGE
            sizes = [each.size_bytes for each in service.ledger.view().registered.device_slabs]
            assert sizes == [2 * PAGE]

    def test_waits_for_memory_that_readers_have_open_until_they_let_go(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Nothing else happens that might have it look again."""
        with running(tmp_path, device_pool_size_bytes=2 * PAGE, slab_size_bytes=PAGE) as service:
            waiting, reader = self.wait_behind_a_reader(service, monkeypatch)
            os.close(reader)
            lease = waiting.result(PATIENCE)
            assert lease.extent is not None
            assert lease.extent.size_bytes == 2 * PAGE

    def test_is_told_that_readers_have_the_memory_open(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with running(tmp_path, device_pool_size_bytes=2 * PAGE, slab_size_bytes=PAGE) as service:
            waiting, reader = self.wait_behind_a_reader(service, monkeypatch)
            service.clock.advance(61.0)
            service.score(service.session(Transport.SHARED_MEMORY))  # wakes it to see the time
            with pytest.raises(PoolFullError, match="given up are still open in readers") as caught:
                waiting.result(PATIENCE)
            assert caught.value.facts["left_over_bytes"] == PAGE
            os.close(reader)

    def wait_behind_a_reader(
        self, service: Service, monkeypatch: pytest.MonkeyPatch
    ) -> tuple[LeaseFuture, int]:
        """Return a request that was refused memory, and what to close for it to be there."""
        refused: SimpleQueue[None] = SimpleQueue()
        make = service.device.make

        def make_and_tell(slab_id: str, usual_bytes: int, least_bytes: int) -> DeviceSlab:
            try:
                return make(slab_id, usual_bytes, least_bytes)
            except PoolFullError:
                refused.put(None)
                raise

        session = service.session()
        first = service.score(session)
        assert first.extent is not None
        reader = open_lock(service.slabs.find_on_device(first.extent.slab_id).fd)
        fcntl.flock(reader, fcntl.LOCK_SH)
        service.ledger.release(session, first.lease_id)
        monkeypatch.setattr(service.device, "make", make_and_tell)
        waiting = service.scorer.submit(service.job(session, [[1] * 60]))
        refused.get(timeout=PATIENCE)
        return waiting, reader

    def test_is_refused_what_can_never_fit(self, tmp_path: Path) -> None:
        with running(tmp_path, device_pool_size_bytes=PAGE, slab_size_bytes=PAGE) as service:
            with pytest.raises(PayloadInvalidError, match="--device-pool-size"):
                service.scorer.submit(service.job(service.session(), [[1] * 60]))

    def test_has_bad_rows_found_and_masked_there(self, tmp_path: Path) -> None:
        def spoil(logits: torch.Tensor) -> torch.Tensor:
            return logits.index_fill(0, torch.tensor([3]), torch.nan)

        with running(tmp_path) as service:
            service.teacher.spoil = spoil
            with pytest.raises(PayloadInvalidError, match="row 1 hold a NaN"):
                service.score(service.session())
            masked = service.score(service.session(), bad_rows=BadRows.MASK)
            on_host = service.score(service.session(Transport.SHARED_MEMORY), bad_rows=BadRows.MASK)
            assert masked.payload.bad_row_count == 1
            assert same(service.columns(masked), service.columns(on_host))
            assert RowStatus.NAN in [int(e) for e in list(service.columns(masked).values())[-1]]

    def test_that_loses_its_device_meanwhile_has_the_payload_copied(self, tmp_path: Path) -> None:
        with running(tmp_path) as service:
            session = service.session()
            service.teacher.gate.clear()
            waiting = service.scorer.submit(service.job(session, ROWS))
            service.lose_device(session)
            service.teacher.gate.set()
            lease = waiting.result(PATIENCE)
            assert not lease.on_device
            on_host = service.score(service.session(Transport.SHARED_MEMORY))
            assert same(service.columns(lease), service.columns(on_host))
            with service.ledger.pin(session, lease.lease_id) as pinned:
                assert pinned.payload.payload_id == lease.payload.payload_id

    def test_that_loses_its_device_afterwards_is_never_streamed_what_lies_there_alone(
        self, tmp_path: Path
    ) -> None:
        with running(tmp_path) as service:
            session = service.session()
            lease = service.score(session)
            service.lose_device(session)
            with pytest.raises(HostCopyNeededError), service.ledger.pin(session, lease.lease_id):
                pass

    def test_is_told_what_its_device_failed_at(self, tmp_path: Path) -> None:
        broken = (Fault(call="record", error=999),)
        with running(tmp_path, device_faults=broken) as service:
            with pytest.raises(EngineError, match="999"):
                service.score(service.session())
            (slab,) = service.ledger.view().registered.device_slabs
            assert slab.used_bytes == 0

    def test_is_told_when_its_slab_makes_way(self, tmp_path: Path) -> None:
        with running(tmp_path) as service:
            reader, other = service.session(), service.session()
            lease = service.score(reader)
            assert lease.extent is not None
            slab_id = lease.extent.slab_id
            service.ledger.may_open(reader, slab_id)
            service.ledger.release(reader, lease.lease_id)
            assert service.ledger.take_mail(reader) == []
            assert service.ledger.take_idle_slabs(on_device=True) == [slab_id]
            assert service.ledger.take_mail(reader) == [SlabsGone(slab_ids=(slab_id,))]
            assert service.ledger.take_mail(reader) == service.ledger.take_mail(other) == []

    def test_counts_as_a_reader_of_its_slab_until_it_ends(self, tmp_path: Path) -> None:
        with running(tmp_path) as service:
            reader = service.session()
            lease = service.score(reader)
            assert lease.extent is not None
            service.ledger.may_open(reader, lease.extent.slab_id)
            (slab,) = service.ledger.view().registered.device_slabs
            assert slab.reader_count == 1
            service.ledger.release(reader, lease.lease_id)
            service.ledger.line_ended(reader, process_alive=False)
            (slab,) = service.ledger.view().registered.device_slabs
            assert slab.reader_count == 0


class TestAnotherSession:
    def test_that_reads_the_host_is_refused_a_payload_that_is_not_there(
        self, tmp_path: Path
    ) -> None:
        with running(tmp_path) as service:
            lease = service.score(service.session())
            other = service.session(Transport.SHARED_MEMORY)
            payload_id = lease.payload.payload_id
            with pytest.raises(HostCopyNeededError, match="score the rows in a session"):
                service.ledger.acquire(session_id=other, request_id="r", payload_id=payload_id)

    def test_that_reads_device_memory_too_may_have_it(self, tmp_path: Path) -> None:
        with running(tmp_path) as service:
            lease = service.score(service.session())
            payload_id = lease.payload.payload_id
            again = service.ledger.acquire(
                session_id=service.session(), request_id="r", payload_id=payload_id
            )
            assert again.on_device
            assert again.extent == lease.extent

    def test_is_passed_the_device_part_only_if_it_reads_that(self, tmp_path: Path) -> None:
        with running(tmp_path) as service:
            reader, other = service.session(), service.session(Transport.SHARED_MEMORY)
            lease = service.score(reader)
            assert lease.extent is not None
            slab_id = lease.extent.slab_id
            assert service.ledger.passes_own_device(reader, slab_id)
            assert not service.ledger.passes_own_device(other, slab_id)
            with pytest.raises(NotAllowedError):
                service.ledger.may_open(service.session(Transport.STREAM), slab_id)


def test_everything_is_given_back_at_the_end(tmp_path: Path) -> None:
    with running(tmp_path) as service:
        for _ in range(5):
            session = service.session()
            service.ledger.release(session, service.score(session).lease_id)
    log = read_log(tmp_path)
    assert faults(log) == []
    assert leaked(log) == set()
