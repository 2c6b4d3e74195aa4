"""Reading a YAML file. Refuses a key that a mapping has twice: YAML keeps one in silence."""

from __future__ import annotations

from typing import TYPE_CHECKING

import yaml

if TYPE_CHECKING:
    from collections.abc import Hashable


class _Loader(yaml.SafeLoader):
    def construct_mapping(
        self, node: yaml.MappingNode, deep: bool = False
    ) -> dict[Hashable, object]:
        keys = [str(key.value) for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for key, _ in node.value:
            if keys.count(str(key.value)) > 1:
                raise yaml.constructor.ConstructorError(
                    problem=f"{key.value} is given twice", problem_mark=key.start_mark
                )
        return super().construct_mapping(node, deep=deep)


def read_yaml(path: str) -> object:
    """Return what a file holds.

    Raises:
        OSError, UnicodeDecodeError, yaml.YAMLError: it cannot be read, or has a key twice.
    """
    with open(path, encoding="utf-8") as file:
        try:
            document: object = _Loader(file).get_single_data()
        except (ValueError, TypeError, ArithmeticError, LookupError, RecursionError) as error:
            if isinstance(error, UnicodeDecodeError):
                raise
            # The library lets out what Python says of a date, a number or a depth that is none.
            raise yaml.YAMLError(f"a value is none: {error}") from error
    return document
