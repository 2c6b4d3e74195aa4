"""A student that reads a lease while its test does something to it. Run by path; it is no test.

python reader.py scored ADDRESS             leases a payload of its own
python reader.py step ADDRESS TEACHER_ID    leases step 0 of a published teacher

says "held", and at each line of its input closes its lease, says "fresh" or "stale", and
what it then finds, and leases anew.
"""

import os
import sys
from contextlib import AbstractContextManager

import torch

import teacher_logits_client as tl
from teacher_logits.errors import StalePayloadError, TeacherLogitsError


def main(how: str, address: str, teacher_id: str = "") -> None:
    """Lease, wait, close and say how it was, again and again."""
    grid = tl.BatchGrid(global_batch_size=2, data_parallel_size=1, micro_batch_size=1)
    profile = tl.StudentProfile(
        batch_grid=grid,
        top_k=8 if how == "scored" else 4,
        teacher_id=teacher_id or "teacher",
        student_id=f"reader-{os.getpid()}",
        transports=(tl.Transport.SHARED_MEMORY,),
    )
    with tl.connect(address) as client, client.open_session(profile) as session:

        def lease() -> AbstractContextManager[tl.LeasedPayload | tl.Batch]:
            if how == "scored":
                return session.score([[1, 2, 3], [4, 5]]).result()
            return session.acquire(step=0, timeout=30)

        while True:
            try:
                with lease():
                    say("held")
                    if not sys.stdin.readline():
                        return
            except StalePayloadError:
                say("stale")
            except TeacherLogitsError as error:
                say(type(error).__name__)
                return
            else:
                say("fresh")


def say(line: str) -> None:
    """Write a line that the test waits for."""
    os.write(1, f"{line}\n".encode())


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
