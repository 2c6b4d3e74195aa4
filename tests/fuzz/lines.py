"""The broker: packets of strangers, students and publishers, with descriptors of any kind.

    input   WHO packets, each behind its length:   KIND request

WHO is `n` for somebody new, `s` for a student's line, `p` for a publisher's; in upper case the line
is left with its replies unread. KIND is a byte: how many descriptors ride beside the packet, and
what they are. Two kinds are no packets: a publisher writes what follows into its slab's room, and
marks it (`WRITES`), or over the control page (`SCRIBBLES`).
"""

from __future__ import annotations

import itertools
import os
import socket
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from tests.compat.golden_bytes import instances_of
from tests.fuzz.house import LEASE, PAYLOAD, RESERVED, SESSION, House, word_of_status
from tests.fuzz.surface import PATIENCE_SECONDS, joined, split
from tests.server.services import registry_rig as rig

from teacher_logits.payload import Extent
from teacher_logits.slab import CONTROL_BYTES, WriterSlab
from teacher_logits.v1 import line_pb2, registry_service_pb2
from teacher_logits.v1 import teacher_logits_service_pb2 as student
from teacher_logits.wire.payloads import extent_to_wire, payload_to_wire

if TYPE_CHECKING:
    from collections.abc import Sequence

SLAB = "fuzz-slab"
PLACE = Extent(slab_id=SLAB, offset_bytes=0, size_bytes=4096, slot=0, generation=2)
_LAST_OF_A_LINE = frozenset({"seal", "abandon", "drop_slab", "release"})
_SLAB_BYTES = 64 * 1024
_PACKET_BYTES = 1 << 16
_LAST_CALL = (1 << 63) + 1
"""The call id of what is asked behind every input."""
WRITES, SCRIBBLES = 0xFF, 0xF8
_FLOOD = 253
"""The most that the kernel passes at once."""


