"""The stage of the fault scenarios over Ray, and which of them run.

`TEACHER_LOGITS_RAY_FAULT_SEEDS=7,31` has exactly those scenarios played, in `make test` too.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.processes.faults.seeds import seed_params
from tests.processes.faults.stage import in_order
from tests.ray.faults.scenarios import scenario_count, scenario_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.ray.faults.stage import RayStage

FEW = (6, 22, 32)
"""Seeds that `make test` plays: no server is started anew for them."""
SEEDS_NAME = "TEACHER_LOGITS_RAY_FAULT_SEEDS"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give the tests of seeds the ones that were asked for."""
    if "ray_seed" in metafunc.fixturenames:
        params = seed_params(
            SEEDS_NAME, FEW, range(scenario_count()), name=lambda seed: str(scenario_of(seed))
        )
        metafunc.parametrize("ray_seed", params)


@pytest.fixture(scope="module")
def whole_stage() -> Iterator[RayStage]:
    """A stage with a server, on a cluster of one node."""
    from tests.ray.faults.cast import INLINE_BYTES, RayCast
    from tests.ray.faults.stage import RayStage
    from tests.ray.nodes import one_node

    with (
        tempfile.TemporaryDirectory(prefix="tl-faults-") as folder,
        one_node(max_direct_call_object_size=INLINE_BYTES) as cluster,
    ):
        cast = RayCast(Path(folder), cluster)
        try:
            yield RayStage(cast)
        finally:
            cast.end()


@pytest.fixture
def stage(whole_stage: RayStage, request: pytest.FixtureRequest) -> Iterator[RayStage]:
    """The module's stage, on which nothing must be left in the end."""
    yield from in_order(whole_stage, request.session)
