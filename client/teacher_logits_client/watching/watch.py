"""A watch: what was seen of a server and what was typed, as the scene to be drawn. Pure.

A paused one shows what it showed when it was paused; it goes on looking, so that rates are right
as it goes on.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from teacher_logits_client.watching.frame import Scene
from teacher_logits_client.watching.rates import Looks

if TYPE_CHECKING:
    from teacher_logits_client.watching.asking import Answer

QUIT, PAUSE, SORT = "qQ\x03\x04", "pP ", "sS"


class Watch:
    """Takes answers and keys.

    Args:
        address: of the server.
        keys: whether there is a keyboard.
        now: monotonic seconds, as are those of answers.
    """

    def __init__(self, address: str, *, keys: bool, now: float) -> None:
        self._looks = Looks()
        self._seen_at = now
        self._now = Scene(address=address, keys=keys)
        self._shown = self._now

    def answered(self, answer: Answer) -> None:
        """Take an answer.

        Raises what it is where asking again cannot mend it.
        """
        if answer.is_final and answer.error is not None:
            raise answer.error
        if answer.view is None:
            self._now = replace(self._now, trouble=str(answer.error))
            return
        is_other = self._looks.add(answer.view)
        self._seen_at = answer.at
        self._now = replace(
            self._now,
            view=answer.view,
            rates=self._looks.rates(),
            trouble="",
            restarts=self._now.restarts + is_other,
        )

    def typed(self, keys: str) -> bool:
        """Do what keys say; returns False where one of them ends it."""
        for key in keys:
            if key in QUIT:
                return False
            if key in PAUSE:
                self._shown = self._now
                self._now = replace(self._now, paused=not self._now.paused)
            elif key in SORT:
                self._now = replace(self._now, sort=self._now.sort.next())
        return True

    def scene(self, now: float) -> Scene:
        """Return what to draw at this time."""
        seen = self._shown if self._now.paused else self._now
        return replace(
            seen,
            sort=self._now.sort,
            paused=self._now.paused,
            silent_seconds=max(0.0, now - self._seen_at) if seen.trouble else 0.0,
        )
