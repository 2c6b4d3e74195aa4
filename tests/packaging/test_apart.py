"""What runs apart from the rest of the suite is what lies in `tests/ray`, and nothing else."""

import os

from tests.ray.alone import INSIDE


def test_a_test_from_elsewhere_runs_in_the_pytest_that_collected_it() -> None:
    assert INSIDE not in os.environ
