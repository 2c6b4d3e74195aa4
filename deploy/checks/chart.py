"""The chart: Helm's own lint, its values against their schema, and what it renders.

Helm itself does both, as a library (helm-python-sdk). Each set of values in ``ci/`` is rendered
and held against what holds of every manifest; and as the manifests of ``kubernetes/`` are what it
renders, the two are compared: `python -m deploy.check --write` writes them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deploy.checks import ToolMissingError
from deploy.checks.documents import name_of, read_documents
from deploy.checks.manifests import resource_findings

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType

    from deploy.checks.documents import Document

RELEASE = "teacher-logits"
NOTES = "NOTES.txt"
_SUFFIX = "-values.yaml"
_HEAD = """\
# Rendered from deploy/helm/teacher-logits with ci/{values} by
# `python -m deploy.check --write`: change it there. In short:
#
{told}"""


def check_chart(folder: Path) -> list[str]:
    """Lint and render it, and compare with the manifests."""
    chart = folder / "helm" / RELEASE
    found = _lint(chart)
    if found:
        return found
    for values in value_files(folder):
        where = name_of(values, folder)
        try:
            text = manifest_of(values)
        except ValueError as error:
            found.append(f"{where}: {error}")
            continue
        found += resource_findings(text, where=where)
        written = manifest_path(folder, values)
        if not written.exists() or written.read_text("utf-8") != text:
            found.append(
                f"{name_of(written, folder)}: is not what the chart renders: "
                "python -m deploy.check --write"
            )
    return found


def write_manifests(folder: Path) -> list[Path]:
    """Write the manifests anew, and return them.

    Raises:
        ValueError: values that the chart does not take; the message is Helm's.
    """
    written = []
    for values in value_files(folder):
        path = manifest_path(folder, values)
        path.write_text(manifest_of(values), "utf-8")
        written.append(path)
    return written


def value_files(folder: Path) -> list[Path]:
    """Return the sets of values that are rendered."""
    return sorted((folder / "helm" / RELEASE / "ci").glob(f"*{_SUFFIX}"))


def manifest_path(folder: Path, values: Path) -> Path:
    """Return where a set's manifest is: ``one-pod-values.yaml`` is ``one_pod.yaml``."""
    stem = values.name.removesuffix(_SUFFIX).replace("-", "_")
    return folder / "kubernetes" / f"{stem}.yaml"


def manifest_of(values: Path) -> str:
    """Return what the chart makes of a file of values, under a head that says so.

    Raises:
        ValueError: the chart does not take them; the message is Helm's.
        ToolMissingError: Helm is not here.
    """
    text = values.read_text("utf-8")
    (given,) = read_documents(text) or [{}]
    told = "".join(line + "\n" for line in text.splitlines() if line.startswith("#"))
    return _HEAD.format(values=values.name, told=told) + render(values.parents[1], given)


def render(chart: Path, values: Document) -> str:
    """Return the resources that the chart makes of values beside its own.

    Raises: as ``manifest_of``.
    """
    helm = _helm()
    try:
        with helm.Chart.load(str(chart)) as loaded:
            loaded.validate_schema(values)
            made = loaded.render(values, name=RELEASE, namespace="default")
    except helm.HelmError as error:
        raise ValueError(str(error)) from error
    parts = [made[name].strip() for name in sorted(made) if not name.endswith(NOTES)]
    return "".join(f"---\n{part}\n" for part in parts if part)


def _lint(chart: Path) -> list[str]:
    told = _helm().lint(str(chart), strict=True)
    said = [
        f"{chart.name}: {each['path']}: {each['error']}"
        for each in told["messages"]
        if each["severity"] > 1
    ]
    return said + [f"{chart.name}: {each}" for each in told["errors"]]


def _helm() -> ModuleType:
    try:
        import helm_python
    except ModuleNotFoundError:
        raise ToolMissingError(
            "helm-python-sdk (PyPI) is not installed; it is there for x86_64 Linux"
        ) from None
    return helm_python
