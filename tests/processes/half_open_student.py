"""A student over TCP that says in JSON lines what becomes of it, word by word.

    python half_open_student.py ADDRESS

It opens a session, holds a lease, and then does what a line says: `score` once more, within three
seconds, `use` the session until it has ended, or begin `anew`.
"""

import json
import sys

import teacher_logits_client as tl
from teacher_logits.errors import SessionExpiredError, TeacherLogitsError

ROWS = [[3, 1, 4, 1, 5], [9, 2, 6]]
SECONDS = 3.0


def main(address: str) -> None:
    """Hold a lease, and obey."""
    client = tl.connect(address, insecure=True)
    session = client.open_session(a_profile())
    held = session.score(ROWS).result()
    say(lease_id=held.lease_id)
    for word in map(str.strip, sys.stdin):
        if word == "score":
            say(**scored(session))
        elif word == "use":
            while (said := scored(session)).get("error") != SessionExpiredError.__name__:
                pass
            say(**said)
        elif word == "anew":
            with tl.connect(address, insecure=True, timeout=30) as other:
                with other.open_session(a_profile()) as again:
                    say(**scored(again))


def a_profile() -> tl.StudentProfile:
    """A student of one rank."""
    grid = tl.BatchGrid(global_batch_size=2, data_parallel_size=1, micro_batch_size=1)
    return tl.StudentProfile(batch_grid=grid, top_k=8, transports=(tl.Transport.STREAM,))


def scored(session: tl.Session) -> dict[str, object]:
    """Score once, within a deadline."""
    try:
        with session.score(ROWS, timeout=SECONDS).result() as payload:
            return {"rows": len(payload.row_offsets) - 1}
    except TeacherLogitsError as error:
        return {"error": type(error).__name__, "message": error.message}


def say(**said: object) -> None:
    """Write a line."""
    sys.stdout.write(json.dumps(said) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
