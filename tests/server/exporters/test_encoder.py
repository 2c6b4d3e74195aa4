"""The encoder makes any run of an encoded payload's bytes, the same as those of the whole."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.encoded import Written, written

from teacher_logits.cuts import cut_rows
from teacher_logits.encodings import (
    CODEC_FACT,
    CodecError,
    Encoding,
    IdCodec,
    Plane,
    StreamCodec,
    ValueCodec,
    encoding_of,
)
from teacher_logits.layout import ColumnKind, ElementType
from teacher_logits_server.exporters.encoder import Encoder
from teacher_logits_server.lending.rooms import Pinned

LENGTHS = (3, 0, 5, 4)
LOGITS = torch.randn(12, 90, generator=torch.Generator().manual_seed(3)).mul_(4).bfloat16()
PAYLOAD = written(LOGITS, top_k=7, row_lengths=LENGTHS)
ENCODINGS = [
    PAYLOAD.encoding(values, ids)
    for values in ("as_written", "float16", "bfloat16", "bfloat16_exact", "uint8")
    for ids in ("int32", "planes24", "packed18")
    if (values, ids) != ("as_written", "int32")
]
each_encoding = pytest.mark.parametrize(
    "encoding", ENCODINGS, ids=lambda e: f"{e.codec.values.value}-{e.codec.ids.value}"
)


@each_encoding
@settings(max_examples=25)
@given(data=st.data())
def test_any_run_of_bytes_is_that_of_the_whole(encoding: Encoding, data: st.DataObject) -> None:
    whole = PAYLOAD.encoded(encoding)
    start = data.draw(st.integers(0, encoding.size_bytes))
    stop = data.draw(st.integers(start, encoding.size_bytes))
    encoder = Encoder(PAYLOAD.pinned, encoding, PAYLOAD.room)

    assert len(whole) == encoding.size_bytes
    assert b"".join(encoder.parts(start, stop)) == whole[start:stop]


@each_encoding
@settings(max_examples=25)
@given(start=st.integers(0, 300), most=st.integers(1, 200))
def test_chunks_are_the_whole_and_none_is_of_more_bytes_than_it_may(
    encoding: Encoding, start: int, most: int
) -> None:
    whole = PAYLOAD.encoded(encoding)
    encoder = Encoder(PAYLOAD.pinned, encoding, PAYLOAD.room)
    made = bytearray(whole[:start])
    while len(made) < len(whole):
        stop = encoder.stop_of(len(made), most)
        assert len(made) < stop <= len(made) + most
        made += b"".join(encoder.parts(len(made), stop))

    assert made == whole


def test_a_chunk_of_scales_looks_at_no_more_entries_than_one_of_codes() -> None:
    wide = written(torch.randn(40, 64), top_k=64)
    encoding = wide.encoding("uint8")
    encoder = Encoder(wide.pinned, encoding, wide.room)
    scale, codes = (
        next(each for each in encoding.columns if each.plane is plane)
        for plane in (Plane.SCALE, Plane.CODES)
    )

    assert encoder.stop_of(scale.offset_bytes, 640) == scale.offset_bytes + 10 * scale.row_bytes
    assert encoder.stop_of(scale.offset_bytes - 3, 640) == scale.offset_bytes + 80
    assert encoder.stop_of(scale.offset_bytes + 5, 7) == scale.offset_bytes + 12
    assert encoder.stop_of(codes.offset_bytes, 640) == codes.offset_bytes + 640


@each_encoding
def test_some_rows_of_a_payload_are_encoded_from_where_they_lie(encoding: Encoding) -> None:
    cut = cut_rows(PAYLOAD.payload, LENGTHS, first_row=2, row_count=2)
    pinned = Pinned(
        payload=cut.payload,
        extent=PAYLOAD.pinned.extent,
        writer_id="w",
        segments=cut.segments,
    )
    found = encoding_of(cut.payload, encoding.codec)
    assert found is not None
    encoder = Encoder(pinned, found, PAYLOAD.room)
    made = b"".join(encoder.parts(0, found.size_bytes))

    gathered = bytearray(cut.payload.size_bytes)
    for each in cut.segments:
        start = each.source_offset_bytes
        gathered[each.offset_bytes : each.offset_bytes + each.size_bytes] = PAYLOAD.room[
            start : start + each.size_bytes
        ]
    alone = Written(payload=cut.payload, room=memoryview(gathered))
    assert made == alone.encoded(found)


def test_what_a_codec_cannot_carry_is_refused_with_payload_and_position() -> None:
    fine = written(torch.randn(4, 30), top_k=5)

    with pytest.raises(CodecError, match="payload p, from position 0 on") as refused:
        fine.encoded(fine.encoding("bfloat16_exact"))
    assert refused.value.facts[CODEC_FACT] == "bfloat16_exact"
    assert refused.value.facts["payload_id"] == "p"


@pytest.mark.parametrize(
    ("values", "ids", "size"),
    [
        ("float16", "int32", 392),
        ("float16", "planes24", 328),
        ("float16", "packed18", 280),
        ("uint8", "packed18", 224),
    ],
)
def test_the_bytes_of_a_position_are_those_of_the_math_note(
    values: str, ids: str, size: int
) -> None:
    payload = written(torch.randn(1, 70), top_k=64, temperatures=(1.0,)).payload
    found = encoding_of(payload, StreamCodec(values=ValueCodec(values), ids=IdCodec(ids)))
    assert found is not None
    a_position = sum(
        column.row_bytes
        for column in found.columns
        if column.kind
        in (
            ColumnKind.TOPK_IDS,
            ColumnKind.TOPK_LOGPROBS,
            ColumnKind.LOG_TAIL,
            ColumnKind.LOGSUMEXP,
        )
    )

    assert a_position == size


def test_where_nothing_is_saved_nothing_is_encoded() -> None:
    halves = written(LOGITS, top_k=7, value_type=ElementType.FLOAT16).payload
    wide = replace(halves, vocabulary_size=2**18 + 1)

    assert encoding_of(halves, StreamCodec(values=ValueCodec.FLOAT16)) is None
    assert encoding_of(halves, StreamCodec(values=ValueCodec.BFLOAT16)) is None
    assert encoding_of(wide, StreamCodec(ids=IdCodec.PACKED18)) is None
    assert encoding_of(halves, StreamCodec()) is None


def test_a_payload_without_positions_has_nothing_to_encode() -> None:
    none = written(LOGITS[:0], top_k=7)

    assert encoding_of(none.payload, StreamCodec(values=ValueCodec.UINT8)) is None
