"""Whoever of a Ray cluster is killed or stopped at whatever moment: no wrong byte, no leak, no
hang, and the others served. Each scenario follows from its seed; see ``scenarios``.
"""

from tests.ray.faults.scenarios import scenario_of
from tests.ray.faults.stage import RayStage


def test_a_scenario_over_ray_leaves_nothing_behind(stage: RayStage, ray_seed: int) -> None:
    stage.play(scenario_of(ray_seed))
