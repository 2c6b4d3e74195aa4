"""Reloading: a change of a file is seen at the next look, and what makes no sense is not taken."""

from __future__ import annotations

import itertools
import os
import resource
from typing import TYPE_CHECKING

import pytest
from tests.interrupts import Interrupt

from teacher_logits.errors import ConfigError
from teacher_logits.reloading import Reloading
from teacher_logits.secret_files import MAX_BYTES, read_file_bytes, read_secret_file

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.touch(mode=0o600)
    path.write_text("one")
    return path


class Kept:
    """What one file says, how often it was read, and what was said against it."""

    def __init__(self, path: Path) -> None:
        self.reads = 0
        self.said: list[str] = []
        self._path = str(path)
        self._kept = Reloading(
            [self._path], self._read, on_failure=lambda error: self.said.append(error.message)
        )

    @property
    def now(self) -> str:
        return self._kept.current()

    def _read(self) -> str:
        self.reads += 1
        return read_secret_file(self._path, what="--it")


def test_a_file_is_read_once_for_each_change(path: Path) -> None:
    kept = Kept(path)
    assert [kept.now, kept.now, kept.reads] == ["one", "one", 1]
    path.write_text("another")
    assert [kept.now, kept.now, kept.reads] == ["another", "another", 2]


def test_a_file_that_is_put_in_its_place_is_a_change(path: Path) -> None:
    kept = Kept(path)
    new = path.with_name("new")
    new.touch(mode=0o600)
    new.write_text("two")
    os.utime(new, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
    new.rename(path)
    assert kept.now == "two"


def test_a_link_that_leads_elsewhere_is_a_change(path: Path) -> None:
    # As Kubernetes changes a mounted secret.
    link, other = path.with_name("link"), path.with_name("other")
    link.symlink_to(path)
    kept = Kept(link)
    other.touch(mode=0o600)
    other.write_text("two")
    link.with_name("new").symlink_to(other)
    link.with_name("new").rename(link)
    assert kept.now == "two"


def test_what_makes_no_sense_is_told_once_and_mended_by_the_next_change(path: Path) -> None:
    kept = Kept(path)
    path.chmod(0o644)
    assert [kept.now, kept.now, len(kept.said)] == ["one", "one", 1]
    assert "--it" in kept.said[0]
    path.chmod(0o600)
    path.write_text("good again")
    assert [kept.now, len(kept.said)] == ["good again", 1]


def test_what_could_not_be_read_is_read_again_without_a_change(path: Path) -> None:
    kept = Kept(path)
    path.write_text("another")
    files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, files[1]))
    try:
        assert [kept.now, kept.now, len(kept.said)] == ["one", "one", 1]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, files)
    assert [kept.now, kept.now, len(kept.said)] == ["another", "another", 1]


def test_a_change_is_taken_by_the_next_look_where_one_is_interrupted(path: Path) -> None:
    kept = Kept(path)
    for moment in itertools.count():
        path.write_text(f"{moment}")
        with Interrupt(moment, inside="teacher_logits/") as interrupt:
            assert kept.now == f"{moment}"
        assert kept.now == f"{moment}", interrupt.came_at
        if not interrupt.came_at:
            break
    assert moment > 10


def test_what_is_none_at_the_start_is_raised(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--it .*nowhere cannot be read"):
        Kept(tmp_path / "nowhere")


def test_a_secret_is_a_file_of_text_of_a_sane_size(path: Path, tmp_path: Path) -> None:
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="holds no text"):
        read_secret_file(str(path), what="--it")
    path.write_bytes(bytes(MAX_BYTES + 1))
    with pytest.raises(ConfigError, match="more than"):
        read_secret_file(str(path), what="--it")
    os.mkfifo(tmp_path / "pipe", 0o600)
    for name in ("pipe", "."):
        for read in (read_secret_file, read_file_bytes):
            with pytest.raises(ConfigError, match=r"is no file|cannot be read"):
                read(str(tmp_path / name), what="--it")


def test_a_mark_of_utf_8_in_front_of_a_secret_is_none_of_it(path: Path) -> None:
    path.write_text("one", encoding="utf-8-sig")
    assert read_secret_file(str(path), what="--it") == "one"
