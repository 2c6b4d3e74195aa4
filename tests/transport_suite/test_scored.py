"""What a server scores is what a dense teacher says, over every transport and between processes."""

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from tests.transport_suite.contents import TOP_KS, VALUE_TYPES
from tests.transport_suite.dense_teacher import HEAD_ROWS, VOCABULARY_SIZE
from tests.transport_suite.right import RAGGED, answer, assert_near, assert_right
from tests.transport_suite.ways import WAYS, Way
from tests.transport_suite.writing import Embedded, a_profile

import teacher_logits_client as tl
from teacher_logits.layout import ElementType

ROOT = Path(__file__).parents[2]
BETWEEN_PROCESSES = [way for way in WAYS if way.transport is not tl.Transport.LOCAL]

TEMPERATURES = (1.0, 2.0, 0.5)
RECTANGLE = ([10, 20, 30, 40], [41, 31, 21, 11])


@pytest.fixture(scope="module")
def remote() -> Iterator[tuple[tl.Client, tl.Client]]:
    engine = "tests.transport_suite.dense_teacher:make"
    with (
        tl.testing.serve(engine, folder=ROOT, pool_size="64MiB", slab_size="64MiB") as server,
        tl.connect(server.address) as first,
        tl.connect(server.address) as second,
    ):
        yield first, second


@contextmanager
def open_session(
    client: tl.Client,
    way: Way,
    *,
    top_k: int,
    value_type: ElementType = ElementType.FLOAT32,
    temperatures: tuple[float, ...] = TEMPERATURES,
    **wishes: object,
) -> Iterator[tl.Session]:
    """Open a session over one transport and no other."""
    profile = a_profile(
        top_k=top_k,
        value_type=value_type,
        temperatures=temperatures,
        transports=(way.transport,),
        **wishes,
    )
    with client.open_session(profile) as session:
        assert session.transport is way.transport
        yield session


#: Every K with every value type turns up as often as it can; all temperatures each time.
SHAPES = [(top_k, VALUE_TYPES[turn % 3]) for turn, top_k in enumerate(TOP_KS)]


@pytest.mark.parametrize("way", BETWEEN_PROCESSES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"k{shape[0]}-{shape[1].value}")
def test_every_k_and_value_type_is_the_dense_teachers(
    remote: tuple[tl.Client, tl.Client], way: Way, shape: tuple[int, ElementType]
) -> None:
    top_k, value_type = shape
    with open_session(remote[0], way, top_k=top_k, value_type=value_type) as session:
        ragged, rectangle = session.score(RAGGED), session.score(torch.tensor(RECTANGLE))
        with ragged.result() as leased:
            assert leased.transport is way.transport
            assert_right(leased, RAGGED)
        with rectangle.result() as leased:
            assert_right(leased, RECTANGLE)
            shaped = leased.targets.rectangular().topk_ids
            assert shaped.shape == (2, 4, top_k)
            assert shaped.data_ptr() == leased.columns["topk_ids"].data_ptr()
            del shaped


def test_the_dense_teacher_is_heard_in_the_servers_own_process_too(
    server: Embedded, clients: tuple[tl.Client, tl.Client], way: Way
) -> None:
    with open_session(clients[0], way, top_k=64) as session:
        with session.score(RAGGED).result() as leased:
            assert leased.transport is way.transport
            assert_right(leased, RAGGED)


@pytest.mark.parametrize("way", BETWEEN_PROCESSES, ids=str)
@pytest.mark.parametrize("value_type", VALUE_TYPES, ids=lambda each: each.value)
def test_windows_show_the_same_positions_and_empty_ones_none(
    remote: tuple[tl.Client, tl.Client], way: Way, value_type: ElementType
) -> None:
    windows = [(5, 3), (1, 0), (0, 2)]
    with open_session(remote[0], way, top_k=65, value_type=value_type) as session:
        with session.score(RAGGED, windows=windows).result() as leased:
            assert leased.row_offsets.tolist() == [0, 3, 3, 5]
            assert_right(leased, RAGGED, windows=windows)


@pytest.mark.parametrize("way", BETWEEN_PROCESSES, ids=str)
def test_no_window_at_all_is_a_payload_of_no_positions(
    remote: tuple[tl.Client, tl.Client], way: Way
) -> None:
    with open_session(remote[0], way, top_k=9) as session:
        with session.score(RAGGED, windows=[(0, 0)] * 3).result() as leased:
            assert leased.payload.position_count == 0
            assert leased.targets.topk_ids.shape == (0, 9)


