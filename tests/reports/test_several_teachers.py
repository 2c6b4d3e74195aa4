"""Several teachers behind one address: R17, R18, R30, R44, R52."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.client.publishing.a_publisher import a_student, a_teacher, expected, some_rows
from tests.client.publishing.test_publisher import same
from tests.processes.test_fifty_steps import await_true
from tests.server.test_serve_command import ready, unix
from tests.transport_suite.dense_teacher import VOCABULARY_SIZE, DenseTeacher, head_logits
from tests.transport_suite.right import RAGGED
from tests.transport_suite.writing import Embedded, a_profile, embedded_server

import teacher_logits_client as tl
from teacher_logits.__main__ import main
from teacher_logits.errors import (
    DeadlinePassedError,
    EngineError,
    LeaseLostError,
    NotAllowedError,
    PayloadInvalidError,
    PoolFullError,
    RequestInvalidError,
    SessionExpiredError,
    SessionRefusedError,
    UnknownTeacherError,
)
from teacher_logits_client.calls.inspection import inspect_server
from teacher_logits_server.app import serve_in_thread
from teacher_logits_server.config import ServerConfig
from teacher_logits_server.engines import Row
from teacher_logits_server.named_teachers import NamedTeacher

PAGE = 4096
NAMES = tuple(f"t{number}" for number in range(8))
TAGS = {name: (f"tag-{name}", f"more-{name}") for name in NAMES}
TOY = "teacher_logits_client.testing:toy_teacher"
FAILING_TOKEN = 1403


class TurnedTeacher(DenseTeacher):
    """The dense teacher with its columns turned by a number, held up by a gate."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.gate = threading.Event()
        self.gate.set()

    def logits(self, rows: Sequence[Row]) -> Iterator[torch.Tensor]:
        """Yield them behind the gate."""
        self.gate.wait(30)
        if any(FAILING_TOKEN in row.token_ids.tolist() for row in rows):
            raise RuntimeError("out of order")
        for chunk in super().logits(rows):
            yield turned(chunk, self.number)


def turned(logits: torch.Tensor, number: int) -> torch.Tensor:
    logits[:, :VOCABULARY_SIZE] = logits[:, :VOCABULARY_SIZE].roll(number, 1)
    return logits


def actual_of(row: Sequence[int], number: int) -> torch.Tensor:
    """What a turned teacher says of the tokens that really come next [L]; 0 at the last."""
    logprobs = turned(head_logits(row), number)[:, :VOCABULARY_SIZE].log_softmax(1)
    following = torch.tensor([*row[1:], 0]).unsqueeze(1)
    actual = logprobs.gather(1, following).squeeze(1)
    actual[-1] = 0
    return actual


class Several:
    """Eight teachers of one server, and a client of it."""

    def __init__(self, server: Embedded, teachers: dict[str, TurnedTeacher], client: tl.Client):
        self.server, self.teachers, self.client = server, teachers, client

    def number(self, name: str) -> int:
        return self.teachers[name].number

    @contextmanager
    def held(self, name: str) -> Iterator[None]:
        """Have a teacher wait for the end of the block."""
        gate = self.teachers[name].gate
        gate.clear()
        try:
            yield
        finally:
            gate.set()


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Several]:
    teachers = {name: TurnedTeacher(number * 7) for number, name in enumerate(NAMES)}
    greedy = NamedTeacher(teacher_id="t1", settings={"engine": TOY, "pool_size_bytes": 2 * PAGE})
    folder, pool = tmp_path_factory.mktemp("several"), 64 * PAGE
    with (
        embedded_server(folder, pool_bytes=pool, engine=teachers, teachers=(greedy,)) as server,
        tl.connect(server.address) as client,
    ):
        yield Several(server, teachers, client)


@pytest.fixture(scope="module")
def router(several: Several) -> Iterator[tl.TeacherRouter]:
    with tl.TeacherRouter.open(several.client, a_profile(top_k=8), TAGS) as made:
        yield made


