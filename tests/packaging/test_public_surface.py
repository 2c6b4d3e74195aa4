"""What `import teacher_logits`, `..._server` and `..._client` give: what they say they give."""

import ast
import importlib
import inspect

import pytest

PACKAGES = ("teacher_logits", "teacher_logits_server", "teacher_logits_client")


def public_names(package: str) -> list[str]:
    """`__all__`; none where there is none."""
    return list(getattr(importlib.import_module(package), "__all__", []))


def in_order(name: str) -> tuple[int, str]:
    """Constants, types, functions, each by name: ruff's order of `__all__`, and of imports."""
    if name.isupper() and len(name) > 1:
        return 0, name
    return (1 if name[0].isupper() else 2), name


@pytest.mark.parametrize("package", PACKAGES)
def test_what_a_package_imports_for_its_users_stands_in_all(package: str) -> None:
    tree = ast.parse(inspect.getsource(importlib.import_module(package)))
    imported = {
        alias.asname or alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module not in {"__future__", "typing"}
        for alias in node.names
    }
    assert {name for name in imported if not name.startswith("_")} <= set(public_names(package))


@pytest.mark.parametrize("package", PACKAGES)
def test_what_stands_in_all_can_be_had(package: str) -> None:
    module = importlib.import_module(package)

    missing = [name for name in public_names(package) if not hasattr(module, name)]

    assert missing == []


@pytest.mark.parametrize("package", PACKAGES)
def test_all_is_sorted_and_says_nothing_twice(package: str) -> None:
    names = public_names(package)

    assert names == sorted(set(names), key=in_order)


@pytest.mark.parametrize("package", PACKAGES)
def test_all_names_nothing_private(package: str) -> None:
    private = {name for name in public_names(package) if name.startswith("_")}

    assert private <= {"__version__"}
