"""Publishers against a server: what they write is what students read, over every way."""

import copy
import gc
import itertools
import os
import pickle
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from tests.client.conftest import Service, serve
from tests.client.publishing.a_publisher import (
    ROWS,
    VOCABULARY,
    WIDTH,
    K,
    a_grid,
    a_student,
    a_teacher,
    expected,
    flat,
    next_of,
    some_rows,
)
from tests.clocks import answer_early

import teacher_logits_client as tl
from teacher_logits.errors import (
    ConfigError,
    DeadlinePassedError,
    ForkedClientError,
    NoCommonTransportError,
    PayloadConflictError,
    PayloadInvalidError,
    PoolFullError,
    RequestInvalidError,
    ReservationLapsedError,
    ServerUnreachableError,
    SessionExpiredError,
    SessionRefusedError,
)
from teacher_logits.payload_room import HostRoom
from teacher_logits.selection import Selection
from teacher_logits_client import line
from teacher_logits_client.slabs.claims import Sealing

WAYS = [("shared_memory",), ("stream",)]
_names = (f"teacher-{number}" for number in itertools.count())


@pytest.fixture(params=WAYS, ids=lambda way: way[0])
def way(request: pytest.FixtureRequest) -> tuple[str, ...]:
    found: tuple[str, ...] = request.param
    return found


@contextmanager
def publishing(
    service: Service, way: tuple[str, ...] = WAYS[0], *, pool: int = 1 << 20, **profile: object
) -> Iterator[tuple[tl.Client, tl.Publisher]]:
    """A client with one publisher of a teacher of its own."""
    with (
        tl.connect(service.address) as client,
        client.open_publisher(
            a_teacher(next(_names), **profile),
            transports=way,
            pool_size_bytes=pool,
            slab_size_bytes=pool,
        ) as publisher,
    ):
        yield client, publisher


def write(publisher: tl.Publisher, step: int, seed: int | None = None, **more: object) -> None:
    ids, lengths, logits = some_rows(step if seed is None else seed)
    with publisher.reserve(step, input_ids=ids, lengths=lengths, **more) as draft:  # type: ignore[arg-type]
        tl.select_top_k(logits, out=draft)


def write_all(publisher: tl.Publisher, steps: int) -> None:
    for step in range(steps):
        write(publisher, step)


def same(columns: object, wanted: object) -> bool:
    assert isinstance(wanted, Selection)
    names = ("topk_ids", "topk_logprobs", "log_tail", "logsumexp", "actual_logprob")
    return all(torch.equal(columns[name], getattr(wanted, name)) for name in names)  # type: ignore[index]


def test_what_a_publisher_selects_is_what_a_student_reads(
    service: Service, way: tuple[str, ...]
) -> None:
    with publishing(service, way) as (client, publisher):
        assert publisher.transport.value == way[0]
        name = publisher.profile.teacher_id
        with client.open_session(a_student(name)) as session:
            for step in range(3):
                write(publisher, step)
                ids, lengths, logits = some_rows(step)
                with session.acquire(step=step, input_ids=ids, lengths=lengths) as batch:
                    assert same(batch.columns, expected(ids, lengths, logits))
                    assert batch.global_count is None


def test_the_positions_that_count_are_those_of_the_mask_that_have_a_next_token(
    service: Service, way: tuple[str, ...]
) -> None:
    mask = torch.ones(ROWS, WIDTH, dtype=torch.bool)
    mask[0, 3] = False
    with publishing(service, way) as (client, publisher):
        name = publisher.profile.teacher_id
        write(publisher, 0, loss_mask=mask)
        with client.open_session(a_student(name)) as session, session.acquire(step=0) as batch:
            _, lengths, _ = some_rows(0)
            assert batch.global_count == int((lengths - 1).sum()) - 1


