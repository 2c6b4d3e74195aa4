"""The doctor in namespaces of its own, with a /dev/shm of 64 MiB: a container without an image."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from teacher_logits_client import testing

ALONE = ("unshare", "-Urnpmi", "--fork", "--mount-proc", "--kill-child")
SMALL = "mount -t tmpfs -o size=64m none /dev/shm && "
VISITS = """
import sys
from teacher_logits_client import cli
for address in sys.argv[1:]:
    print(cli.doctor([address, "--json"]), flush=True)
"""


def in_a_container(*command: str) -> "subprocess.CompletedProcess[str]":
    """Run a program in namespaces of its own."""
    return subprocess.run(
        [*ALONE, "sh", "-c", SMALL + 'exec "$@"', "sh", *command],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def reports(output: str) -> list[tuple[dict[str, dict[str, object]], int]]:
    """Each report that was written, its findings by name, and the exit code behind it."""
    found, rest, decoder = [], output.lstrip(), json.JSONDecoder()
    while rest:
        document, end = decoder.raw_decode(rest)
        code, _, rest = rest[end:].lstrip().partition("\n")
        found.append(({each["name"]: each for each in document["findings"]}, int(code)))
    return found


@pytest.mark.slow  # four seconds
@pytest.mark.skipif(shutil.which("unshare") is None, reason="unshare is not installed")
def test_a_container_is_told_what_it_shares_with_the_server_and_that_it_does_not_matter() -> None:
    if (tried := in_a_container("true")).returncode:
        pytest.skip(f"no namespaces here: {tried.stderr.strip()}")
    with testing.serve(pool_size="16MiB") as server:
        done = in_a_container(sys.executable, "-c", VISITS, server.address, "127.0.0.1:1")

    (visited, fine), (unreached, failed) = reports(done.stdout)
    assert (fine, failed) == (0, 1)
    assert visited["container"]["facts"] == {
        "cgroup": visited["container"]["facts"]["cgroup"],  # type: ignore[index]
        "pid": False,
        "ipc": False,
        "user": False,
        "uts": True,
    }
    assert visited["dev_shm"]["facts"]["size_bytes"] == 64 << 20  # type: ignore[index]
    theirs = visited["server_namespaces"]
    assert theirs["facts"]["server_pid"] == 0  # type: ignore[index]
    assert "pid: peers are proven by SO_PEERPIDFD" in str(theirs["message"])
    if visited["peer_pidfd"]["verdict"] == "ok":
        assert visited["transport"]["facts"] == {"transport": "shared_memory"}
    assert unreached["tcp"]["verdict"] == "fail"
    assert "another network namespace" in str(unreached["tcp"]["cure"])
