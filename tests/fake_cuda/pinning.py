"""Host memory that was pinned, and whether it may be: pinning private pages breaks them off."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tests.fake_cuda.numbers import refusal

if TYPE_CHECKING:
    from tests.fake_cuda.log import Log


class Pinned:
    """Ranges by address."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._ranges: dict[int, int] = {}

    def pin(self, address: int, size_bytes: int) -> None:
        """Note a range; refuse what is pinned (712) or not mapped (1)."""
        if any(
            start < address + size_bytes and address < start + length
            for start, length in self._ranges.items()
        ):
            raise refusal(712, "pin", f"{address:#x} is pinned already")
        flags = _flags_of(address, size_bytes)
        if not flags:
            raise refusal(1, "pin", f"{size_bytes} bytes at {address:#x} are not all mapped")
        if any("p" in each for each in flags):
            self._log.fault("pin", "pinned a private mapping: its pages are copies from now on")
        self._ranges[address] = size_bytes

    def unpin(self, address: int) -> None:
        """Forget a range."""
        if self._ranges.pop(address, None) is None:
            raise refusal(713, "unpin", f"{address:#x} was not pinned")

    def around(self, address: int) -> tuple[int, int]:
        """Return the pinned range that an address lies in, else the address and no bytes."""
        for start, length in self._ranges.items():
            if start <= address < start + length:
                return start, length
        return address, 0


def _flags_of(address: int, size_bytes: int) -> list[str]:
    """Return the flags of the mappings that cover a range; none if there is a gap."""
    found, reached = [], address
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, flags = line.split()[:2]
        start, end = (int(each, 16) for each in span.split("-"))
        if start <= reached < end:
            found.append(flags)
            reached = end
            if reached >= address + size_bytes:
                return found
    return []
