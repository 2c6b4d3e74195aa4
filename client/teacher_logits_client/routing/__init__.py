"""Routing: a student that learns from several teachers, each row from the one that has its tag.

    router = tl.TeacherRouter.open(client, profile, {"math": ("gsm8k", "aime"), "code": "mbpp"})

    batch of mixed rows --tags--> rows of math --session of math--> \\
                                  rows of code --session of code--> targets in the batch's order

Each teacher has a session of its own, so that none waits for another. Refuses tags that two
teachers have before a session is opened, and a row whose tag nobody has before anything is sent.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from teacher_logits.errors import RequestInvalidError
from teacher_logits_client.config import MapMode
from teacher_logits_client.routing.answers import RoutedFuture
from teacher_logits_client.routing.failing import about
from teacher_logits_client.routing.mixed_rows import read_mixed
from teacher_logits_client.routing.tags import Tags
from teacher_logits_client.scoring.chosen_ids import check_given

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from types import TracebackType

    import torch

    from teacher_logits.profiles import StudentProfile
    from teacher_logits_client.client import Client
    from teacher_logits_client.routing.mixed_rows import MixedRows, Rowed
    from teacher_logits_client.routing.tags import Tagged
    from teacher_logits_client.rows.flat_rows import Mask, Numbers, Rows
    from teacher_logits_client.scoring.chosen_ids import Ids
    from teacher_logits_client.scoring.futures import ScoreFuture
    from teacher_logits_client.student import Session


class TeacherRouter:
    """Sessions of one student with several teachers; a context manager, which closes them.

    ``sessions`` are those, by the teacher's id. Registered steps are not routed, since a step is
    the whole global batch, of one teacher: ``sessions["math"].acquire(step=7)`` has it.
    """

    def __init__(self, sessions: Mapping[Session, Iterable[str] | str]) -> None:
        """Take over sessions, each with the tags of its teacher; ``open`` opens them as well.

        Sessions may be of several clients and have different profiles.

        Raises:
            RequestInvalidError: a tag is given to two of them, two are with one teacher, or one
                has no tags; the sessions stay the caller's.
        """
        by_id = {session.teacher.teacher_id: session for session in sessions}
        if len(by_id) < len(sessions):
            names = ", ".join(session.teacher.teacher_id for session in sessions)
            raise RequestInvalidError(
                f"two sessions are with one teacher ({names}): give one of them the tags of both",
                facts={"teachers": names},
            )
        self._tags = Tags({name: sessions[session] for name, session in by_id.items()})
        self.sessions = by_id

    @classmethod
    def open(
        cls,
        client: Client,
        profile: StudentProfile,
        teachers: Tagged,
        *,
        timeout: float | None = None,
        mode: MapMode = MapMode.COW,
    ) -> TeacherRouter:
        """Open a session with each teacher of a server.

        Args:
            profile: what this rank says to each of them; it names no teacher itself.
            teachers: the tags of each teacher, by its id; or ids, which are then the tags.
            timeout, mode: of each session; see ``Client.open_session``.

        Raises:
            RequestInvalidError: two teachers have one tag, one has none, or ``profile`` names one.
            SessionRefusedError, UnknownTeacherError, NoCommonTransportError: by one of the
                teachers, with its name; no session is left open then.
        """
        tags = Tags(teachers)
        if profile.teacher_id:
            raise RequestInvalidError(
                f"the profile names teacher {profile.teacher_id!r}, and the router asks "
                f"{', '.join(tags.teachers)}: leave it out of the profile",
                facts={"teacher_id": profile.teacher_id},
            )
        with ExitStack() as opened:
            sessions: dict[str, Session] = {}
            for name in tags.teachers:
                with about(name):
                    own = replace(profile, teacher_id=name)
                    session = client.open_session(own, timeout=timeout, mode=mode)
                sessions[name] = opened.enter_context(session)
            made = cls({each: tags.of(name) for name, each in sessions.items()})
            opened.pop_all()
        return made

    def score(
        self,
        input_ids: Rows,
        lengths: Numbers | None = None,
        *,
        tags: Sequence[str],
        attention_mask: Mask | None = None,
        prefix_ids: Rows | None = None,
        prefix_lengths: Numbers | None = None,
        windows: torch.Tensor | Sequence[Sequence[int]] | None = None,
        bad_rows: Literal["reject", "mask"] = "reject",
        seed: int | None = None,
        timeout: float | None = None,
    ) -> RoutedFuture:
        """Have each row scored by the teacher that has its tag; returns at once.

        Args:
            tags: one a row.
            input_ids, lengths, attention_mask, prefix_ids, prefix_lengths, windows, bad_rows,
                seed, timeout: as for ``Session.score``.

        Raises:
            UnknownTeacherError: no teacher has a row's tag; nothing was sent.
            PayloadInvalidError: rows that no server would score, with their place in the batch;
                or there is not one tag a row. What was sent to other teachers is given up.
            SessionExpiredError, EpochChangedError: a session has ended.
        """
        batch = read_mixed(
            input_ids,
            lengths,
            attention_mask=attention_mask,
            prefix_ids=prefix_ids,
            prefix_lengths=prefix_lengths,
            windows=windows,
        )

        def ask(session: Session, own: Rowed) -> ScoreFuture:
            return session.score(
                own.ids,
                prefix_ids=own.prefix,
                windows=own.windows,
                bad_rows=bad_rows,
                seed=seed,
                timeout=timeout,
            )

        return self._ask(batch, tags, ask)

    def scored_ids(
        self,
        input_ids: Rows,
        lengths: Numbers | None = None,
        *,
        ids: Ids,
        tags: Sequence[str],
        attention_mask: Mask | None = None,
        prefix_ids: Rows | None = None,
        prefix_lengths: Numbers | None = None,
        windows: torch.Tensor | Sequence[Sequence[int]] | None = None,
        bad_rows: Literal["reject", "mask"] = "reject",
        timeout: float | None = None,
    ) -> RoutedFuture:
        """Have ids of your own choice scored in each row by the teacher that has its tag.

        Args:
            ids: M a position, as for ``Session.scored_ids``.
            tags: one a row.
            input_ids, lengths, attention_mask, prefix_ids, prefix_lengths, windows, bad_rows,
                timeout: as for ``Session.score``.

        Raises:
            UnknownTeacherError: no teacher has a row's tag; nothing was sent.
            PayloadInvalidError: as for ``score``; or ids that no server would score.
            SessionExpiredError, EpochChangedError: a session has ended.
        """
        check_given(ids)
        batch = read_mixed(
            input_ids,
            lengths,
            attention_mask=attention_mask,
            prefix_ids=prefix_ids,
            prefix_lengths=prefix_lengths,
            windows=windows,
        )
        chosen = batch.split_ids(ids)

        def ask(session: Session, own: Rowed) -> ScoreFuture:
            return session.scored_ids(
                own.ids,
                ids=[chosen[row] for row in own.rows],
                prefix_ids=own.prefix,
                windows=own.windows,
                bad_rows=bad_rows,
                timeout=timeout,
            )

        return self._ask(batch, tags, ask)

    def _ask(
        self,
        batch: MixedRows,
        tags: Sequence[str],
        ask: Callable[[Session, Rowed], ScoreFuture],
    ) -> RoutedFuture:
        """Have each teacher asked about its rows; where one cannot be, give up what was asked."""
        split = self._tags.split(tags, row_count=batch.row_count)
        futures: dict[str, ScoreFuture] = {}
        try:
            for name, own in split.items():
                with about(name, own):
                    futures[name] = ask(self.sessions[name], batch.take(own))
        except BaseException:
            for each in futures.values():
                each.cancel()
            raise
        return RoutedFuture(futures, {name: tuple(own) for name, own in split.items()})

    def close(self) -> None:
        """End all sessions; twice is fine. Payloads that are open stay good."""
        for session in self.sessions.values():
            session.close()

    def __enter__(self) -> TeacherRouter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
