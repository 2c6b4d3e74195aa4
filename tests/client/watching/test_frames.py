"""What `top` draws of a server: pure, from a view to lines."""

from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from tests.client.watching.views import MIB, a_session, a_view, counted

from teacher_logits.errors import NotAllowedError, ServerUnreachableError
from teacher_logits.transport import Settlement, Transport
from teacher_logits.views import ServerView
from teacher_logits_client.terminal_text import harmless
from teacher_logits_client.watching import rates
from teacher_logits_client.watching.asking import Answer
from teacher_logits_client.watching.frame import Scene, draw
from teacher_logits_client.watching.rates import Looks
from teacher_logits_client.watching.sections import Sort
from teacher_logits_client.watching.tables import bar
from teacher_logits_client.watching.watch import Watch

GONE = ServerUnreachableError("nobody answers at unix:/s")


def a_scene(view: ServerView | None = None, **given: object) -> Scene:
    looks = Looks()
    if view is None:
        looks.add(a_view(10))
        view = a_view(12)
    looks.add(view)
    values = {"address": "unix:/s", "view": view, "rates": looks.rates(), "keys": True, **given}
    return Scene(**values)  # type: ignore[arg-type]


def drawn(scene: Scene, width: int = 80, height: int | None = 24) -> list[str]:
    return [each.plain for each in draw(scene, width=width, height=height)]


def row(lines: list[str], first: str) -> str:
    """The row that begins so, a space between its words."""
    (found,) = [" ".join(each.split()) for each in lines if each.split()[:1] == [first]]
    return found


class TestRates:
    def test_are_differences_by_the_servers_own_clock(self) -> None:
        seen = a_scene().rates

        assert seen.seconds == 2.0
        assert seen.rate(rates.GRANTED_BYTES, "shared_memory") == 3 * MIB
        assert seen.rate(rates.SCORED_TOKENS, "own") == 1000.0
        assert seen.share(rates.PASS_FILLS, rates.PASSES, "own") == 0.75
        assert seen.rate(rates.REFUSALS, "UNKNOWN_TEACHER") == 2.0  # over both surfaces

    def test_are_unknown_of_one_look(self) -> None:
        looks = Looks()
        looks.add(a_view(10))

        assert looks.rates().rate(rates.SCORED_TOKENS, "own") is None

    def test_are_unknown_of_a_server_that_tells_no_metrics(self) -> None:
        looks = Looks()
        looks.add(a_view(10, metrics=()))
        looks.add(a_view(12, metrics=()))

        assert looks.rates().rate(rates.SCORED_TOKENS, "own") is None

    def test_begin_anew_with_another_server(self) -> None:
        looks = Looks()
        assert looks.add(a_view(1000)) is False
        assert looks.add(a_view(1, epoch="e2")) is True
        assert looks.rates().rate(rates.SCORED_TOKENS, "own") is None

        looks.add(a_view(2, epoch="e2"))
        assert looks.rates().rate(rates.SCORED_TOKENS, "own") == 1000.0

    @settings(max_examples=40)
    @given(st.lists(st.floats(0.1, 3.0), min_size=2, max_size=30))
    def test_cover_a_window_and_no_more(self, gaps: list[float]) -> None:
        looks, now = Looks(window_seconds=5.0), 0.0
        for gap in gaps:
            now += gap
            looks.add(a_view(now))

        seen = looks.rates()
        assert seen.seconds <= 5.0 + 3.0
        assert seen.seconds >= min(5.0, now - gaps[0]) - 1e-5
        assert seen.rate(rates.SCORED_TOKENS, "own") == pytest.approx(1000, rel=1e-3)

    def test_of_a_label_that_is_new_are_counted_from_nothing(self) -> None:
        looks = Looks()
        looks.add(a_view(10, metrics=counted(10)[:2]))
        looks.add(a_view(11, metrics=counted(11)))

        assert looks.rates().rate(rates.REFUSALS, "UNKNOWN_TEACHER") == 22.0


