"""What a worker does: the calls of the client, with what they give as plain values."""

from __future__ import annotations

import gc

from tests.cuda.late_reading import LateReading
from tests.cuda.publishing import Publishing

from teacher_logits.errors import DeadlinePassedError, TeacherLogitsError


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

    def stop_writing(self, seconds: float) -> str:
        """Wait until the publisher knows that all was read; say what is not.

        That its process keeps to its end, and its close would wait for it as long as a client may.
        """
        try:
            if self._publisher is not None:
                self._publisher.wait_free(timeout=seconds)
        except DeadlinePassedError as late:
            return late.message
        except TeacherLogitsError:
            pass  # it has ended, or its server
        return ""

    def reset(self) -> None:
        """Close all, the last first, and forget it."""
        self._stack.close()
        self.__init__()  # type: ignore[misc]
        gc.collect()
