"""The stage of the fault scenarios, and which of them run.

A test's name begins with its seed: `TEACHER_LOGITS_FAULT_SEEDS=7,31` has exactly those
scenarios played, in `make test` too.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.processes.faults.cast import Cast
from tests.processes.faults.local_scenarios import plan_count, plan_of
from tests.processes.faults.scenarios import scenario_count, scenario_of
from tests.processes.faults.seeds import seed_params
from tests.processes.faults.stage import Stage, in_order

FEW = (
    *(0, 1, 2, 3, 4, 5, 7, 8, 10, 11, 12, 13, 15, 17, 21, 22, 23, 24, 25, 26),
    *(249, 251, 256, 264),
)
"""Seeds that `make test` plays: every victim, and most moments."""
SEEDS_NAME = "TEACHER_LOGITS_FAULT_SEEDS"
FEW_LOCAL = (3, 13, 18, 28, 41, 44, 48)
"""Likewise, within one process: what once found something."""
FEW_STORMS = range(4)
MANY_STORMS = range(100)
"""Seeds that `make test` and `make test-all` play."""
LOCAL_NAME = "TEACHER_LOGITS_LOCAL_FAULT_SEEDS"
STORMS_NAME = "TEACHER_LOGITS_STORM_SEEDS"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give the tests of seeds the ones that were asked for."""
    if "seed" in metafunc.fixturenames:
        many = range(scenario_count())
        params = seed_params(SEEDS_NAME, FEW, many, name=lambda seed: str(scenario_of(seed)))
        metafunc.parametrize("seed", params)
    if "storm_seed" in metafunc.fixturenames:
        metafunc.parametrize("storm_seed", seed_params(STORMS_NAME, FEW_STORMS, MANY_STORMS))
    if "local_seed" in metafunc.fixturenames:
        plans = range(plan_count())
        params = seed_params(LOCAL_NAME, FEW_LOCAL, plans, name=lambda seed: str(plan_of(seed)))
        metafunc.parametrize("local_seed", params)


@pytest.fixture(scope="module")
def whole_stage() -> Iterator[Stage]:
    """A stage with a server, in a folder of its own with a path as short as a socket's must be."""
    with tempfile.TemporaryDirectory(prefix="tl-faults-") as folder:
        cast = Cast(Path(folder))
        try:
            yield Stage(cast)
        finally:
            cast.end()


@pytest.fixture
def stage(whole_stage: Stage, request: pytest.FixtureRequest) -> Iterator[Stage]:
    """The module's stage, on which nothing must be left in the end."""
    yield from in_order(whole_stage, request.session)
