"""Every transport is bit-exact, for whatever bits a payload has."""

import itertools

import pytest
from tests.transport_suite.conftest import OpenSession
from tests.transport_suite.contents import KINDS, ROWS, TOP_KS, VALUE_TYPES, Content, every_kind
from tests.transport_suite.ways import WAYS, Way
from tests.transport_suite.writing import Embedded, Sealed

from teacher_logits.layout import ColumnKind, ElementType
from teacher_logits.tensors import DTYPES, to_bytes
from teacher_logits_client import LeasedPayload, MapMode

#: Every K with every form of rows; every K and every form with every value type.
SHAPES = [
    pytest.param((top_k, rows, VALUE_TYPES[(turn + place) % 3]), id=f"k{top_k}-{rows}")
    for (turn, top_k), (place, rows) in itertools.product(enumerate(TOP_KS), enumerate(ROWS))
]


def assert_same_bits(leased: LeasedPayload, content: Content) -> None:
    """Every column came, in its shape and type and with its bits."""
    assert set(leased.columns) == {column.kind.value for column in content.columns}
    for column in content.columns:
        tensor = leased.columns[column.kind.value]
        assert tuple(tensor.shape) == column.shape
        assert tensor.dtype == DTYPES[column.element_type]
        assert to_bytes(tensor) == content.data[column.kind], column.kind


@pytest.mark.parametrize("shape", SHAPES)
def test_every_k_and_form_of_rows_comes_bit_by_bit(
    server: Embedded,
    open_session: OpenSession,
    way: Way,
    shape: tuple[int, str, ElementType],
) -> None:
    top_k, rows, value_type = shape
    content = every_kind(top_k=top_k, windows=ROWS[rows], element_type=value_type, seed=top_k)
    with server.sealed(content) as held, open_session(way, content) as session:
        with session.acquire(payload_id=held.payload.payload_id) as leased:
            assert leased.transport is way.transport
            assert leased.payload == held.payload
            assert_same_bits(leased, content)


@pytest.mark.parametrize("element_type", ElementType, ids=lambda each: each.value)
def test_every_element_type_comes_bit_by_bit(
    server: Embedded, open_session: OpenSession, way: Way, element_type: ElementType
) -> None:
    content = every_kind(top_k=21, windows=ROWS["ragged"], element_type=element_type, seed=1)
    assert {column.kind for column in content.columns} == KINDS
    assert element_type in {column.element_type for column in content.columns}
    with server.sealed(content) as held, open_session(way, content) as session:
        with session.acquire(payload_id=held.payload.payload_id) as leased:
            assert_same_bits(leased, content)


@pytest.mark.parametrize("mode", MapMode, ids=lambda each: each.value)
def test_every_way_of_mapping_shows_the_same_bits(
    server: Embedded, open_session: OpenSession, way: Way, mode: MapMode
) -> None:
    content = every_kind(top_k=10, windows=ROWS["ragged"], element_type=ElementType.FLOAT32)
    with server.sealed(content) as held, open_session(way, content, mode=mode) as session:
        with session.acquire(payload_id=held.payload.payload_id) as leased:
            assert_same_bits(leased, content)


def test_rows_without_a_single_position_come_too(
    server: Embedded, open_session: OpenSession, way: Way
) -> None:
    windows = ((0, 0), (7, 0))
    content = every_kind(top_k=64, windows=windows, element_type=ElementType.FLOAT16)
    with server.sealed(content) as held, open_session(way, content) as session:
        with session.acquire(payload_id=held.payload.payload_id) as leased:
            assert_same_bits(leased, content)
            assert leased.row_offsets.tolist() == [0, 0, 0]
            assert leased.columns[ColumnKind.LOGITS.value].shape == (0, 37)


def test_one_payload_has_one_digest_over_every_transport(
    server: Embedded, open_session: OpenSession
) -> None:
    content = every_kind(top_k=65, windows=ROWS["ragged"], element_type=ElementType.BFLOAT16)
    with server.sealed(content) as held:
        digests = {way: digest_over(way, held, content, open_session) for way in WAYS}
    assert len(set(digests.values())) == 1, digests


def test_a_digest_tells_one_changed_bit(
    server: Embedded, open_session: OpenSession, way: Way
) -> None:
    content = every_kind(top_k=9, windows=ROWS["ragged"], element_type=ElementType.FLOAT32)
    changed = bytearray(content.data[ColumnKind.LOG_TAIL])
    changed[-1] ^= 1
    other = Content(
        windows=content.windows,
        top_k=content.top_k,
        columns=content.columns,
        size_bytes=content.size_bytes,
        data={**content.data, ColumnKind.LOG_TAIL: bytes(changed)},
    )
    with server.sealed(content) as held, server.sealed(other) as held_other:
        before = digest_over(way, held, content, open_session)
        after = digest_over(way, held_other, other, open_session)
    assert before != after


def digest_over(way: Way, held: Sealed, content: Content, open_session: OpenSession) -> str:
    """Read a sealed payload over one transport; return its digest."""
    with open_session(way, content) as session:
        with session.acquire(payload_id=held.payload.payload_id) as leased:
            assert leased.transport is way.transport
            return leased.digest()
