"""`teacher-logits serve` as its users run it: a process, signals, exit codes, what it leaves."""

from __future__ import annotations

import array
import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckResponse
from tests import forked
from tests.processes.test_fifty_steps import await_true
from tests.server.services.registry_rig import Wire, a_payload, a_student, a_teacher, bytes_of
from tests.server.services.registry_rig import refused as called

from teacher_logits import keys
from teacher_logits.__main__ import main
from teacher_logits.errors import NotAllowedError
from teacher_logits.grid import BatchGrid
from teacher_logits.profiles import PROTOCOL_VERSION, StudentProfile
from teacher_logits.transport import Transport
from teacher_logits.v1 import (
    scoring_service_pb2,
    scoring_service_pb2_grpc,
)
from teacher_logits.v1 import teacher_logits_service_pb2 as messages
from teacher_logits.v1 import teacher_logits_service_pb2_grpc as stubs
from teacher_logits.wire import student_to_wire
from teacher_logits_server import app

if TYPE_CHECKING:
    from collections.abc import Iterator

    from teacher_logits_server.server import Server

PATIENCE = 40.0

COMMAND = Path(sys.executable).with_name("teacher-logits")
FORKED = (sys.executable, "-m", "teacher_logits")
ENGINE_HERE = "teacher_logits_client.testing:toy_teacher"

# An engine of our own: loads when there is something at the other end of the pipe that the
# variable GATE names, scores alike, and never comes to an end with a row of one token 49, which
# it tells of when it is at it.
AT_WORK = "at the row without an end"
ENGINE = f"""
import os
import torch
from teacher_logits_server.engines import EngineProfile

class Counting:
    profile = EngineProfile(
        name="counting", vocabulary_size=50, head_rows=64, max_row_tokens=128,
        arithmetic_type="float32",
    )

    def logits(self, rows):
        for row in rows:
            if row.token_ids.tolist() == [49]:
                print("{AT_WORK}", flush=True)
            while row.token_ids.tolist() == [49]:
                torch.ones(500, 500) @ torch.ones(500, 500)
            history = row.token_ids.cumsum(0)[row.first : row.first + row.count].float()
            yield torch.sin(history[:, None] + torch.arange(64)[None, :])

def load(config):
    if "GATE" in os.environ:
        open(os.environ["GATE"]).close()
    return Counting()
"""


STUBBORN = """
import asyncio, sys
from teacher_logits.__main__ import main
from teacher_logits_server import app

async def live():
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            pass

class Stubborn(app.Server):
    async def start(self):
        self.task = asyncio.ensure_future(live())
        return await super().start()

app.Server, app.HUNG_SECONDS = Stubborn, 0.1
sys.exit(main(sys.argv[1:]))
"""


