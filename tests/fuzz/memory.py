"""Shared memory of a writer that means harm: slabs, their control pages, and session pages.

A memfd is filled with an input and passed to a reader, who maps it, opens a lease there and reads.
"""

from __future__ import annotations

import fcntl
import os
import struct
from typing import TYPE_CHECKING

from tests.client.openers.test_openers import a_payload
from tests.fuzz.surface import joined, split

from teacher_logits.errors import TeacherLogitsError
from teacher_logits.payload import Extent
from teacher_logits.session_page import CHALLENGE_BYTES, PAGE_BYTES, ReaderPage
from teacher_logits.slab import CONTROL_BYTES, HEADER_BYTES
from teacher_logits.terms import LeaseTerms
from teacher_logits_client.config import MapMode
from teacher_logits_client.line import PassedSlab
from teacher_logits_client.openers.shared_memory import SharedMemoryOpener

if TYPE_CHECKING:
    from collections.abc import Sequence

_ADD_SEALS = 1033
_SHRINK = 0x2
_PLACE = struct.Struct("<qqiQ")
_HEADER = struct.Struct("<8sIIQI")
_SLAB_BYTES = 4096
_TOTAL = CONTROL_BYTES + _SLAB_BYTES
_SIZES = (_TOTAL, 0, 1, CONTROL_BYTES, _TOTAL - 1, 1 << 20)
_NEVER = float("inf")
_SEALED, _PAGE = 1, 2


class Memory:
    """The surface.

        input   HOW, then three parts, each behind its length:
                place of the extent | header and slots | what the writer writes there meanwhile

    HOW: bit 0 closes the slab against shrinking, bit 1 has the second part be a session page;
    from bit 2 on: what the memfd's size is.
    """

    name = "memory"

    def seeds(self) -> Sequence[bytes]:
        place = _PLACE.pack(0, _SLAB_BYTES, 0, 2)
        slots = struct.pack("<4Q", 2, 1, 4, 3)
        header = _HEADER.pack(b"TLSLAB\r\n", 1, (CONTROL_BYTES - 64) // 8, _SLAB_BYTES, 0)
        control = header.ljust(HEADER_BYTES, b"\0") + slots
        meanwhile = header.ljust(HEADER_BYTES, b"\0") + struct.pack("<Q", 4)
        page = bytes(CHALLENGE_BYTES).ljust(64, b"\0") + struct.pack("<Q", 2).ljust(64, b"\0")
        return [
            bytes([how]) + joined(parts)
            for how in (_SEALED, 0, *(_SEALED | size << 2 for size in range(1, 6)))
            for parts in ([place, control, b""], [place, control, meanwhile])
        ] + [bytes([_SEALED | _PAGE]) + joined([place, page, page])]

    def run(self, data: bytes) -> str:
        how = data[0] if data else 0
        place, first, then = (*split(data[1:]), b"", b"", b"")[:3]
        size = PAGE_BYTES if how & _PAGE else _SIZES[(how >> 2) % len(_SIZES)]
        descriptor = os.memfd_create("fuzz", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        writer = os.dup(descriptor)
        try:
            os.ftruncate(descriptor, size)
            os.pwrite(descriptor, first[:size], 0)
            if how & _SEALED:
                fcntl.fcntl(descriptor, _ADD_SEALS, _SHRINK)
            if how & _PAGE:
                return self._read_page(descriptor, writer, then)
            return self._read_slab(descriptor, writer, place, then, how)
        except TeacherLogitsError as error:
            return error.reason
        finally:
            os.close(descriptor)
            os.close(writer)

    def check(self) -> None:
        assert self.run(self.seeds()[0]) == "OK"

    def close(self) -> None:
        pass

    def _read_page(self, descriptor: int, writer: int, then: bytes) -> str:
        page = ReaderPage(descriptor, CHALLENGE_BYTES)
        os.pwrite(writer, then[:PAGE_BYTES], 0)
        return f"PAGE {page.is_revoked('l')}"

    def _read_slab(self, descriptor: int, writer: int, place: bytes, then: bytes, how: int) -> str:
        offset, size, slot, generation = _PLACE.unpack_from(place.ljust(_PLACE.size, b"\0"))
        extent = Extent(
            slab_id="fuzz",
            offset_bytes=offset,
            size_bytes=size,
            slot=slot,
            generation=generation,
        )
        payload = a_payload(_SLAB_BYTES)
        lease = LeaseTerms(lease_id="l", payload=payload, writer_id="w", extent=extent)
        mode = MapMode.READ_ONLY if how & 0x80 else MapMode.COW

        def get_slab(slab_id: str, seconds: float) -> PassedSlab:
            return PassedSlab(descriptor=os.dup(descriptor), size_bytes=size, device=None)

        opener = SharedMemoryOpener(get_slab, mode=mode)
        try:
            opened = opener.open(lease, until=_NEVER)
            try:
                for column in payload.columns:
                    bytes(opened.bytes_of(column))
                os.pwrite(writer, then[:CONTROL_BYTES], 0)
            finally:
                opened.finish(outlived=False)
        finally:
            opener.close()
        return "OK"
