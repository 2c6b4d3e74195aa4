"""Build the image of ``Dockerfile`` in a clean root, and score with it.

    python -m deploy.image_check          (`make image-check`)

The image's own steps make it (``image``); then runc runs ``compose.yaml`` with it, and a teacher
of the engine that it brings. Each line that this writes was seen to hold; the first thing that
does not ends it with exit code 1. Arguments go to `buildah build`.

Needs root, Linux 6.5 or newer, 6 GB below TMPDIR, and pip settings that find the build of
torch that is asked for.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.image import Builder, CheckFailedError, run_command
from deploy.services import Container, Machine, Service, services_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

COMPOSE = Path(__file__).with_name("compose.yaml")
TOOLS = ("buildah", "debootstrap", "runc")
ADDRESS = "unix:/run/teacher-logits/teacher.sock"
HEALTHY_WITHIN_SECONDS = 120.0
ENDED_WITHIN_SECONDS = 300.0

_MAKE_MODEL = """\
from teacher_logits_client.demo.tiny_teacher import make_tiny_teacher
make_tiny_teacher("/made/tiny")
"""


def main(build_arguments: Sequence[str]) -> int:
    """Check everything, and return the exit code: 0 it held, 1 it did not, 2 a tool is missing."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing or os.geteuid() != 0:
        sys.stderr.write(
            f"image-check needs root and {', '.join(TOOLS)}, which are Debian packages; missing: "
            f"{', '.join(missing) or 'root'}\n"
        )
        return 2
    with tempfile.TemporaryDirectory(prefix="image-check-") as folder:
        try:
            _build_and_check(Path(folder), build_arguments)
        except CheckFailedError as error:
            sys.stderr.write(f"{error}\n")
            return 1
    return 0


def _build_and_check(work: Path, build_arguments: Sequence[str]) -> None:
    builder = Builder(work=work)
    try:
        with _told("base", "debootstrap made what the Dockerfile starts from"):
            builder.make_base()
        with _told("build", "every step of the Dockerfile"):
            builder.build(build_arguments)
        with builder.mounted() as image:
            size = int(run_command("du", "-sb", str(image.root)).split()[0])
            _say("image", f"{size / 1e6:.0f} MB of files, user {image.uid}:{image.gid}")
            machine = Machine(image=image, work=work, compose=COMPOSE.parent)
            services = services_of(COMPOSE)
            _check_compose(machine, teacher=services["teacher"], student=services["student"])
            _check_model(machine, teacher=services["teacher"], student=services["student"])
    finally:
        builder.clear()


def _check_compose(machine: Machine, *, teacher: Service, student: Service) -> None:
    """The file's services, as they are."""
    with _serving(machine, "teacher", teacher):
        doctor = ("teacher-logits", "doctor", ADDRESS, "--locality", "require")
        with _running(machine, "doctor", replace(student, entrypoint=doctor, command=())) as visit:
            _expect_success(visit, within=ENDED_WITHIN_SECONDS)
        _say("doctor", "memory is shared across PID namespaces; no network and no /dev/shm are")
        _train(machine, student, names=[f"student-{n + 1}" for n in range(student.copies)])


def _check_model(machine: Machine, *, teacher: Service, student: Service) -> None:
    """The image's own command, with a small model that the image itself made."""
    folder = machine.work / "made"
    folder.mkdir()
    shutil.chown(folder, machine.image.uid, machine.image.gid)
    maker = student.mounting(folder, "/made", writable=True)
    maker = replace(maker, entrypoint=("python",), command=("-c", _MAKE_MODEL))
    with _running(machine, "maker", maker) as container:
        _expect_success(container, within=ENDED_WITHIN_SECONDS)
    plain = replace(teacher, command=None, folder=None)
    with _serving(machine, "model", plain.mounting(folder / "tiny", "/model", writable=False)):
        _train(machine, student, names=["student"])


def _train(machine: Machine, student: Service, *, names: Sequence[str]) -> None:
    with ExitStack() as stack:
        for each in [stack.enter_context(_running(machine, name, student)) for name in names]:
            _expect_success(each, within=ENDED_WITHIN_SECONDS)
            _say(each.name, each.said().strip())


@contextmanager
def _serving(machine: Machine, name: str, service: Service) -> Iterator[None]:
    """A teacher, from when it is healthy until it has drained at SIGTERM."""
    with _running(machine, name, service) as server:
        _wait_until_healthy(server)
        yield
        with _told(name, f"drained at SIGTERM as pid 1; it may take {service.stop_seconds:g} s"):
            server.signal("TERM")
            _expect_success(server, within=service.stop_seconds)


def _wait_until_healthy(server: Container) -> None:
    until = time.monotonic() + HEALTHY_WITHIN_SECONDS
    while not server.is_healthy():
        if server.process.poll() is not None or time.monotonic() > until:
            raise CheckFailedError(f"{server.name} did not become healthy:\n{server.said()}")
        time.sleep(1)
    _say(server.name, "SERVING, says the image's own health check")


@contextmanager
def _running(machine: Machine, name: str, service: Service) -> Iterator[Container]:
    container = machine.run(name, service)
    try:
        yield container
    finally:
        container.remove()


def _expect_success(container: Container, *, within: float) -> None:
    """Wait for exit code 0."""
    try:
        code = container.process.wait(within)
    except subprocess.TimeoutExpired:
        end = f"still runs after {within:g} s"
    else:
        if code == 0:
            return
        end = f"ended with {code}"
    raise CheckFailedError(f"{container.name} {end}:\n{container.said()}")


@contextmanager
def _told(name: str, line: str) -> Iterator[None]:
    """Say that something held, and how long it took."""
    started = time.monotonic()
    yield
    _say(name, f"{line} ({time.monotonic() - started:.1f} s)")


def _say(name: str, line: str) -> None:
    sys.stdout.write(f"{name:<10} {line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
