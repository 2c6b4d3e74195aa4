"""A server is killed with calls under way: who waits hears of it, and what is leased stays good.

What a successor makes of the ids it gave is tried in ``tests/reports``; that the client finds
the successor, in ``tests/client/sessions/test_processes.py``.
"""

import os
import signal
from collections.abc import Callable

import pytest
from tests.processes.running import PATIENCE_SECONDS
from tests.processes.student import ROWS, a_profile
from tests.stopping import stop

import teacher_logits_client as tl
from teacher_logits.errors import NotAvailable, ServerUnreachableError, SessionExpiredError
from teacher_logits_client import Transport

SHARED_MEMORY, STREAM = Transport.SHARED_MEMORY, Transport.STREAM


def test_whoever_has_to_do_with_a_killed_server_hears_of_it_in_time() -> None:
    with tl.testing.serve() as server, tl.connect(server.address) as client:
        local = client.open_session(a_profile(SHARED_MEMORY))
        remote = client.open_session(a_profile(STREAM))
        held = [session.score(ROWS).result() for session in (local, remote)]
        digests = [leased.digest() for leased in held]
        payload_id = held[0].payload.payload_id
        # What is asked of a server that stands still is on its way when that is killed.
        stop(server.pid)
        futures = [session.score(ROWS, timeout=PATIENCE_SECONDS) for session in (local, remote)]
        os.kill(server.pid, signal.SIGKILL)
        assert server.wait(PATIENCE_SECONDS) == -signal.SIGKILL

        for future in futures:
            assert_raises((ServerUnreachableError, SessionExpiredError), future.result)
        ended = SessionExpiredError
        assert_raises(ended, lambda: local.score(ROWS, timeout=5).result())
        assert_raises(ended, lambda: local.acquire(payload_id=payload_id, timeout=5))
        not_there = NotAvailable
        assert_raises(not_there, lambda: remote.score(ROWS, timeout=5).result())
        assert_raises(not_there, lambda: remote.acquire(payload_id=payload_id, timeout=5))
        assert_raises(not_there, lambda: client.open_session(a_profile(STREAM), timeout=5))
        assert [leased.digest() for leased in held] == digests
        for leased in held:
            leased.close()
        local.close()
        remote.close()


def assert_raises(
    kind: type[Exception] | tuple[type[Exception], ...], call: Callable[[], object]
) -> None:
    with pytest.raises(kind):
        call()