@dataclass
class Served:
    """A server's process."""

    process: subprocess.Popen[bytes]
    log: Path

    def wait(self) -> int:
        return self.process.wait(PATIENCE)

    def terminate(self) -> int:
        """Ask it to stop; return its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.wait()

    def said(self) -> str:
        return self.log.read_text("utf-8")


@contextmanager
def started(
    folder: Path,
    *flags: str,
    gate: Path | None = None,
    engine: str = "own_engine:load",
    program: tuple[str, ...] = FORKED,
    pass_fds: tuple[int, ...] = (),
) -> Iterator[Served]:
    """Start a server; it is killed in the end if it still runs.

    ``program`` is what is run: the command as it is installed, or the same forked.
    """
    (folder / "own_engine.py").write_text(ENGINE, encoding="utf-8")
    log = folder / f"log-{keys.new_epoch()}"
    environment = dict(os.environ)
    if gate is not None:
        environment["GATE"] = str(gate)
    command = [*program, "serve", *(("--engine", engine) if engine else ())]
    popen: type[subprocess.Popen[bytes]] = forked.Popen if program is FORKED else subprocess.Popen
    with log.open("wb") as output:
        process = popen(
            [*command, *flags],
            cwd=folder,
            stdout=output,
            stderr=output,
            env=environment,
            pass_fds=pass_fds,
        )
    try:
        yield Served(process, log)
    finally:
        process.kill()
        process.wait()


@contextmanager
def ready(
    folder: Path,
    *flags: str,
    engine: str = "own_engine:load",
    program: tuple[str, ...] = FORKED,
) -> Iterator[tuple[Served, dict[str, object]]]:
    """Start a server and wait until it is ready; yields what it says of itself."""
    reading, writing = os.pipe()
    try:
        told = ("--ready-fd", str(writing))
        with started(
            folder, *told, *flags, engine=engine, program=program, pass_fds=(writing,)
        ) as served:
            os.close(writing)
            with open(reading, "rb", closefd=False) as pipe:
                line = pipe.readline()
            assert line, served.said()
            yield served, json.loads(line)
    finally:
        os.close(reading)


def refused(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    """Run the command in this process, which it ends with 2; return what it said."""
    try:
        code = main(["serve", *flags])
    except SystemExit as stop:  # of argparse
        code = int(str(stop.code))
    said = capsys.readouterr().err
    assert code == 2
    assert "Traceback" not in said
    return said


def unix(folder: Path) -> tuple[str, str]:
    return "--listen", f"unix:{folder}/s"


def lease_something(channel: grpc.Channel) -> tuple[str, str]:
    """Open a session, score a row; return the session and the lease."""
    students = stubs.TeacherLogitsServiceStub(channel)
    grid = BatchGrid(global_batch_size=1, data_parallel_size=1, micro_batch_size=1)
    profile = StudentProfile(batch_grid=grid, top_k=4, transports=(Transport.STREAM,))
    session_id = students.OpenSession(
        messages.OpenSessionRequest(
            request_id=keys.new_id("r", "test"),
            protocol_version=PROTOCOL_VERSION,
            profile=student_to_wire(profile),
        ),
        timeout=PATIENCE,
    ).session.session_id
    students.ProveLocality(messages.ProveLocalityRequest(session_id=session_id), timeout=PATIENCE)
    lease = score(channel, session_id, "r-1").lease
    return session_id, lease.lease_id


def start_scoring(
    channel: grpc.Channel, session_id: str, request_id: str, *tokens: int
) -> grpc.Future[scoring_service_pb2.ScoreResponse]:
    request = scoring_service_pb2.ScoreRequest(
        session_id=session_id,
        request_id=request_id,
        input_ids=array.array("i", tokens).tobytes(),
        row_lengths=[len(tokens)],
        bad_rows=scoring_service_pb2.BAD_ROW_POLICY_REJECT,
    )
    stub = scoring_service_pb2_grpc.ScoringServiceStub(channel)
    return stub.Score.future(request, timeout=PATIENCE)


def score(
    channel: grpc.Channel, session_id: str, request_id: str
) -> scoring_service_pb2.ScoreResponse:
    return start_scoring(channel, session_id, request_id, 1, 2, 3).result()


def await_work(served: Served) -> None:
    """Wait until the teacher is at the row without an end.

    A request that counts as running may still be given up before its teacher has it.
    """
    await_true(lambda: AT_WORK in served.said())


def health_of(channel: grpc.Channel) -> Iterator[int]:
    """What the server says of its health, change by change."""
    method: grpc.UnaryStreamMultiCallable[bytes, bytes]
    method = channel.unary_stream("/grpc.health.v1.Health/Watch")
    for answer in method(b"", timeout=PATIENCE, wait_for_ready=True):
        yield HealthCheckResponse.FromString(answer).status


class TestReadiness:
    def test_is_told_by_a_descriptor_with_the_address_that_works(self, tmp_path: Path) -> None:
        flags = ("--listen", "127.0.0.1:0", "--insecure", "--broker", f"{tmp_path}/b")
        with ready(tmp_path, *flags) as (served, readiness):
            with grpc.insecure_channel(str(readiness["address"])) as channel:
                lease_something(channel)

            assert readiness["pid"] == served.process.pid
            assert readiness["vocabulary_size"] == 50
            assert readiness["transports"] == ["cuda_ipc", "local", "shared_memory", "stream"]

    def test_is_told_by_a_file_that_is_there_while_the_server_is(self, tmp_path: Path) -> None:
        place = tmp_path / "ready"
        place.write_text("of a server that died", encoding="utf-8")
        flags = (*unix(tmp_path), "--ready-file", str(place))
        with ready(tmp_path, *flags, program=(str(COMMAND),)) as (served, readiness):
            assert json.loads(place.read_text("utf-8")) == readiness
            assert served.terminate() == 0

        assert not place.exists()

    def test_is_logged(self, tmp_path: Path) -> None:
        flags = (*unix(tmp_path), "--log-format", "json")
        with ready(tmp_path, *flags) as (served, readiness):
            served.terminate()
            events = [json.loads(line) for line in served.said().splitlines()]

        [event] = [event for event in events if event["event"] == "ready"]
        assert event.items() >= readiness.items()

    def test_that_cannot_be_told_ends_the_server(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        place = f"{tmp_path}/none/ready"
        said = refused(capsys, *unix(tmp_path), "--engine", ENGINE_HERE, "--ready-file", place)

        assert f"--ready-file {place}" in said
        assert not (tmp_path / "s").exists()


class TestWithoutAnEngine:
    def test_published_teachers_are_served_and_a_score_is_refused(self, tmp_path: Path) -> None:
        with ready(tmp_path, *unix(tmp_path), engine="") as (served, readiness):
            assert (readiness["teacher_id"], readiness["vocabulary_size"]) == ("", 0)
            with Wire(str(readiness["address"])) as wire:
                publisher = wire.publisher(a_teacher(), streams=True)
                publisher.publish(a_payload(), bytes_of(a_payload()))
                student = wire.student(a_student(), streams=True)
                grant = student.acquire(0)
                assert student.read(grant.leases[0]) == bytes_of(a_payload())
                with pytest.raises(NotAllowedError, match="acquire its steps"):
                    called(lambda: score(wire.channel, student.session_id, "r-1"))
                student.release(grant)

            assert served.terminate() == 0  # a payload that nobody has leased holds nothing up

    def test_a_flag_that_speaks_of_its_teacher_is_refused(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert "--top-k 5" in refused(capsys, *unix(tmp_path), "--top-k", "5")


class TestSignals:
    def test_sigterm_drains_and_leaves_nothing(self, tmp_path: Path) -> None:
        folder = tmp_path / "sockets"
        with ready(tmp_path, *unix(folder)) as (served, readiness):
            with grpc.insecure_channel(str(readiness["address"])) as channel:
                session_id, lease_id = lease_something(channel)
                health = health_of(channel)
                before = next(health)
                served.process.send_signal(signal.SIGTERM)
                after = next(health)
                with pytest.raises(grpc.RpcError) as new_session:
                    lease_something(channel)
                with pytest.raises(grpc.RpcError) as new_work:
                    score(channel, session_id, "r-2")
                retried = score(channel, session_id, "r-1").lease.lease_id
                renewed = stubs.TeacherLogitsServiceStub(channel).RenewSession(
                    messages.RenewSessionRequest(session_id=session_id), timeout=PATIENCE
                )
                running = served.process.poll() is None
                stubs.TeacherLogitsServiceStub(channel).ReleasePayload(
                    messages.ReleasePayloadRequest(session_id=session_id, lease_id=lease_id),
                    timeout=PATIENCE,
                )
                code = served.wait()

        assert (before, after) == (HealthCheckResponse.SERVING, HealthCheckResponse.NOT_SERVING)
        assert new_session.value.code() is grpc.StatusCode.UNAVAILABLE
        assert new_work.value.code() is grpc.StatusCode.UNAVAILABLE
        assert retried == lease_id
        assert renewed.draining
        assert (running, code) == (True, 0)
        assert list(folder.iterdir()) == []

    def test_leases_and_work_that_take_too_long_show_in_the_exit_code(self, tmp_path: Path) -> None:
        flags = (*unix(tmp_path), "--drain-grace", "100ms")
        with ready(tmp_path, *flags) as (served, readiness):
            with grpc.insecure_channel(str(readiness["address"])) as channel:
                session_id, _ = lease_something(channel)
                endless = start_scoring(channel, session_id, "r-2", 49)
                await_work(served)
                assert served.terminate() == 3
                assert isinstance(endless.exception(), grpc.RpcError)
            assert "drain gave up leases=1" in served.said()

    def test_a_second_one_stops_at_once_whatever_the_teacher_is_at(self, tmp_path: Path) -> None:
        with ready(tmp_path, *unix(tmp_path), "--drain-grace", "1h") as (served, readiness):
            with grpc.insecure_channel(str(readiness["address"])) as channel:
                session_id, _ = lease_something(channel)
                health = health_of(channel)
                next(health)
                endless = start_scoring(channel, session_id, "r-2", 49)
                await_work(served)
                served.process.send_signal(signal.SIGINT)
                assert next(health) == HealthCheckResponse.NOT_SERVING
                assert served.terminate() == 128 + signal.SIGTERM
                with pytest.raises(grpc.RpcError) as ended:
                    endless.result()
                assert ended.value.code() is grpc.StatusCode.UNAVAILABLE

        assert not (tmp_path / "s").exists()

    def test_a_second_one_stops_a_teacher_at_what_nobody_waits_for(self, tmp_path: Path) -> None:
        """There is nothing to be drained, and the stop itself would wait for it."""
        with ready(tmp_path, *unix(tmp_path), "--drain-grace", "1h") as (served, readiness):
            with grpc.insecure_channel(str(readiness["address"])) as channel:
                session_id, lease_id = lease_something(channel)
                stubs.TeacherLogitsServiceStub(channel).ReleasePayload(
                    messages.ReleasePayloadRequest(session_id=session_id, lease_id=lease_id),
                    timeout=PATIENCE,
                )
                endless = start_scoring(channel, session_id, "r-2", 49)
                await_work(served)
                endless.cancel()
                served.process.send_signal(signal.SIGTERM)
                await_true(lambda: "drained" in served.said())
                assert served.terminate() == 128 + signal.SIGTERM

    @pytest.mark.parametrize("flags", [(), ("--drain-grace", "0s")], ids=["drained", "at once"])
    def test_a_task_that_lets_nobody_cancel_it_keeps_no_process(
        self, tmp_path: Path, flags: tuple[str, ...]
    ) -> None:
        program = (sys.executable, "-c", STUBBORN)
        with ready(tmp_path, *unix(tmp_path), *flags, program=program) as (served, readiness):
            with grpc.insecure_channel(str(readiness["address"])) as channel:
                if flags:
                    lease_something(channel)
                code = served.terminate()
        assert code == (app.EXIT_NOT_DONE if flags else app.EXIT_DRAINED)
        assert "stopped with a task that did not end" in served.said()

    def test_one_while_the_teacher_loads_is_obeyed_at_once(self, tmp_path: Path) -> None:
        gate = tmp_path / "gate"
        os.mkfifo(gate)
        with started(tmp_path, *unix(tmp_path), gate=gate) as served:
            with grpc.insecure_channel(f"unix:{tmp_path}/s") as channel:
                health = health_of(channel)
                assert next(health) == HealthCheckResponse.NOT_SERVING
            assert served.terminate() == 143

        assert not (tmp_path / "s").exists()


class TestLoading:
    def test_answers_for_its_health_meanwhile_and_asks_others_to_come_back(
        self, tmp_path: Path
    ) -> None:
        gate = tmp_path / "gate"
        os.mkfifo(gate)
        with (
            started(tmp_path, *unix(tmp_path), gate=gate) as served,
            grpc.insecure_channel(f"unix:{tmp_path}/s") as channel,
        ):
            health = health_of(channel)
            before = next(health)
            with pytest.raises(grpc.RpcError) as early:
                lease_something(channel)
            opener = threading.Thread(target=lambda: gate.open("w").close())
            opener.start()
            after = next(health)
            opener.join()
            lease_something(channel)
            assert served.process.poll() is None

        assert (before, after) == (HealthCheckResponse.NOT_SERVING, HealthCheckResponse.SERVING)
        assert early.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "loading its teacher" in str(early.value.details())

    @pytest.mark.parametrize(
        ("engine", "named"),
        [
            ("os:nothing", "has no nothing"),
            ("no_such_module:load", "cannot be imported"),
            ("os:getcwd", "is called with one argument"),
            ("transformers", "--model"),
        ],
    )
    def test_an_engine_that_leads_nowhere_is_refused_and_leaves_nothing(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], engine: str, named: str
    ) -> None:
        assert named in refused(capsys, *unix(tmp_path), "--engine", engine)
        assert list(tmp_path.iterdir()) == []

    def test_a_module_that_is_nowhere_is_refused_with_the_places_that_were_looked_in(
        self, tmp_path: Path
    ) -> None:
        with started(tmp_path, *unix(tmp_path), "--engine", "no_such_module:load") as served:
            assert served.wait() == 2
            said = served.said()

        assert f"in the current folder {tmp_path}" in said
        assert len(said.splitlines()) == 1

    def test_a_model_that_is_nowhere_is_refused_before_anybody_can_connect(
        self, tmp_path: Path
    ) -> None:
        flags = ("--engine", "transformers", "--model", "some-lab/Some-135M")
        with started(tmp_path, *unix(tmp_path), *flags) as served:
            assert served.wait() == 2
            [said] = served.said().splitlines()

        assert said.startswith("teacher-logits serve: --model 'some-lab/Some-135M'")
        assert "hf download some-lab/Some-135M --local-dir DIR" in said

    def test_an_engine_that_fails_ends_it_with_its_words_and_a_traceback_only_for_debug(
        self, tmp_path: Path
    ) -> None:
        (tmp_path / "failing.py").write_text("def load(config):\n    raise OSError('no disk')\n")
        said = []
        for level in ("info", "debug"):
            flags = ("--engine", "failing:load", "--log-level", level)
            with started(tmp_path, *unix(tmp_path), *flags) as served:
                assert served.wait() == 1
                said.append(served.said())

        assert "failed while it made its engine: OSError: no disk" in said[0].splitlines()[-1]
        assert ["Traceback" in each for each in said] == [False, True]

    def test_an_engine_with_logits_of_another_width_than_it_said_ends_it(
        self, tmp_path: Path
    ) -> None:
        narrow = ENGINE.replace("head_rows=64", "head_rows=65").replace("own_engine", "narrow")
        (tmp_path / "narrow.py").write_text(narrow, encoding="utf-8")
        with started(tmp_path, *unix(tmp_path), "--engine", "narrow:load") as served:
            assert served.wait() == 1
            said = served.said()

        assert "Traceback" not in said
        last = said.splitlines()[-1]
        assert last.startswith("teacher-logits serve: engine counting failed on the first rows")
        assert "not [c, 65]" in last


class TestASecondServer:
    def test_is_refused_by_pid_and_address_and_the_first_goes_on(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        tcp = ("--listen", "127.0.0.1:0", "--insecure")
        with ready(tmp_path, *unix(tmp_path), *tcp) as (first, readiness):
            port = readiness["addresses"][1]  # type: ignore[index]
            own = ("--engine", ENGINE_HERE)
            by_socket = refused(capsys, *unix(tmp_path), *own)
            by_port = refused(
                capsys, *own, "--insecure", "--listen", port, "--broker", f"{tmp_path}/b"
            )
            with grpc.insecure_channel(port) as channel:
                lease_something(channel)

        assert f"the server with pid {first.process.pid} has this socket" in by_socket
        assert f"--listen {port}: Address already in use" in by_port

    def test_after_one_that_was_killed_takes_its_place(self, tmp_path: Path) -> None:
        with ready(tmp_path, *unix(tmp_path)) as (first, before):
            first.process.kill()
            first.wait()
        left = {path.name for path in tmp_path.iterdir()} & {"s", "s.broker"}

        with ready(tmp_path, *unix(tmp_path)) as (_, after):
            with grpc.insecure_channel(str(after["address"])) as channel:
                lease_something(channel)
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
                line.connect(str(after["broker"]))

        assert left == {"s", "s.broker"}
        assert before["address"] == after["address"]
        assert before["epoch"] != after["epoch"]


class TestUsage:
    @pytest.mark.parametrize(
        ("flags", "named"),
        [
            (("--listen", "0.0.0.0:0"), "--insecure"),
            (("--listen", f"unix:/{'x' * 120}"), "121 bytes"),
            (("--pool-size", "0"), "--pool-size 0: must be at least"),
            (("--max-sessions", "many"), "--max-sessions many: give a whole number"),
            (("--config", "/none.yaml"), "/none.yaml"),
            (("--no-such-flag",), "--no-such-flag"),
        ],
    )
    def test_settings_that_cannot_be_served_with_end_it_with_a_sentence(
        self, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], named: str
    ) -> None:
        assert named in refused(capsys, *flags)

    def test_settings_come_from_a_file(self, tmp_path: Path) -> None:
        file = tmp_path / "server.yaml"
        file.write_text(f"listen: unix:{tmp_path}/s\nteacher_id: filed\n", encoding="utf-8")
        with ready(tmp_path, "--config", str(file)) as (_, readiness):
            assert readiness["teacher_id"] == "filed"
            assert readiness["address"] == f"unix:{tmp_path}/s"


def test_a_second_server_that_is_refused_leaves_the_first_one_s_ready_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "ready"
    flags = (*unix(tmp_path), "--ready-file", str(place))
    with ready(tmp_path, *flags) as (served, readiness):
        assert "has this socket" in refused(capsys, *flags, "--engine", ENGINE_HERE)
        assert json.loads(place.read_text("utf-8")) == readiness
        assert served.terminate() == 0
    assert not place.exists()


def test_a_stop_that_hangs_is_given_up_when_the_drain_s_time_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such as in a device's driver, where memory is given back."""
    monkeypatch.setattr(app, "STOP_SECONDS", 0.0)

    class Hanging:
        async def stop(self) -> None:
            await asyncio.Event().wait()

    async def stop() -> int:
        return await app._stop(cast("Server", Hanging()), app._Signals(), give_up=0.0)

    assert asyncio.run(stop()) == 3
