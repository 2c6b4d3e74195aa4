"""Rules of the house that a reader of the source can check: no import is run.

Each rule is a function from a module's text to its breaches, tried on a text that breaks it
before it is let loose on the product. Who may import whom is import-linter's (`make floors`).
"""

import ast
import functools
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import TypeAlias

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = (
    ROOT / "proto" / "teacher_logits",
    ROOT / "server" / "teacher_logits_server",
    ROOT / "client" / "teacher_logits_client",
)
OUR_NAMES = {package.name for package in PACKAGES}
GENERATED = PACKAGES[0] / "v1"

LONGEST_MODULE_LINES = 300
LONGEST_FUNCTION_LINES = 40

# What turns bytes of another process into code, or a shared segment into a shared fate
# (multiprocessing.shared_memory is unlinked when any attached process exits).
BANNED = (
    "pickle",
    "_pickle",
    "cloudpickle",
    "dill",
    "joblib",
    "marshal",
    "shelve",
    "multiprocessing.shared_memory",
    "torch.load",
    "torch.save",
    "yaml.load",
    "yaml.unsafe_load",
)
ENVIRONMENT = ("os.environ", "os.environb", "os.getenv", "os.getenvb", "os.putenv", "os.unsetenv")

# A clock that can be set: no deadline, lease or session may hang on it. Logs say the time of day,
# which is logging's own affair.
WALL_CLOCKS = (
    "time.time",
    "time.time_ns",
    "datetime.datetime.now",
    "datetime.datetime.utcnow",
    "datetime.datetime.today",
)

Breach: TypeAlias = tuple[int, str]  # line, what stands there


def product_modules() -> list[Path]:
    """Every module that we wrote and ship; the generated ones are protoc's."""
    return sorted(
        path
        for package in PACKAGES
        for path in package.rglob("*.py")
        if GENERATED not in path.parents
    )


