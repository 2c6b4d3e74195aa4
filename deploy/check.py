"""Check every file of `deploy/` by a tool that knows its kind.

    python -m deploy.check                   (`make deploy-check`)
    python -m deploy.check chart units       some of the checks
    python -m deploy.check --write           write kubernetes/ anew from the chart

Exit codes: 0 nothing was found; 1 something was, and each finding stands on a line, or with
``--require-all`` a tool is missing; 2 called wrongly. A check whose tool is missing is skipped
where anybody can see it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.checks import ToolMissingError, folder_of
from deploy.checks.chart import check_chart, write_manifests
from deploy.checks.clusters import check_clusters
from deploy.checks.images import check_compose, check_dockerfiles
from deploy.checks.manifests import check_manifests
from deploy.checks.units import check_units
from deploy.observability_check import check_observability

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

FOLDER = Path(__file__).parent


def _check_observability(folder: Path) -> list[str]:
    folder_of("promql_parser", comes_from="promql-parser (PyPI)")
    return check_observability(folder)


CHECKS: Mapping[str, Callable[[Path], list[str]]] = {
    "dockerfiles": check_dockerfiles,
    "compose": check_compose,
    "manifests": check_manifests,
    "chart": check_chart,
    "clusters": check_clusters,
    "units": check_units,
    "observability": _check_observability,
}


def main(arguments: Sequence[str] | None = None, *, folder: Path = FOLDER) -> int:
    """Run the checks that are named, or all of them; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m deploy.check")
    parser.add_argument("names", nargs="*", metavar="CHECK", help=", ".join(CHECKS))
    parser.add_argument("--require-all", action="store_true", help="a missing tool is a failure")
    parser.add_argument("--write", action="store_true", help="write kubernetes/ from the chart")
    asked = parser.parse_args(arguments)
    unknown = [name for name in asked.names if name not in CHECKS]
    if unknown:
        parser.error(f"no such check: {', '.join(unknown)}")
    if asked.write:
        return _write(folder)
    bad = [name for name in asked.names or CHECKS if not _passes(name, folder, asked.require_all)]
    return 1 if bad else 0


def _write(folder: Path) -> int:
    try:
        written = write_manifests(folder)
    except (ToolMissingError, ValueError) as error:
        _say("chart", f"FAILED: {error}")
        return 1
    for path in written:
        _say("written", str(path.relative_to(folder.parent)))
    return 0


def _passes(name: str, folder: Path, require_all: bool) -> bool:
    try:
        found = CHECKS[name](folder)
    except ToolMissingError as error:
        _say(name, f"{'FAILED' if require_all else 'SKIPPED'}: {error}")
        return not require_all
    for finding in found:
        _say(name, finding)
    if not found:
        _say(name, "ok")
    return not found


def _say(name: str, line: str) -> None:
    sys.stdout.write(f"{name:<14} {line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
