"""Ray's cluster launcher file, by the schema that Ray itself holds it against."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import yaml
from deploy.checks import folder_of
from deploy.checks.documents import findings_by_schema, name_of, read_documents

if TYPE_CHECKING:
    from pathlib import Path


def check_clusters(folder: Path) -> list[str]:
    """Check `ray/cluster.yaml`, and that what it sends along is there."""
    schema = folder_of("ray", comes_from="ray (PyPI)") / "autoscaler" / "ray-schema.json"
    path = folder / "ray" / "cluster.yaml"
    where = name_of(path, folder)
    try:
        (document,) = read_documents(path.read_text("utf-8"))
    except (yaml.YAMLError, ValueError) as error:
        return [f"{where}: {error}"]
    rules = json.loads(schema.read_text("utf-8"))
    said = list(findings_by_schema(document, rules, where=where))
    for source in document.get("file_mounts", {}).values():
        if not (folder.parent / source).exists():
            said.append(f"{where}: file_mounts: {source} is not there")
    return said