@pytest.mark.parametrize("way", BETWEEN_PROCESSES, ids=str)
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_targets_of_each_temperature_sum_to_one_and_are_the_dense_teachers(
    remote: tuple[tl.Client, tl.Client], way: Way, temperature: float
) -> None:
    row = RAGGED[0]
    with open_session(remote[0], way, top_k=20) as session:
        with session.score([row]).result() as leased:
            targets = leased.targets_at(temperature)
            tempered = answer(
                row, top_k=20, temperatures=(temperature,), vocabulary_size=VOCABULARY_SIZE
            )
            at_one = answer(row, top_k=20, temperatures=(1.0,), vocabulary_size=VOCABULARY_SIZE)
            logits = at_one.logprobs + at_one.logsumexp
            expected = logits / temperature - tempered.logsumexp
            assert_near(targets.topk_logprobs, expected, (1e-5, 1e-5))
            assert_near(targets.log_tail, tempered.log_tail[:, 0], (1e-5, 1e-5))
            total = targets.topk_logprobs.double().exp().sum(1) + targets.log_tail.double().exp()
            assert_near(total, torch.ones(len(row), dtype=torch.float64), (0.0, 1e-6))


@pytest.mark.parametrize("way", BETWEEN_PROCESSES, ids=str)
def test_two_clients_that_want_different_things_are_answered_at_the_same_time(
    remote: tuple[tl.Client, tl.Client], way: Way
) -> None:
    wishes: list[tuple[int, tuple[float, ...]]] = [(64, ()), (16, ()), (16, (2.0,)), (64, (0.5,))]
    with (
        open_session(remote[0], way, top_k=64, temperatures=()) as wide,
        open_session(remote[1], way, top_k=16, temperatures=()) as narrow,
        open_session(remote[0], way, top_k=16, temperatures=(2.0,)) as warm,
        open_session(remote[1], way, top_k=64, temperatures=(0.5,)) as cold,
    ):
        sessions = [wide, narrow, warm, cold]
        futures = [session.score(RAGGED) for _ in range(3) for session in sessions]
        for future, (top_k, temperatures) in zip(futures, wishes * 3, strict=True):
            with future.result() as leased:
                assert leased.payload.top_k == top_k
                assert leased.payload.temperatures == (1.0, *temperatures)
                assert_right(leased, RAGGED)


def test_a_scored_payload_has_one_digest_over_every_transport(
    remote: tuple[tl.Client, tl.Client],
) -> None:
    digests = []
    for way, other in itertools.permutations(BETWEEN_PROCESSES, 2):
        with (
            open_session(remote[0], way, top_k=21) as session,
            open_session(remote[1], other, top_k=21) as sibling,
            session.score(RAGGED).result() as leased,
            sibling.acquire(payload_id=leased.payload.payload_id, input_ids=RAGGED) as shared,
        ):
            assert {leased.transport, shared.transport} == {way.transport, other.transport}
            digests += [leased.digest(), shared.digest()]
    assert len(set(digests)) == 1


@pytest.mark.parametrize("way", BETWEEN_PROCESSES, ids=str)
def test_k_of_the_whole_vocabulary_leaves_no_tail(
    remote: tuple[tl.Client, tl.Client], way: Way
) -> None:
    truncate = tl.VocabularyPolicy.TRUNCATE
    rows = [[1, 2, 3], [999]]
    with open_session(
        remote[0], way, top_k=1000, vocabulary_size=1000, vocabulary_policy=truncate
    ) as session:
        with session.score(rows).result() as leased:
            assert_right(leased, rows, vocabulary_size=1000)
            assert leased.columns["log_tail"].unique().tolist() == [-math.inf]
            assert bool(leased.targets.log_tail.isfinite().all())


@pytest.mark.parametrize("way", BETWEEN_PROCESSES, ids=str)
def test_padded_columns_of_the_head_are_never_selected(
    remote: tuple[tl.Client, tl.Client], way: Way
) -> None:
    with open_session(remote[0], way, top_k=1024) as session:
        assert session.teacher.head_rows == HEAD_ROWS > session.teacher.vocabulary_size
        with session.score(RAGGED).result() as leased:
            assert int(leased.columns["topk_ids"].max()) < VOCABULARY_SIZE
