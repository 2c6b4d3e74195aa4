"""What the server says of a teacher of its own, once that is loaded: its profile, and its probe."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

from teacher_logits import __version__
from teacher_logits.profiles import NodeHints, TeacherProfile
from teacher_logits_server.engines.probe import probe_engine
from teacher_logits_server.named_teachers import about
from teacher_logits_server.publishers.engines import EngineTeacher

if TYPE_CHECKING:
    from teacher_logits_server.config import ServerConfig
    from teacher_logits_server.engines import EngineProfile
    from teacher_logits_server.engines.served import ServedTeacher


def described(teacher: ServedTeacher, *, of_several: bool) -> EngineTeacher:
    """Probe a teacher, and return what is known of it.

    Raises:
        AlignmentError: its answer for a position depends on later tokens.
        EngineError: it failed on the probe's rows.
    """
    with about(teacher.teacher_id, of_several=of_several):
        return EngineTeacher(
            profile=_profile(teacher.config, teacher.engine.profile),
            checks=(probe_engine(teacher.engine),),
            pool_size_bytes=teacher.config.pool_size_bytes,
        )


def _profile(config: ServerConfig, engine: EngineProfile) -> TeacherProfile:
    return TeacherProfile(
        teacher_id=config.teacher_id,
        revision=engine.revision,
        vocabulary_size=engine.vocabulary_size,
        head_rows=engine.head_rows,
        top_k=min(config.top_k, engine.vocabulary_size),
        max_row_tokens=engine.max_row_tokens,
        batch_grid=config.batch_grid,
        model_grid=config.model_grid,
        tokenizer_fingerprint=engine.tokenizer_fingerprint,
        engine=engine.name,
        arithmetic_type=engine.arithmetic_type,
        hints=NodeHints(
            host_name=socket.gethostname(),
            pid=os.getpid(),
            versions={"teacher-logits": __version__},
        ),
    )