class TestAFrame:
    def test_shows_everything_at_80_by_24(self) -> None:
        lines = drawn(a_scene())

        assert len(lines) == 24
        assert lines[0].startswith("teacher-logits, serving, up 12 s, unix:/s")
        assert row(lines, "shared_memory") == "shared_memory 3 3 MiB 2.0 36.0 MiB no"
        assert row(lines, "stream").endswith("yes")
        assert row(lines, "own") == "own 1,000 4.0 5 640 1 75% 50%"
        assert row(lines, "theirs").startswith("theirs published")
        assert row(lines, "refused") == "refused UNKNOWN_TEACHER 24 (+2.0/s)"
        assert row(lines, "7") == "7 theirs complete 8/8 trainer:0, trainer:1 and 1 more"
        session = "000003 trainer-3 3 unresponsive shared_memory 3 3 MiB 3 s"
        assert row(lines, "000003") == session
        assert lines[-1].startswith("q quit  p pause  s sort by: leased")

    def test_of_an_older_server_has_dashes(self) -> None:
        lines = drawn(a_scene(a_view(metrics=())))

        assert row(lines, "own") == "own - - - - - - -"
        assert row(lines, "shared_memory") == "shared_memory 3 - - - no"
        assert not any(each.startswith("refused") for each in lines)

    def test_bars_are_used_quarantined_and_free(self) -> None:
        (line,) = [each for each in drawn(a_scene()) if each.startswith("pool")]

        inside = line[line.index("[") + 1 : line.index("]")]
        used, quarantined, free = (inside.count(each) for each in "|q ")
        assert used == round(len(inside) * 0.5)
        assert quarantined == round(len(inside) * 0.1)
        assert free == len(inside) - used - quarantined

    def test_a_part_that_is_not_nothing_is_seen_in_a_bar(self) -> None:
        assert bar([(1e-9, "|", ""), (1.0, "q", "")], 12).plain == "[|qqqqqqqqq]"
        assert bar([(0.0, "|", ""), (0.0, "q", "")], 12).plain == "[          ]"

    def test_of_a_server_that_is_gone_says_for_how_long_and_keeps_what_it_showed(self) -> None:
        lines = drawn(a_scene(trouble=GONE.message, silent_seconds=7.4))

        assert "no answer" in lines[0]
        assert lines[1].startswith("no answer for 7 s, asking again; what it showed last is below")
        assert row(lines, "own")

    def test_of_a_server_that_never_answered_says_so(self) -> None:
        scene = Scene(address="unix:/s", trouble=GONE.message, silent_seconds=2, keys=True)

        lines = drawn(scene)
        assert "nothing was seen yet" in lines[1]

    def test_counts_the_rows_that_find_no_room(self) -> None:
        sessions = tuple(map(a_session, range(1, 100)))

        lines = drawn(a_scene(a_view(sessions=sessions)))

        shown = [each for each in lines if "trainer-" in each]
        (rest,) = [each for each in lines if "more" in each and each.startswith("...")]
        assert int(rest.split()[2]) + len(shown) == 99

    def test_without_a_height_leaves_no_row_out(self) -> None:
        sessions = tuple(map(a_session, range(1, 100)))

        lines = drawn(a_scene(a_view(sessions=sessions), keys=False), height=None)

        assert sum("trainer-" in each for each in lines) == 99

    @pytest.mark.parametrize(
        ("sort", "first"),
        [
            (Sort.LEASED, "trainer-3"),
            (Sort.SEEN, "trainer-2"),
            (Sort.STATE, "trainer-1"),
            (Sort.WHO, "trainer-1"),
        ],
    )
    def test_sorts_sessions(self, sort: Sort, first: str) -> None:
        sessions = (
            a_session(2, silent=timedelta(hours=1)),
            a_session(3),
            a_session(1, state="died"),
        )
        lines = drawn(a_scene(a_view(sessions=sessions), sort=sort))

        assert next(each for each in lines if "trainer-" in each).split()[1] == first

    def test_keeps_what_matters_in_a_narrow_one(self) -> None:
        lines = drawn(a_scene(), width=40)

        assert "trainer-1" in "\n".join(lines)
        assert "BYTES/S" in "\n".join(lines)
        assert not any("PID" in each for each in lines)

    def test_obeys_no_escape_of_a_clients(self) -> None:
        named = a_session(1, student_id="a\x1b[2Jb\x07\nc\u202ed")

        text = "\n".join(drawn(a_scene(a_view(sessions=(named,)))))

        assert "\x1b" not in text
        assert "a?[2Jb??c?d" in text
        assert harmless("père 教師") == "père 教師"

    def test_of_several_transports_names_each(self) -> None:
        both = a_session(
            1,
            settlements=(
                Settlement(writer_id="a", transport=Transport.STREAM),
                Settlement(writer_id="b", transport=Transport.CUDA_IPC),
                Settlement(writer_id="c", transport=None),
            ),
        )
        text = "\n".join(drawn(a_scene(a_view(sessions=(both,))), width=120))

        assert "cuda_ipc,none,stream" in text

    @settings(max_examples=40)
    @given(
        width=st.integers(1, 200),
        height=st.one_of(st.none(), st.integers(1, 60)),
        names=st.lists(st.text(max_size=40), max_size=30),
        step_count=st.integers(0, 30),
        trouble=st.sampled_from(["", GONE.message]),
        restarts=st.integers(0, 2),
    )
    def test_fits_every_terminal(self, **drawn_from: object) -> None:
        width, height = drawn_from["width"], drawn_from["height"]
        names, step_count = drawn_from["names"], drawn_from["step_count"]
        assert isinstance(width, int)
        assert isinstance(names, list)
        assert isinstance(step_count, int)
        step = a_view().steps[0]
        view = a_view(
            sessions=tuple(a_session(at, student_id=name) for at, name in enumerate(names)),
            steps=tuple(replace(step, step=at) for at in range(step_count)),
        )
        scene = a_scene(view, trouble=drawn_from["trouble"], restarts=drawn_from["restarts"])

        lines = drawn(scene, width, height)  # type: ignore[arg-type]

        assert all(cell_len(each) <= width for each in lines)
        assert height is None or len(lines) == height