# R44: no teacher waits for another


def test_r44_while_one_of_eight_teachers_is_held_up_the_other_seven_have_answered(
    several: Several, router: tl.TeacherRouter
) -> None:
    tags = [f"tag-{name}" for name in NAMES]
    with several.held("t3"):
        future = router.score([RAGGED[0]] * len(NAMES), tags=tags)
        for name in set(NAMES) - {"t3"}:
            with future.futures[name].result() as payload:
                assert payload.payload.teacher_id == name
        assert not future.futures["t3"].done()

    with future.futures["t3"].result() as late:
        assert late.payload.teacher_id == "t3"


def test_r44_what_has_come_is_had_while_another_teacher_is_late(
    several: Several, router: tl.TeacherRouter
) -> None:
    with several.held("t3"):
        future = router.score([RAGGED[0], RAGGED[2]], tags=["tag-t3", "tag-t5"])
        assert future.futures["t5"].wait()
        with future.result(0.01, partial=True) as answer:
            assert set(answer.payloads) == {"t5"}
            assert "teacher 't3': waited 0.01 s for its scores" in answer.failures["t3"].message
            assert answer.targets.valid.tolist() == [False] * 8 + [True, True, False]
        with pytest.raises(DeadlinePassedError, match=r"teacher 't3': waited 0\.01 s"):
            future.result(0.01)

    with future.futures["t3"].result() as late:
        assert late.payload.teacher_id == "t3"


def test_r44_leases_on_one_teachers_share_of_the_pool_leave_the_others_theirs(
    several: Several,
) -> None:
    profile = a_profile(top_k=8)
    with ExitStack() as stack:
        greedy, other = (
            stack.enter_context(several.client.open_session(replace(profile, teacher_id=name)))
            for name in ("t1", "t2")
        )
        first, second = (greedy.score(RAGGED).result() for _ in range(2))
        waiting = greedy.score(RAGGED)
        for _ in range(4):
            stack.enter_context(other.score(RAGGED).result())
        with pytest.raises(PoolFullError, match=r"teacher 't1' have taken 8192 of the 8192"):
            several.server.core.ledger.reserve(1, teacher_id="t1")

        first.close()
        second.close()
        with waiting.result() as payload:
            assert payload.payload.teacher_id == "t1"


# R30: each row goes where its tag says


def test_r30_each_row_of_a_mixed_batch_is_scored_by_the_teacher_that_has_its_tag(
    several: Several, router: tl.TeacherRouter
) -> None:
    rows = [*RAGGED, [5, 6], [1]]
    tags = ["more-t4", "tag-t0", "tag-t4", "tag-t7", "more-t0"]
    with router.score(rows, tags=tags).result() as answer:
        assert answer.rows == {"t0": (1, 4), "t4": (0, 2), "t7": (3,)}
        targets = answer.targets.clone()

    assert targets.row_offsets.diff().tolist() == [8, 1, 3, 2, 1]
    assert targets.actual_logprob is not None
    numbers = [several.number(tag[-2:]) for tag in tags]
    said = [actual_of(row, number) for row, number in zip(rows, numbers, strict=True)]
    torch.testing.assert_close(targets.actual_logprob, torch.cat(said), atol=2e-3, rtol=2e-3)
    assert targets.valid.sum() == len(torch.cat(said)) - len(rows)


