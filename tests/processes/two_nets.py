"""Two network namespaces with a cable between them that can be pulled out.

Nobody is told when it is: what is sent is lost, and no end of a connection arrives. Unix sockets go
by the folder that they lie in, and do not notice.
"""

import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from tests.processes.running import program

SERVER, CLIENT = "10.77.0.1", "10.77.0.2"
_ENDS = {SERVER: "near", CLIENT: "far"}
_ESTABLISHED = "01"


class Cable:
    """The cable. Programs run at either end, which are named by their addresses."""

    def __init__(self, pids: dict[str, int]) -> None:
        self._pids = pids

    def pull(self, end: str) -> None:
        """Pull it out at one end; what runs at the other sees nothing at all."""
        _ip(self._pids[end], "link", "set", _ENDS[end], "down")

    def plug(self, end: str) -> None:
        """Put it back."""
        _ip(self._pids[end], "link", "set", _ENDS[end], "up")

    def run(
        self, end: str, command: Sequence[str], *, pass_fds: Sequence[int] = ()
    ) -> AbstractContextManager["subprocess.Popen[str]"]:
        """Run a program at an end; it is killed in the end."""
        return program([*_inside(self._pids[end]), *command], pass_fds=pass_fds)

    def connections(self, end: str, port: int) -> int:
        """How many connections a port has there that nobody has ended."""
        folder = Path(f"/proc/{self._pids[end]}/net")
        tables = [(folder / name).read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
        rows = [line.split() for lines in tables for line in lines]
        return sum(row[1].endswith(f":{port:04X}") and row[3] == _ESTABLISHED for row in rows)


@contextmanager
def cable() -> Iterator[Cable]:
    """Make the namespaces and the cable, plugged in at both ends."""
    with _namespace() as one, _namespace() as other:
        pids = {SERVER: one, CLIENT: other}
        _ip(one, "link", "add", _ENDS[SERVER], "type", "veth", "peer", "name", _ENDS[CLIENT])
        _ip(one, "link", "set", _ENDS[CLIENT], "netns", str(other))
        for address, pid in pids.items():
            _ip(pid, "link", "set", "lo", "up")
            _ip(pid, "address", "add", f"{address}/24", "dev", _ENDS[address])
            _ip(pid, "link", "set", _ENDS[address], "up")
        yield Cable(pids)


def why_not() -> str:
    """What keeps this process from making one; empty where it can."""
    missing = [name for name in ("unshare", "nsenter", "ip") if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} is not installed"
    try:
        with cable():
            return ""
    except (OSError, subprocess.CalledProcessError) as error:
        return str(error)


@contextmanager
def _namespace() -> Iterator[int]:
    """Make a network namespace; yields the process that holds it."""
    with program(["unshare", "--net", "--", "sh", "-c", "echo && exec cat"]) as holder:
        assert holder.stdout is not None
        if not holder.stdout.readline():
            raise OSError("no network namespace is to be had")
        yield holder.pid


def _inside(pid: int) -> tuple[str, ...]:
    return ("nsenter", f"--net=/proc/{pid}/ns/net", "--")


def _ip(pid: int, *command: str) -> None:
    subprocess.run([*_inside(pid), "ip", *command], check=True, capture_output=True)
