"""Tests that need a real Ray: each file runs in a pytest of its own, alone with loopback.

They are ordinary tests: select, stop and time them as any other. Where no network namespace can
be made they are skipped in sight, and fail in CI.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import pytest
from tests.ray.alone import INSIDE, ChildEnded, Stage, why_not

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ray.cluster_utils import Cluster

HERE = Path(__file__).parent

_stages = pytest.StashKey[dict[Path, Stage]]()
_hindrance = pytest.StashKey["str | None"]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.ray)
            if INSIDE not in os.environ:  # the child keeps the item's time; see `_patience`
                item.add_marker(pytest.mark.timeout(0), append=False)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Have the file's child run the item, and report what it reports.

    Pytest asks for every item of the run, whichever folder it is in.
    """
    if INSIDE in os.environ or HERE not in item.path.parents:
        return None
    hook = item.ihook
    hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    ended = ""
    try:
        for report in _reports(item, nextitem):
            hook.pytest_runtest_logreport(report=report)
    except ChildEnded as error:
        ended = str(error)
    if ended:
        hook.pytest_runtest_logreport(report=_failed(item, ended))
        _close(item)
    if nextitem is None or nextitem.path != item.path:
        _close(item)
    hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def _reports(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[pytest.TestReport]:
    config = item.config
    if (why := config.stash.setdefault(_hindrance, why_not())) is not None:
        yield _hindered(item, f"no network namespace for Ray: {why}")
        return
    stages = config.stash.setdefault(_stages, {})
    if item.path not in stages:
        stages[item.path] = Stage(item.path, root=config.rootpath, options=_options(config))
    then = nextitem.nodeid if nextitem is not None and nextitem.path == item.path else None
    for form in stages[item.path].run(item.nodeid, then=then, seconds=_patience(item)):
        report = config.hook.pytest_report_from_serializable(config=config, data=form)
        if isinstance(report.longrepr, list):  # of a skip: JSON has no tuples
            report.longrepr = tuple(report.longrepr)
        yield report


def _patience(item: pytest.Item) -> float:
    """Seconds after which a child that has said nothing is past helping."""
    limits = [mark.args[0] for mark in item.iter_markers("timeout") if mark.args and mark.args[0]]
    return 60 + float(limits[0] if limits else item.config.getini("timeout"))


def _options(config: pytest.Config) -> list[str]:
    """What of the command line the child needs to collect and run the same items."""
    return ["-p", "no:cacheprovider", *["-vv"] * bool(config.getoption("verbose") > 1)]


def pytest_sessionfinish(session: pytest.Session) -> None:
    """However the run ends: no child outlives it."""
    for stage in session.config.stash.setdefault(_stages, {}).values():
        stage.close()


def _close(item: pytest.Item) -> None:
    if stage := item.config.stash.setdefault(_stages, {}).pop(item.path, None):
        stage.close()


def _hindered(item: pytest.Item, why: str) -> pytest.TestReport:
    if os.environ.get("CI"):
        return _failed(item, why)
    return _made(item, lambda: pytest.skip(why))


def _failed(item: pytest.Item, why: str) -> pytest.TestReport:
    return _made(item, lambda: pytest.fail(why, pytrace=False))


def _made(item: pytest.Item, outcome: Callable[[], NoReturn]) -> pytest.TestReport:
    call: pytest.CallInfo[None] = pytest.CallInfo.from_call(outcome, "call")
    return pytest.TestReport.from_item_and_call(item, call)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A cluster of one node, to which this process is connected."""
    from tests.ray.nodes import one_node  # brings Ray

    with one_node() as made:
        yield made
