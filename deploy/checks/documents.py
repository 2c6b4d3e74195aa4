"""YAML documents, and what a JSON schema says of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import jsonschema
import yaml

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

Document: TypeAlias = "dict[str, Any]"


class _Loader(yaml.SafeLoader):
    """YAML in which no key comes twice: the second would win without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        twice = {str(key) for key in keys if keys.count(key) > 1}
        if twice:
            where = node.start_mark.line + 1
            raise yaml.YAMLError(f"line {where}: keys come twice: {', '.join(sorted(twice))}")
        return super().construct_mapping(node, deep)


def read_documents(text: str) -> list[Document]:
    """Return the documents of a YAML text that are not empty.

    Raises:
        yaml.YAMLError: it is no YAML, or a key comes twice.
    """
    return [each for each in yaml.load_all(text, _Loader) if each is not None]


def findings_by_schema(document: object, schema: Document, *, where: str) -> Iterator[str]:
    """Say what a JSON schema does not allow."""
    for error in jsonschema.validators.validator_for(schema)(schema).iter_errors(document):
        path = ".".join(map(str, error.absolute_path)) or "the document"
        yield f"{where}: {path}: {error.message}"


def name_of(path: Path, folder: Path) -> str:
    """Return how a finding names a file."""
    return str(path.relative_to(folder.parent))
