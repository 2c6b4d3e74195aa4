"""The GPU check: what a user runs on a machine with a GPU to see that the hand-over works there.

    python -m tests.gpu.check                         all stages, under 8 minutes (`make gpu-check`)
    python -m tests.gpu.check --device 1 --only raw_ipc,bandwidth
    python -m tests.gpu.check --other-python /path/of/another/python    its torch is another release

Prints one JSON object: each stage with ``ok``, ``failed`` or ``skipped``, its numbers and seconds,
and what it left out because its time was up. Progress goes to standard error. One failing stage
stops no other: each has a process of its own, and a share of the seconds (``--seconds``).
Needs torch with CUDA and this checkout; no network, no Ray, no transformers. What an interpreter
lacks is named before anything else.

Exit code: 0 nothing failed, 1 something did, or was left out, 2 there is no GPU to check, or
something is missing.
"""

from __future__ import annotations

import sys

from tests.gpu.needs import missing, sentence


def main(argv: list[str]) -> int:
    """Run what the command line asks for."""
    lacking = missing()
    if lacking:
        sys.stderr.write(sentence(lacking))
        return 2
    from tests.gpu.running import main as run  # needs what was just looked for

    return run(argv, description=__doc__)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