class TestAWatch:
    def a_watch(self) -> Watch:
        watch = Watch("unix:/s", keys=True, now=100.0)
        watch.answered(Answer(at=101.0, view=a_view(10)))
        return watch

    def test_shows_what_it_saw_last(self) -> None:
        watch = self.a_watch()
        watch.answered(Answer(at=102.0, view=a_view(11)))

        scene = watch.scene(102.5)
        assert scene.view == a_view(11)
        assert scene.rates.seconds == 1.0
        assert scene.trouble == ""

    def test_counts_from_the_last_answer_how_long_a_server_is_silent(self) -> None:
        watch = self.a_watch()
        watch.answered(Answer(at=103.0, error=GONE))

        assert watch.scene(105.0).silent_seconds == 4.0
        assert watch.scene(105.0).view == a_view(10)

        watch.answered(Answer(at=106.0, view=a_view(1, epoch="e2")))
        assert watch.scene(106.0).trouble == ""
        assert watch.scene(106.0).restarts == 1

    def test_of_a_server_that_never_answered_counts_from_its_own_beginning(self) -> None:
        watch = Watch("unix:/s", keys=True, now=100.0)
        watch.answered(Answer(at=101.0, error=GONE))

        assert watch.scene(105.0).silent_seconds == 5.0

    def test_ends_at_once_where_asking_again_mends_nothing(self) -> None:
        for error in (NotAllowedError("no"), ValueError("a fault of ours")):
            with pytest.raises(type(error)):
                self.a_watch().answered(Answer(at=102.0, error=error))

    def test_stands_still_while_paused_and_has_missed_nothing_afterwards(self) -> None:
        watch = self.a_watch()
        assert watch.typed("p")
        watch.answered(Answer(at=102.0, view=a_view(11)))
        assert watch.scene(103.0).paused
        assert watch.scene(103.0).view == a_view(10)

        assert watch.typed(" ")
        assert not watch.scene(103.0).paused
        assert watch.scene(103.0).rates.seconds == 1.0

    def test_sorts_while_paused_too_and_comes_round(self) -> None:
        watch = self.a_watch()
        watch.typed("p")
        seen = []
        for _ in Sort:
            watch.typed("s")
            seen.append(watch.scene(102.0).sort)

        assert seen == [*list(Sort)[1:], Sort.LEASED]

    @pytest.mark.parametrize("key", ["q", "Q", "\x04"])
    def test_ends_by_a_key_whatever_else_is_typed(self, key: str) -> None:
        assert self.a_watch().typed("xé" + key) is False
        assert self.a_watch().typed("xyz") is True
