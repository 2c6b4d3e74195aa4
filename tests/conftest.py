"""What every test runs under: one thread of arithmetic, steady hypothesis, the golden cases.

The time limit of a test stands in pyproject.toml; a test that may take longer carries a
`timeout` mark of its own.
"""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
from tests import forked

# Before torch is first imported, and inherited by the servers that tests start: the tests
# share two cores, and threads that wait for one another make them slow and uneven.
for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"

# Nothing timed: a shared machine may stop for longer than any example takes. CI tries the
# same examples each time, so that it fails for a change and not for its luck.
_untimed = hypothesis.settings(
    deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.register_profile("dev", _untimed)
hypothesis.settings.register_profile("ci", _untimed, derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "dev")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Iterator[None]:
    """Collect no garbage among what stays: the modules and tests that are made here."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()  # no later collection looks at it either
        gc.enable()


@pytest.fixture(scope="session", autouse=True)
def forked_servers() -> Iterator[None]:
    """`testing.serve` runs servers that are forked, in all tests but those of itself."""
    from teacher_logits_client import testing  # once OMP_NUM_THREADS is set, and not for --help

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(testing, "subprocess", forked)
        yield


@pytest.fixture(scope="session")
def cases_folder() -> Path:
    """The folder of golden cases: `TEACHER_LOGITS_CASES`, or `tests/cases/data`.

    A folder that is not there is an error, as is a file of it that a test then reads: cases
    that did not run must not look like cases that passed.
    """
    named = os.environ.get("TEACHER_LOGITS_CASES")
    folder = Path(named) if named else Path(__file__).parent / "cases" / "data"
    if not folder.is_dir():
        where = "TEACHER_LOGITS_CASES" if named else "the default of TEACHER_LOGITS_CASES"
        raise FileNotFoundError(f"golden cases: {where} is {folder}, which is no folder")
    return folder


def pytest_collection_finish() -> None:
    """Leave what the tests' imports made out of every garbage collection from here on.

    They are millions of objects that stay to the end, and many a test collects garbage, as a
    trainer does each time that it begins: a tenth of a second and more, each time.
    """
    gc.collect()
    gc.freeze()
