"""Payloads that a server or publisher of another make describes: read, or refused by the tree."""

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.client.losses.shards import VOCABULARY_SIZE, K, shard_of, some_ids
from tests.foreign import Foreign, foreign

from teacher_logits.encodings import IdCodec, StreamCodec, ValueCodec, encoding_of
from teacher_logits.errors import PayloadInvalidError, TeacherLogitsError
from teacher_logits.grid import BatchGrid
from teacher_logits.layout import ColumnKind
from teacher_logits.profiles import StudentProfile
from teacher_logits_client.openers.decoder import Decoder
from teacher_logits_client.openers.host_payload import HostPayload
from teacher_logits_client.payloads.checked_rows import CheckedRows
from teacher_logits_client.payloads.columns import LeasedColumns
from teacher_logits_client.payloads.guards import check_scored, check_statuses
from teacher_logits_client.payloads.row_columns import Part, RowColumns, Shape
from teacher_logits_client.payloads.step_guards import check_shape, check_tiling
from teacher_logits_client.rows import make_row_batch
from teacher_logits_client.targets import make_targets
from teacher_logits_client.targets.leased_targets import Made

ROWS = 3
IDS = some_ids(ROWS)
WRITTEN = [shard_of(IDS), shard_of(IDS, temperatures=(1.0, 2.0)), shard_of(IDS, bad_rows=[1])]
OWN = make_row_batch(IDS, vocabulary_size=VOCABULARY_SIZE, prefix_vocabulary_size=VOCABULARY_SIZE)
TRIES = 20
"""Payloads of each example."""


def wishes(dice: random.Random, payload: Foreign) -> StudentProfile:
    """A student that asks for much of what it gets."""
    return StudentProfile(
        batch_grid=BatchGrid(global_batch_size=ROWS, data_parallel_size=1, micro_batch_size=1),
        top_k=dice.choice([1, K, max(1, payload.payload.top_k)]),
        temperatures=payload.payload.temperatures[1:],
        columns=dice.choice([(), tuple(each.kind for each in WRITTEN[0].payload.columns)]),
    )


def columns_of(given: Foreign) -> LeasedColumns:
    made = Made(what="it", again="it", facts={})
    return LeasedColumns(given.payload, HostPayload(memoryview(given.data)), made, watch=None)


def read_scored(dice: random.Random, given: Foreign) -> None:
    """What a client does with an answer."""
    columns, profile = columns_of(given), wishes(dice, given)
    own = dice.choice([OWN, None])
    reject = dice.random() < 0.9
    check_scored(given.payload, columns, batch=own, profile=profile, reject_bad_rows=reject)
    for temperature in given.payload.temperatures:
        make_targets(
            columns,
            temperature=temperature,
            temperatures=given.payload.temperatures,
            lengths=dice.choice([OWN.rows.lengths, None]),
            bound=columns.bound,
        )


def read_step(dice: random.Random, given: Foreign) -> None:
    """What a client does with a shard of a step, of which it reads all or a row."""
    columns, profile = columns_of(given), wishes(dice, given)
    check_shape(given.payload, profile)
    part = Part(given.payload, columns, first=0, row_count=given.payload.row_count)
    check_tiling([part], range(ROWS))
    checked = CheckedRows([part], rows=range(ROWS), is_sealed=dice.random() < 0.5)
    checked.look_again()
    if dice.random() < 0.5:
        checked.compare(OWN)
    shape = Shape.of([part], profile)
    for first in range(ROWS):
        for padding in (0, 1):
            taken = RowColumns([part.rows(first, 1)], padding_rows=padding, shape=shape)
            for temperature in shape.temperatures:
                make_targets(
                    taken,
                    temperature=temperature,
                    temperatures=shape.temperatures,
                    lengths=None if padding else checked.lengths_of(first, 1),
                    bound=taken.bound,
                )
            list(taken.items())


def stream_in(dice: random.Random, given: Foreign) -> None:
    """What a client does with a stream: the bytes come encoded, whatever they say."""
    codec = StreamCodec(values=dice.choice(list(ValueCodec)), ids=dice.choice(list(IdCodec)))
    encoding = encoding_of(given.payload, codec)
    if encoding is None:
        return
    data = memoryview(bytearray(encoding.size_bytes))
    for column in encoding.columns:
        own = given.payload.column(column.kind)
        source = given.data[own.offset_bytes : own.end_bytes]
        size = column.end_bytes - column.offset_bytes
        noise = dice.randbytes(size)
        data[column.offset_bytes : column.end_bytes] = (bytes(source) + noise)[:size]
    sink = Decoder(given.payload, encoding, memoryview(bytearray(given.payload.size_bytes)))
    step = dice.choice([7, 64, max(1, len(data))])
    for at in range(0, len(data), step):
        sink.take(data[at : at + step], at)
    sink.finish()


@pytest.mark.parametrize("read", [read_scored, read_step, stream_in])
@settings(max_examples=15)
@given(seed=st.integers(0, 1 << 32))
def test_a_payload_is_read_or_refused_by_the_tree(
    read: Callable[[random.Random, Foreign], None], seed: int
) -> None:
    dice = random.Random(seed)
    for _ in range(TRIES):
        shard = dice.choice(WRITTEN)
        given = foreign(dice, shard.payload, shard.data)
        if given is None:
            continue
        try:
            read(dice, given)
        except TeacherLogitsError:
            continue


@pytest.mark.parametrize("read", [read_scored, read_step])
def test_what_was_written_rightly_is_read(
    read: Callable[[random.Random, Foreign], None],
) -> None:
    shard = WRITTEN[0]

    read(random.Random(0), Foreign(payload=shard.payload, data=bytearray(shard.data)))


@pytest.mark.parametrize("read", [read_scored, read_step])
def test_a_status_that_there_is_none_of_is_refused_by_its_row(
    read: Callable[[random.Random, Foreign], None],
) -> None:
    shard = WRITTEN[0]
    data = bytearray(shard.data)
    data[shard.payload.column(ColumnKind.ROW_STATUS).offset_bytes + 2] = 124

    with pytest.raises(PayloadInvalidError, match="row 2 has status 124; the statuses are 0 to 3"):
        read(random.Random(0), Foreign(payload=shard.payload, data=data))


def test_rows_that_are_not_sealed_yet_may_have_any_status() -> None:
    shard = WRITTEN[0]
    data = bytearray(shard.data)
    at = shard.payload.column(ColumnKind.ROW_STATUS).offset_bytes
    data[at] = 124
    columns = columns_of(Foreign(payload=shard.payload, data=data))
    part = Part(shard.payload, columns, first=0, row_count=ROWS)

    checked = CheckedRows([part], rows=range(ROWS), is_sealed=False)

    with pytest.raises(PayloadInvalidError, match="row 0 has status 124"):
        checked.look_again()
    data[at] = 0
    checked.look_again()
    check_statuses(bytes([0, 1, 2, 3]), first_row=0)
