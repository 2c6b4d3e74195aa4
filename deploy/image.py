"""The image of ``Dockerfile``, built in a clean root without Docker or a registry of images.

debootstrap makes the Debian that the file starts from, and buildah takes the file's own steps
from there (chroot isolation, so that it runs inside a container too). Needs root.

The steps find packages as this machine's pip does: its settings are lent to the build, and do
not stay in the image.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

DOCKERFILE = Path(__file__).with_name("Dockerfile")
PIP_FOLDER = Path("/etc/xdg/pip")
_BASE = re.compile(r"^FROM (debian:([a-z]+)-slim)\b", re.MULTILINE)
_SETTING = re.compile(r"^[^.]*\.+([a-z-]+)='(.*)'$", re.MULTILINE)
_TAG = "checked"


class CheckFailedError(Exception):
    """Something did not hold; the message says what, and shows what was written."""


@dataclass(frozen=True, kw_only=True)
class Image:
    """A built image: its files at ``root``, and what its Dockerfile said of running it."""

    root: Path
    entrypoint: tuple[str, ...]
    command: tuple[str, ...]
    environment: tuple[str, ...]
    folder: str
    uid: int
    gid: int
    health: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Builder:
    """buildah, with a store of its own below ``work``.

    Its methods raise ``CheckFailedError`` with the last lines of a command that failed.
    """

    work: Path

    def make_base(self) -> str:
        """Make the image that the Dockerfile starts from, and return its name."""
        bases = set(_BASE.findall(DOCKERFILE.read_text("utf-8")))
        if len(bases) != 1:
            raise CheckFailedError(
                f"Dockerfile: one debian:RELEASE-slim in every FROM, not {bases}"
            )
        ((name, release),) = bases
        root = self.work / "debian"
        run_command("debootstrap", "--variant=minbase", release, str(root))
        container = self._buildah("from", "--pull-never", "scratch").strip()
        self._buildah("add", "-q", container, str(root), "/")
        self._buildah("commit", "-q", "--rm", container, f"docker.io/library/{name}")
        return str(name)

    def build(self, arguments: Sequence[str]) -> None:
        """Take the Dockerfile's steps; ``arguments`` are buildah's, such as ``--build-arg``."""
        self._buildah(
            *("build", "--isolation=chroot", "--pull-never", "--format=docker", "--layers=false"),
            *(f"--volume={each}" for each in pip_settings(self.work / "pip")),
            *arguments,
            *("-f", str(DOCKERFILE), "-t", _TAG, str(DOCKERFILE.parents[1])),
        )

    @contextmanager
    def mounted(self) -> Iterator[Image]:
        """Yield the built image, its files mounted."""
        said = json.loads(self._buildah("inspect", "--type=image", _TAG))["Docker"]["config"]
        uid, _, gid = said["User"].partition(":")
        if not uid.isdecimal() or not gid.isdecimal() or int(uid) == 0:
            raise CheckFailedError(f"Dockerfile: USER {said['User']}: two numbers, and not root")
        container = self._buildah("from", "--pull-never", _TAG).strip()
        root = Path(self._buildah("mount", container).strip())
        try:
            yield Image(
                root=root,
                entrypoint=tuple(said["Entrypoint"]),
                command=tuple(said["Cmd"]),
                environment=tuple(said["Env"]),
                folder=said["WorkingDir"],
                uid=int(uid),
                gid=int(gid),
                health=tuple(said["Healthcheck"]["Test"][1:]),
            )
        finally:
            self._buildah("umount", container)

    def clear(self) -> None:
        """Give every mount and file of the store back."""
        self._buildah("rm", "--all")
        self._buildah("rmi", "--all", "--force")

    def _buildah(self, *arguments: str) -> str:
        store = ("--root", str(self.work / "store"), "--runroot", str(self.work / "run"))
        return run_command("buildah", *store, *arguments)


def pip_settings(folder: Path) -> list[str]:
    """Copy this machine's pip settings into ``folder``; return the volumes that a build needs.

    Certificates and constraints go along as copies, folders of wheels as they are. An index on
    this machine's disk does not: its files lie elsewhere.
    """
    folder.mkdir()
    volumes = [f"{folder}:{PIP_FOLDER}:ro"]
    lines = ["[global]"]
    shown = run_command(sys.executable, "-m", "pip", "config", "list")
    for key, value in dict(_SETTING.findall(shown)).items():
        words = [word for word in value.split() if not word.startswith("file:")]
        for place, word in enumerate(words):
            if os.path.isfile(word):
                shutil.copy(word, folder / f"{key}-{place}")
                words[place] = str(PIP_FOLDER / f"{key}-{place}")
            elif os.path.isdir(word):
                volumes.append(f"{word}:{word}:ro")
        if words:
            lines.append(f"{key} = " + "\n    ".join(words))
    (folder / "pip.conf").write_text("\n".join(lines) + "\n")
    return volumes


def run_command(*command: str) -> str:
    """Run a command and return what it wrote to standard output.

    Raises:
        CheckFailedError: it ended with another exit code than 0.
    """
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        last = "\n".join((done.stdout + done.stderr).splitlines()[-40:])
        raise CheckFailedError(f"{' '.join(command)}\nended with {done.returncode}:\n{last}")
    return done.stdout
