"""Bad weather: what a machine and strangers do to a cast, for as long as a block takes.

Limits are the kernel's own, set from outside (``prlimit``): a process without descriptors, and
one whose files cannot grow, memfds and logs alike, are told so by the calls that they make.
"""

import os
import random
import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

from tests.processes.faults.cast import Cast, Role
from tests.processes.faults.storms import PUBLISHERS, Weather

FLAPS = 12
SILENT = 8
MOST_GARBAGE = 4096
NO_BYTES = 0


@contextmanager
def weather(cast: Cast, kinds: tuple[Weather, ...], chance: random.Random) -> Iterator[None]:
    """Have the weather bad, and good again."""
    with ExitStack() as stack:
        for kind in kinds:
            if kind is Weather.FLAPPING:
                _flap(cast)
            elif kind is Weather.GARBAGE:
                _throw_garbage(cast, chance)
            elif kind is Weather.HALF_OPEN:
                for connection in _connections(cast, SILENT):
                    stack.enter_context(connection)
            elif kind is Weather.NO_DESCRIPTORS:
                count = len(os.listdir(f"/proc/{cast.server.pid}/fd"))
                stack.enter_context(_limited(cast.server, resource.RLIMIT_NOFILE, count))
            else:
                for role in (cast.server, *(cast.role(name, "publisher") for name in PUBLISHERS)):
                    stack.enter_context(_limited(role, resource.RLIMIT_FSIZE, NO_BYTES))
        yield


def _connections(cast: Cast, count: int) -> Iterator[socket.socket]:
    """Connect to each of the server's sockets."""
    for _ in range(count):
        for name, kind in (("s", socket.SOCK_STREAM), ("s.broker", socket.SOCK_SEQPACKET)):
            connection = socket.socket(socket.AF_UNIX, kind)
            connection.setblocking(False)
            with suppress(BlockingIOError):  # a backlog that is full
                connection.connect(str(cast.place.run / name))
            yield connection


def _flap(cast: Cast) -> None:
    for connection in _connections(cast, FLAPS):
        connection.close()


def _throw_garbage(cast: Cast, chance: random.Random) -> None:
    for connection in _connections(cast, FLAPS):
        with connection, suppress(OSError):
            connection.send(chance.randbytes(chance.randrange(1, MOST_GARBAGE)))


@contextmanager
def _limited(role: Role, limit: int, value: int) -> Iterator[None]:
    soft, hard = resource.prlimit(role.pid, limit)
    resource.prlimit(role.pid, limit, (value, hard))
    yield
    with suppress(ProcessLookupError):
        resource.prlimit(role.pid, limit, (soft, hard))