@pytest.mark.parametrize("form", ["flat", "rectangle", "rows"])
def test_r30_ids_of_ones_own_choice_are_scored_by_the_teacher_of_their_row(
    several: Several, router: tl.TeacherRouter, form: str
) -> None:
    rows, tags = [[3, 1, 4], [1, 5], [9, 2]], ["tag-t5", "tag-t2", "more-t5"]
    chosen = torch.arange(3 * 3 * 2).view(3, 3, 2) * 7 % VOCABULARY_SIZE
    each = [chosen[row, : len(ids)] for row, ids in enumerate(rows)]
    forms: dict[str, torch.Tensor | list[torch.Tensor]] = {
        "flat": torch.cat(each),
        "rectangle": chosen,
        "rows": each,
    }
    with router.scored_ids(rows, ids=forms[form], tags=tags).result() as answer:
        targets = answer.targets

    said = [
        turned(head_logits(row), several.number(tag[-2:]))[:, :VOCABULARY_SIZE].log_softmax(1)
        for row, tag in zip(rows, tags, strict=True)
    ]
    wanted = torch.cat([one.gather(1, ids) for one, ids in zip(said, each, strict=True)])
    assert torch.equal(targets.topk_ids.long(), torch.cat(each))
    valid = targets.valid
    torch.testing.assert_close(targets.topk_logprobs[valid], wanted[valid], atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize(
    ("ids", "told"),
    [
        (None, "ids is None"),
        (torch.zeros(3, 1, dtype=torch.int64), "4 positions are wanted"),
        (torch.zeros(3, 2, 1, dtype=torch.int64), "ids are of 3 rows and input_ids of 2"),
        ([[[1], [2]]], "ids are of 1 rows and input_ids of 2"),
        (torch.zeros(2, 1, 1, dtype=torch.int64), "row 0 of ids has shape"),
        (torch.zeros(2, 2, 1), "integers"),
    ],
)
def test_r30_ids_that_are_not_of_the_batch_are_refused(
    router: tl.TeacherRouter, ids: torch.Tensor, told: str
) -> None:
    with pytest.raises(PayloadInvalidError, match=told):
        router.scored_ids([[1, 2], [3, 4]], ids=ids, tags=["tag-t0", "tag-t1"])


def test_r30_rows_of_one_teacher_are_its_own_payload(router: tl.TeacherRouter) -> None:
    with router.score(RAGGED, tags=["tag-t2"] * 3).result() as answer:
        (payload,) = answer.payloads.values()

        assert answer.targets is payload.targets


def test_r30_sessions_with_profiles_of_their_own_make_one_batch_of_the_widest(
    several: Several,
) -> None:
    opened = several.client.open_session
    narrow = opened(a_profile(teacher_id="t4", top_k=2))
    wide = opened(a_profile(teacher_id="t5", top_k=6))
    with tl.TeacherRouter({narrow: "a", wide: ("b", "c")}) as router:
        with router.score(RAGGED, tags=["b", "a", "c"]).result() as answer:
            present = answer.targets.present.sum(1).tolist()
            assert answer.targets.topk_ids.shape == (12, 6)
        twice = opened(a_profile(teacher_id="t5"))
        with twice, pytest.raises(RequestInvalidError, match=r"with one teacher \(t5, t5\)"):
            tl.TeacherRouter({wide: "b", twice: "c"})

    assert present == [*[6] * 8, 2, *[6] * 3]
    with pytest.raises(SessionExpiredError):
        narrow.score(RAGGED)


def test_r30_a_profile_that_names_a_teacher_itself_is_refused(several: Several) -> None:
    with pytest.raises(RequestInvalidError, match=r"names teacher 't0', and the router asks t1"):
        tl.TeacherRouter.open(several.client, a_profile(teacher_id="t0"), ["t1"])


def test_r30_what_is_taken_out_ends_with_the_answer(router: tl.TeacherRouter) -> None:
    with router.score(RAGGED, tags=["tag-t0", "tag-t2", "tag-t2"]).result() as answer:
        first = answer.targets

        assert answer.targets is first
        with pytest.raises(PayloadInvalidError, match=r"teacher 't0': .* no temperature 3"):
            answer.targets_at(3.0)
    with pytest.raises(LeaseLostError, match="several teachers is closed"):
        _ = answer.targets
    answer.close()


def test_r30_a_row_with_a_tag_that_nobody_has_is_refused_before_anything_is_sent(
    several: Several, router: tl.TeacherRouter
) -> None:
    before = inspect_server(several.client.address, timeout=10).queue
    with pytest.raises(UnknownTeacherError, match=r"row 1 has the tag 'art'.*there are: tag-t0, "):
        router.score(RAGGED, tags=["tag-t0", "art", "tag-t1"])

    after = inspect_server(several.client.address, timeout=10).queue
    assert after == before


def test_r30_a_tag_that_two_teachers_have_is_refused_before_a_session_is_opened(
    several: Several,
) -> None:
    with pytest.raises(RequestInvalidError, match=r"tag 'aime' is of teacher 't0' and of .* 't1'"):
        tl.TeacherRouter.open(
            several.client, a_profile(), {"t0": ("gsm8k", "aime"), "t1": ("mbpp", "aime")}
        )


def test_r30_a_teacher_that_is_not_there_is_told_with_those_that_are_and_no_session_is_left(
    several: Several,
) -> None:
    def sessions() -> int:
        return len(inspect_server(several.client.address, timeout=10).sessions)

    before = sessions()
    with pytest.raises(UnknownTeacherError, match=r"'t9'.*there are: t0, t1, .*, t7") as refusal:
        tl.TeacherRouter.open(several.client, a_profile(), ["t0", "t9"], timeout=0.2)

    assert refusal.value.facts["teacher_id"] == "t9"
    await_true(lambda: sessions() <= before)  # those of its lines end a moment later


def test_r30_who_names_no_teacher_of_several_is_told_them(several: Several) -> None:
    with pytest.raises(UnknownTeacherError, match=r"names no teacher; there are: t0, t1"):
        several.client.open_session(a_profile())


def test_r30_one_teacher_that_fails_is_named_and_what_the_others_said_is_not_lost(
    router: tl.TeacherRouter,
) -> None:
    rows = [RAGGED[0], [FAILING_TOKEN, 2], RAGGED[2]]
    future = router.score(rows, tags=["tag-t0", "tag-t6", "tag-t5"])
    whose = r"teacher 't6' \(its row 0 is row 1 of the batch\): the teacher failed on these 1"
    with pytest.raises(EngineError, match=whose) as failure:
        future.result()
    assert failure.value.facts["batch_row"] == 1

    with future.result(partial=True) as answer:
        assert isinstance(answer.failures["t6"], EngineError)
        assert set(answer.payloads) == {"t0", "t5"}
        targets = answer.targets.clone()
    assert targets.row_offsets.diff().tolist() == [8, 2, 3]
    assert targets.valid.tolist() == [*[True] * 7, False, False, False, True, True, False]
    assert targets.topk_ids[8:10].max() == -1
    assert targets.log_tail[8:10].tolist() == [0.0, 0.0]


def test_r30_a_publisher_of_a_name_that_an_engine_has_is_refused_with_the_names(
    several: Several,
) -> None:
    with pytest.raises(SessionRefusedError, match=r"'t5'.*this server's own \(those are: t0, t1"):
        several.client.open_publisher(a_teacher("t5"))


def test_r30_what_is_wrong_with_a_row_names_its_place_in_the_batch_and_nothing_is_left_asked(
    several: Several, router: tl.TeacherRouter
) -> None:
    rows = [[1], [2], [VOCABULARY_SIZE, 3]]
    with pytest.raises(PayloadInvalidError, match=r"'t2' \(its row 1 is row 2 of the") as refusal:
        router.score(rows, tags=["tag-t0", "tag-t2", "tag-t2"])

    assert refusal.value.facts["batch_row"] == 2
    several.server.wait_until(lambda: several.server.usage.used_bytes == 0)


def test_r30_prefixes_and_windows_go_with_their_rows(
    several: Several, router: tl.TeacherRouter
) -> None:
    rows, prefix = [[5, 6, 7], [8, 9], [3, 4, 1]], [[], [1, 2], [9]]
    tags, windows = ["tag-t6", "tag-t0", "tag-t6"], [[1, 2], [0, 1], [0, 3]]
    with router.score(rows, tags=tags, prefix_ids=prefix, windows=windows).result() as answer:
        targets = answer.targets.clone()

    said = [
        actual_of([*before, *row], several.number(tag[-2:]))[len(before) :][first : first + count]
        for row, before, tag, (first, count) in zip(rows, prefix, tags, windows, strict=True)
    ]
    assert targets.actual_logprob is not None
    torch.testing.assert_close(targets.actual_logprob, torch.cat(said), atol=2e-3, rtol=2e-3)
    assert targets.row_firsts is not None
    assert targets.row_firsts.tolist() == [1, 0, 0]


# R52: default and named together, none left out


def test_r52_a_default_and_named_teachers_are_all_there(tmp_path: Path) -> None:
    flags = ("--teacher-id", "default", "--teacher", f"math={TOY}", "--teacher", f"code={TOY}")
    with (
        ready(tmp_path, *unix(tmp_path), *flags, engine=TOY) as (_, readiness),
        tl.connect(str(readiness["address"])) as client,
    ):
        assert readiness["teacher_ids"] == ["default", "math", "code"]
        with tl.TeacherRouter.open(client, a_profile(), ["default", "math", "code"]) as router:
            tags = ["code", "default", "math"]
            with router.score([[1, 2], [3], [4]], tags=tags).result() as answer:
                told = {name: each.payload.teacher_id for name, each in answer.payloads.items()}
                assert told == {name: name for name in tags}
        view = inspect_server(client.address, timeout=10)
        assert [each.teacher_id for each in view.teachers] == ["default", "math", "code"]


def test_r52_a_start_in_which_one_teacher_does_not_load_is_refused_by_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--engine", TOY, "--teacher", f"math={tmp_path}/missing", "--teacher", f"code={TOY}")
    code = main(["serve", "--listen", f"unix:{tmp_path}/s", *flags])

    assert code == 2
    assert "teacher 'math': --model" in capsys.readouterr().err
    assert not (tmp_path / "s").exists()


# R18: a server without a model, and teachers of several publishers


def test_r18_two_publishers_of_two_teachers_publish_where_no_model_is_loaded(
    tmp_path: Path,
) -> None:
    with (
        serve_in_thread(ServerConfig(listen=(f"unix:{tmp_path}/s",)), None) as server,
        tl.connect(server.address) as client,
        client.open_publisher(a_teacher("math")) as math,
        client.open_publisher(a_teacher("code")) as code,
    ):
        assert server.readiness.teacher_ids == ()
        steps = {"math": (math, some_rows(1)), "code": (code, some_rows(2))}
        for publisher, (ids, lengths, logits) in steps.values():
            with publisher.reserve(0, input_ids=ids, lengths=lengths) as draft:
                tl.select_top_k(logits, out=draft)
        for name, (_, rows) in steps.items():
            with client.open_session(a_student(name)) as session:
                with session.acquire(step=0, input_ids=rows[0], lengths=rows[1]) as batch:
                    assert same(batch.columns, expected(*rows))
        view = inspect_server(client.address, timeout=10)
        assert [each.teacher_id for each in view.teachers] == ["math", "code"]


@pytest.mark.parametrize("transport", [tl.Transport.SHARED_MEMORY, tl.Transport.STREAM])
def test_r17_who_asks_a_published_teacher_for_scores_is_told_at_the_first_call(
    tmp_path: Path, transport: tl.Transport
) -> None:
    ids, lengths, _ = some_rows(1)
    with (
        serve_in_thread(ServerConfig(listen=(f"unix:{tmp_path}/s",)), None) as server,
        tl.connect(server.address) as client,
        client.open_publisher(a_teacher("math")),
        client.open_session(a_student("math", transports=(transport,))) as session,
    ):
        future = session.score(ids, lengths=lengths)
        with pytest.raises(NotAllowedError, match=r"'math' is published.*acquire its steps"):
            future.result()