def test_a_teacher_that_has_columns_writes_them_by_name(
    service: Service, way: tuple[str, ...]
) -> None:
    ids, lengths, logits = some_rows(7)
    wanted = expected(ids, lengths, logits)
    assert isinstance(wanted, Selection)
    with publishing(service, way) as (client, publisher):
        with publisher.reserve(0, input_ids=ids, lengths=lengths) as draft:
            draft.columns["topk_ids"][...] = wanted.topk_ids
            draft.columns["topk_logprobs"][...] = wanted.topk_logprobs
            draft.write(log_tail=wanted.log_tail, logsumexp=wanted.logsumexp)
            assert wanted.actual_logprob is not None
            draft.write(actual_logprob=wanted.actual_logprob)
        name = publisher.profile.teacher_id
        with (
            client.open_session(a_student(name)) as session,
            session.acquire(step=0, input_ids=ids, lengths=lengths) as batch,
        ):
            assert same(batch.columns, wanted)


def test_micro_batches_fill_a_draft_row_by_row(service: Service) -> None:
    ids, lengths, logits = some_rows(3)
    with publishing(service, batch_grid=a_grid(micro=2)) as (client, publisher):
        with publisher.reserve(0, input_ids=ids, lengths=lengths) as draft:
            for part in draft.micro_batches():
                assert part.rows == range(part.index.start, part.index.stop)
                tl.select_top_k(logits[part.index], out=part)
        name = publisher.profile.teacher_id
        with client.open_session(a_student(name)) as session, session.acquire(step=0) as batch:
            assert same(batch.columns, expected(ids, lengths, logits))


def test_what_is_sealed_stays_when_its_publisher_closes(
    service: Service, way: tuple[str, ...]
) -> None:
    ids, lengths, logits = some_rows(0)
    with publishing(service, way) as (_, publisher):
        name = publisher.profile.teacher_id
        write(publisher, 0)
    with (
        tl.connect(service.address) as client,
        client.open_session(a_student(name)) as session,
        session.acquire(step=0, input_ids=ids, lengths=lengths) as batch,
    ):
        assert same(batch.columns, expected(ids, lengths, logits))


def test_a_draft_that_was_not_fully_written_is_refused_and_its_rows_come_again(
    service: Service, way: tuple[str, ...]
) -> None:
    ids, lengths, logits = some_rows(0)
    with publishing(service, way) as (_, publisher):
        with pytest.raises(PayloadInvalidError, match="topk_ids was not written") as raised:
            with publisher.reserve(0, input_ids=ids, lengths=lengths) as draft:
                tl.select_top_k(logits[:3], out=draft.part(range(3)))
        assert raised.value.facts["row"] == 3
        assert draft.stage == "abandoned"
        write(publisher, 0)


def test_bytes_of_an_older_payload_do_not_pass_for_those_of_a_new_one(service: Service) -> None:
    with publishing(service, pool=1 << 16) as (client, publisher):
        name = publisher.profile.teacher_id
        with client.open_session(a_student(name), prefetch=0) as session:
            write(publisher, 0)
            session.acquire(step=0).close()
            assert client._returner.wait(30)
            ids, lengths, _ = some_rows(0)
            with pytest.raises(PayloadInvalidError, match="was not written for"):
                publisher.reserve(1, input_ids=ids, lengths=lengths).seal()


def test_an_error_in_the_block_abandons_the_draft(service: Service, way: tuple[str, ...]) -> None:
    ids, lengths, _ = some_rows(0)
    with publishing(service, way) as (_, publisher):
        with pytest.raises(ZeroDivisionError):
            with publisher.reserve(0, input_ids=ids, lengths=lengths):
                raise ZeroDivisionError
        write(publisher, 0)


