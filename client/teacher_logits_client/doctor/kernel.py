"""What the kernel lets us do, tried for real: memory that is shared without copies, and proof.

Each trial does what server and client do, in small, between two ends of one process: a
sealed slab, passed over a socket, mapped copy-on-write; the peer's process known beyond
doubt; a slab's file watched; pages filled ahead, and the dirtied ones found. What fails here is
streamed instead, visibly, or costs time, so nothing here is worse than a warning.
"""

from __future__ import annotations

import array
import mmap
import os
import platform
import select
import socket
from typing import TYPE_CHECKING

from teacher_logits.errors import SlabOpenError
from teacher_logits.slab import WriterSlab
from teacher_logits_client.doctor.findings import Finding, Verdict
from teacher_logits_client.line.file_watch import FileWatch

if TYPE_CHECKING:
    from collections.abc import Callable

_SO_PEERPIDFD = 77
_MADV_POPULATE_READ = 22
_PAGE_MAP = "/proc/self/pagemap"
_WATCH_SECONDS = 5
_STREAMED = "without it payloads are streamed, even on one node"


def kernel_findings() -> list[Finding]:
    """Try everything; one finding each."""
    if platform.system() != "Linux":
        return [
            Finding(
                name="kernel",
                verdict=Verdict.WARN,
                message=f"this is {platform.system()}: payloads are streamed, also on one node",
                cure="run trainer and server on Linux 6.5 or newer to share memory",
                facts={"system": platform.system(), "release": platform.release()},
            )
        ]
    return [
        Finding(
            name="kernel",
            verdict=Verdict.OK,
            message=f"Linux {platform.release()} on {platform.machine()}",
            facts={"system": "Linux", "release": platform.release()},
        ),
        _tried("sealed_slab", _seal_slab, cure=_SEAL_CURE),
        _tried("slab_passing", _pass_slab, cure=_PASS_CURE),
        _tried("peer_pidfd", _know_peer, cure=_PEER_CURE),
        _tried("pidfd_open", _watch_process, cure=_PIDFD_CURE),
        _tried("file_watch", _watch_file, cure=_WATCH_CURE),
        _tried("populate_read", _fill_pages, cure=_POPULATE_CURE),
        _tried("page_map", _find_dirty_page, cure=_PAGE_MAP_CURE),
    ]


_SEAL_CURE = (
    "memfd_create with F_SEAL_FUTURE_WRITE needs Linux 5.1, and a sandbox that lets it through "
    f"(gVisor does not); {_STREAMED}"
)
_PASS_CURE = (
    "allow AF_UNIX sockets of type SEQPACKET and passing descriptors over them (a seccomp or "
    f"AppArmor profile forbids it here); {_STREAMED}"
)
_PEER_CURE = (
    "use Linux 6.5 or newer; on older kernels peers are proven by pidfd_open and a second look, "
    "which fails where server and trainer have PID namespaces of their own: let them share one "
    "(docker --pid=container:NAME, Kubernetes shareProcessNamespace)"
)
_PIDFD_CURE = (
    "use Linux 5.3 or newer, and allow pidfd_open in the container's seccomp profile; SO_PEERPIDFD "
    "does the same where it works"
)
_WATCH_CURE = (
    "raise fs.inotify.max_user_instances: each session takes one of those that its user has, 128 "
    "unless set otherwise; without it steps are sent by the server once they are sealed, which "
    "takes longer, and nothing else changes"
)
_POPULATE_CURE = (
    "use Linux 5.14 or newer to fill pages ahead; without it the first read of each page costs a "
    "page fault, and nothing else changes"
)
_PAGE_MAP_CURE = (
    f"let the process read {_PAGE_MAP}; without it returning a lease drops all pages of its room "
    "and not only those that were written into, which costs page faults later"
)


def _tried(name: str, trial: Callable[[], str], *, cure: str) -> Finding:
    """Run a trial, which says what worked, or raises ``OSError`` with what did not."""
    try:
        return Finding(name=name, verdict=Verdict.OK, message=trial())
    except (OSError, AttributeError, SlabOpenError) as error:
        return Finding(
            name=name, verdict=Verdict.WARN, message=f"does not work here: {error}", cure=cure
        )


def _seal_slab() -> str:
    slab = WriterSlab("doctor", mmap.PAGESIZE)
    try:
        try:
            mmap.mmap(slab.fd, slab.total_bytes, flags=mmap.MAP_SHARED).close()
        except PermissionError:
            return "a memfd slab can be sealed against every later writer (F_SEAL_FUTURE_WRITE)"
        raise OSError("a sealed slab could still be mapped for writing")
    finally:
        slab.close()


def _pass_slab() -> str:
    slab = WriterSlab("doctor", mmap.PAGESIZE)
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with left, right:
        rights = array.array("i", [slab.fd]).tobytes()
        left.sendmsg([b"slab"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        _, ancillary, _, _ = right.recvmsg(16, socket.CMSG_SPACE(4), socket.MSG_CMSG_CLOEXEC)
        total = slab.total_bytes
        received = array.array("i")
        received.frombytes(ancillary[0][2] if ancillary else b"")
        if not received:
            slab.close()
            raise OSError("the descriptor did not arrive")
    try:
        _check_copy_on_write(received[0], total)
    finally:
        os.close(received[0])
        slab.close()
    return "a slab passed over a SEQPACKET socket can be mapped copy-on-write"


def _check_copy_on_write(fd: int, total: int) -> None:
    """Refuse a map whose writes reach other readers."""
    kept = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0)
    with (
        mmap.mmap(fd, total, flags=kept, prot=mmap.PROT_READ | mmap.PROT_WRITE) as mine,
        mmap.mmap(fd, total, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ) as theirs,
    ):
        before = theirs[-1]
        mine[-1] = before ^ 0xFF
        if theirs[-1] != before:
            raise OSError("a private map's writes reached another reader")


def _know_peer() -> str:
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with left, right:
        os.close(left.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD))
    return "the process at a socket's other end is known beyond doubt (SO_PEERPIDFD)"


def _watch_process() -> str:
    pidfd = os.pidfd_open(os.getpid())
    try:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        poll.poll(0)
    finally:
        os.close(pidfd)
    return "the end of a process can be seen by pidfd_open"


def _watch_file() -> str:
    slab = WriterSlab("doctor", mmap.PAGESIZE)
    try:
        watch = FileWatch()
        try:
            watch.add(slab.fd)
            slab.touch()
            poll = select.poll()
            poll.register(watch.fd, select.POLLIN)
            if not poll.poll(_WATCH_SECONDS * 1000):
                raise OSError("a watch was not told that its file was touched")
        finally:
            watch.close()
    finally:
        slab.close()
    return "who waits for a seal is woken by it (inotify)"


def _fill_pages() -> str:
    with mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as pages:
        pages.madvise(_MADV_POPULATE_READ)
    return "pages can be filled ahead of their first read (MADV_POPULATE_READ)"


def _find_dirty_page() -> str:
    fd = os.open(_PAGE_MAP, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if len(os.pread(fd, 8, 0)) != 8:
            raise OSError(f"{_PAGE_MAP} is empty")
    finally:
        os.close(fd)
    return "pages that a reader wrote into can be told from the others (pagemap)"
