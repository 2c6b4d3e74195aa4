"""One process of a pretended node: its devices, what it has allocated and opened, and its log.

The part of the fake driver that knows memory; ``driver.FakeCuda`` hands it over and copies it.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from typing import TYPE_CHECKING

from tests.fake_cuda.addresses import AddressBook
from tests.fake_cuda.allocations import Allocation
from tests.fake_cuda.log import Log
from tests.fake_cuda.numbers import refusal
from tests.fake_cuda.pinning import Pinned
from tests.fake_cuda.streams import Streams
from tests.fake_cuda.visible import ONE_GPU, Visible

from teacher_logits.device_memory import MemoryKind, Whereabouts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from tests.fake_cuda.allocations import Memory, Opened
    from tests.fake_cuda.visible import VisibleDevice

    from teacher_logits.device_memory import Device


class FakeProcess:
    """What one process has of its devices. ``log`` is what it was asked."""

    def __init__(
        self,
        folder: Path,
        *,
        devices: Sequence[VisibleDevice] = (ONE_GPU,),
        no_peer_access: Iterable[tuple[str, str]] = (),
        peer_error: int = 217,
        pid_namespace: int | None = None,
        memory_bytes: int | None = None,
    ) -> None:
        """``no_peer_access``: pairs of UUIDs; ``pid_namespace``: pretend to be in another one;
        ``memory_bytes``: what all allocations together may take, else out of memory (2).
        """
        self._visible = Visible(devices, no_peer_access=no_peer_access, peer_error=peer_error)
        self._namespace = pid_namespace or os.stat("/proc/self/ns/pid").st_ino
        self._memory_bytes = memory_bytes
        self.log = Log(folder)
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._addresses = AddressBook()
        self._allocations: dict[int, Allocation] = {}
        self._opened: dict[tuple[bytes, str], Opened] = {}
        self._pinned = Pinned(self.log)
        self._contexts: set[str] = set()
        self._streams = Streams()
        left = weakref.finalize(self, _give_up, self._pid, self._allocations, self._addresses)
        left.atexit = False

    def devices(self) -> tuple[Device, ...]:
        """Return the devices that this process sees."""
        return self._visible.devices

    # --- memory -------------------------------------------------------------

    def allocate(
        self, size_bytes: int, *, device: Device, kind: MemoryKind = MemoryKind.PLAIN
    ) -> int:
        """Return the address of new memory; the tests may ask for another kind of it."""
        with self._asked("allocate", device, size_bytes=size_bytes) as note:
            taken = sum(each.size_bytes for each in self._allocations.values())
            if size_bytes <= 0:
                raise refusal(1, "allocate", f"{size_bytes} bytes")
            if self._memory_bytes is not None and taken + size_bytes > self._memory_bytes:
                raise refusal(2, "allocate", f"{taken} of {self._memory_bytes} bytes are taken")
            made = Allocation.make(size_bytes, uuid=device.uuid, kind=kind)
            made.address = self._addresses.map(made.fd, size_bytes)
            self._allocations[made.address] = made
            note(made.serial, made.address)
            return made.address

    def free(self, address: int, *, device: Device) -> None:
        """Give memory back; a fault is noted if a living process has it open."""
        with self._asked("free", device, address=address) as note:
            made = self._allocations.get(address)
            if made is None or made.uuid != device.uuid:
                raise refusal(1, "free", f"nothing was allocated at {address:#x} of {device.uuid}")
            note(made.serial, address)
            if made.is_open_elsewhere():
                self.log.fault("free", "freed while a reader has it open", serial=made.serial)
            del self._allocations[address]
            made.spoil()
            self._addresses.give_back(address, made.size_bytes)

    def locate(self, address: int) -> Whereabouts:
        """Return what lies at an address: allocated here, opened here, pinned, or unknown."""
        with self._lock:
            base, size_bytes = self._pinned.around(address)
            kind = MemoryKind.HOST if size_bytes else MemoryKind.UNKNOWN
            uuid = ""
            for each in self._mapped():
                if each.address <= address < each.address + each.size_bytes:
                    base, size_bytes, kind = each.address, each.size_bytes, each.kind
                    uuid = "" if kind is MemoryKind.HOST else each.uuid
        return Whereabouts(
            kind=kind, device=self._visible.find(uuid), base=base, allocation_bytes=size_bytes
        )

    # --- within -------------------------------------------------------------

    @contextlib.contextmanager
    def _asked(
        self, call: str, device: Device | None, **about: int
    ) -> Iterator[Callable[[bytes, int], None]]:
        """Write one call to the log, as it went; make the context of its device."""
        uuid = device.uuid if device else ""
        with self._lock, self.log.asked(call, uuid=uuid, **about) as note:
            if os.getpid() != self._pid:
                raise refusal(3, call, "a forked child has no context of its own")
            if device is not None:
                self._visible.check(call, device)
                if uuid not in self._contexts:
                    self._contexts.add(uuid)
                    self.log.note("context", uuid=uuid)
            yield note

    def _check_range(self, call: str, address: int, size_bytes: int) -> None:
        """Refuse bytes that do not lie in one allocation that is had here."""
        for each in self._mapped():
            if each.address <= address and address + size_bytes <= each.address + each.size_bytes:
                return
        raise refusal(1, call, f"{size_bytes} bytes at {address:#x} are in no allocation")

    def _mapped(self) -> list[Memory]:
        return [*self._allocations.values(), *self._opened.values()]

    def _allocation_at(self, address: int) -> Allocation | None:
        with self._lock:
            for made in self._allocations.values():
                if made.address <= address < made.address + made.size_bytes:
                    return made
        return None


def _give_up(pid: int, allocations: dict[int, Allocation], addresses: AddressBook) -> None:
    """Take back what a driver's process kept to its end: many tests share one process."""
    if os.getpid() != pid:
        return
    for made in allocations.values():
        made.spoil()
        addresses.give_back(made.address, made.size_bytes)