def test_a_nan_is_refused_by_row_and_position(service: Service, way: tuple[str, ...]) -> None:
    ids, lengths, logits = some_rows(0)
    logits[2, 1, 5] = torch.nan
    with publishing(service, way) as (_, publisher):
        with pytest.raises(PayloadInvalidError, match="a NaN at position 1") as raised:
            with publisher.reserve(0, input_ids=ids, lengths=lengths) as draft:
                tl.select_top_k(logits, out=draft)
        assert raised.value.facts["row"] == 2
        write(publisher, 0)


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_bad_row_can_be_masked(service: Service, by_hand: bool) -> None:
    ids, lengths, logits = some_rows(0)
    good = expected(ids, lengths, logits)
    logits[2, 1, 5] = torch.nan
    with publishing(service) as (client, publisher):
        with publisher.reserve(0, input_ids=ids, lengths=lengths, bad_rows="mask") as draft:
            if by_hand:
                assert isinstance(good, Selection)
                draft.write(
                    **{
                        name: value.clone()
                        for name, value in vars(good).items()
                        if name != "status" and value is not None
                    }
                )
                draft.part(range(2, 3)).columns["topk_logprobs"][1, 2] = torch.nan
            else:
                tl.select_top_k(logits, out=draft)
        name = publisher.profile.teacher_id
        with client.open_session(a_student(name)) as session, session.acquire(step=0) as batch:
            assert batch.columns["row_status"].tolist() == [0, 0, tl.RowStatus.NAN, 0]
            start, end = batch.columns["row_offsets"][2:4].tolist()
            assert bool((batch.columns["topk_ids"][start:end] == -1).all())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("topk_ids", "outside the vocabulary"),
        ("topk_logprobs", "falling order"),
        ("log_tail", "do not sum to one"),
    ],
)
def test_columns_that_cannot_be_are_refused(service: Service, change: str, words: str) -> None:
    ids, lengths, logits = some_rows(0)
    columns = {k: v for k, v in vars(expected(ids, lengths, logits)).items() if k != "status"}
    if change == "topk_ids":
        columns[change][5, 0] = VOCABULARY
    elif change == "topk_logprobs":
        columns[change][5] = columns[change][5].flip(0)
    else:
        columns[change][5] -= 1.0
    with publishing(service) as (_, publisher):
        with pytest.raises(PayloadInvalidError, match=words):
            with publisher.reserve(0, input_ids=ids, lengths=lengths) as draft:
                draft.write(**columns)


def test_rows_of_another_width_are_refused_with_both_numbers(service: Service) -> None:
    """R04: a padded length must not leak into a payload."""
    ids, lengths, logits = some_rows(0)
    wide = torch.nn.functional.pad(logits, (0, 0, 0, 5))
    with publishing(service) as (_, publisher):
        draft = publisher.reserve(0, input_ids=ids, lengths=lengths)
        with pytest.raises(PayloadInvalidError, match=f"cut padding beyond {WIDTH}") as raised:
            tl.select_top_k(wide, out=draft)
        assert (raised.value.facts["given_width"], raised.value.facts["width"]) == (17, 12)
        with pytest.raises(PayloadInvalidError, match="topk_ids have shape") as raised:
            draft.write(topk_ids=torch.zeros(ROWS, 17, K, dtype=torch.int32))
        assert raised.value.facts["given_width"] == 17
        draft.abandon()


def test_the_same_rows_again_are_fine_and_others_are_refused(
    service: Service, way: tuple[str, ...]
) -> None:
    with publishing(service, way) as (_, publisher):
        write(publisher, 0)
        write(publisher, 0)
        with pytest.raises(PayloadConflictError, match="were sealed before"):
            write(publisher, 0, seed=99)
        write(publisher, 1)


def test_rows_that_are_being_written_are_not_given_twice(
    service: Service, way: tuple[str, ...]
) -> None:
    ids, lengths, logits = some_rows(0)
    with publishing(service, way) as (_, publisher):
        with publisher.reserve(0, input_ids=ids, lengths=lengths) as draft:
            with pytest.raises(PayloadConflictError):
                publisher.reserve(0, input_ids=ids, lengths=lengths)
            tl.select_top_k(logits, out=draft)


