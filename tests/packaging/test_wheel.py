"""The wheel: all of the three packages and nothing else, usable without the checkout."""

import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOTS = (ROOT / "proto", ROOT / "server", ROOT / "client")
PACKAGES = ("teacher_logits", "teacher_logits_server", "teacher_logits_client")
EXTRAS = ("transformers", "accelerate", "gguf", "safetensors", "matplotlib", "ray", "numpy", "rich")


def build(target: str, folder: Path) -> Path:
    """Build with the hatchling of this environment: no isolation, so no network."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (built,) = folder.iterdir()
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    return zipfile.ZipFile(build("wheel", tmp_path_factory.mktemp("wheel")))


@pytest.fixture(scope="module")
def installed(wheel: zipfile.ZipFile, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel in it and nothing of the checkout."""
    folder = tmp_path_factory.mktemp("installed")
    wheel.extractall(folder)
    return folder


def run_from(installed: Path, program: str) -> str:
    """Run a program that finds the wheel before the editable checkout; its output."""
    start = f"import sys; sys.path.insert(0, {str(installed)!r})\n"
    done = subprocess.run(
        [sys.executable, "-c", start + program], cwd=installed, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def metadata_file(wheel: zipfile.ZipFile, name: str) -> str:
    (member,) = (member for member in wheel.namelist() if member.endswith(f".dist-info/{name}"))
    return wheel.read(member).decode()


def test_holds_the_files_of_the_three_packages_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    ours = {
        path.relative_to(root).as_posix()
        for root in ROOTS
        for package in PACKAGES
        for path in (root / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    inside = {name for name in wheel.namelist() if ".dist-info/" not in name}

    assert inside == ours


@pytest.mark.parametrize("package", PACKAGES)
def test_tells_type_checkers_that_it_is_typed(wheel: zipfile.ZipFile, package: str) -> None:
    assert f"{package}/py.typed" in wheel.namelist()


def test_carries_every_schema_with_its_stubs(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    schemas = [name.removesuffix(".proto") for name in names if name.endswith(".proto")]
    stubs = {f"{schema}{ending}" for schema in schemas for ending in ("_pb2.py", "_pb2.pyi")}
    stubs |= {
        f"{schema}_pb2_grpc{ending}"
        for schema in schemas
        if schema.endswith("_service")
        for ending in (".py", ".pyi")
    }

    assert schemas
    assert stubs - names == set()


def test_names_its_licence_and_brings_the_text(wheel: zipfile.ZipFile) -> None:
    assert "License-Expression: Apache-2.0\n" in metadata_file(wheel, "METADATA")
    assert metadata_file(wheel, "licenses/LICENSE") == (ROOT / "LICENSE").read_text("utf-8")


def test_takes_its_version_from_the_contract_package(wheel: zipfile.ZipFile) -> None:
    text = (ROOT / "proto" / "teacher_logits" / "__init__.py").read_text("utf-8")
    version = re.search(r'^__version__ = "(.+)"$', text, re.MULTILINE)

    assert version is not None
    assert f"Version: {version[1]}\n" in metadata_file(wheel, "METADATA")


def test_is_what_its_packages_are_imported_from(installed: Path) -> None:
    program = "".join(f"import {name}; print({name}.__file__)\n" for name in PACKAGES)

    files = run_from(installed, program).split()

    assert files == [str(installed / name / "__init__.py") for name in PACKAGES]


def test_its_commands_load_without_the_extras(installed: Path) -> None:
    program = f"""
sys.modules.update(dict.fromkeys({EXTRAS!r}))
from importlib.metadata import distribution
for entry in distribution("teacher-logits").entry_points:
    entry.load()
    print(entry.name)
"""
    commands = run_from(installed, program).split()

    assert sorted(commands) == ["demo", "doctor", "inspect", "serve", "teacher-logits", "top"]


def test_the_source_archive_holds_what_make_needs(tmp_path: Path) -> None:
    with tarfile.open(build("sdist", tmp_path)) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}

    assert {"Makefile", "pyproject.toml", "constraints.txt", "tests/conftest.py"} <= names
    assert {"proto/buf.yaml", "LICENSE", "README.md", "CONTRIBUTING.md"} <= names
    assert not any(name.startswith((".venv", "build", "dist")) for name in names)
