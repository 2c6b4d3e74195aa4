"""Codecs, bounds and encodings come back from their messages, or are refused by name."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.encoded import written

from teacher_logits.encodings import Encoding, IdCodec, StreamCodec, ValueCodec, encoding_of
from teacher_logits.error_bounds import bound_of
from teacher_logits.errors import PayloadInvalidError, RequestInvalidError
from teacher_logits.grid import BatchGrid
from teacher_logits.layout import ElementType
from teacher_logits.profiles import StudentProfile
from teacher_logits.terms import LeaseTerms, StreamTerms
from teacher_logits.v1 import payload_pb2
from teacher_logits.wire import student_from_wire, student_to_wire
from teacher_logits.wire.payloads import lease_from_wire, lease_to_wire
from teacher_logits.wire.streams import stream_terms_from_wire, stream_terms_to_wire

PAYLOAD = written(torch.randn(4, 30), top_k=6).payload
codecs = st.builds(StreamCodec, values=st.sampled_from(ValueCodec), ids=st.sampled_from(IdCodec))


def a_lease(encoding: Encoding | None) -> LeaseTerms:
    return LeaseTerms(lease_id="l", payload=PAYLOAD, writer_id="w", extent=None, encoding=encoding)


@given(codecs, st.sampled_from([ElementType.FLOAT16, ElementType.FLOAT32]))
def test_the_terms_of_streams_come_back(codec: StreamCodec, written_as: ElementType) -> None:
    terms = StreamTerms(codec=codec, bound=bound_of(codec, written=written_as, top_k=64))

    assert stream_terms_from_wire(stream_terms_to_wire(terms)) == terms


@given(codecs)
def test_a_lease_says_what_its_stream_consists_of(codec: StreamCodec) -> None:
    lease = a_lease(encoding_of(PAYLOAD, codec))

    assert lease_from_wire(lease_to_wire(lease)) == lease


def test_a_lease_without_a_word_of_it_is_a_stream_of_the_payload_s_own_bytes() -> None:
    message = lease_to_wire(a_lease(None))

    assert message.stream == payload_pb2.StreamSource()
    assert message.WhichOneof("source") == "stream"
    assert lease_from_wire(message).encoding is None


@pytest.mark.parametrize("field", ["size_bytes", "columns", "row_bytes"])
def test_another_layout_than_the_codec_makes_is_refused(field: str) -> None:
    encoding = encoding_of(PAYLOAD, StreamCodec(values=ValueCodec.UINT8))
    message = lease_to_wire(a_lease(encoding))
    if field == "size_bytes":
        message.stream.size_bytes += 1
    elif field == "columns":
        del message.stream.columns[0]
    else:
        message.stream.columns[1].row_bytes += 1

    with pytest.raises(PayloadInvalidError, match="is not what uint8 and int32 make of it"):
        lease_from_wire(message)


def test_a_codec_that_saves_nothing_of_the_payload_is_refused() -> None:
    encoding = encoding_of(PAYLOAD, StreamCodec(values=ValueCodec.UINT8))
    assert encoding is not None
    lied = replace(encoding, codec=StreamCodec(values=ValueCodec.FLOAT32))

    with pytest.raises(PayloadInvalidError, match="make of it \\(0 bytes\\)"):
        lease_from_wire(lease_to_wire(a_lease(lied)))


@pytest.mark.parametrize("field", ["values", "ids"])
def test_a_codec_that_this_release_does_not_know_is_refused_by_name(field: str) -> None:
    message = lease_to_wire(a_lease(encoding_of(PAYLOAD, StreamCodec(values=ValueCodec.UINT8))))
    setattr(message.stream, field, 99)

    with pytest.raises(RequestInvalidError, match="codec 99 is not known here"):
        lease_from_wire(message)


def test_a_student_s_wishes_come_back_in_their_order() -> None:
    student = StudentProfile(
        batch_grid=BatchGrid(global_batch_size=1, data_parallel_size=1, micro_batch_size=1),
        value_codecs=(ValueCodec.UINT8, ValueCodec.AS_WRITTEN),
        id_codecs=(IdCodec.PACKED18, IdCodec.INT32),
    )

    assert student_from_wire(student_to_wire(student)) == student


def test_more_codecs_than_there_are_are_not_read() -> None:
    student = StudentProfile(
        batch_grid=BatchGrid(global_batch_size=1, data_parallel_size=1, micro_batch_size=1),
        id_codecs=(IdCodec.INT32,) * 17,
    )

    with pytest.raises(RequestInvalidError, match="id_codecs has 17 entries"):
        student_from_wire(student_to_wire(student))


@pytest.mark.parametrize(
    ("field", "number"),
    [("relative", 1.0), ("relative", -0.1), ("of_range", math.nan), ("kl", math.inf)],
)
def test_a_bound_that_is_none_is_refused(field: str, number: float) -> None:
    codec = StreamCodec(values=ValueCodec.FLOAT16)
    terms = StreamTerms(codec=codec, bound=bound_of(codec, written=ElementType.FLOAT32, top_k=64))
    message = stream_terms_to_wire(terms)
    setattr(message.bound, field, number)

    with pytest.raises(RequestInvalidError, match="error bound is"):
        stream_terms_from_wire(message)
