"""Several harmed at once, in bad weather: no wrong byte, no leak, no late answer, and peace after.

`TEACHER_LOGITS_STORM_SEEDS=0-4999` plays those; see `storms` and `conftest`.
"""

import sys

from tests.processes.faults.stage import Stage
from tests.processes.faults.storm_plays import StormPlay
from tests.processes.faults.storms import storm_of


def test_a_storm_leaves_nothing_behind(stage: Stage, storm_seed: int) -> None:
    storm = storm_of(storm_seed)
    sys.stdout.write(f"{storm}\n")  # shown with a failure
    StormPlay(stage, storm).play()
