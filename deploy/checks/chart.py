"""The chart: Helm's own lint, its values against their schema, and what it renders.

Each set of values in ``ci/`` is rendered and held against what holds of every manifest; and as
the manifests of ``kubernetes/`` are what it renders, the two are compared: `python -m
deploy.check --write` writes them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import yaml
from deploy.checks.documents import name_of, read_documents
from deploy.checks.helm import ask_helm
from deploy.checks.manifests import resource_findings

if TYPE_CHECKING:
    from pathlib import Path

    from deploy.checks.documents import Document
    from deploy.checks.helm import Told

RELEASE = "teacher-logits"
_SUFFIX = "-values.yaml"
_HEAD = """\
# Rendered from deploy/helm/teacher-logits with ci/{values} by
# `python -m deploy.check --write`: change it there. In short:
#
{told}"""


def check_chart(folder: Path) -> list[str]:
    """Lint and render it, and compare with the manifests."""
    try:
        told = _ask(folder)
    except yaml.YAMLError as error:
        return [f"{RELEASE}: {error}"]
    found = [f"{RELEASE}: {each}" for each in told.lint]
    for values, rendered in zip(value_files(folder), told.rendered, strict=False):
        where = name_of(values, folder)
        if rendered.refusal:
            found.append(f"{where}: {rendered.refusal}")
            continue
        found += resource_findings(rendered.text, where=where)
        written = _manifest_path(folder, values)
        if not written.exists() or written.read_text("utf-8") != _head(values) + rendered.text:
            found.append(
                f"{name_of(written, folder)}: is not what the chart renders: "
                "python -m deploy.check --write"
            )
    return found


def write_manifests(folder: Path) -> list[Path]:
    """Write the manifests anew, and return them.

    Raises:
        ValueError: the chart is wrong, or does not take its values; the message is Helm's.
        ToolMissingError: Helm is not here.
    """
    told = _ask(folder)
    refusals = [*told.lint, *(each.refusal for each in told.rendered if each.refusal)]
    if refusals:
        raise ValueError("; ".join(refusals))
    written = []
    for values, rendered in zip(value_files(folder), told.rendered, strict=True):
        path = _manifest_path(folder, values)
        path.write_text(_head(values) + rendered.text, "utf-8")
        written.append(path)
    return written


def value_files(folder: Path) -> list[Path]:
    """Return the sets of values that are rendered."""
    return sorted((folder / "helm" / RELEASE / "ci").glob(f"*{_SUFFIX}"))


def _ask(folder: Path) -> Told:
    given = [_values(path) for path in value_files(folder)]
    return ask_helm(folder / "helm" / RELEASE, given)


def _values(path: Path) -> Document:
    (values,) = read_documents(path.read_text("utf-8")) or [{}]
    return values


def _manifest_path(folder: Path, values: Path) -> Path:
    """``one-pod-values.yaml`` is written to ``one_pod.yaml``."""
    stem = values.name.removesuffix(_SUFFIX).replace("-", "_")
    return folder / "kubernetes" / f"{stem}.yaml"


def _head(values: Path) -> str:
    """What a manifest begins with: where it comes from, and what its values say of it."""
    lines = values.read_text("utf-8").splitlines()
    told = "".join(line + "\n" for line in lines if line.startswith("#"))
    return _HEAD.format(values=values.name, told=told)