def test_a_full_pool_waits_for_students_and_then_goes_on(
    service: Service, way: tuple[str, ...]
) -> None:
    """Room for two steps, and twenty of them: the publisher runs no further ahead."""
    with publishing(service, way, pool=1 << 14) as (client, publisher):
        name = publisher.profile.teacher_id
        with (
            client.open_session(a_student(name)) as session,
            ThreadPoolExecutor(1) as pool,
        ):
            ahead = pool.submit(write_all, publisher, 20)
            for step in range(20):
                ids, lengths, logits = some_rows(step)
                with session.acquire(step=step, input_ids=ids, lengths=lengths) as batch:
                    assert same(batch.columns, expected(ids, lengths, logits))
            ahead.result(30)


def test_a_pool_that_stays_full_says_what_it_waits_for(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line, "SAY_WHY_SECONDS", 30.0)
    ids, lengths, _ = some_rows(0)
    with publishing(service, pool=1 << 13) as (_, publisher):
        write(publisher, 0)
        with pytest.raises(PoolFullError, match="step 0 is not read by all yet") as raised:
            publisher.reserve(1, input_ids=ids, lengths=lengths, timeout=1.0)
        assert str(raised.value).endswith("(no student is there to read)")
        assert raised.value.facts["need_bytes"] == 4352
        assert raised.value.facts["free_bytes"] == 0
        # The claim was given up with it.
        with pytest.raises(PoolFullError, match="step 1 needs"):
            publisher.reserve(1, input_ids=ids, lengths=lengths, timeout=1.0)


def test_a_payload_larger_than_the_pool_is_refused_at_once(service: Service) -> None:
    rows = torch.zeros(ROWS, 60, dtype=torch.int64)
    with publishing(service, pool=4096) as (_, publisher):
        with pytest.raises(PayloadInvalidError, match="can never fit"):
            publisher.reserve(0, input_ids=rows)


def test_two_threads_write_two_steps_at_once(service: Service, way: tuple[str, ...]) -> None:
    both = threading.Barrier(2)

    def one(step: int) -> None:
        ids, lengths, logits = some_rows(step)
        both.wait(30)
        with publisher.reserve(step, input_ids=ids, lengths=lengths) as draft:
            both.wait(30)
            tl.select_top_k(logits, out=draft)

    with publishing(service, way) as (client, publisher), ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(one, step) for step in range(2)]:
            done.result(30)
        name = publisher.profile.teacher_id
        with client.open_session(a_student(name)) as session:
            for step in range(2):
                ids, lengths, logits = some_rows(step)
                with session.acquire(step=step, input_ids=ids, lengths=lengths) as batch:
                    assert same(batch.columns, expected(ids, lengths, logits))


def test_two_shards_make_a_step(service: Service) -> None:
    name = next(_names)
    ids, lengths, logits = some_rows(5)
    with tl.connect(service.address) as client:
        publishers = [
            client.open_publisher(
                a_teacher(name, batch_grid=a_grid(2), data_parallel_rank=rank), transports=way
            )
            for rank, way in enumerate(WAYS)
        ]
        for rank, publisher in enumerate(publishers):
            own = slice(2 * rank, 2 * rank + 2)
            with publisher.reserve(0, input_ids=ids[own], lengths=lengths[own]) as draft:
                assert draft.rows == range(2 * rank, 2 * rank + 2)
                tl.select_top_k(logits[own], out=draft)
        with (
            client.open_session(a_student(name)) as session,
            session.acquire(step=0, input_ids=ids, lengths=lengths) as batch,
        ):
            assert same(batch.columns, expected(ids, lengths, logits))
        for publisher in publishers:
            publisher.close()


