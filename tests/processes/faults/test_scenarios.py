"""Whoever is killed or stopped at whatever moment: no wrong byte, no leak, no hang, and the
others served. Each scenario follows from its seed; see ``scenarios`` and ``conftest``.
"""

from tests.processes.faults.scenarios import scenario_of
from tests.processes.faults.stage import Stage
from tests.processes.faults.step_plays import StepPlays


def test_a_scenario_leaves_nothing_behind(stage: Stage, seed: int) -> None:
    scenario = scenario_of(seed)
    steps = StepPlays(stage)
    (steps if steps.has(scenario) else stage).play(scenario)
