"""Check ``grafana/dashboard.json`` and ``prometheus/alerts.yaml`` against the server's metrics.

    python -m deploy.observability_check           (`make deploy-check`)

Each file parses; panels have ids of their own and stand on each other nowhere; each query is
PromQL (by ``promql-parser``), names metrics that there are, and labels that those have. Exit codes:
0 nothing was found; 1 something was, and each finding stands on a line.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from teacher_logits_server.metrics.names import METRICS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

FOLDER = Path(__file__).parent
DASHBOARD, ALERTS = Path("grafana/dashboard.json"), Path("prometheus/alerts.yaml")
OF_THE_TARGET = frozenset({"job", "instance"})
OF_THE_PROCESS = (
    "up",
    "process_cpu_seconds_total",
    "process_max_fds",
    "process_open_fds",
    "process_resident_memory_bytes",
    "process_start_time_seconds",
)
_MACROS = {"$__rate_interval": "5m", "$__interval": "1m", "$__range": "1h"}
_LABEL_VALUES = re.compile(r"label_values\((\w+), *(\w+)\)\Z")


def known() -> dict[str, frozenset[str]]:
    """Return every series that there may be, with its labels."""
    names: dict[str, frozenset[str]] = dict.fromkeys(OF_THE_PROCESS, OF_THE_TARGET)
    for metric in METRICS:
        labels = OF_THE_TARGET | set(metric.labels)
        if metric.kind != "histogram":
            names[metric.name] = labels
            continue
        names |= dict.fromkeys((f"{metric.name}_count", f"{metric.name}_sum"), labels)
        names[f"{metric.name}_bucket"] = labels | {"le"}
    return names


def check_observability(folder: Path = FOLDER) -> list[str]:
    """Return what is wrong with the files of a folder laid out as this one."""
    found = [f"{DASHBOARD}: {each}" for each in _check_dashboard(folder / DASHBOARD)]
    return found + [f"{ALERTS}: {each}" for each in _check_alerts(folder / ALERTS)]


def _check_dashboard(path: Path) -> Iterator[str]:
    try:
        board = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        yield str(error)
        return
    panels = board["panels"]
    for number, count in Counter(panel["id"] for panel in panels).items():
        if count > 1:
            yield f"{count} panels have id {number}"
    yield from _overlaps(panels)
    yield from _check_variables(board["templating"]["list"])
    for panel in panels:
        for target in panel.get("targets", ()):
            if target["datasource"]["uid"] != "${datasource}":
                yield f"panel {panel['title']!r} has a data source of its own"
            for finding in check_query(target["expr"]):
                yield f"panel {panel['title']!r}: {finding}"


def _overlaps(panels: list[Mapping[str, Mapping[str, int]]]) -> Iterator[str]:
    taken: dict[tuple[int, int], object] = {}
    for panel in panels:
        place = panel["gridPos"]
        if place["x"] + place["w"] > 24:
            yield f"panel {panel['title']!r} reaches beyond the 24 columns"
        cells = [
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        ]
        under = {taken[cell] for cell in cells if cell in taken}
        yield from (f"panel {panel['title']!r} stands on {other!r}" for other in under)
        taken.update(dict.fromkeys(cells, panel["title"]))


def _check_variables(variables: list[dict[str, object]]) -> Iterator[str]:
    if not any(each["type"] == "datasource" for each in variables):
        yield "it has no variable for its data source"
    for each in variables:
        if each["type"] != "query":
            continue
        asked = each["query"]
        query = str(asked["query"]) if isinstance(asked, dict) else str(asked)
        match = _LABEL_VALUES.match(query)
        if match is None:
            yield f"variable {each['name']!r}: {query!r} is no label_values(metric, label)"
        elif match[2] not in known().get(match[1], ()):
            yield f"variable {each['name']!r}: {match[1]} is no metric with a label {match[2]}"


def _check_alerts(path: Path) -> Iterator[str]:
    try:
        groups = yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]
    except (OSError, KeyError, TypeError, yaml.YAMLError) as error:
        yield str(error)
        return
    rules = [rule for group in groups for rule in group["rules"]]
    for name, count in Counter(rule["alert"] for rule in rules).items():
        if count > 1:
            yield f"{count} alerts are called {name}"
    for rule in rules:
        if not {"summary", "description"} <= set(rule.get("annotations", {})):
            yield f"{rule['alert']} lacks a summary or a description"
        if rule.get("labels", {}).get("severity") not in ("critical", "warning", "info"):
            yield f"{rule['alert']} has no severity"
        for finding in check_query(rule["expr"]):
            yield f"{rule['alert']}: {finding}"


def check_query(query: str) -> list[str]:
    """Return what is wrong with a query: its grammar, or what it names."""
    import promql_parser

    for macro, value in _MACROS.items():
        query = query.replace(macro, value)
    try:
        tree = promql_parser.parse(query)
    except ValueError as error:
        return [f"{query!r} is no PromQL: {error}"]
    found: list[str] = []
    there = known()

    def visit(node: object) -> bool:
        if isinstance(node, promql_parser.VectorSelector):
            if node.name not in there:
                found.append(f"there is no metric {node.name}")
            else:
                asked = {matcher.name for matcher in node.matchers.matchers}
                for label in sorted(asked - there[node.name]):
                    found.append(f"{node.name} has no label {label}")
        return True

    promql_parser.walk(tree, visit)
    return found


def main() -> int:
    """Check the files beside this module; return the exit code."""
    found = check_observability()
    for finding in found or ["dashboard and alerts: ok"]:
        sys.stdout.write(f"{finding}\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
