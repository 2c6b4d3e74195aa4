"""What happens to a client when its process forks: stories that are told in a process apart.

    python -m tests.client.fork_stories ADDRESS STORY...

Writes one JSON object: what went wrong in each story, empty where nothing did. The child of a
fork tells its parent how it fared by its exit code.
"""

import gc
import json
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import grpc
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import teacher_logits_client as tl
from teacher_logits.errors import ForkedClientError
from teacher_logits.v1 import operator_service_pb2, operator_service_pb2_grpc

IDS = torch.arange(40).view(4, 10)
FARED_WELL = 7


@contextmanager
def a_session(address: str, *transports: tl.Transport) -> Iterator[tuple[tl.Client, tl.Session]]:
    grid = tl.BatchGrid(global_batch_size=4, data_parallel_size=1, micro_batch_size=1)
    profile = tl.StudentProfile(batch_grid=grid, top_k=8, transports=transports)
    with tl.connect(address, timeout=60) as client, client.open_session(profile) as session:
        yield client, session


def fork(child: Callable[[], bool]) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        fared_well = child()
    except BaseException:
        sys.excepthook(*sys.exc_info())
        fared_well = False
    sys.stderr.flush()
    os._exit(FARED_WELL if fared_well else 1)


def fared_well(pid: int) -> bool:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == FARED_WELL


def refuses(call: Callable[[], object]) -> bool:
    try:
        call()
    except ForkedClientError as error:
        return str(os.getpid()) in error.message and str(os.getppid()) in error.message
    return False


def lease_count(address: str) -> int:
    with grpc.insecure_channel(address) as channel:
        stub = operator_service_pb2_grpc.OperatorServiceStub(channel)
        return len(stub.Inspect(operator_service_pb2.InspectRequest(), timeout=60).leases)


def every_call_is_refused_in_a_child(address: str) -> None:
    with a_session(address, tl.Transport.SHARED_MEMORY) as (client, session):
        future, pending = session.score(IDS), session.score(IDS)
        payload = future.result()
        profile = session.profile

        def child() -> bool:
            return all(
                refuses(call)
                for call in (
                    lambda: client.open_session(profile),
                    client.statistics,
                    client.__enter__,
                    lambda: session.score(IDS),
                    lambda: session.acquire(payload_id=payload.payload.payload_id),
                    session.__enter__,
                    future.result,
                    pending.result,
                    pending.done,
                    pending.cancel,
                    lambda: payload.columns,
                    lambda: payload.targets,
                    payload.digest,
                )
            )

        assert fared_well(fork(child))
        assert payload.columns["topk_ids"].shape == (40, 8)
        payload.close()
        pending.result().close()
        session.score(IDS).result().close()  # the parent goes on as before


def closing_and_dropping_in_a_child_returns_nothing(address: str) -> None:
    with a_session(address, tl.Transport.SHARED_MEMORY) as (client, session):
        payload = session.score(IDS).result()
        holder = [payload]
        del payload

        def child() -> bool:
            nonlocal client, session
            holder[0].close()
            holder[0].__exit__(None, None, None)
            session.close()
            client.close()
            holder.clear()
            del client, session
            gc.collect()
            return True

        assert fared_well(fork(child))
        assert lease_count(address) == 1
        assert holder[0].columns
        session.score(IDS).result().close()
        holder[0].close()


def room_is_held_until_the_child_that_may_read_it_has_ended(address: str) -> None:
    with a_session(address, tl.Transport.SHARED_MEMORY) as (client, session):
        payload = session.score(IDS).result()
        kept = [payload.columns["topk_ids"]]
        expected = kept[0].clone()
        told_r, told_w = os.pipe()

        def child() -> bool:
            os.close(told_w)
            os.read(told_r, 1)  # until the parent has done its worst
            return torch.equal(kept[0], expected)

        pid = fork(child)
        os.close(told_r)
        kept.clear()
        payload.close()
        assert client._returner.wait(60)
        assert client.statistics().held_leases == 1
        assert lease_count(address) == 1
        for _ in range(20):  # none of these may come into the room that the child reads
            session.score(IDS.flip(1)).result().close()
        os.close(told_w)

        assert fared_well(pid)
        for thread in threading.enumerate():
            if thread.name == "teacher-logits-fork":
                thread.join(60)
        assert client._returner.wait(60)
        assert client.statistics().held_leases == 0
        assert lease_count(address) == 0


