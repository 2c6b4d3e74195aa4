"""The kernel's page map: which pages of a private map are the reader's own.

A page of the reader's own is anonymous memory, and the page map tells it from a page of the file.
Linux 6.7 finds them itself (``PAGEMAP_SCAN``); where it cannot, the map is read, eight bytes a
page, which takes five to twenty times as long.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import struct

import torch

PAGE_BYTES = mmap.PAGESIZE
PAGE_MAP = "/proc/self/pagemap"
MOST_RUNS = 256

# PAGEMAP_SCAN of linux/fs.h: _IOWR('f', 16, struct pm_scan_arg), twelve numbers of 64 bits.
_SCAN_ARGUMENTS = struct.Struct("=12Q")
_SCAN = 3 << 30 | _SCAN_ARGUMENTS.size << 16 | ord("f") << 8 | 16
_WALK_END = 4  # the number in it that says how far the scan came
_IS_FILE, _IS_PRESENT, _IS_SWAPPED = 1 << 2, 1 << 3, 1 << 4

# The upper bits of an entry of the map: 61 page of a file, 62 swapped out, 63 present.
_ENTRY_BYTES = 8
_FLAG_SHIFT, _OF_FILE, _SOMEWHERE = 61, 0b001, 0b110
_PAGES_A_READ = 1 << 16

Run = tuple[int, int]


def own_pages(address: int, size_bytes: int) -> list[Run]:
    """Return (address, bytes) of each run of pages that are the reader's own.

    Never more than ``MOST_RUNS``: of more, one of them spans others and what lies between.

    Raises:
        OSError: this process may not see its page map.
    """
    # Opened anew each time: the file speaks of the process that opened it, and we may be a fork.
    fd = os.open(PAGE_MAP, os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            return _scanned(fd, address, size_bytes)
        except OSError:  # an older kernel, or one that does not let us
            return _read(fd, address, size_bytes)
    finally:
        os.close(fd)


def _scanned(fd: int, address: int, size_bytes: int) -> list[Run]:
    end = address + size_bytes
    regions = (ctypes.c_uint64 * (3 * MOST_RUNS))()
    where = (ctypes.addressof(regions), MOST_RUNS)
    inverted, wanted, any_of, told = _IS_FILE, _IS_FILE, _IS_PRESENT | _IS_SWAPPED, _IS_FILE
    arguments = bytearray(
        _SCAN_ARGUMENTS.pack(
            _SCAN_ARGUMENTS.size, 0, address, end, 0, *where, 0, inverted, wanted, any_of, told
        )
    )
    count = fcntl.ioctl(fd, _SCAN, arguments)
    runs = [(regions[3 * n], regions[3 * n + 1] - regions[3 * n]) for n in range(count)]
    if count == MOST_RUNS and _SCAN_ARGUMENTS.unpack(arguments)[_WALK_END] < end:
        runs[-1] = (runs[-1][0], end - runs[-1][0])
    return runs


def _read(fd: int, address: int, size_bytes: int) -> list[Run]:
    first, count = address // PAGE_BYTES, size_bytes // PAGE_BYTES
    runs: list[Run] = []
    for start in range(0, count, _PAGES_A_READ):
        pages = min(_PAGES_A_READ, count - start)
        entries = bytearray(pages * _ENTRY_BYTES)
        if os.preadv(fd, [entries], (first + start) * _ENTRY_BYTES) != len(entries):
            raise OSError(f"{PAGE_MAP} ends early")
        for page, run in _runs(entries):
            runs.append((address + (start + page) * PAGE_BYTES, run * PAGE_BYTES))
    if len(runs) > MOST_RUNS:
        spanning = runs[MOST_RUNS - 1][0]
        runs[MOST_RUNS - 1 :] = [(spanning, runs[-1][0] + runs[-1][1] - spanning)]
    return runs


def _runs(entries: bytearray) -> list[Run]:
    """Return (first page, pages) of each run of own pages among entries, of too many but one."""
    flags = torch.frombuffer(entries, dtype=torch.int64) >> _FLAG_SHIFT
    own = ((flags & _OF_FILE) == 0) & ((flags & _SOMEWHERE) != 0)
    if not bool(own.any()):
        return []
    edges = torch.diff(own.to(torch.int8), prepend=torch.zeros(1, dtype=torch.int8))
    starts = (edges == 1).nonzero().flatten()
    ends = (edges == -1).nonzero().flatten()
    if len(ends) < len(starts):
        ends = torch.cat([ends, torch.tensor([len(own)])])
    if len(starts) > MOST_RUNS:
        starts, ends = starts[:1], ends[-1:]
    return list(zip(starts.tolist(), (ends - starts).tolist(), strict=True))
