"""One run of the demo, from nothing to a student that has learned something.

teacher    a process of its own: teacher-logits serve
student    this process: opens a session, has its rows scored, trains on what comes
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import torch

from teacher_logits.clock import span_text
from teacher_logits.errors import ConfigError
from teacher_logits.grid import BatchGrid
from teacher_logits.profiles import StudentProfile
from teacher_logits.transport import PREFERENCE
from teacher_logits_client.connecting import connect
from teacher_logits_client.demo.config import threads_a_side
from teacher_logits_client.demo.evaluation import HeldOut
from teacher_logits_client.demo.smollm2 import fetch_model
from teacher_logits_client.demo.student import Student
from teacher_logits_client.demo.summary import (
    PLOT,
    RESULTS,
    Learned,
    Outcome,
    Parties,
    draw_losses,
)
from teacher_logits_client.demo.teacher import TEACHER_ID, TeacherProcess, native_dtype
from teacher_logits_client.demo.texts import load_tokenizer, make_texts
from teacher_logits_client.demo.tiny_teacher import make_tiny_teacher
from teacher_logits_client.demo.training import train

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from teacher_logits_client.demo.config import DemoConfig
    from teacher_logits_client.demo.texts import Texts
    from teacher_logits_client.student import Session

_LOAD_SECONDS = 180.0
_NAMES = {"smollm2": "SmolLM2-135M-Instruct", "tiny": "the tiny teacher"}


def run_demo(config: DemoConfig, *, say: Callable[[str], None]) -> bool:
    """Run it; return whether all was shown that had to be.

    Raises:
        TeacherLogitsError: the model could not be fetched, or the teacher failed.
    """
    started = time.monotonic()
    _make_folder(config.output)
    threads = threads_a_side()
    torch.set_num_threads(threads)
    _quieten_transformers()
    model = _find_model(config, say)
    log = config.output / "teacher.log"
    dtype = _dtype(config)
    with TeacherProcess(model=model, threads=threads, dtype=dtype, log=log) as teacher:
        say(f"teacher: process {teacher.pid}, {threads} thread(s), {dtype}, log in {log}")
        say(f"student: process {os.getpid()}, {threads} thread(s)")
        texts = make_texts(
            load_tokenizer(model), row_tokens=config.row_tokens, held_out_rows=config.held_out_rows
        )
        say(
            f"text: {texts.train.numel():,} tokens to train on, {texts.held_out.numel():,} held "
            f"out, in rows of {config.row_tokens}"
        )
        teacher.wait_until_ready(_LOAD_SECONDS)
        say(f"the teacher serves at {teacher.address} after {_since(started)}")
        with (
            connect(teacher.address) as client,
            client.open_session(_profile(config, texts)) as session,
        ):
            learned = _teach(session, texts, config=config, say=say)
            parties = _parties(session, config=config, teacher_pid=teacher.pid)
    outcome = Outcome(
        parties=parties,
        learned=learned,
        unigram_perplexity=texts.unigram_perplexity(),
        total_seconds=time.monotonic() - started,
    )
    results, plot = config.output / RESULTS, config.output / PLOT
    results.write_text(outcome.to_json() + "\n", "utf-8")
    draw_losses(outcome, plot)
    say(f"\n{outcome.to_text()}\n")
    say(f"figures in {results}, picture in {plot}; {span_text(outcome.total_seconds)} in all")
    return outcome.holds


def _teach(
    session: Session, texts: Texts, *, config: DemoConfig, say: Callable[[str], None]
) -> Learned:
    """Measure, train and measure again."""
    transport = session.transport
    say(f"session: payloads come over {transport.value if transport else 'nothing'}")
    student = Student(
        vocabulary_size=texts.vocabulary_size,
        row_tokens=config.row_tokens,
        size=config.student,
        learning_rate=config.learning_rate,
        seed=config.seed,
        half=_dtype(config) == "bfloat16",
    )
    with HeldOut(session, texts.held_out, rows_a_request=config.rows_per_step) as held_out:
        before = held_out.measure(student)
        say(f"before: divergence {before.divergence:.3f} nats, perplexity {before.perplexity:,.1f}")
        training = train(student, session, texts.train, config=config, say=say)
        return Learned(
            training=training,
            before=before,
            after=held_out.measure(student),
            teacher_perplexity=held_out.teacher_perplexity(),
            held_out_tokens=held_out.token_count,
            student_parameters=student.parameter_count,
        )


def _parties(session: Session, *, config: DemoConfig, teacher_pid: int) -> Parties:
    return Parties(
        teacher_name=_NAMES[config.teacher],
        teacher_pid=teacher_pid,
        teacher_revision=session.teacher.revision,
        teacher_arithmetic=session.teacher.arithmetic_type,
        student_pid=os.getpid(),
        vocabulary_size=session.teacher.vocabulary_size,
        transport=session.transport,
        refusals=session.refusals,
        checks=session.checks,
    )


def _dtype(config: DemoConfig) -> str:
    """The arithmetic of both sides; a tiny model gains nothing from short numbers."""
    return native_dtype() if config.teacher == "smollm2" else "float32"


def _since(started: float) -> str:
    return span_text(time.monotonic() - started)


def _profile(config: DemoConfig, texts: Texts) -> StudentProfile:
    return StudentProfile(
        batch_grid=BatchGrid(
            global_batch_size=config.rows_per_step,
            data_parallel_size=1,
            micro_batch_size=config.rows_per_step,
        ),
        teacher_id=TEACHER_ID,
        tokenizer_fingerprint=texts.fingerprint,
        vocabulary_size=texts.vocabulary_size,
        top_k=config.top_k,
        student_id="demo-student",
        transports=config.transports or PREFERENCE,
    )


def _find_model(config: DemoConfig, say: Callable[[str], None]) -> Path:
    if config.teacher == "smollm2":
        return fetch_model(config.cache, say=say)
    say(f"making a tiny teacher in {config.cache}, unless it is there")
    return make_tiny_teacher(config.cache / "tiny-teacher")


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--output {folder}: the folder cannot be made: {error.strerror}",
            facts={"flag": "--output", "value": str(folder)},
        ) from error


def _quieten_transformers() -> None:
    """Keep progress bars and advice of the library out of the demo's lines."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
