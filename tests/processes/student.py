"""A student in a process of its own, which the tests kill. Run by path; it is no test.

python student.py hold ADDRESS TRANSPORT      leases a payload, says "held", waits for its end
python student.py fork ADDRESS LEASH          the same with a forked child that reads on until
                                              the descriptor LEASH is closed at its other
                                              end, and then says whether all was "intact"
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

import teacher_logits_client as tl
from teacher_logits_client import LeasedPayload, StudentProfile, Transport

ROWS = [[1, 2, 3], [4, 5]]


def a_profile(transport: Transport) -> StudentProfile:
    """A student of one rank, whose payload of `ROWS` fits one page."""
    grid = tl.BatchGrid(global_batch_size=2, data_parallel_size=1, micro_batch_size=1)
    return StudentProfile(batch_grid=grid, top_k=8, transports=(transport,))


@contextmanager
def a_lease(address: str, transport: Transport) -> Iterator[LeasedPayload]:
    """Lease a payload of the rows."""
    with tl.connect(address) as client, client.open_session(a_profile(transport)) as session:
        assert session.transport is transport, session.refusals
        with session.score(ROWS).result() as leased:
            yield leased


def hold(address: str, transport: str) -> None:
    """Lease and wait."""
    with a_lease(address, Transport(transport)):
        say("held")
        sys.stdin.read()


def fork(address: str, leash: str) -> None:
    """Lease, fork, and wait in both."""
    with a_lease(address, Transport.SHARED_MEMORY) as leased:
        ids = leased.columns["topk_ids"]
        before = ids.clone()
        if os.fork() == 0:
            os.read(int(leash), 1)
            say("intact" if torch.equal(ids, before) else "overwritten")
            os._exit(0)
        say("held")
        sys.stdin.read()


def say(line: str) -> None:
    """Write a line that the test waits for."""
    os.write(1, f"{line}\n".encode())


if __name__ == "__main__":
    torch.set_num_threads(1)
    command, *arguments = sys.argv[1:]
    {"hold": hold, "fork": fork}[command](*arguments)
