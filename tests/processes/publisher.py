"""A publisher in a process of its own, in raw messages, which the tests kill. It is no test.

python -m tests.processes.publisher ADDRESS SHARD OF

passes a slab, says "ready", and then does what its standard input says, a line each:

    publish STEP    reserves, writes and seals, and says "sealed STEP"
    reserve STEP    only reserves, and says "reserved STEP"
"""

import os
import sys

from tests.server.services.registry_rig import Wire, a_payload, a_teacher, bytes_of


def main(address: str, shard: int, of: int) -> None:
    """Publish what is asked for."""
    with Wire(address) as wire:
        publisher = wire.publisher(a_teacher(shard, of=of))
        publisher.put_slab()
        say("ready")
        for line in sys.stdin:
            command, step = line.split()
            payload = a_payload(int(step), shard, of=of)
            if command == "reserve":
                publisher.reserve(payload)
                say(f"reserved {step}")
            else:
                publisher.publish(payload, bytes_of(payload))
                say(f"sealed {step}")


def say(line: str) -> None:
    """Write a line that the test waits for."""
    os.write(1, f"{line}\n".encode())


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
