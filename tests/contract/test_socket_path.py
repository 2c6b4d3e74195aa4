"""Server and client find the same socket where nobody named one."""

import os
import tempfile
from pathlib import Path

import pytest

from teacher_logits.socket_path import default_socket_path, socket_folder, user_runtime_folder
from teacher_logits_client.doctor.config import read_surroundings
from teacher_logits_server.config import default_address


def nothing_can_be_written(path: str, mode: int) -> bool:
    """Stands for ``os.access`` of a user who owns no folder of the system's."""
    del path, mode
    return False


def test_it_is_in_the_users_runtime_folder(tmp_path: Path) -> None:
    path = default_socket_path({"XDG_RUNTIME_DIR": str(tmp_path)})

    assert path == f"{tmp_path}/teacher-logits/teacher.sock"


@pytest.mark.parametrize("folder", ["", ".", "/no/such/folder"])
def test_a_runtime_folder_that_is_none_is_as_good_as_not_named(folder: str) -> None:
    environment = {"XDG_RUNTIME_DIR": folder}

    assert user_runtime_folder(environment) == ""
    assert socket_folder(environment) == socket_folder({})


def test_without_a_runtime_folder_it_is_in_run_where_that_may_be_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: path == "/run")

    assert default_socket_path({}) == "/run/teacher-logits/teacher.sock"


def test_else_it_is_in_a_temporary_folder_of_the_users_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "access", nothing_can_be_written)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    assert default_socket_path({}) == f"{tmp_path}/teacher-logits-{os.geteuid()}/teacher.sock"


@pytest.mark.parametrize("is_named", [True, False])
def test_both_sides_come_to_the_same_answer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_named: bool
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path) if is_named else "")

    assert default_address() == f"unix:{read_surroundings().socket_path}"
