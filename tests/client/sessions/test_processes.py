"""The client against servers in processes of their own: stopped, killed and replaced."""

import ctypes
import gc
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tests.client.conftest import SHARED_MEMORY, STREAM, a_profile
from tests.stopping import stop, stopped

import teacher_logits_client as tl
from teacher_logits.errors import (
    DeadlinePassedError,
    EpochChangedError,
    ServerUnreachableError,
    SessionExpiredError,
)
from teacher_logits_client import testing

IDS = torch.arange(40).view(4, 10)


@pytest.fixture(scope="module")
def server() -> Iterator[testing.ServerProcess]:
    with testing.serve(pool_size="64MiB") as server:
        yield server


class TestStoppedServer:
    @pytest.mark.parametrize("transports", [SHARED_MEMORY, STREAM], ids=lambda t: t[0].value)
    def test_a_call_ends_by_its_deadline_and_the_client_goes_on_afterwards(
        self, server: testing.ServerProcess, transports: tuple[tl.Transport]
    ) -> None:
        with (
            tl.connect(server.address) as client,
            client.open_session(a_profile(transports=transports)) as session,
            session.score(IDS).result() as payload,
        ):
            payload_id = payload.payload.payload_id
            with stopped(server.pid):
                for call in (
                    lambda: session.score(IDS, timeout=0.3).result(),
                    lambda: session.acquire(payload_id=payload_id, timeout=0.3),
                    lambda: client.open_session(a_profile(), timeout=0.3),
                ):
                    with pytest.raises(DeadlinePassedError, match=r"waited 0\.3"):
                        call()

            session.acquire(payload_id=payload_id, input_ids=IDS).close()
            session.score(IDS).result().close()

    def test_a_stream_that_stops_half_way_ends_by_its_deadline(
        self, server: testing.ServerProcess
    ) -> None:
        with (
            tl.connect(server.address) as client,
            client.open_session(a_profile(transports=STREAM, top_k=250)) as session,
        ):
            honest = client._calls.read_payload

            def stop_after_one(*what: object, **how: object) -> Iterator[bytes]:
                chunks = honest(*what, **how)  # type: ignore[arg-type]
                yield next(chunks)
                stop(server.pid)
                yield from chunks

            client._calls.read_payload = stop_after_one  # type: ignore[method-assign]
            large = session.score(torch.zeros(8, 2000, dtype=torch.int64))
            try:
                large._pending.result(50)
                with pytest.raises(DeadlinePassedError, match="stream of lease"):
                    large.result(timeout=0.5)
            finally:
                os.kill(server.pid, signal.SIGCONT)
                client._calls.read_payload = honest  # type: ignore[method-assign]

            session.score(IDS).result().close()

    def test_connecting_to_it_ends_by_the_deadline(self, server: testing.ServerProcess) -> None:
        with stopped(server.pid), pytest.raises(ServerUnreachableError, match=r"within 0\.3 s"):
            tl.connect(server.address, timeout=0.3)

    def test_what_could_not_be_returned_is_returned_later(
        self, server: testing.ServerProcess, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("teacher_logits_client.sessions.reader.RETURN_TIMEOUT_SECONDS", 0.1)
        with (
            tl.connect(server.address) as client,
            client.open_session(a_profile(transports=SHARED_MEMORY)) as session,
        ):
            payload = session.score(IDS).result()
            lease_id = payload.lease_id
            with stopped(server.pid):
                payload.close()
                assert client._returner.wait(30)
                assert lease_id in session._reader._out
            while lease_id in session._reader._out:
                assert client._returner.wait(30)


class TestLostServer:
    def test_is_said_at_once_and_its_successor_refuses_what_it_gave(self, tmp_path: Path) -> None:
        listen = f"unix:{tmp_path}/s"
        with testing.serve(listen=listen, session_ttl="1h") as first:  # it outlives the restart
            client = tl.connect(first.address)
            local = client.open_session(a_profile(transports=SHARED_MEMORY))
            remote = client.open_session(a_profile(transports=STREAM))
            payload = local.score(IDS).result()
            digest = payload.digest()
        # Killed on leaving.
        assert payload.digest() == digest
        payload.close()
        with pytest.raises(SessionExpiredError, match="closed its broker line"):
            local.score(IDS)
        with pytest.raises(ServerUnreachableError, match="the scores of 4 rows"):
            remote.score(IDS).result()
        with testing.serve(listen=listen):
            with tl.connect(listen):
                pass  # it is there, and the client below finds it by itself
            with pytest.raises(EpochChangedError, match="open a new session"):
                later(lambda: remote.score(IDS).result())
            with pytest.raises(EpochChangedError):
                remote.score(IDS)  # remembered
            with client.open_session(a_profile()) as session:
                session.score(IDS).result().close()
            client.close()


class TestStarvedClient:
    def test_a_local_session_lives_and_a_remote_one_says_that_it_does_not(self) -> None:
        with (
            testing.serve(session_ttl="400ms", renew_interval="100ms") as server,
            tl.connect(server.address) as client,
            client.open_session(a_profile(transports=SHARED_MEMORY)) as local,
            client.open_session(a_profile(transports=STREAM)) as remote,
            local.score(IDS).result() as payload,
        ):
            digest = payload.digest()
            # Through PyDLL the GIL is held: no thread of this process runs for 3 TTLs.
            ctypes.PyDLL(None).usleep(1_200_000)

            assert payload.digest() == digest
            local.score(IDS).result().close()
            with pytest.raises(SessionExpiredError):
                remote.score(IDS).result()


FETCHES = 50


def test_fetches_leave_nothing_for_the_garbage_collector(server: testing.ServerProcess) -> None:
    with (
        tl.connect(server.address) as client,
        client.open_session(a_profile(transports=SHARED_MEMORY)) as session,
    ):
        gc.disable()
        try:
            fetch(session)
            before = objects_of_ours()
            for _ in range(FETCHES):
                fetch(session)
            assert client._returner.wait(30)
            grown = objects_of_ours() - before
            # A few are another test's, whose client is still returning what it had.
            assert not {kind: count for kind, count in grown.items() if count >= FETCHES}
        finally:
            gc.enable()


def fetch(session: tl.Session) -> None:
    with session.score(IDS).result() as payload:
        assert payload.targets.topk_ids.numel()


def objects_of_ours() -> Counter[str]:
    """What the garbage collector would have to look at, by type."""
    kinds = (type(each) for each in gc.get_objects())
    return Counter(
        kind.__qualname__
        for kind in kinds
        if str(kind.__module__).startswith(("teacher_logits", "torch", "google", "grpc"))
    )


def later(call: Callable[[], object]) -> object:
    """Call until the server is reachable again: the channel looks for it once a second."""
    while True:
        try:
            return call()
        except ServerUnreachableError:
            continue
