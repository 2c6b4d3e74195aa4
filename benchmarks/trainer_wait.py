"""How long a `Trainer` stands still for its teacher, with its scores asked for ahead and without.

    python -m benchmarks.trainer_wait
    python -m benchmarks.trainer_wait --steps 4 --rounds 1 --layers 1

A `TeacherServerTrainer` trains a small Llama. The teacher, `paced_teacher`, takes none of this
machine's cores, and 0.6 of the time that the student was found to need. One JSON object a line.
`trainer_wait`: the part of the training spent waiting, in %, by `prefetch`, the micro batches
asked for ahead; `ratio` is to none ahead. `student_step` and `teacher_step`: milliseconds that
each needs for one micro batch.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import dataclass

import torch
from benchmarks.report import report
from benchmarks.teacher import VOCABULARY
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.trainer_callback import PrinterCallback

from teacher_logits_client import testing
from teacher_logits_client.trainers.transformers import TeacherServerConfig, TeacherServerTrainer

ROWS = 8
SHARE = 0.6
"""The teacher's time beside the student's."""
PREFETCHES = (0, 1, 2)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training: the part of it that was waited, in %, and a step's time without the waits."""

    waited: float
    step_ms: float


def main(argv: list[str]) -> int:
    """Run all and write the figures."""
    options = _parser().parse_args(argv)
    torch.set_num_threads(options.threads)
    found: dict[int, list[Run]] = {each: [] for each in PREFETCHES}
    with testing.serve("benchmarks.paced_teacher:make_0") as server:
        _run(server.address, options, prefetch=1)  # what is loaded late is loaded now
        alone = _run(server.address, options, prefetch=1).step_ms
    pace = max(1, round(SHARE * alone / ROWS))
    with testing.serve(f"benchmarks.paced_teacher:make_{pace}") as server:
        for _ in range(options.rounds):
            for prefetch in PREFETCHES:
                found[prefetch].append(_run(server.address, options, prefetch=prefetch))
    shape = {"rows": ROWS, "tokens": options.tokens, "layers": options.layers}
    report("teacher_step", "ms", [float(pace * ROWS)], **shape)
    steps = [run.step_ms for runs in found.values() for run in runs]
    report("student_step", "ms", steps, **shape)
    none = [run.waited for run in found[0]]
    for prefetch, runs in found.items():
        report(
            "trainer_wait",
            "%",
            [run.waited for run in runs],
            against=("none ahead", none) if prefetch else None,
            prefetch=prefetch,
            steps=options.steps,
            **shape,
        )
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks.trainer_wait", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=128, help="of a row")
    parser.add_argument("--layers", type=int, default=4, help="of the student")
    parser.add_argument("--threads", type=int, default=1)
    return parser


def _run(address: str, options: argparse.Namespace, *, prefetch: int) -> Run:
    torch.manual_seed(0)
    student = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=options.layers,
            num_attention_heads=4,
            num_key_value_heads=4,
        )
    )
    rows = torch.randint(0, VOCABULARY, (ROWS * options.steps, options.tokens)).tolist()
    with tempfile.TemporaryDirectory() as folder:
        trainer = TeacherServerTrainer(
            model=student,
            args=TeacherServerConfig(
                output_dir=folder,
                teacher_server=address,
                top_k=16,
                teacher_prefetch=prefetch,
                per_device_train_batch_size=ROWS,
                max_steps=options.steps,
                logging_strategy="no",
                save_strategy="no",
                report_to=[],
                use_cpu=True,
                disable_tqdm=True,
            ),
            train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        )
        trainer.remove_callback(PrinterCallback)  # it writes between the figures
        started = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - started
    waited = trainer.teacher.waited_seconds
    return Run(waited=100 * waited / seconds, step_ms=(seconds - waited) / options.steps * 1e3)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
