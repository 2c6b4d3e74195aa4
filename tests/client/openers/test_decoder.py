"""Streams that come encoded: decoded as they come, taken up where they broke, and checked."""

from __future__ import annotations

import itertools
import logging
import threading
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.encoded import Written, chunk, rows_of_logits, written

from teacher_logits.encodings import (
    CODEC_FACT,
    Encoding,
    IdCodec,
    Plane,
    StreamCodec,
    ValueCodec,
    encoding_of,
)
from teacher_logits.errors import (
    ChecksumError,
    PayloadInvalidError,
    StreamBrokenError,
)
from teacher_logits.layout import ColumnKind, ElementType
from teacher_logits.terms import LeaseTerms
from teacher_logits_client.openers import decoder as decoding
from teacher_logits_client.openers.buffers import BufferPool
from teacher_logits_client.openers.decoder import Decoder
from teacher_logits_client.openers.stream import StreamOpener

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from teacher_logits.payload import Payload

NEVER = float("inf")
LENGTHS = (3, 0, 5, 4)
LOGITS = torch.randn(12, 90, generator=torch.Generator().manual_seed(3)).mul_(4).bfloat16()
PAYLOAD = written(LOGITS, top_k=7, row_lengths=LENGTHS, bad_rows=(2,))
LOSSLESS = [("bfloat16_exact", "packed18"), ("bfloat16_exact", "planes24"), ("float32", "planes24")]


def bits(columns: dict[ColumnKind, torch.Tensor]) -> dict[ColumnKind, bytes]:
    return {
        kind: bytes(each.contiguous().view(torch.uint8).flatten().tolist())
        for kind, each in columns.items()
    }


def decoded(
    source: Written, encoding: Encoding, cuts: Sequence[int] = ()
) -> dict[ColumnKind, torch.Tensor]:
    """The columns of a payload after their way, in chunks that end at ``cuts``."""
    data, room = source.encoded(encoding), bytearray(b"\x55" * source.payload.size_bytes)
    sink = Decoder(source.payload, encoding, memoryview(room))
    bounds = [0, *sorted(cuts), len(data)]
    for start, stop in itertools.pairwise(bounds):
        sink.take(memoryview(data)[start:stop], start)
    sink.finish()
    return Written(payload=source.payload, room=memoryview(room)).columns


@pytest.mark.parametrize(("values", "ids"), LOSSLESS)
@settings(max_examples=25)
@given(data=st.data())
def test_what_loses_nothing_comes_back_bit_for_bit_however_it_is_cut(
    values: str, ids: str, data: st.DataObject
) -> None:
    encoding = PAYLOAD.encoding(values, ids)
    cuts = data.draw(st.lists(st.integers(0, encoding.size_bytes), max_size=6))

    assert bits(decoded(PAYLOAD, encoding, cuts)) == bits(PAYLOAD.columns)


