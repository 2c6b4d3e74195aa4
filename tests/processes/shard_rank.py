"""A tensor- and context-parallel rank that publishes its part, which the tests kill. It is no test.

python -m tests.processes.shard_rank ADDRESS TEACHER RANK

says "ready" once it is admitted, and then does what its standard input says, a line each:

    publish STEP    reserves, selects and seals, and says "sealed STEP"
    reserve STEP    only reserves, and says "reserved STEP"
"""

import os
import sys

from tests.client.publishing.sharded import logits_of, publish, ranks, reserve, whole_teacher

import teacher_logits_client as tl

TENSOR, CONTEXT = 2, 2


def profiles(teacher_id: str) -> list[tl.TeacherProfile]:
    """The ranks of the teacher."""
    teacher = whole_teacher(teacher_id)
    return ranks(teacher, "zigzag", "vocabulary", tensor=TENSOR, context=CONTEXT)


def main(address: str, teacher_id: str, rank: int) -> None:
    """Publish what is asked for."""
    with (
        tl.connect(address) as client,
        client.open_publisher(profiles(teacher_id)[rank]) as publisher,
    ):
        say("ready")
        held = []
        for line in sys.stdin:
            command, step = line.split()
            if command == "reserve":
                held.append(reserve(publisher, int(step)))
                say(f"reserved {step}")
            else:
                publish([publisher], int(step), logits_of(int(step)))
                say(f"sealed {step}")


def say(line: str) -> None:
    """Write a line that the test waits for."""
    os.write(1, f"{line}\n".encode())


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
