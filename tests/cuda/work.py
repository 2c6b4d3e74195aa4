"""What a worker does: the calls of the client, with what they give as plain values."""

from __future__ import annotations

import gc
from contextlib import suppress

from tests.cuda.late_reading import LateReading
from tests.cuda.publishing import Publishing

from teacher_logits.errors import TeacherLogitsError

READ_SECONDS = 10.0


class Work(Publishing, LateReading):
    """One process's driver, client, publisher and session."""

    def stop_reading(self) -> None:
        """Close what is read, and the session."""
        for batch in self._batches.values():
            batch.close()
        self._batches.clear()
        self.scores.close_all_scored()
        self._kept.clear()
        self._late.clear()
        gc.collect()
        for session in (self._session, self._other):
            if session is not None:
                session.close()

    def stop_writing(self) -> None:
        """Wait until the publisher knows that all was read: what is not, it keeps to its end."""
        if self._publisher is not None:
            with suppress(TeacherLogitsError):
                self._publisher.wait_free(timeout=READ_SECONDS)

    def reset(self) -> None:
        """Close all, the last first, and forget it."""
        self._stack.close()
        self.__init__()  # type: ignore[misc]
        gc.collect()
