"""Services of ``compose.yaml``, run as its reader would, by runc instead of Docker.

Each runs in namespaces of its own, as the image's user, without capabilities, with what the
file mounts and no more. Its first process is the service's own (``init`` is left out: signals
have to work without it too). Named volumes get owner and mode from the image, as in Docker.

What is not run as Docker has it: no seccomp profile, and no limits of memory.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import yaml

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from deploy.image import Image

NAMESPACES = ("pid", "mount", "ipc", "uts", "network")
_SPAN = re.compile(r"(\d+)s")


@dataclass(frozen=True, kw_only=True)
class Service:
    """How a container is started; ``None`` is what the image says."""

    entrypoint: tuple[str, ...] | None = None
    command: tuple[str, ...] | None = None
    folder: str | None = None
    #: (source, target, whether it may be written); a source without "/" is a named volume.
    volumes: tuple[tuple[str, str, bool], ...] = ()
    tmpfs: tuple[str, ...] = ()
    read_only: bool = False
    stop_seconds: float = 10.0
    copies: int = 1

    def mounting(self, source: Path, target: str, *, writable: bool) -> Service:
        """Return the service with one more folder mounted."""
        return replace(self, volumes=(*self.volumes, (str(source), target, writable)))


def services_of(path: Path) -> dict[str, Service]:
    """Return the services of a compose file by their names."""
    document = yaml.safe_load(path.read_text("utf-8"))
    return {name: _service(said) for name, said in document["services"].items()}


def _service(said: Mapping[str, object]) -> Service:
    def words(key: str) -> tuple[str, ...] | None:
        found = said.get(key)
        return tuple(map(str, found)) if isinstance(found, list) else None

    span = _SPAN.fullmatch(str(said.get("stop_grace_period", "10s")))
    if span is None:
        raise ValueError(f"stop_grace_period {said['stop_grace_period']}: say it in seconds (45s)")
    return Service(
        entrypoint=words("entrypoint"),
        command=words("command"),
        folder=str(said["working_dir"]) if "working_dir" in said else None,
        volumes=tuple(map(_volume, words("volumes") or ())),
        tmpfs=words("tmpfs") or (),
        read_only=said.get("read_only") is True,
        stop_seconds=float(span[1]),
        copies=int(str(said.get("scale", 1))),
    )


def _volume(text: str) -> tuple[str, str, bool]:
    source, target, *flags = text.split(":")
    return source, target, "ro" not in flags


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Where containers run. ``work`` holds their bundles and volumes; ``compose`` is the folder
    that a compose file's relative paths start from."""

    image: Image
    work: Path
    compose: Path

    def run(self, name: str, service: Service) -> Container:
        """Start a container; ``name`` is its own for good."""
        bundle = self.work / "bundles" / name
        bundle.mkdir(parents=True)
        (bundle / "config.json").write_text(json.dumps(self._config(service)))
        log = bundle / "log"
        command = [*self._runc(), "run", "--bundle", str(bundle), name]
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
            )
        return Container(
            name=name, process=process, log=log, runc=tuple(self._runc()), image=self.image
        )

    def _runc(self) -> list[str]:
        return ["runc", "--root", str(self.work / "runc")]

    def _config(self, service: Service) -> dict[str, object]:
        image = self.image
        entrypoint = image.entrypoint if service.entrypoint is None else service.entrypoint
        # As in Docker: the image's command belongs to the image's entry point.
        default = image.command if service.entrypoint is None else ()
        command = default if service.command is None else service.command
        return {
            "ociVersion": "1.0.2",
            "process": {
                "user": {"uid": image.uid, "gid": image.gid},
                "args": [*entrypoint, *command],
                "env": list(image.environment),
                "cwd": service.folder or image.folder,
                "capabilities": {},
                "noNewPrivileges": True,
            },
            "root": {"path": str(image.root), "readonly": service.read_only},
            "mounts": [*_SYSTEM, *self._mounts(service)],
            "linux": {"namespaces": [{"type": each} for each in NAMESPACES]},
        }

    def _mounts(self, service: Service) -> list[dict[str, object]]:
        mounts = [_mount(target, "tmpfs", "mode=1777") for target in service.tmpfs]
        for source, target, is_writable in service.volumes:
            place = self.compose / source if "/" in source else self._named(source, target)
            flags = ("rbind", "rw" if is_writable else "ro")
            mounts.append(_mount(target, "bind", *flags, source=str(place)))
        return mounts

    def _named(self, name: str, target: str) -> Path:
        """A named volume's folder, made by its first user."""
        place = self.work / "volumes" / name
        if not place.exists():
            like = (self.image.root / target.lstrip("/")).stat()
            place.mkdir(parents=True)
            place.chmod(like.st_mode & 0o7777)
            shutil.chown(place, like.st_uid, like.st_gid)
        return place


@dataclass(frozen=True, kw_only=True)
class Container:
    """A container that was started; ``process`` ends with it, with its exit code."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    runc: tuple[str, ...]
    image: Image

    def is_healthy(self) -> bool:
        """Run the image's own health check in it, once."""
        checked = subprocess.run(
            [*self.runc, "exec", self.name, *self.image.health], capture_output=True
        )
        return checked.returncode == 0

    def signal(self, name: str) -> None:
        """Send a signal to its first process."""
        subprocess.run([*self.runc, "kill", self.name, name], check=True)

    def remove(self) -> None:
        """End it at once, if it still runs."""
        if self.process.poll() is None:
            subprocess.run([*self.runc, "delete", "--force", self.name], capture_output=True)
            self.process.wait()

    def said(self) -> str:
        """What it wrote."""
        return self.log.read_text("utf-8", "replace")


def _mount(target: str, kind: str, *options: str, source: str = "") -> dict[str, object]:
    return {
        "destination": target,
        "type": kind,
        "source": source or kind,
        "options": ["nosuid", "nodev", *options],
    }


_SYSTEM: Sequence[dict[str, object]] = [
    {"destination": "/proc", "type": "proc", "source": "proc"},
    {
        "destination": "/dev",
        "type": "tmpfs",
        "source": "tmpfs",
        "options": ["nosuid", "strictatime", "mode=755", "size=65536k"],
    },
    _mount("/dev/shm", "tmpfs", "noexec", "mode=1777", "size=64m"),
    _mount("/sys", "sysfs", "noexec", "ro"),
]
