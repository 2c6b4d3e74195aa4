"""The student's side: connect to a teacher's server, and train on what it says.

    import teacher_logits_client as tl

    with tl.connect("unix:/run/teacher-logits/teacher.sock") as client:
        profile = tl.StudentProfile(
            batch_grid=tl.BatchGrid(
                global_batch_size=64, data_parallel_size=4, micro_batch_size=2
            ),
            data_parallel_rank=1,
        )
        with client.open_session(profile) as session:
            future = session.score(input_ids, lengths=lengths)
            with future.result(timeout=30) as payload:
                loss_sum, count = tl.losses.forward_kl(student_logits, payload.targets, mask)

``testing`` starts a server of its own for tests; it is imported when it is first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from teacher_logits import __version__, errors
from teacher_logits.grid import BatchGrid
from teacher_logits.layout import ColumnKind, ElementType, RowStatus
from teacher_logits.locality import ModelGrid
from teacher_logits.profiles import NodeHints, StudentProfile, TeacherProfile, VocabularyPolicy
from teacher_logits.terms import Check, Verdict
from teacher_logits.tokenizer import fingerprint_of, id_count
from teacher_logits.transport import Locality, Refusal, Transport
from teacher_logits_client import losses
from teacher_logits_client.client import Client, connect
from teacher_logits_client.config import MapMode
from teacher_logits_client.futures import ScoreFuture
from teacher_logits_client.leased import ClientStatistics
from teacher_logits_client.payloads import LeasedPayload
from teacher_logits_client.student import Session
from teacher_logits_client.targets import Targets

if TYPE_CHECKING:
    from types import ModuleType

    import teacher_logits_client.testing as testing

__all__ = [
    "BatchGrid",
    "Check",
    "Client",
    "ClientStatistics",
    "ColumnKind",
    "ElementType",
    "LeasedPayload",
    "Locality",
    "MapMode",
    "ModelGrid",
    "NodeHints",
    "Refusal",
    "RowStatus",
    "ScoreFuture",
    "Session",
    "StudentProfile",
    "Targets",
    "TeacherProfile",
    "Transport",
    "Verdict",
    "VocabularyPolicy",
    "__version__",
    "connect",
    "errors",
    "fingerprint_of",
    "id_count",
    "losses",
    "testing",
]


def __getattr__(name: str) -> ModuleType:
    if name == "testing":
        return importlib.import_module("teacher_logits_client.testing")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