def a_child_holds_nothing_that_was_closed_before_it(address: str) -> None:
    """Though it has not gone back yet: that is another thread's work, which the fork waits for."""
    with a_session(address, tl.Transport.SHARED_MEMORY) as (client, session):
        payload = session.score(IDS).result()
        assert payload.columns["topk_ids"].shape == (40, 8)
        forking = threading.Event()
        os.register_at_fork(before=forking.set)  # the last that is registered is the first called

        def busy() -> None:
            forking.wait(60)

        client._returner.later(busy)
        payload.close()
        told_r, told_w = os.pipe()

        def child() -> bool:
            os.close(told_w)
            os.read(told_r, 1)
            return True

        pid = fork(child)
        os.close(told_r)
        assert client._returner.wait(60)
        assert client.statistics().held_leases == 0
        assert lease_count(address) == 0
        os.close(told_w)
        assert fared_well(pid)


def a_child_holds_nothing_that_was_leased_after_it(address: str) -> None:
    with a_session(address, tl.Transport.SHARED_MEMORY) as (client, session):
        told_r, told_w = os.pipe()

        def child() -> bool:
            os.close(told_w)
            os.read(told_r, 1)
            return True

        pid = fork(child)
        os.close(told_r)
        session.score(IDS).result().close()
        assert client._returner.wait(60)
        assert lease_count(address) == 0
        os.close(told_w)
        assert fared_well(pid)


def streamed_room_is_not_held_for_a_child(address: str) -> None:
    with a_session(address, tl.Transport.STREAM) as (client, session):
        payload = session.score(IDS).result()
        kept = [payload.columns["topk_ids"]]
        expected = kept[0].clone()
        told_r, told_w = os.pipe()

        def child() -> bool:
            os.close(told_w)
            os.read(told_r, 1)
            return torch.equal(kept[0], expected)

        pid = fork(child)
        os.close(told_r)
        kept.clear()
        payload.close()
        assert client._returner.wait(60)
        assert lease_count(address) == 0
        session.score(IDS.flip(1)).result().close()  # into the same buffer
        os.close(told_w)
        assert fared_well(pid)


class Scores(Dataset[int]):
    """Asks the teacher from wherever it is asked."""

    def __init__(self, session: tl.Session) -> None:
        self.session = session

    def __len__(self) -> int:
        return 4

    def __getitem__(self, row: int) -> int:
        self.session.score(IDS).result().close()
        return row


def a_data_loader_that_forks_is_told_at_once(address: str) -> None:
    with a_session(address, tl.Transport.SHARED_MEMORY) as (_, session):
        loader = DataLoader(Scores(session), num_workers=2, multiprocessing_context="fork")
        with pytest.raises(ForkedClientError, match="worker_init_fn"):
            list(loader)
        session.score(IDS).result().close()


def a_fork_of_a_fork_is_held_for_too(address: str) -> None:
    with a_session(address, tl.Transport.SHARED_MEMORY) as (client, session):
        payload = session.score(IDS).result()
        told_r, told_w = os.pipe()

        def grandchild() -> bool:
            os.close(told_w)
            os.read(told_r, 1)
            return True

        def child() -> bool:
            fork(grandchild)
            return True

        assert fared_well(fork(child))
        payload.close()
        assert client._returner.wait(60)
        assert lease_count(address) == 1
        os.close(told_r)
        os.close(told_w)
        for thread in threading.enumerate():
            if thread.name == "teacher-logits-fork":
                thread.join(60)
        assert client._returner.wait(60)
        assert lease_count(address) == 0


def tell(address: str, *stories: str) -> dict[str, str]:
    """Run stories one after the other; return what went wrong in each."""
    ends = {}
    for name in stories:
        try:
            globals()[name](address)
        except BaseException:
            ends[name] = traceback.format_exc()
        else:
            ends[name] = ""
    return ends


if __name__ == "__main__":
    sys.stdout.write(json.dumps(tell(*sys.argv[1:])))
