"""SIGTERM drains a server: nothing new, the old runs out, then it ends and says how it went."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.processes.running import PATIENCE_SECONDS, await_not_serving
from tests.processes.student import ROWS, a_profile

import teacher_logits_client as tl
from teacher_logits.errors import DrainingError, NotAvailable
from teacher_logits_client import Transport


@dataclass(frozen=True)
class Drain:
    """A server that was told to end, and whoever still has to do with it."""

    server: tl.testing.ServerProcess
    client: tl.Client
    session: tl.Session
    leased: tl.LeasedPayload


@contextmanager
def drain_with_a_lease_out(folder: Path, *, drain_grace: str) -> Iterator[Drain]:
    """Have a lease, and tell the server to end."""
    listen = f"unix:{folder / 's'}"
    with (
        tl.testing.serve(listen=listen, drain_grace=drain_grace) as server,
        tl.connect(server.address) as client,
        client.open_session(a_profile(Transport.SHARED_MEMORY)) as session,
    ):
        leased = session.score(ROWS).result()
        os.kill(server.pid, signal.SIGTERM)
        yield Drain(server, client, session, leased)


def test_the_old_runs_out_and_nothing_new_is_taken(tmp_path: Path) -> None:
    with drain_with_a_lease_out(tmp_path, drain_grace="60s") as drain:
        await_not_serving(drain.server.address)
        leased = drain.leased
        digest = leased.digest()
        with pytest.raises(DrainingError, match="shutting down"):
            drain.client.open_session(a_profile(Transport.STREAM))
        with pytest.raises(DrainingError, match="shutting down"):
            drain.session.score(ROWS).result()
        with pytest.raises(NotAvailable, match="shutting down"):
            tl.connect(drain.server.address, timeout=2)
        # Another reader of what is leased is no new work.
        payload_id = leased.payload.payload_id
        with drain.session.acquire(payload_id=payload_id, input_ids=ROWS) as again:
            assert again.digest() == digest
        assert leased.digest() == digest
        leased.close()
        assert drain.server.wait(PATIENCE_SECONDS) == 0
    assert list(tmp_path.iterdir()) == []


def test_a_lease_that_stays_out_is_told_by_the_exit_code_and_stays_good(tmp_path: Path) -> None:
    with drain_with_a_lease_out(tmp_path, drain_grace="200ms") as drain:
        digest = drain.leased.digest()
        assert drain.server.wait(PATIENCE_SECONDS) == 3
        assert drain.leased.digest() == digest
        drain.leased.close()
    assert list(tmp_path.iterdir()) == []


def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    with drain_with_a_lease_out(tmp_path, drain_grace="60s") as drain:
        await_not_serving(drain.server.address)
        os.kill(drain.server.pid, signal.SIGTERM)
        assert drain.server.wait(PATIENCE_SECONDS) == 128 + signal.SIGTERM
        drain.leased.close()
    assert list(tmp_path.iterdir()) == []