@given(rows_of_logits(), st.sampled_from(["uint8", "float16", "bfloat16"]), st.data())
def test_whatever_a_teacher_says_passes_the_checks_after_its_way(
    logits: torch.Tensor, values: str, data: st.DataObject
) -> None:
    source = written(logits, top_k=data.draw(st.sampled_from([1, 6, 50])))
    encoding = source.encoding(values, "packed18")

    found = decoded(source, encoding, [encoding.size_bytes // 2])

    assert torch.equal(found[ColumnKind.TOPK_IDS], source.columns[ColumnKind.TOPK_IDS])
    for kind, column in source.columns.items():
        assert found[kind].dtype == column.dtype
        if kind is not ColumnKind.TOPK_LOGPROBS:
            assert torch.equal(found[kind], column)


def test_a_vocabulary_of_all_eighteen_bits_has_its_last_id_and_absent_ones() -> None:
    logits = torch.full((2, 2**18), -torch.inf)
    logits[0, [5, 2**18 - 1]] = torch.tensor([0.0, 1.0])
    logits[1, 9] = 0.0
    source = written(logits, top_k=3, row_lengths=(1, 1), bad_rows=(1,))

    for values in ("uint8", "float16"):
        found = decoded(source, source.encoding(values, "packed18"))
        assert found[ColumnKind.TOPK_IDS].tolist() == [[2**18 - 1, 5, -1], [-1, -1, -1]]


def test_a_position_wider_than_a_tile_is_decoded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "TILE_BYTES", 5)
    encoding = PAYLOAD.encoding("bfloat16_exact", "packed18")

    assert bits(decoded(PAYLOAD, encoding, [100, 101])) == bits(PAYLOAD.columns)


class Server:
    """Streams one lease, in chunks of some bytes, and breaks off where it is told to."""

    def __init__(self, source: Written, encoding: Encoding, *, chunk: int = 50) -> None:
        self.lease = LeaseTerms(
            lease_id="l", payload=source.payload, writer_id="w", extent=None, encoding=encoding
        )
        self._chunk = chunk
        self.data = bytearray(source.encoded(encoding))
        self.own = bytes(source.room)
        self.breaks_at: list[int] = []
        self.asked: list[tuple[str, int]] = []
        self.refuses_at: int | None = None

    def read(self, lease_id: str, offset: int, timeout: float) -> Iterator[bytes]:
        self.asked.append(("encoded", offset))
        stop = self.breaks_at.pop(0) if self.breaks_at else len(self.data)
        for start in range(offset, stop, self._chunk):
            if self.refuses_at is not None and start >= self.refuses_at:
                raise PayloadInvalidError("it cannot go so", facts={CODEC_FACT: "uint8"})
            yield chunk(self.data[start : min(start + self._chunk, stop)], start)
        if stop < len(self.data):
            raise StreamBrokenError("broke off")

    def read_as_written(self, lease_id: str, offset: int, timeout: float) -> Iterator[bytes]:
        self.asked.append(("as written", offset))
        yield chunk(self.own[offset:], offset)

    def opener(self) -> StreamOpener:
        self.counted = 0
        return StreamOpener(
            self.read,
            read_as_written=self.read_as_written,
            pool=BufferPool(),
            count=self.count,
            pause=lambda seconds: None,
        )

    def count(self, size_bytes: int) -> None:
        self.counted += size_bytes


def columns(payload: Payload, opener: StreamOpener, lease: LeaseTerms) -> dict[ColumnKind, bytes]:
    opened = opener.open(lease, until=NEVER)
    return bits(Written(payload=payload, room=opened.buffer).columns)


@pytest.mark.parametrize(("values", "ids"), LOSSLESS)
@settings(max_examples=20)
@given(breaks=st.lists(st.integers(1, 900), max_size=4))
def test_a_stream_is_taken_up_at_the_byte_that_it_broke_at(
    values: str, ids: str, breaks: list[int]
) -> None:
    server = Server(PAYLOAD, PAYLOAD.encoding(values, ids))
    size = len(server.data)
    server.breaks_at = sorted(min(each, size - 1) for each in breaks)

    found = columns(PAYLOAD.payload, server.opener(), server.lease)

    assert found == bits(PAYLOAD.columns)
    assert server.counted == size
    assert [offset for _, offset in server.asked] == [0, *sorted(min(b, size - 1) for b in breaks)]


def test_bytes_that_changed_on_the_way_are_never_decoded() -> None:
    server = Server(PAYLOAD, PAYLOAD.encoding("uint8", "packed18"))
    good = server.read

    def damaged(lease_id: str, offset: int, timeout: float) -> Iterator[bytes]:
        for message in good(lease_id, offset, timeout):
            yield message[:-1] + bytes([message[-1] ^ 1])

    opener = StreamOpener(
        damaged, pool=BufferPool(), count=lambda size: None, pause=lambda seconds: None
    )
    with pytest.raises(ChecksumError, match="changed on the way"):
        opener.open(server.lease, until=NEVER)


@pytest.mark.parametrize("settled", [("float16", "packed18"), ("uint8", "int32")])
def test_a_stream_in_another_codec_than_the_session_s_is_not_even_asked_for(
    settled: tuple[str, str],
) -> None:
    server = Server(PAYLOAD, PAYLOAD.encoding("uint8", "packed18"))
    codec = StreamCodec(values=ValueCodec(settled[0]), ids=IdCodec(settled[1]))
    opener = StreamOpener(server.read, pool=BufferPool(), count=lambda size: None, codec=codec)

    with pytest.raises(PayloadInvalidError, match=r"settled on .*whose error it certified"):
        opener.open(server.lease, until=NEVER)
    assert server.asked == []


def plane_of(encoding: Encoding, plane: Plane) -> slice:
    [column] = [each for each in encoding.columns if each.plane is plane]
    return slice(column.offset_bytes, column.end_bytes)


@pytest.mark.parametrize(
    ("plane", "content", "rule"),
    [
        (Plane.PACKED18, b"\x00", "an id that stands there twice"),
        (Plane.PACKED18, b"\xfe", "an id outside the vocabulary of 90"),
        (Plane.CODES, b"\x00", "do not sum to one"),
        (Plane.SCALE, b"\x00", "do not sum to one"),
        (Plane.SCALE, b"\xff", "malformed"),
    ],
)
def test_bytes_that_no_payload_encodes_to_are_refused(
    plane: Plane, content: bytes, rule: str
) -> None:
    server = Server(PAYLOAD, PAYLOAD.encoding("uint8", "packed18"))
    place = plane_of(PAYLOAD.encoding("uint8", "packed18"), plane)
    server.data[place] = content * (place.stop - place.start)

    with pytest.raises(PayloadInvalidError, match=rule):
        server.opener().open(server.lease, until=NEVER)
    assert [what for what, _ in server.asked] == ["encoded"]


@pytest.mark.parametrize(
    "missing", [ColumnKind.ROW_OFFSETS, ColumnKind.TOPK_LOGPROBS, ColumnKind.LOG_TAIL]
)
def test_a_server_that_encodes_what_is_no_payload_is_refused_by_the_missing_column(
    missing: ColumnKind,
) -> None:
    kept = tuple(each for each in PAYLOAD.payload.columns if each.kind is not missing)
    payload = replace(PAYLOAD.payload, columns=kept, vocabulary_size=1 << 18)
    encoding = encoding_of(payload, StreamCodec(ids=IdCodec.PACKED18))
    assert encoding is not None
    decoder = Decoder(payload, encoding, memoryview(bytearray(payload.size_bytes)))
    decoder.take(memoryview(bytes(encoding.size_bytes)), 0)

    with pytest.raises(PayloadInvalidError, match=f"no column {missing.value}"):
        decoder.finish()


def test_rows_of_less_than_no_positions_are_refused_in_a_vocabulary_of_all_eighteen_bits() -> None:
    source = written(LOGITS, top_k=7, row_lengths=[2, len(LOGITS) - 2], vocabulary_size=1 << 18)
    source.columns[ColumnKind.ROW_OFFSETS][1] = len(LOGITS) + 3

    with pytest.raises(PayloadInvalidError, match="row_offsets run from 0"):
        decoded(source, source.encoding("uint8", "packed18"))


def test_what_a_codec_cannot_carry_comes_as_it_was_written_and_so_does_the_rest(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = Server(PAYLOAD, PAYLOAD.encoding("uint8", "packed18"))
    server.refuses_at = 100
    opener = server.opener()
    with caplog.at_level(logging.WARNING):
        first = columns(PAYLOAD.payload, opener, server.lease)
        second = columns(PAYLOAD.payload, opener, server.lease)

    assert first == second == bits(PAYLOAD.columns)
    assert server.asked == [("encoded", 0), ("as written", 0), ("as written", 0)]
    here = threading.get_ident()  # threads of other tests may log too
    [message] = [each.getMessage() for each in caplog.records if each.thread == here]
    assert "as it was written" in message


def test_halves_that_were_written_are_halves_when_they_come_as_uint8() -> None:
    source = written(LOGITS, top_k=7, value_type=ElementType.FLOAT16)
    found = decoded(source, source.encoding("uint8", "planes24"))

    assert found[ColumnKind.TOPK_LOGPROBS].dtype is torch.float16
