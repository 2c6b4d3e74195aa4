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

``testing`` starts a server of its own for tests.

Importing this package imports neither torch nor gRPC: what needs them is imported when it is
first asked for, so that commands answer ``--help`` at once. Type checkers see it all.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from teacher_logits import __version__, errors
from teacher_logits.encodings import IdCodec, ValueCodec
from teacher_logits.grid import BatchGrid
from teacher_logits.layout import ColumnKind, ElementType, RowStatus
from teacher_logits.locality import ModelGrid
from teacher_logits.profiles import NodeHints, StudentProfile, TeacherProfile, VocabularyPolicy
from teacher_logits.selection_rules import Nucleus, Sampled, TopK
from teacher_logits.terms import Check, Verdict
from teacher_logits.tokenizer import fingerprint_of, id_count
from teacher_logits.transport import Locality, Refusal, Transport
from teacher_logits_client.config import HostCopies, MapMode
from teacher_logits_client.credentials import Tls
from teacher_logits_client.leased import ClientStatistics

if TYPE_CHECKING:
    from teacher_logits.selection import select_top_k
    from teacher_logits.selection.partial_selection import merge_partials, select_partial
    from teacher_logits.selection.rank_merging import merge_over_ranks
    from teacher_logits_client import losses, testing
    from teacher_logits_client.client import Client
    from teacher_logits_client.connecting import connect
    from teacher_logits_client.drafts import Draft
    from teacher_logits_client.normalisation import (
        GroupReduction,
        LossReport,
        OpenStep,
        Reduction,
        RepeatedMicroBatchError,
        RescaleOrder,
        StaleAttemptError,
        StepLoss,
        StepNormaliser,
        StepReport,
        gradient_norms,
    )
    from teacher_logits_client.parity import Parity, compare_with_reference
    from teacher_logits_client.payloads import LeasedPayload
    from teacher_logits_client.payloads.batch import Batch
    from teacher_logits_client.payloads.micro_batches import MicroBatch
    from teacher_logits_client.publishing.publisher import Publisher
    from teacher_logits_client.routing import TeacherRouter
    from teacher_logits_client.routing.answers import RoutedFuture, RoutedPayload
    from teacher_logits_client.rows.labels import labels_mask
    from teacher_logits_client.scoring.futures import ScoreFuture
    from teacher_logits_client.slabs.own_buffers import OwnBuffer
    from teacher_logits_client.student import Session
    from teacher_logits_client.targets import Targets

__all__ = [
    "Batch",
    "BatchGrid",
    "Check",
    "Client",
    "ClientStatistics",
    "ColumnKind",
    "Draft",
    "ElementType",
    "GroupReduction",
    "HostCopies",
    "IdCodec",
    "LeasedPayload",
    "Locality",
    "LossReport",
    "MapMode",
    "MicroBatch",
    "ModelGrid",
    "NodeHints",
    "Nucleus",
    "OpenStep",
    "OwnBuffer",
    "Parity",
    "Publisher",
    "Reduction",
    "Refusal",
    "RepeatedMicroBatchError",
    "RescaleOrder",
    "RoutedFuture",
    "RoutedPayload",
    "RowStatus",
    "Sampled",
    "ScoreFuture",
    "Session",
    "StaleAttemptError",
    "StepLoss",
    "StepNormaliser",
    "StepReport",
    "StudentProfile",
    "Targets",
    "TeacherProfile",
    "TeacherRouter",
    "Tls",
    "TopK",
    "Transport",
    "ValueCodec",
    "Verdict",
    "VocabularyPolicy",
    "__version__",
    "compare_with_reference",
    "connect",
    "errors",
    "fingerprint_of",
    "gradient_norms",
    "id_count",
    "labels_mask",
    "losses",
    "merge_over_ranks",
    "merge_partials",
    "select_partial",
    "select_top_k",
    "testing",
]

_HOMES = {
    "Batch": "payloads.batch",
    "Client": "client",
    "Draft": "drafts",
    "GroupReduction": "normalisation",
    "LeasedPayload": "payloads",
    "LossReport": "normalisation",
    "MicroBatch": "payloads.micro_batches",
    "OpenStep": "normalisation",
    "OwnBuffer": "slabs.own_buffers",
    "Parity": "parity",
    "Publisher": "publishing.publisher",
    "Reduction": "normalisation",
    "RepeatedMicroBatchError": "normalisation",
    "RescaleOrder": "normalisation",
    "RoutedFuture": "routing.answers",
    "RoutedPayload": "routing.answers",
    "ScoreFuture": "scoring.futures",
    "Session": "student",
    "StaleAttemptError": "normalisation",
    "StepLoss": "normalisation",
    "StepNormaliser": "normalisation",
    "StepReport": "normalisation",
    "Targets": "targets",
    "TeacherRouter": "routing",
    "compare_with_reference": "parity",
    "connect": "connecting",
    "gradient_norms": "normalisation",
    "labels_mask": "rows.labels",
    "losses": "",
    "merge_over_ranks": "teacher_logits.selection.rank_merging",
    "merge_partials": "teacher_logits.selection.partial_selection",
    "select_partial": "teacher_logits.selection.partial_selection",
    "select_top_k": "teacher_logits.selection",
    "testing": "",
}
"""Names imported when first asked for, each with its module; "" for one that is a module."""


def _find(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _HOMES[name] or name
    module = importlib.import_module(
        home if home.startswith("teacher_logits.") else f"{__name__}.{home}"
    )
    found: object = getattr(module, name) if _HOMES[name] else module
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})


if not TYPE_CHECKING:  # or a misspelt name would pass as an object
    __getattr__ = _find