def test_a_partial_batch_is_cut_at_its_real_rows(service: Service) -> None:
    ids, lengths, logits = some_rows(5)
    with publishing(service) as (client, publisher):
        with publisher.reserve(0, input_ids=ids, lengths=lengths, real_rows=3) as draft:
            assert draft.rows == range(3)
            tl.select_top_k(logits, out=draft)  # the padding row is passed over
        name = publisher.profile.teacher_id
        with client.open_session(a_student(name)) as session, session.acquire(step=0) as batch:
            assert batch.real_row_count == 3
            assert same(batch.columns, expected(ids[:3], lengths[:3], logits[:3]))


def test_without_token_ids_digests_are_zero_and_next_ids_are_asked_for(service: Service) -> None:
    ids, lengths, logits = some_rows(5)
    with publishing(service) as (client, publisher):
        with publisher.reserve(0, lengths=lengths) as draft:
            with pytest.raises(PayloadInvalidError, match="give input_ids to reserve"):
                tl.select_top_k(logits, out=draft)
            tl.select_top_k(logits, out=draft, next_ids=next_of(ids, lengths))
        name = publisher.profile.teacher_id
        with client.open_session(a_student(name)) as session, session.acquire(step=0) as batch:
            assert same(batch.columns, expected(ids, lengths, logits))
            assert not bool(batch.columns["row_digests"].any())


def test_windows_keep_the_positions_that_are_wanted(service: Service) -> None:
    ids, lengths, logits = some_rows(5)
    windows = torch.stack([torch.ones_like(lengths), lengths - 1], 1)
    with publishing(service) as (client, publisher):
        with publisher.reserve(0, input_ids=ids, lengths=lengths, windows=windows) as draft:
            tl.select_top_k(logits, out=draft)
        name = publisher.profile.teacher_id
        with (
            client.open_session(a_student(name)) as session,
            session.acquire(step=0, input_ids=ids, lengths=lengths, windows=windows) as batch,
        ):
            wanted = flat(logits[:, 1:], lengths - 1)
            got = tl.select_top_k(wanted, k=K, vocab_size=VOCABULARY)
            assert torch.equal(batch.columns["topk_ids"], got.topk_ids)


def test_what_a_draft_knows_must_not_be_said_otherwise(service: Service) -> None:
    ids, lengths, logits = some_rows(0)
    with publishing(service) as (_, publisher):
        draft = publisher.reserve(0, input_ids=ids, lengths=lengths)
        for given in ({"k": 3}, {"temperatures": (1.0,)}, {"vocab_size": 9}):
            with pytest.raises(PayloadInvalidError, match="profile says"):
                tl.select_top_k(logits, out=draft, **given)
        draft.abandon()
        with pytest.raises(ReservationLapsedError, match="abandoned"):
            tl.select_top_k(logits, out=draft)


