"""Teacher and student in two containers' halves: what is settled, why, and that the data is right.

Each row of the table is one thing that containers do not share. `docs/deploying.md` has the same
table for those who deploy.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests import forked

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    Place = Mapping[str, object]

APART, STUDENT, OLD_KERNEL = (
    str(Path(__file__).with_name(name))
    for name in ("apart.py", "apart_student.py", "old_kernel.py")
)
TOY = "teacher_logits_client.testing:toy_teacher"
PATIENCE_SECONDS = 60
EVERY_KIND = ["mount", "uts", "ipc", "pid", "net"]
MIB = 1 << 20


def shm(size: str) -> list[str]:
    """A /dev/shm of its own, as every container has one (Docker's is of 64 MiB)."""
    return ["-t", "tmpfs", "-o", f"size={size}", "none", "/dev/shm"]


PROC = ["-t", "proc", "proc", "/proc"]
CONTAINER = {"kinds": EVERY_KIND, "mounts": [PROC, shm("64m")]}


@dataclass(frozen=True, kw_only=True)
class Server:
    """A server, the process that stands for its container, and the folder of its sockets."""

    folder: Path
    addresses: list[str]
    pid: int


@contextmanager
def serving(
    folder: Path, *, place: Place | None = None, program: str = "teacher_logits"
) -> Iterator[Server]:
    """A server in a place of its own, or in that of the tests."""
    reading, writing = os.pipe()
    apart = [APART, json.dumps(place)] if place is not None else []
    own = [program] if apart or program.endswith(".py") else ["-m", program]
    command = [sys.executable, *apart, *own, "serve", "--engine", TOY, "--pool-size", "192MiB"]
    command += ["--listen", f"unix:{folder}/s", "--listen", "127.0.0.1:0", "--insecure"]
    command += ["--max-batch-tokens", "65536", "--ready-fd", str(writing)]
    server = forked.Popen(command, pass_fds=[writing])
    os.close(writing)
    try:
        with os.fdopen(reading) as ready:
            addresses = json.loads(ready.readline())["addresses"]
        yield Server(folder=folder, addresses=addresses, pid=server.pid)
    finally:
        server.kill()
        server.wait()


@dataclass(frozen=True, kw_only=True)
class Came:
    """What a student said of its payload."""

    transport: str
    refusals: dict[str, str]
    digest: str
    streamed: str
    bytes: int
    shm_bytes: int
    pid: int = field(compare=False)


def student_of(
    server: Server, place: Place, *, by_tcp: bool = False, rows: int = 2, positions: int = 5
) -> Came:
    """Have a student in a place of its own score rows."""
    address = server.addresses[1 if by_tcp else 0]
    sizes = map(str, (rows, positions, 256))
    command = [sys.executable, APART, json.dumps(place), STUDENT, address, *sizes]
    done = forked.run(command, timeout=PATIENCE_SECONDS)
    assert done.returncode == 0, done.stderr
    return Came(**json.loads(done.stdout))


@pytest.fixture(scope="module", autouse=True)
def namespaces() -> None:
    """Skip where an ordinary user, or this container's root, may not have namespaces."""
    command = [sys.executable, APART, json.dumps(CONTAINER), "platform"]
    done = forked.run(command, timeout=PATIENCE_SECONDS)
    if "Operation not permitted" in done.stderr:
        pytest.skip(f"no namespaces here: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def host(namespaces: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server in the tests' own namespaces."""
    with serving(tmp_path_factory.mktemp("host")) as server:
        yield server


@pytest.fixture(scope="module")
def container(namespaces: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server in a container."""
    with serving(tmp_path_factory.mktemp("container"), place=CONTAINER) as server:
        yield server


@pytest.fixture(scope="module")
def right(host: Server) -> str:
    """The digest of what the teacher says of the rows, to a student who shares everything."""
    came = student_of(host, {})
    assert (came.transport, came.digest) == ("shared_memory", came.streamed)
    return came.digest


FOREIGN = {
    "a PID namespace": {"kinds": ["pid"]},
    "an IPC namespace": {"kinds": ["ipc"]},
    "a network namespace": {"kinds": ["net"]},
    "a host name": {"kinds": ["uts"]},
    "a mount namespace": {"kinds": ["mount"]},
    "a private /dev/shm": {"kinds": ["mount"], "mounts": [shm("1g")]},
    "a /dev/shm of 64 MiB": {"kinds": ["mount"], "mounts": [shm("64m")]},
    "all of them": CONTAINER,
}


@pytest.mark.parametrize("place", FOREIGN.values(), ids=FOREIGN)
def test_memory_is_shared_with_a_student_that_has_of_its_own(
    place: Place, host: Server, right: str
) -> None:
    came = student_of(host, place)

    assert (came.transport, came.refusals) == ("shared_memory", {})
    assert came.digest == came.streamed == right


def test_memory_is_shared_over_a_folder_that_is_read_only(host: Server, right: str) -> None:
    bind = [["--bind", str(host.folder), str(host.folder)]]
    bind += [["-o", "remount,bind,ro", str(host.folder)]]
    came = student_of(host, {"kinds": ["mount"], "mounts": bind})

    assert (came.transport, came.digest) == ("shared_memory", right)


def test_a_student_without_the_folder_is_streamed_to(host: Server, right: str) -> None:
    hidden = {"kinds": ["mount"], "mounts": [["-t", "tmpfs", "none", str(host.folder)]]}
    came = student_of(host, hidden, by_tcp=True)

    assert came.transport == "stream"
    assert came.refusals == {"shared_memory": "BROKER_UNREACHABLE"}
    assert came.digest == came.streamed == right


@pytest.mark.skipif(os.geteuid() != 0, reason="takes another user's number")
def test_a_student_with_uids_of_its_own_is_streamed_to(host: Server, right: str) -> None:
    """A user namespace of its own maps its root to nobody whom the server knows."""
    came = student_of(host, {"uid": 64_123}, by_tcp=True)

    assert came.transport == "stream"
    assert came.refusals == {"shared_memory": "BROKER_UNREACHABLE"}
    assert came.digest == right


def test_two_containers_share_memory(container: Server, right: str) -> None:
    came = student_of(container, CONTAINER)

    assert (came.transport, came.refusals, came.pid) == ("shared_memory", {}, 1)
    assert came.digest == came.streamed == right


def test_a_payload_may_be_larger_than_either_container_s_dev_shm(container: Server) -> None:
    came = student_of(container, CONTAINER, rows=45, positions=1000)

    assert came.transport == "shared_memory"
    assert came.bytes > came.shm_bytes == 64 * MIB
    assert came.digest == came.streamed


@pytest.fixture(scope="module")
def old_container(namespaces: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server in a container on an old kernel."""
    folder = tmp_path_factory.mktemp("old")
    with serving(folder, place=CONTAINER, program=OLD_KERNEL) as server:
        yield server


def test_on_an_old_kernel_a_student_of_another_pid_namespace_is_streamed_to(
    old_container: Server, right: str
) -> None:
    came = student_of(old_container, CONTAINER)

    assert came.transport == "stream"
    assert came.refusals == {"shared_memory": "PEER_UNPROVEN"}
    assert came.digest == came.streamed == right


def test_on_an_old_kernel_memory_is_shared_within_one_pid_namespace(
    old_container: Server, right: str
) -> None:
    """As `shareProcessNamespace: true` has it."""
    came = student_of(old_container, {"join": old_container.pid})

    assert (came.transport, came.refusals) == ("shared_memory", {})
    assert came.pid > 1
    assert came.digest == right


def test_on_an_old_kernel_it_is_enough_that_the_server_sees_the_student(
    tmp_path: Path, namespaces: None, right: str
) -> None:
    """As `hostPID: true` at the teacher alone has it."""
    with serving(tmp_path, program=OLD_KERNEL) as server:
        came = student_of(server, CONTAINER)

    assert (came.transport, came.refusals, came.pid) == ("shared_memory", {}, 1)
    assert came.digest == right
