"""Teacher and student in network and PID namespaces of their own, under one host name: T08.

Names, boot ids and namespaces say nothing of whether memory is shared: here they are all but
equal where it is not, and all different where it is. Proof decides, both ways.
"""

import dataclasses
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from tests.processes.running import line_of, program
from tests.reports.namespaced import WAYS
from tests.reports.raw import connect_raw
from tests.reports.tunnels import tunnel

import teacher_logits_client as tl
from teacher_logits_client.sessions.agreement import node_hints

STUDENT = Path(__file__).with_name("namespaced.py")
ALONE = ("unshare", "-Urnpm", "--fork", "--mount-proc", "--kill-child")
TOY = "teacher_logits_client.testing:toy_teacher"


Said = dict[str, object]


def alone(
    command: Sequence[str], *, hidden: Path | None = None, pass_fds: Sequence[int] = ()
) -> AbstractContextManager["subprocess.Popen[str]"]:
    """Run a program in namespaces of its own, where a folder is empty; it is killed in the end."""
    hide = f"mount -t tmpfs none '{hidden}' && " if hidden else ""
    shell = [*ALONE, "sh", "-c", hide + 'exec "$@"', "sh"]
    return program([*shell, *command], pass_fds=pass_fds)


@pytest.fixture(scope="module")
def namespaces() -> None:
    """Skip where such namespaces are not to be had."""
    if shutil.which("unshare") is None:
        pytest.skip("unshare is not installed")
    command = [*ALONE, "sh", "-c", "mount -t tmpfs none /mnt"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    if done.returncode:
        pytest.skip(f"no namespaces here: {done.stderr.strip()}")


@dataclasses.dataclass(frozen=True)
class Place:
    """A server in namespaces of its own: its folder, and its two sockets in it."""

    folder: Path

    @property
    def socket(self) -> Path:
        return self.folder / "s"

    @property
    def broker(self) -> Path:
        return self.folder / "b"

    def leases(self) -> int:
        """How many leases it has granted and not had back."""
        with connect_raw(f"unix:{self.socket}") as raw:
            return len(raw.inspect().leases)


@pytest.fixture(scope="module")
def place(namespaces: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    made = Place(tmp_path_factory.mktemp("server"))
    reading, writing = os.pipe()
    command = [sys.executable, "-m", "teacher_logits", "serve", "--engine", TOY]
    command += ["--listen", f"unix:{made.socket}", "--broker", str(made.broker)]
    command += ["--ready-fd", str(writing), "--pool-size", "16MiB"]
    with os.fdopen(reading) as ready, alone(command, pass_fds=(writing,)):
        os.close(writing)
        assert json.loads(ready.readline())["address"] == f"unix:{made.socket}"
        yield made


def heard(student: "subprocess.Popen[str]") -> dict[str, Said]:
    """What each handshake came to; the student is here by its host name, and in no other way."""
    who = json.loads(line_of(student))
    assert (who["host_name"], who["pid"]) == (socket.gethostname(), 1)
    assert who["net"] != os.stat("/proc/self/ns/net").st_ino
    lines = [json.loads(line_of(student)) for _ in WAYS]
    return {line.pop("way"): line for line in lines}


def command_of(address: Path, hints: tl.NodeHints) -> list[str]:
    said = json.dumps(dataclasses.asdict(hints))
    return [sys.executable, str(STUDENT), f"unix:{address}", said]


def test_t08_other_namespaces_and_another_boot_id_keep_nobody_from_memory_that_is_shared(
    place: Place,
) -> None:
    """A socket by path is one to every network namespace of a kernel, and passes descriptors."""
    elsewhere = tl.NodeHints(host_name="another", boot_id="0" * 36, pid=1, namespaces={"pid": 1})
    shared = {"transport": "shared_memory", "refusals": {}, "same": True}
    with alone(command_of(place.socket, elsewhere)) as student:
        assert heard(student) == dict.fromkeys(WAYS, shared)
        assert json.loads(line_of(student))["holds"]
        assert place.leases() == 1
    # Killed, and out of sight of the server's /proc: its pidfd tells all the same.
    assert any(place.leases() == 0 for _ in range(10_000))


def test_t08_the_servers_name_boot_id_and_namespaces_through_a_tunnel_open_nothing(
    place: Place, tmp_path: Path
) -> None:
    """Bytes pass; what they speak of is memory that this student cannot map."""
    command = command_of(tmp_path / "s", node_hints())
    with (
        tunnel(tmp_path / "s", place.socket),
        alone(command, hidden=place.folder) as student,
    ):
        said = heard(student)
    assert said.pop("prefer") == {
        "transport": "stream",
        "refusals": {"shared_memory": "BROKER_UNREACHABLE"},
        "same": True,
    }
    refused = {"require": "SessionRefusedError", "nothing else": "NoCommonTransportError"}
    assert {way: each["error"] for way, each in said.items()} == refused
    assert all("BROKER_UNREACHABLE" in str(each["message"]) for each in said.values())
