"""Whoever of one process is dropped, fails or is stopped at whatever moment, over ``local``: no
wrong byte, no leak, no hang, and the others served. Each scenario follows from its seed; see
``local_scenarios``. `TEACHER_LOGITS_LOCAL_FAULT_SEEDS=7,31` plays those.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.processes.faults.local_scenarios import plan_of
from tests.processes.faults.local_stage import LocalStage
from tests.processes.faults.stage import in_order
from tests.processes.faults.threads import House

# What is dropped unclosed is named in one.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")


@pytest.fixture(scope="module")
def whole_house() -> Iterator[LocalStage]:
    """A stage within this process."""
    with tempfile.TemporaryDirectory(prefix="tl-faults-") as folder:
        house = House(Path(folder))
        try:
            yield LocalStage(house)
        finally:
            house.end()


@pytest.fixture
def house(whole_house: LocalStage, request: pytest.FixtureRequest) -> Iterator[LocalStage]:
    """The module's stage, on which nothing must be left in the end."""
    yield from in_order(whole_house, request.session)


def test_a_scenario_within_one_process_leaves_nothing_behind(
    house: LocalStage, local_seed: int
) -> None:
    house.play_plan(plan_of(local_seed))