def test_a_draft_whose_announcement_met_an_ended_line_is_given_up_without_a_word(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    def announce(*args: object) -> None:
        raise ServerUnreachableError("the line to the broker has ended")

    ids, lengths, _ = some_rows(0)
    with publishing(service) as (_, publisher), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with monkeypatch.context() as patch:
            patch.setattr(line.Line, "announce", announce)
            with pytest.raises(ServerUnreachableError, match="has ended"):
                publisher.reserve(0, input_ids=ids, lengths=lengths)
        gc.collect()
        assert [str(each.message) for each in said] == []
        write(publisher, 0)  # its rows are free again


def test_a_closed_publisher_abandons_its_drafts_and_refuses_to_go_on(service: Service) -> None:
    ids, lengths, _ = some_rows(0)
    with publishing(service) as (_, publisher):
        draft = publisher.reserve(0, input_ids=ids, lengths=lengths)
        publisher.close()
        publisher.close()
        assert draft.stage == "abandoned"
        with pytest.raises(SessionExpiredError, match="was closed"):
            publisher.reserve(1, input_ids=ids, lengths=lengths)


@pytest.mark.parametrize("end", ["abandoned", "closed"])
def test_a_seal_amid_which_another_thread_gives_the_draft_up_does_not_pass_for_one(
    service: Service, way: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """While it waits for its teacher's device: the step would be there for nobody."""
    ids, lengths, logits = some_rows(0)
    with publishing(service, way) as (_, publisher):
        draft = publisher.reserve(0, input_ids=ids, lengths=lengths)
        tl.select_top_k(logits, out=draft)
        give_up = {"abandoned": draft.abandon, "closed": publisher.close}[end]
        monkeypatch.setattr(HostRoom, "settle", lambda room: give_up())
        with pytest.raises(ReservationLapsedError, match="abandoned"):
            draft.seal()
        assert draft.stage == "abandoned"


def test_a_seal_that_the_server_heard_before_another_thread_gave_the_draft_up_is_one(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, lengths, logits = some_rows(0)
    with publishing(service) as (_, publisher):
        draft = publisher.reserve(0, input_ids=ids, lengths=lengths)
        tl.select_top_k(logits, out=draft)
        seal = publisher._desk.way.seal

        def seal_and_abandon(payload_id: str, sealing: Sealing, *, until: float) -> None:
            seal(payload_id, sealing, until=until)
            draft.abandon()

        monkeypatch.setattr(publisher._desk.way, "seal", seal_and_abandon)
        draft.seal()
        assert draft.stage == "sealed"


def test_a_seal_over_a_line_that_has_ended_says_that_the_session_has(service: Service) -> None:
    ids, lengths, logits = some_rows(0)
    with publishing(service) as (_, publisher):
        draft = publisher.reserve(0, input_ids=ids, lengths=lengths)
        tl.select_top_k(logits, out=draft)
        line_of = publisher._desk.way.line
        assert line_of is not None
        line_of.close()
        with pytest.raises(SessionExpiredError, match="has ended"):
            draft.seal()
        assert draft.stage == "sealed, as far as is known"
        draft.abandon()


def test_a_shard_comes_back_once_its_publisher_is_closed(service: Service) -> None:
    with tl.connect(service.address) as client:
        profile = a_teacher(next(_names))
        with client.open_publisher(profile):
            with pytest.raises(SessionRefusedError) as raised:
                client.open_publisher(profile)
            assert [each.rule for each in raised.value.violations] == ["shard_taken"]
        with client.open_publisher(profile) as publisher:
            write(publisher, 0)


def test_publishers_and_drafts_are_not_pickled_or_copied(service: Service) -> None:
    ids, lengths, _ = some_rows(0)
    with publishing(service) as (_, publisher):
        draft = publisher.reserve(0, input_ids=ids, lengths=lengths)
        for each in (publisher, draft):
            with pytest.raises(RequestInvalidError):
                pickle.dumps(each)
            with pytest.raises(RequestInvalidError):
                copy.copy(each)
        draft.abandon()


def test_a_draft_that_is_dropped_is_named_and_given_up(service: Service) -> None:
    ids, lengths, _ = some_rows(0)
    with publishing(service) as (client, publisher):
        with pytest.warns(ResourceWarning, match="draft of step 0"):
            publisher.reserve(0, input_ids=ids, lengths=lengths)
        assert client._returner.wait(30)
        write(publisher, 0)


def test_a_publisher_that_is_dropped_is_named_and_ended(service: Service) -> None:
    profile = a_teacher(next(_names))
    with tl.connect(service.address) as client:
        with pytest.warns(ResourceWarning, match="publisher"):
            client.open_publisher(profile)
        assert client._returner.wait(30)
        client.open_publisher(profile).close()


def test_a_forked_child_is_refused(service: Service) -> None:
    ids, lengths, logits = some_rows(0)
    with publishing(service) as (_, publisher):
        with publisher.reserve(0, input_ids=ids, lengths=lengths) as draft:
            part = draft.part(range(2))
            calls: tuple[Callable[[], object], ...] = (
                lambda: publisher.reserve(1, input_ids=ids, lengths=lengths),
                draft.seal,
                draft.check,
                *(partial(tl.select_top_k, logits[: len(at.rows)], out=at) for at in (draft, part)),
                *(partial(at.write, topk_ids=None) for at in (draft, part)),
                *(partial(getattr, at, "columns") for at in (draft, part)),
                *(partial(getattr, at, "selection") for at in (draft, part)),
                lambda: draft.part(range(1)),
                lambda: list(draft.micro_batches()),
            )
            child = os.fork()
            if not child:
                refused = 0
                for call in calls:
                    try:
                        call()
                    except ForkedClientError:
                        refused += 1
                draft.abandon()
                publisher.close()
                os._exit(refused)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == len(calls)
            tl.select_top_k(logits, out=draft)


def test_settings_that_cannot_be_are_refused(service: Service) -> None:
    with tl.connect(service.address) as client:
        with pytest.raises(RequestInvalidError, match="TeacherProfile"):
            client.open_publisher(a_student("t"))  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="pool_size_bytes"):
            client.open_publisher(a_teacher("t"), pool_size_bytes=0)
        with pytest.raises(RequestInvalidError, match="cannot write for local"):
            client.open_publisher(a_teacher("t"), transports=("local",))
        with pytest.raises(SessionRefusedError):
            client.open_publisher(a_teacher("t", batch_grid=None))


def test_a_publisher_that_insists_on_shared_memory_is_refused_without_it(tmp_path: Path) -> None:
    over_network = (tl.Transport.STREAM,)
    with (
        serve(tmp_path, transports=over_network) as service,
        tl.connect(service.address) as client,
    ):
        with client.open_publisher(a_teacher("t")) as publisher:
            assert publisher.transport is tl.Transport.STREAM
        with pytest.raises(NoCommonTransportError, match="allow 'stream'"):
            client.open_publisher(a_teacher("u"), transports="shared_memory")


def test_reserve_refuses_what_makes_no_sense(service: Service) -> None:
    ids, lengths, _ = some_rows(0)
    with publishing(service) as (_, publisher):
        for given, words in (
            ({"step": -1}, "whole number from 0"),
            ({"step": 1 << 62}, "whole number from 0"),
            ({"step": 1 << 70}, "whole number from 0"),
            ({"step": True}, "whole number from 0"),
            ({"windows": [[2**62, 2**62]] * ROWS}, "wants"),
            ({"bad_rows": "drop"}, "no policy"),
            ({"rows": range(2)}, "are 2"),
            ({"rows": range(2, 9)}, "not among the step's 4"),
            ({"real_rows": 9}, "give 1 to 4"),
            ({"lengths": lengths + 40}, "wide"),
            ({"input_ids": None, "lengths": None}, "neither input_ids nor lengths"),
        ):
            asked = {"step": 0, "input_ids": ids, "lengths": lengths, **given}
            with pytest.raises(PayloadInvalidError, match=words):
                publisher.reserve(**asked)  # type: ignore[arg-type]


def test_logits_of_a_wider_head_than_the_profile_says_are_refused(service: Service) -> None:
    ids, lengths, logits = some_rows(0)
    wide = torch.nn.functional.pad(logits, (0, 1))
    with publishing(service) as (_, publisher):
        with publisher.reserve(0, input_ids=ids, lengths=lengths) as draft:
            with pytest.raises(PayloadInvalidError, match=r"57 columns.*this rank has 56"):
                tl.select_top_k(wide, out=draft)
            tl.select_top_k(logits[..., :VOCABULARY], out=draft)  # a head that was cut is fine


def test_a_rank_of_padding_alone_finds_no_rows_to_publish(service: Service) -> None:
    with publishing(service, batch_grid=a_grid(2), data_parallel_rank=1) as (_, publisher):
        assert publisher.rows_of_step() == range(2, 4)
        assert publisher.rows_of_step(3) == range(2, 3)
        assert not publisher.rows_of_step(2)
        with pytest.raises(PayloadInvalidError, match="rows_of_step"):
            publisher.reserve(0, lengths=[1, 1], real_rows=2)
        with pytest.raises(PayloadInvalidError, match="give 1 to 4"):
            publisher.rows_of_step(5)


def test_a_remote_publisher_waits_for_room_of_the_server_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server's pool has 1 MiB; nobody reads. It is this test's own: what lies there stays."""
    answer_early(monkeypatch)
    many = torch.zeros(ROWS, 64, dtype=torch.int64)
    with (
        serve(tmp_path) as service,
        publishing(service, ("stream",), top_k=250, vocabulary_size=300, head_rows=300) as (
            _,
            publisher,
        ),
    ):

        def write_on() -> None:
            for step in range(4):
                with publisher.reserve(step, input_ids=many, timeout=30.0) as draft:
                    tl.select_top_k(torch.zeros(ROWS, 64, 300), out=draft)

        with pytest.raises(PoolFullError, match="no room") as raised:
            write_on()
        assert raised.value.facts["need_bytes"]


@pytest.mark.parametrize("interruption", [DeadlinePassedError("no answer"), KeyboardInterrupt()])
@pytest.mark.parametrize("was_sent", [True, False])
def test_a_draft_whose_seal_went_out_is_sealed_again_or_abandoned_and_nothing_else(
    service: Service,
    way: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    interruption: BaseException,
    was_sent: bool,
) -> None:
    ids, lengths, logits = some_rows(0)
    with publishing(service, way) as (client, publisher):
        draft = publisher.reserve(0, input_ids=ids, lengths=lengths)
        part = draft.part(range(ROWS))
        tl.select_top_k(logits, out=draft)
        calls: tuple[Callable[[], object], ...] = (
            draft.check,
            *(partial(at.select, logits * torch.nan) for at in (draft, part)),
            *(partial(at.write, topk_ids=None) for at in (draft, part)),
            *(partial(getattr, at, "columns") for at in (draft, part)),
            *(partial(getattr, at, "selection") for at in (draft, part)),
            lambda: draft.part(range(1)),
        )
        with monkeypatch.context() as patch:
            patch.setattr(draft._desk.way, "seal", unanswered(draft, interruption, was_sent))
            with pytest.raises(type(interruption)):
                draft.seal()
        for call in calls:
            with pytest.raises(ReservationLapsedError, match="seal it again, or abandon it"):
                call()
        assert draft.stage == "sealed, as far as is known"
        if was_sent and way == ("stream",):
            draft.abandon()  # a stream has forgotten what was sealed
        else:
            draft.seal()
        assert draft.stage == "sealed"
        name = publisher.profile.teacher_id
        with (
            client.open_session(a_student(name)) as session,
            session.acquire(step=0, input_ids=ids, lengths=lengths) as batch,
        ):
            assert same(batch.columns, expected(ids, lengths, logits))


def unanswered(draft: tl.Draft, interruption: BaseException, was_sent: bool) -> Callable[..., None]:
    """A way's seal that the server may have heard, whose answer does not come."""
    seal = draft._desk.way.seal

    def without_an_answer(*given: object, **more: object) -> None:
        if was_sent:
            seal(*given, **more)  # type: ignore[arg-type]
        raise interruption

    return without_an_answer


def test_values_are_checked_however_often_a_seal_is_tried(service: Service) -> None:
    ids, lengths, logits = some_rows(0)
    with publishing(service) as (_, publisher):
        draft = publisher.reserve(0, input_ids=ids, lengths=lengths)
        tl.select_top_k(logits, out=draft)
        draft.check()  # and an interruption, right before its seal
        tl.select_top_k(logits * torch.nan, out=draft)
        with pytest.raises(PayloadInvalidError, match="a NaN"):
            draft.seal()
