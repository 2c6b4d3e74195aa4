"""Student processes that tests start, and what a test waits for without sleeping."""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2
from tests import forked

ROOT = Path(__file__).parents[2]
PATIENCE_SECONDS = 30
STUDENT = Path(__file__).with_name("student.py")


@contextmanager
def student(*arguments: str, pass_fds: Sequence[int] = ()) -> Iterator["subprocess.Popen[str]"]:
    """Run a student; it is killed in the end if it still runs."""
    process: subprocess.Popen[str] = forked.Popen(
        [sys.executable, STUDENT, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        pass_fds=pass_fds,
    )
    with _killed_in_the_end(process):
        yield process


@contextmanager
def program(
    command: Sequence[str], *, pass_fds: Sequence[int] = ()
) -> Iterator["subprocess.Popen[str]"]:
    """Run a program that is spoken with in lines; it is killed in the end if it still runs."""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        pass_fds=pass_fds,
    )
    with _killed_in_the_end(process):
        yield process


@contextmanager
def _killed_in_the_end(process: "subprocess.Popen[str]") -> Iterator[None]:
    try:
        yield
    finally:
        process.kill()
        process.communicate()


def line_of(process: "subprocess.Popen[str]") -> str:
    """Wait for the next line that a student says."""
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, f"the student ended with {process.wait(PATIENCE_SECONDS)}"
    return line.rstrip("\n")


def await_not_serving(address: str) -> None:
    """Wait until a server says that it takes no new work."""
    with grpc.insecure_channel(address) as channel:
        watch = channel.unary_stream(
            "/grpc.health.v1.Health/Watch",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )(health_pb2.HealthCheckRequest(), timeout=PATIENCE_SECONDS)
        assert any(answer.status == answer.NOT_SERVING for answer in watch)
        watch.cancel()
