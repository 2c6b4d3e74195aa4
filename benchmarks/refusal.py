"""How quickly a request is refused that no server could answer, and what the refusal costs.

    python -m benchmarks.refusal

A session with K = V = 151,936 asks a server with a pool of 1 GiB for 100,000 tokens: a payload
of 91 GB. `scoring_refusal`: milliseconds until the refusal; `rise_kib` is what all rounds
together added to the resident set, and the server's pool holds nothing afterwards.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING

from benchmarks.memory import resident_bytes
from benchmarks.report import report

from teacher_logits import keys
from teacher_logits.clock import MonotonicClock
from teacher_logits.errors import PayloadInvalidError
from teacher_logits.grid import BatchGrid
from teacher_logits.profiles import PROTOCOL_VERSION, StudentProfile, TeacherProfile
from teacher_logits.transport import Transport
from teacher_logits_server.config import ServerConfig
from teacher_logits_server.engines import EngineProfile
from teacher_logits_server.ledger import Ledger
from teacher_logits_server.publishers.engines import EngineTeacher
from teacher_logits_server.scorer import ScoreJob, Scorer
from teacher_logits_server.slabs import ServerSlabs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from teacher_logits_server.engines import Row

VOCABULARY = 151_936


class Idle:
    """An engine that is never asked."""

    profile = EngineProfile(
        name="idle",
        vocabulary_size=VOCABULARY,
        head_rows=VOCABULARY,
        max_row_tokens=1 << 20,
        arithmetic_type="",
    )

    def logits(self, rows: Sequence[Row]) -> Iterator[Tensor]:
        """Yield nothing."""
        yield from ()


def main(argv: list[str]) -> int:
    """Ask, be refused, and write the figure."""
    parser = argparse.ArgumentParser(prog="benchmarks.refusal", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=21)
    options = parser.parse_args(argv)
    submit, committed_bytes = _open_scorer(max_request_tokens=options.tokens)
    lengths = (1000,) * (options.tokens // 1000)
    input_ids = b"\1\0\0\0" * sum(lengths)
    milliseconds: list[float] = []
    before = 0
    for number in range(1 + options.rounds):
        if number == 1:  # what the first one imports is not the request's
            milliseconds.clear()
            before = resident_bytes()
        started = time.perf_counter()
        try:
            submit(input_ids, lengths)
        except PayloadInvalidError:
            milliseconds.append((time.perf_counter() - started) * 1e3)
    if len(milliseconds) < options.rounds or committed_bytes():
        raise SystemExit("a request that no pool can hold was taken")
    report(
        "scoring_refusal",
        "ms",
        milliseconds,
        tokens=options.tokens,
        k=VOCABULARY,
        rise_kib=(resident_bytes() - before) // 1024,
    )
    return 0


def _open_scorer(
    *, max_request_tokens: int
) -> tuple[Callable[[bytes, tuple[int, ...]], object], Callable[[], int]]:
    """Return a scorer's submission, for a session with K = V, and the bytes of its slabs."""
    config, clock = ServerConfig(max_request_tokens=max_request_tokens), MonotonicClock()
    epoch = keys.new_epoch()
    slabs = ServerSlabs(epoch=epoch)
    ledger = Ledger(
        epoch=epoch,
        limits=config,
        engines=(
            EngineTeacher(
                profile=TeacherProfile(
                    teacher_id="idle",
                    vocabulary_size=VOCABULARY,
                    head_rows=VOCABULARY,
                    top_k=VOCABULARY,
                    max_row_tokens=1 << 20,
                )
            ),
        ),
        clock=clock,
        slots=slabs,
        offered=frozenset({Transport.STREAM}),
    )
    scorer = Scorer(engine=Idle(), ledger=ledger, slabs=slabs, config=config, clock=clock)
    grid = BatchGrid(global_batch_size=1, data_parallel_size=1, micro_batch_size=1)
    session_id = ledger.open_session(
        request_id="open",
        protocol_version=PROTOCOL_VERSION,
        profile=StudentProfile(batch_grid=grid, top_k=VOCABULARY),
    ).terms.session_id
    ledger.prove_locality(session_id, proofs={}, failures=[])

    def submit(input_ids: bytes, row_lengths: tuple[int, ...]) -> object:
        return scorer.submit(
            ScoreJob(
                session_id=session_id,
                request_id="score",
                input_ids=input_ids,
                row_lengths=row_lengths,
                deadline=clock.now() + 60,
            )
        )

    return submit, lambda: ledger.view().pool.committed_bytes


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
