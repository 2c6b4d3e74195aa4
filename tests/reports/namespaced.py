"""A student in namespaces of its own, which says in JSON lines what each handshake came to.

    python namespaced.py ADDRESS HINTS

``HINTS`` is the JSON of the hints that it gives, whatever is true. After a line for each way to
insist it holds a lease until its end.
"""

import json
import os
import socket
import sys

import teacher_logits_client as tl
from teacher_logits.errors import TeacherLogitsError

ROWS = [[3, 1, 4, 1, 5], [9, 2, 6]]
ANY = (tl.Transport.SHARED_MEMORY, tl.Transport.STREAM)
WAYS = {
    "prefer": (tl.Locality.PREFER, ANY),
    "require": (tl.Locality.REQUIRE, ANY),
    "nothing else": (tl.Locality.PREFER, ANY[:1]),
}


def main(address: str, hints: str) -> None:
    """Say who we are, try each way, then hold a lease."""
    say(host_name=socket.gethostname(), pid=os.getpid(), net=os.stat("/proc/self/ns/net").st_ino)
    given = tl.NodeHints(**json.loads(hints))
    with tl.connect(address) as client:
        for name, (locality, transports) in WAYS.items():
            profile = a_profile(given, locality=locality, transports=transports)
            try:
                with client.open_session(profile) as session:
                    say(way=name, **tried(client, session))
            except TeacherLogitsError as error:
                say(way=name, error=type(error).__name__, message=error.message)
        session = client.open_session(a_profile(given, locality=tl.Locality.PREFER, transports=ANY))
        leased = session.score(ROWS).result()
        say(holds=leased.lease_id)
        sys.stdin.read()


def tried(client: tl.Client, session: tl.Session) -> dict[str, object]:
    """How a payload comes, and whether it is what a stream brings."""
    hints = session.profile.hints
    streamed = a_profile(hints, locality=tl.Locality.PREFER, transports=ANY[1:])
    with session.score(ROWS).result() as leased, client.open_session(streamed) as other:
        with other.acquire(payload_id=leased.payload.payload_id) as copy:
            same = copy.transport is tl.Transport.STREAM and copy.digest() == leased.digest()
        return {
            "transport": leased.transport.value,
            "refusals": {each.transport.value: each.reason.value for each in session.refusals},
            "same": same,
        }


def a_profile(
    hints: tl.NodeHints, *, locality: tl.Locality, transports: tuple[tl.Transport, ...]
) -> tl.StudentProfile:
    """A student of one rank."""
    grid = tl.BatchGrid(global_batch_size=2, data_parallel_size=1, micro_batch_size=1)
    return tl.StudentProfile(
        batch_grid=grid, top_k=8, hints=hints, locality=locality, transports=transports
    )


def say(**said: object) -> None:
    """Write a line."""
    sys.stdout.write(json.dumps(said) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