def imports(tree: ast.Module) -> Iterator[Breach]:
    """(line, dotted name) of each absolute import, by statement or by a call with its name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif (
            isinstance(node, ast.Call)
            and ast.unparse(node.func).endswith(("import_module", "__import__"))
            and node.args
            and isinstance(node.args[0], ast.Constant)
        ):
            yield node.lineno, str(node.args[0].value)


def meanings(tree: ast.Module) -> dict[str, str]:
    """What each imported name stands for: {"np": "numpy"} after `import numpy as np`."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                found[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            for alias in node.names:
                found[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return found


def dotted_names(tree: ast.Module) -> Iterator[Breach]:
    """(line, dotted name) of each import, and of each attribute of something imported."""
    yield from imports(tree)
    meaning = meanings(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            first, _, rest = ast.unparse(node).partition(".")
            if first in meaning:
                yield node.lineno, f"{meaning[first]}.{rest}"


@functools.cache
def parsed(text: str) -> ast.Module:
    """A text's tree, for every rule."""
    return ast.parse(text)


@functools.cache
def dotted_names_of(text: str) -> tuple[Breach, ...]:
    """All dotted names of a text, for both rules that look at them."""
    return tuple(dotted_names(parsed(text)))


def uses(text: str, names: tuple[str, ...]) -> list[Breach]:
    """Where a text imports or looks up one of `names`, or something inside one of them."""
    return sorted(
        {
            (line, name)
            for line, found in dotted_names_of(text)
            for name in names
            if f"{found}.".startswith(f"{name}.")
        }
    )


def long_module(text: str) -> list[Breach]:
    """The first line of a module that it should not have, if it has it."""
    lines = len(text.splitlines())
    too_long = lines > LONGEST_MODULE_LINES
    return [(LONGEST_MODULE_LINES + 1, f"{lines} lines")] if too_long else []


def long_functions(text: str) -> list[Breach]:
    """Functions of more lines than the house allows, their docstrings not counted."""
    breaches = []
    for node in ast.walk(parsed(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = _lines(node)
            if ast.get_docstring(node, clean=False) is not None:
                lines -= _lines(node.body[0])
            if lines > LONGEST_FUNCTION_LINES:
                breaches.append((node.lineno, f"{node.name} has {lines} lines"))
    return breaches


def _lines(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def left_out_by_o(text: str) -> list[Breach]:
    """What `python -O` leaves out, but for asserts that only tell a type to its checker."""
    return [
        (node.lineno, ast.unparse(node))
        for node in ast.walk(parsed(text))
        if (isinstance(node, ast.Assert) and not _tells_a_type(node.test))
        or (isinstance(node, ast.Name) and node.id == "__debug__")
    ]


def _tells_a_type(test: ast.expr) -> bool:
    if isinstance(test, ast.Compare):
        return isinstance(test.ops[0], ast.IsNot) and ast.unparse(test.comparators[0]) == "None"
    return isinstance(test, ast.Call) and ast.unparse(test.func) == "isinstance"


@functools.cache
def required() -> frozenset[str]:
    """The distributions that ours requires, those of its extras too."""
    requirements = metadata.requires("teacher-logits") or []
    return frozenset(_normal(re.split(r"[^\w.-]", requirement)[0]) for requirement in requirements)


def _normal(name: str) -> str:
    """The form in which names of distributions are compared (PyPA's name normalisation)."""
    return re.sub(r"[-_.]+", "-", name).lower()


@functools.cache
def distributions() -> Mapping[str, list[str]]:
    """Import name -> the distributions here that bring it."""
    return metadata.packages_distributions()


def undeclared(text: str) -> list[Breach]:
    """Imports of what is neither Python's, nor ours, nor of a distribution that we require."""
    breaches = []
    for line, there in imports(parsed(text)):
        top = there.partition(".")[0]
        if top in sys.stdlib_module_names or top in OUR_NAMES:
            continue
        if not required() & {_normal(name) for name in distributions().get(top, [top])}:
            breaches.append((line, top))
    return breaches


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "import pickle as harmless",
        "from pickle import loads",
        "import cloudpickle.cloudpickle",
        "def late():\n    import dill",
        "import importlib\nimportlib.import_module('pickle')",
        "__import__('marshal')",
        "from multiprocessing import shared_memory",
        "import multiprocessing.shared_memory as shared",
        "from multiprocessing.shared_memory import SharedMemory",
        "import torch\ntorch.load('checkpoint')",
        "from torch import load",
        "import torch as t\nt.save({}, 'checkpoint')",
        "import yaml\nyaml.load(text, yaml.Loader)",
    ],
)
def test_the_rule_against_pickle_and_shared_segments_bites(text: str) -> None:
    assert uses(text, BANNED)


@pytest.mark.parametrize(
    "text",
    [
        "import multiprocessing",
        "import json\njson.loads(text)",
        "import torch\ntorch.empty(3)",
        "import yaml\nyaml.safe_load(text)",
        "payload.load()",
        "from teacher_logits import pickled",
    ],
)
def test_the_rule_against_pickle_and_shared_segments_leaves_the_rest_alone(text: str) -> None:
    assert uses(text, BANNED) == []


@pytest.mark.parametrize(
    "text",
    [
        "import os\nos.environ['HOME']",
        "import os\nos.getenv('HOME')",
        "import os as system\nsystem.environ.get('HOME')",
        "from os import environ",
        "from os import getenv as look_up",
        "import os.path\nos.environ",
    ],
)
def test_the_rule_about_the_environment_bites(text: str) -> None:
    assert uses(text, ENVIRONMENT)


def test_the_rule_about_the_environment_leaves_the_rest_of_os_alone() -> None:
    assert uses("import os\nos.getpid()\nself.environ = {}", ENVIRONMENT) == []


@pytest.mark.parametrize(
    "text",
    [
        "import time\ntime.time()",
        "from time import time_ns",
        "import datetime\ndatetime.datetime.now()",
        "from datetime import datetime\ndatetime.now(tz)",
    ],
)
def test_the_rule_against_clocks_that_can_be_set_bites(text: str) -> None:
    assert uses(text, WALL_CLOCKS)


def test_the_rule_against_clocks_that_can_be_set_leaves_the_others_alone() -> None:
    text = "import time\nfrom datetime import timedelta\ntime.monotonic(), timedelta(seconds=1)"
    assert uses(text, WALL_CLOCKS) == []


def test_the_rule_about_long_functions_bites() -> None:
    def function(lines: int) -> str:
        return "def f():\n" + "    x = 1\n" * (lines - 1)

    assert long_functions(function(LONGEST_FUNCTION_LINES)) == []
    assert long_functions(function(LONGEST_FUNCTION_LINES + 1)) == [(1, "f has 41 lines")]


def test_the_rule_about_long_modules_bites() -> None:
    assert long_module("x = 1\n" * LONGEST_MODULE_LINES) == []
    assert long_module("x = 1\n" * (LONGEST_MODULE_LINES + 1)) == [(301, "301 lines")]


def test_the_rule_about_long_functions_does_not_count_a_docstring() -> None:
    docstring = '    """One.\n' + "\n" * LONGEST_FUNCTION_LINES + '    """\n'

    assert long_functions(f"def f():\n{docstring}    x = 1\n") == []


@pytest.mark.parametrize("text", ["assert dp % 2 == 0", "assert rows", "if __debug__:\n    x = 1"])
def test_the_rule_about_python_o_bites(text: str) -> None:
    assert left_out_by_o(text)


def test_the_rule_about_python_o_leaves_what_tells_a_type() -> None:
    assert left_out_by_o("assert x is not None\nassert isinstance(x, int)") == []


def test_the_rule_about_undeclared_imports_bites() -> None:
    assert undeclared("import os\nimport torch.nn\nimport pytest as py") == [(3, "pytest")]


def test_the_rules_find_modules_to_look_at() -> None:
    assert PACKAGES[0] / "errors.py" in product_modules()


def breaches_of(rule: Callable[[str], list[Breach]], *, but: str = "") -> dict[str, list[Breach]]:
    """Where the product breaks a rule, by module; those whose paths end so may."""
    found = {
        str(path.relative_to(ROOT)): rule(path.read_text("utf-8"))
        for path in product_modules()
        if not (but and path.match(but))
    }
    return {module: breaches for module, breaches in found.items() if breaches}


class TestTheProduct:
    def test_unpickles_nothing_and_shares_no_python_segments(self) -> None:
        assert breaches_of(lambda text: uses(text, BANNED)) == {}

    def test_reads_the_environment_in_config_modules_alone(self) -> None:
        assert breaches_of(lambda text: uses(text, ENVIRONMENT), but="config.py") == {}

    def test_reads_no_clock_that_can_be_set(self) -> None:
        # What a certificate says of its time is the time of day.
        assert breaches_of(lambda text: uses(text, WALL_CLOCKS), but="certificates.py") == {}

    def test_is_the_same_under_python_o(self) -> None:
        assert breaches_of(left_out_by_o) == {}

    def test_imports_only_what_the_distribution_requires(self) -> None:
        assert breaches_of(undeclared) == {}

    def test_has_no_module_longer_than_the_house_allows(self) -> None:
        assert breaches_of(long_module) == {}

    def test_has_no_function_longer_than_the_house_allows(self) -> None:
        assert breaches_of(long_functions) == {}
