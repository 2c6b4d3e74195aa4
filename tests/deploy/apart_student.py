"""A student that says in a line of JSON how a payload came, and whether it is the right one.

python apart_student.py ADDRESS ROWS POSITIONS TOP_K
"""

import json
import os
import sys

import teacher_logits_client as tl

ANY = (tl.Transport.SHARED_MEMORY, tl.Transport.STREAM)


def main(address: str, rows: int, positions: int, top_k: int) -> dict[str, object]:
    """Have rows scored, and compare what came with what a stream brings of the same payload."""
    ids = [[(row + place) % 251 for place in range(positions)] for row in range(rows)]
    grid = tl.BatchGrid(global_batch_size=rows, data_parallel_size=1, micro_batch_size=1)

    def profile(transports: tuple[tl.Transport, ...]) -> tl.StudentProfile:
        return tl.StudentProfile(batch_grid=grid, top_k=top_k, transports=transports)

    with (
        tl.connect(address) as client,
        client.open_session(profile(ANY)) as session,
        session.score(ids).result() as leased,
        client.open_session(profile(ANY[1:])) as other,
        other.acquire(payload_id=leased.payload.payload_id) as copy,
    ):
        shm = os.statvfs("/dev/shm")
        return {
            "transport": leased.transport.value,
            "refusals": {each.transport.value: each.reason.value for each in session.refusals},
            "digest": leased.digest(),
            "streamed": copy.digest(),
            "bytes": leased.payload.size_bytes,
            "shm_bytes": shm.f_blocks * shm.f_frsize,
            "pid": os.getpid(),
        }


if __name__ == "__main__":
    said = main(sys.argv[1], *map(int, sys.argv[2:]))
    sys.stdout.write(json.dumps(said) + "\n")
