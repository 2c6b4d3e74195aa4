"""A server under the service's filter of system calls lends its memory as any other does."""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
from ctypes.util import find_library
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests import forked
from tests.deploy.test_files import allowed_calls, setting

import teacher_logits_client as tl

if TYPE_CHECKING:
    from collections.abc import Iterator

PROGRAM = Path(__file__).with_name("hardened.py")
TOY = "teacher_logits_client.testing:toy_teacher"
ROWS = [[3, 1, 4, 1, 5], [9, 2, 6]]

pytestmark = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None or find_library("seccomp") is None,
    reason="systemd and libseccomp are not installed",
)


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """A server that may do what the unit lets it do, and no more."""
    tmp_path.chmod(int(setting("RuntimeDirectoryMode"), 8))
    family = getattr(socket, setting("RestrictAddressFamilies"))
    reading, writing = os.pipe()
    command = [sys.executable, str(PROGRAM), ",".join(sorted(allowed_calls())), str(int(family))]
    command += ["teacher_logits", "serve", "--engine", TOY, "--listen", f"unix:{tmp_path}/s"]
    command += ["--socket-group", str(os.getegid()), "--pool-size", "1MiB"]
    command += ["--ready-fd", str(writing)]
    server = forked.Popen(command, pass_fds=[writing])
    os.close(writing)
    try:
        with os.fdopen(reading) as ready:
            yield str(json.loads(ready.readline())["address"])
    finally:
        server.kill()
        server.wait()


def test_memory_is_shared_under_the_service_s_filter(address: str) -> None:
    grid = tl.BatchGrid(global_batch_size=2, data_parallel_size=1, micro_batch_size=2)
    profile = tl.StudentProfile(batch_grid=grid, top_k=8, locality=tl.Locality.REQUIRE)
    with tl.connect(address) as client, client.open_session(profile) as session:
        with session.score(ROWS).result() as leased:
            assert leased.transport is tl.Transport.SHARED_MEMORY
            assert leased.payload.row_count == 2
