"""What `import teacher_logits`, `..._server` and `..._client` give: what they say they give."""

import ast
import importlib
import inspect
import subprocess
import sys

import pytest

PACKAGES = ("teacher_logits", "teacher_logits_server", "teacher_logits_client")


def public_names(package: str) -> list[str]:
    """`__all__`; none where there is none."""
    return list(getattr(importlib.import_module(package), "__all__", []))


def imported_names(package: str) -> set[str]:
    """What a package imports from elsewhere, for type checkers alone too."""
    tree = ast.parse(inspect.getsource(importlib.import_module(package)))
    return {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module not in {"__future__", "typing"}
        for alias in node.names
    }


def printed(program: str) -> str:
    """What a program in a process of its own writes."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def in_order(name: str) -> tuple[int, str]:
    """Constants, types, functions, each by name: ruff's order of `__all__`, and of imports."""
    if name.isupper() and len(name) > 1:
        return 0, name
    return (1 if name[0].isupper() else 2), name


@pytest.mark.parametrize("package", PACKAGES)
def test_what_a_package_imports_for_its_users_stands_in_all(package: str) -> None:
    public = {name for name in imported_names(package) if not name.startswith("_")}

    assert public <= set(public_names(package))


def test_type_checkers_see_every_name_that_the_client_has() -> None:
    assert set(public_names("teacher_logits_client")) == imported_names("teacher_logits_client")


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


def test_the_client_shows_what_it_has_before_it_is_imported() -> None:
    program = "import teacher_logits_client as tl; print(set(tl.__all__) - set(dir(tl)))"

    assert printed(program).strip() == "set()"


@pytest.mark.parametrize(
    "use",
    [
        "from teacher_logits_client import Session, connect, losses; losses.forward_kl",
        "import teacher_logits_client as tl; tl.losses.forward_kl; tl.testing.serve; tl.errors",
    ],
)
def test_what_the_client_imports_late_is_there_when_asked_for(use: str) -> None:
    printed(use)


def test_what_the_client_has_not_is_refused_by_name() -> None:
    client = importlib.import_module("teacher_logits_client")

    with pytest.raises(AttributeError, match=r"'teacher_logits_client' .* 'conect'"):
        client.conect  # noqa: B018


@pytest.mark.parametrize("command", ["demo", "doctor", "inspect", "top"])
def test_help_of_a_command_of_the_client_needs_neither_torch_nor_grpc(command: str) -> None:
    program = f"""
import sys
from teacher_logits.__main__ import main
try:
    main([{command!r}, "--help"])
except SystemExit as left:
    print(left.code, sorted({{"torch", "grpc"}} & set(sys.modules)))
"""
    told = printed(program)

    assert told.startswith(f"usage: teacher-logits {command}")
    assert told.splitlines()[-1] == "0 []"