class Descriptors:
    """Descriptors of every kind, to be passed; they stay here."""

    def __init__(self) -> None:
        self.slab = WriterSlab(SLAB, _SLAB_BYTES)
        self._control = self.slab._map[:CONTROL_BYTES]
        self._pipe = os.pipe()
        self._sockets = socket.socketpair()
        bare = os.memfd_create("bare", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        short = os.memfd_create("short", os.MFD_CLOEXEC)
        os.ftruncate(short, 100)
        self._own = [
            *self._pipe, bare, short, os.open("/dev/zero", os.O_RDONLY), os.open("/", os.O_PATH),
            os.eventfd(0),
        ]  # fmt: skip
        self.kinds = [self.slab.fd, self.slab.fd, *self._own, *(s.fileno() for s in self._sockets)]

    def of(self, kind: int) -> list[int]:
        """What a packet's first byte says: none mostly, one, two, or as many as go."""
        count = (0, 1, 1, 2, 0, 1, 3, _FLOOD)[kind & 7]
        return [self.kinds[(kind >> 3) % len(self.kinds)]] * count

    def write(self, data: bytes, *, is_room: bool) -> None:
        """Write into the slab's room from its start, and mark its first slot; or anywhere."""
        if is_room:
            self.slab.room(PLACE)[: len(data)] = data[: PLACE.size_bytes]
            self.slab.mark(PLACE.slot, PLACE.generation)
        else:
            self.slab._map[: len(data)] = data

    def restore(self) -> None:
        """Have the slab as it was made."""
        self.slab._map[: len(self._control)] = self._control

    def close(self) -> None:
        self.slab.close()
        for each in self._own:
            os.close(each)
        for one in self._sockets:
            one.close()


class Lines:
    """The surface."""

    name = "line"

    def __init__(self, house: House) -> None:
        self._house = house
        self._descriptors = Descriptors()
        self._lines: dict[str, tuple[dict[str, str], rig.LineEnd]] = {}
        self._numbers = itertools.count()
        self._broker = house.server.address.removeprefix("unix:") + ".broker"

    def seeds(self) -> Sequence[bytes]:
        students = [b"\0" + each.SerializeToString() for each in self._requests_of_students()]
        right = bytes([WRITES]) + rig.bytes_of(self._house.payload("line"))
        publishers = self._packets_of_publishers()
        golden = [b"\0" + each.data for each in instances_of("LineRequest")]
        hello = line_pb2.LineRequest(call_id=1, hello=line_pb2.HelloRequest(session_id=SESSION))
        return [
            b"n" + joined([b"\0" + hello.SerializeToString()]),
            *(b"s" + joined([each]) for each in (*students, *golden)),
            *(b"p" + joined([each]) for each in (*publishers, *golden)),
            b"s" + joined(students),
            b"p" + joined(publishers),
            b"p" + joined([right, publishers[3]]),
            b"p" + joined([right, publishers[2], publishers[3]]),
            b"p" + joined([publishers[0], bytes([SCRIBBLES]) + bytes(100), right, publishers[3]]),
            b"S" + joined(students),
            b"P" + joined(publishers[:3]),
        ]

    def run(self, data: bytes) -> str:
        who = data[:1].decode("latin-1")
        packets = [(each[:1] or b"\0", each[1:]) for each in split(data[1:])]
        if who.lower() not in ("s", "p"):
            return self._knock(packets)
        names, line = self._line(who.lower())
        is_over = who.isupper()
        try:
            for kind, packet in packets:
                if kind[0] in (WRITES, SCRIBBLES):
                    self._descriptors.write(packet, is_room=kind[0] == WRITES)
                    is_over = True
                    continue
                for name, own in names.items():
                    packet = packet.replace(name.encode(), own.encode())
                self._send(line.socket, packet, kind[0])
            if who.isupper():
                return self._leave(who.lower(), "LEFT")
            word, is_spent = self._answered(line, names[SESSION])
            return self._leave(who, word) if is_spent or is_over else word
        except (BrokenPipeError, ConnectionResetError, EOFError):
            return self._leave(who.lower(), "HUNG UP")

    def check(self) -> None:
        self._house.assert_serves()

    def close(self) -> None:
        for who in list(self._lines):
            self._leave(who, "")
        self._descriptors.close()

    def _line(self, who: str) -> tuple[dict[str, str], rig.LineEnd]:
        """A settled line of a student with a lease, or of a publisher with a reservation.

        Its ids come by their placeholders.
        """
        if who not in self._lines:
            opened = self._student() if who == "s" else self._publisher()
            self._lines[who] = opened
        return self._lines[who]

    def _student(self) -> tuple[dict[str, str], rig.LineEnd]:
        opened = self._house.wire.student(self._house.student_profile())
        lease = self._house.score(opened.session_id)
        assert lease.extent is not None
        names = {
            SESSION: opened.session_id,
            LEASE: lease.lease_id,
            PAYLOAD: lease.payload.payload_id,
            SLAB: lease.extent.slab_id,
        }
        return names, opened.own_line

    def _publisher(self) -> tuple[dict[str, str], rig.LineEnd]:
        opened = self._house.wire.publisher(self._house.teacher_profile("line"))
        line, slab = opened.own_line, self._descriptors.slab
        self._descriptors.restore()
        slab_id = f"{SLAB[:5]}{next(self._numbers):04d}"  # of that length
        put = line_pb2.PutSlabRequest(slab_id=slab_id, size_bytes=slab.total_bytes)
        line.call([slab.fd], put_slab=put)
        step = next(self._numbers)
        reserved = opened.reserve(self._house.payload("line", step=step)).payload_id
        return {SESSION: opened.session_id, RESERVED: reserved, SLAB: slab_id}, line

    def _leave(self, who: str, word: str) -> str:
        names, line = self._lines.pop(who)
        # Closed first: room of a line that ends unannounced is in quarantine while we live.
        self._house.close_session(names[SESSION])
        self._house.wire.lines.remove(line)
        line.close()
        if who == "p":
            self._house.reclaim("line")
        return word

    def _send(self, end: socket.socket, packet: bytes, kind: int) -> None:
        descriptors = self._descriptors.of(kind)
        with suppress(TimeoutError):
            if descriptors:
                socket.send_fds(end, [packet[:_PACKET_BYTES]], descriptors)
            else:
                end.send(packet[:_PACKET_BYTES])

    def _answered(self, line: rig.LineEnd, session_id: str) -> tuple[str, bool]:
        """Read all replies up to that of a last good call; the last word before it counts.

        Say too whether what the line had reserved, or leased, is used up.
        """
        renew = student.RenewSessionRequest(session_id=session_id)
        line.socket.send(line_pb2.LineRequest(call_id=_LAST_CALL, renew=renew).SerializeToString())
        word, is_over = "OK", False
        while True:
            reply = line.receive()
            is_over |= reply.WhichOneof("body") in _LAST_OF_A_LINE
            while line.descriptors:
                os.close(line.descriptors.pop())
            if reply.status:
                word = word_of_status(reply.status)
            if reply.call_id == _LAST_CALL:
                return word, is_over

    def _knock(self, packets: list[tuple[bytes, bytes]]) -> str:
        """Somebody of whom the server knows nothing: one answer, and the end of the line."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as end:
            end.settimeout(PATIENCE_SECONDS)
            end.connect(self._broker)
            with suppress(BrokenPipeError, ConnectionResetError):
                for kind, packet in packets:
                    self._send(end, self._house.with_ids(packet), kind[0])
                end.shutdown(socket.SHUT_WR)
            word = "CLOSED"
            with suppress(ConnectionResetError):
                while packet := end.recv(_PACKET_BYTES):
                    reply = line_pb2.LineReply.FromString(packet)
                    assert reply.status, "a stranger is let in"
                    word = word_of_status(reply.status)
            return word

    def _requests_of_students(self) -> list[line_pb2.LineRequest]:
        own: dict[str, Any] = {"session_id": SESSION}
        asked: dict[str, Any] = {"request_id": "fuzz"}
        bodies: list[dict[str, object]] = [
            {"get_slab": line_pb2.GetSlabRequest(slab_id=SLAB)},
            {"acquire": student.AcquirePayloadRequest(**own, **asked, payload_id=PAYLOAD)},
            {"release": student.ReleasePayloadRequest(**own, lease_id=LEASE)},
            {"renew": student.RenewSessionRequest(**own)},
            {"want_steps": line_pb2.WantStepsRequest(**own, first_step=1, count=2)},
            {"want_steps": line_pb2.WantStepsRequest(**own, first_step=1)},
        ]
        return [_request(number + 1, body) for number, body in enumerate(bodies)]

    def _packets_of_publishers(self) -> list[bytes]:
        payload = self._house.payload("line", step=1)
        own: dict[str, Any] = {"session_id": SESSION}
        named: dict[str, Any] = {**own, "payload_id": RESERVED}
        place = extent_to_wire(PLACE)
        slab = line_pb2.PutSlabRequest(
            slab_id="other", size_bytes=self._descriptors.slab.total_bytes
        )
        reserve = registry_service_pb2.ReservePayloadRequest(
            **own,
            request_id="fuzz",
            payload=payload_to_wire(payload),
            row_positions=rig.positions_of(payload),
        )
        bodies: list[tuple[int, dict[str, object]]] = [
            (1, {"put_slab": slab}),
            (0, {"reserve": reserve}),
            (0, {"announce": line_pb2.AnnouncePayloadRequest(**named, extent=place)}),
            (0, {"seal": registry_service_pb2.SealPayloadRequest(**named, extent=place)}),
            (0, {"abandon": registry_service_pb2.AbandonPayloadRequest(**named)}),
            (0, {"drop_slab": line_pb2.DropSlabRequest(slab_id=SLAB)}),
        ]
        return [
            bytes([kind]) + _request(number + 1, body).SerializeToString()
            for number, (kind, body) in enumerate(bodies)
        ]


def _request(call_id: int, body: dict[str, object]) -> line_pb2.LineRequest:
    return line_pb2.LineRequest(call_id=call_id, **body)  # type: ignore[arg-type]
