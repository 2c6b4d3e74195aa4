"""A warning where a trainer's whole step counts no position, so that nothing is learnt from it."""

from __future__ import annotations

import logging

_log = logging.getLogger("teacher_logits_client")


class EmptySteps:
    """Warns of the first step, and of the first evaluation, without a position that counts.

    That is no error, a step may have none; but a collator that masks every label would train to
    the end at a loss of 0.
    """

    def __init__(self, *, cause: str, is_silent: bool) -> None:
        """Take what to say of the cause; all ranks but one are silent."""
        self._cause = cause
        self._is_silent = is_silent
        self._said: set[str] = set()

    def note(self, *, what: str, is_empty: bool) -> None:
        """Warn if it is the first ``what`` that is empty."""
        if not is_empty or self._is_silent or what in self._said:
            return
        self._said.add(what)
        _log.warning(
            "no position of a whole %s counts, so its loss is 0: %s (said once)", what, self._cause
        )
