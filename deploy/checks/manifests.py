"""Resources of Kubernetes: each against the schema of its kind, and each pod against our rules.

The schemas of Kubernetes' own kinds are kubernetes-validate's, strict: a field that the kind does
not have is a finding. Those of kinds that an operator adds (``schemas/``) are ours, and know the
fields that we use; a kind without a schema is a finding too.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import yaml
from deploy.checks import ToolMissingError
from deploy.checks.documents import findings_by_schema, name_of, read_documents
from deploy.checks.pods import pod_findings, pod_specs, ray_templates

if TYPE_CHECKING:
    from collections.abc import Iterator

    from deploy.checks.documents import Document

VERSIONS = ("1.29", "1.37")
"""The oldest Kubernetes that has what the manifests use, and the newest that we know."""
SCHEMAS = Path(__file__).with_name("schemas")


def check_manifests(folder: Path) -> list[str]:
    """Check `kubernetes/`, and what `ray/` has for Kubernetes."""
    files = [*sorted((folder / "kubernetes").glob("*.yaml")), folder / "ray" / "raycluster.yaml"]
    found: list[str] = []
    for path in files:
        found += resource_findings(path.read_text("utf-8"), where=name_of(path, folder))
    return found


def resource_findings(text: str, *, where: str) -> Iterator[str]:
    """Say what is wrong with the resources of a YAML text."""
    try:
        documents = read_documents(text)
    except yaml.YAMLError as error:
        yield f"{where}: {error}"
        return
    if not documents:
        yield f"{where}: no resource"
    for document in documents:
        here = f"{where}: {document.get('kind')} {document.get('metadata', {}).get('name')}"
        found = list(_schema_findings(document, where=here))
        yield from found
        if not found:
            for place, spec in pod_specs(document):
                yield from (f"{here}: {place}: {finding}" for finding in pod_findings(spec))


def _schema_findings(document: Document, *, where: str) -> Iterator[str]:
    own = SCHEMAS / f"{str(document.get('kind')).lower()}.json"
    if own.is_file():
        yield from findings_by_schema(document, json.loads(own.read_text("utf-8")), where=where)
    else:
        yield from _kind_findings(document, where=where)
    for template in ray_templates(document):
        whole = {"apiVersion": "v1", "kind": "PodTemplate", "template": template}
        yield from _kind_findings(whole, where=f"{where}: a template")


def _kind_findings(document: Document, *, where: str) -> Iterator[str]:
    try:
        import kubernetes_validate
    except ModuleNotFoundError:
        raise ToolMissingError("kubernetes-validate (PyPI) is not installed") from None
    for version in VERSIONS:
        try:
            kubernetes_validate.validate(document, version, strict=True)
        except kubernetes_validate.SchemaNotFoundError:
            yield f"{where}: Kubernetes {version} has no such kind, and {SCHEMAS.name}/ no schema"
        except kubernetes_validate.ValidationError as error:
            path = ".".join(map(str, error.path)) or "the resource"
            yield f"{where}: Kubernetes {version}: {path}: {error.message}"
        except KeyError as error:
            yield f"{where}: {error.args[0]} is missing"
