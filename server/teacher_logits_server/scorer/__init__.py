"""The scorer: runs the server's engine for whoever asks, on a thread of its own.

``jobs`` says what can be asked and what is refused before anything is computed, ``queue`` has
what waits and who is told, ``thread`` does the work.
"""

from teacher_logits_server.scorer.jobs import BadRows, ScoreJob
from teacher_logits_server.scorer.thread import Scorer

__all__ = ["BadRows", "ScoreJob", "Scorer"]
