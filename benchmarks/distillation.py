"""Does a student learn more with the teacher than without? Held-out text decides.

    nice python -m benchmarks.distillation --plot docs/distillation.svg
    python -m benchmarks.distillation --tiny          the same with a tiny teacher, in seconds

The demo's student (a small Llama of random weights) takes the same tokens in as many steps, once
a recipe and seed; `distilling` says what the recipes are. The teacher, SmolLM2-135M-Instruct by
`teacher-logits serve`, scores the rows over the service, once for its K best and once for a sample
where a recipe takes one, and all learn from the same bytes. A seed chooses the student's weights
and the order of the rows.

One JSON object a line. `held_out`, of each recipe and seed: `unit` `perplexity`, of the text
itself, and `unit` `nats`, the KL (teacher ‖ student) a token with the tail as a bucket. Lines
with `seed` `all` have the spread over seeds; `ratio` is to the same without the teacher.
`teacher_better` counts the seeds at which a recipe's perplexity is below that, and
`teacher_mass` is the part of the teacher's probability that K ids hold, a mean over held-out text.
The exit code is 0 where the tail bucket with all of the scored ids won at every seed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from teacher_logits_client.student import Session

from benchmarks.distillation_figures import (
    NO_TEACHER,
    Results,
    report_mass,
    report_quality,
    report_summary,
)
from benchmarks.distilling import HeldOutQuality, Recipe, Scored, loss_of, measure

from teacher_logits.grid import BatchGrid
from teacher_logits.profiles import StudentProfile
from teacher_logits.selection_rules import Sampled
from teacher_logits_client.connecting import connect
from teacher_logits_client.demo.command import PRESETS, Preset
from teacher_logits_client.demo.config import default_cache_folder, threads_a_side
from teacher_logits_client.demo.smollm2 import fetch_model
from teacher_logits_client.demo.student import Student
from teacher_logits_client.demo.teacher import TeacherProcess, native_dtype
from teacher_logits_client.demo.texts import load_tokenizer, make_texts
from teacher_logits_client.demo.tiny_teacher import make_tiny_teacher

LOAD_SECONDS = SCORE_SECONDS = 600.0
AHEAD = 4


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is run: the demo's preset, its recipes and seeds, and where the teacher is."""

    preset: Preset
    recipes: tuple[Recipe, ...]
    seeds: tuple[int, ...]
    model: Path
    dtype: str
    vocabulary_size: int

    @property
    def sample_size(self) -> int:
        """M of the recipe `sampled`, 0 where it is not run."""
        return max((each.k for each in self.recipes if each.name == "sampled"), default=0)


def main(argv: list[str]) -> int:
    """Run all and write the figures; 1 where the teacher did not teach better at every seed."""
    options = _parser().parse_args(argv)
    torch.set_num_threads(threads_a_side())
    preset = _preset(options)
    model, dtype = _find(options)
    tokenizer = load_tokenizer(model)
    texts = make_texts(tokenizer, row_tokens=preset.row_tokens, held_out_rows=preset.held_out_rows)
    plan = Plan(
        preset=preset,
        recipes=_recipes(options, preset),
        seeds=tuple(range(options.seeds)),
        model=model,
        dtype=dtype,
        vocabulary_size=texts.vocabulary_size,
    )
    wanted = texts.train[: preset.steps * preset.rows_per_step]
    train, held_out = _score(plan, wanted, texts.held_out)
    results: Results = {recipe: [] for recipe in plan.recipes}
    for recipe, seed, found in _train_all(plan, train, held_out, jobs=options.jobs):
        results[recipe].append(found)
        report_quality(recipe, [found], seed=seed, steps=preset.steps)
    winners = report_summary(results, steps=preset.steps)
    report_mass(plan.recipes, held_out)
    if options.plot:
        from benchmarks.distillation_plot import draw

        draw(results, Path(options.plot))
    return 0 if Recipe(name="tail_bucket", k=preset.top_k) in winners else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks.distillation", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--tiny", action="store_true", help="with the tiny teacher")
    parser.add_argument("--steps", type=int, help="training steps; the demo's where not given")
    parser.add_argument("--seeds", type=int, default=3, help="how many, from 0 on")
    parser.add_argument("--held-out-rows", type=int, default=96)
    parser.add_argument("--few", type=int, default=16, help="the smaller K, and M of the sample")
    parser.add_argument("--jobs", type=int, default=1, help="students trained at a time")
    parser.add_argument(
        "--recipes", default="", help="those to run, as in tail_bucket:128,sampled:16; all if empty"
    )
    parser.add_argument("--plot", default="", metavar="FILE", help="draw it, as SVG or PNG")
    return parser


def _preset(options: argparse.Namespace) -> Preset:
    preset = PRESETS["tiny" if options.tiny else "smollm2"]
    steps = preset.steps if options.steps is None else options.steps
    return replace(preset, steps=steps, held_out_rows=options.held_out_rows)


def _find(options: argparse.Namespace) -> tuple[Path, str]:
    cache = default_cache_folder()
    if options.tiny:
        return make_tiny_teacher(cache / "tiny-teacher"), "float32"
    return fetch_model(cache, say=lambda line: None), native_dtype()


def _recipes(options: argparse.Namespace, preset: Preset) -> tuple[Recipe, ...]:
    many, few = preset.top_k, options.few
    if options.recipes:
        chosen = [each.partition(":") for each in options.recipes.split(",")]
        return (NO_TEACHER, *(Recipe(name=name, k=int(k)) for name, _, k in chosen))
    named = [("tail_bucket", many), ("renormalised", many)]
    named += [("tail_bucket", few), ("renormalised", few), ("sampled", few)]
    return (NO_TEACHER, *(Recipe(name=name, k=k) for name, k in named))


# --- the teacher ----------------------------------------------------------------------------


def _score(
    plan: Plan, train: torch.Tensor, held_out: torch.Tensor
) -> tuple[list[Scored], list[Scored]]:
    """Have the service score all rows, and sample those that are trained on."""
    preset = plan.preset
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "teacher.log"
        threads = threads_a_side()
        with TeacherProcess(model=plan.model, threads=threads, dtype=plan.dtype, log=log) as it:
            it.wait_until_ready(LOAD_SECONDS)
            grid = BatchGrid(
                global_batch_size=preset.rows_per_step,
                data_parallel_size=1,
                micro_batch_size=preset.rows_per_step,
            )
            profile = StudentProfile(batch_grid=grid, top_k=preset.top_k)
            with connect(it.address) as client:
                with client.open_session(profile) as session:
                    best = list(_ask(session, train.split(preset.rows_per_step)))
                    unseen = list(_ask(session, held_out.split(preset.rows_per_step)))
                if not plan.sample_size:
                    return best, unseen
                profile = replace(profile, top_k=plan.sample_size, selection=Sampled(seed=0))
                with client.open_session(profile) as session:
                    drawn = _ask(session, train.split(preset.rows_per_step))
                    pairs = zip(best, drawn, strict=True)
                    return [replace(a, sampled=b.targets) for a, b in pairs], unseen


def _ask(session: Session, batches: Sequence[torch.Tensor]) -> Iterator[Scored]:
    """Yield each batch of rows as it is scored, some being under way at any time."""
    waiting = [session.score(each, timeout=SCORE_SECONDS) for each in batches[:AHEAD]]
    for at, batch in enumerate(batches):
        if at + AHEAD < len(batches):
            waiting.append(session.score(batches[at + AHEAD], timeout=SCORE_SECONDS))
        with waiting.pop(0).result(timeout=SCORE_SECONDS) as payload:
            yield Scored(rows=batch, targets=payload.targets.clone())


# --- the students ---------------------------------------------------------------------------


def _train_all(
    plan: Plan, train: list[Scored], held_out: list[Scored], *, jobs: int
) -> Iterator[tuple[Recipe, int, HeldOutQuality]]:
    """Yield what came of each recipe at each seed, in order."""
    tasks = [(recipe, seed) for seed in plan.seeds for recipe in plan.recipes]
    # Forked, so that the rows are there without being sent.
    forked = multiprocessing.get_context("fork")
    with forked.Pool(jobs, initializer=_share, initargs=(plan, train, held_out)) as pool:
        for (recipe, seed), found in zip(tasks, pool.imap(_train_shared, tasks), strict=True):
            yield recipe, seed, found


_SHARED: list[tuple[Plan, list[Scored], list[Scored]]] = []


def _share(plan: Plan, train: list[Scored], held_out: list[Scored]) -> None:
    _SHARED[:] = [(plan, train, held_out)]


def _train_shared(task: tuple[Recipe, int]) -> HeldOutQuality:
    [(plan, train, held_out)] = _SHARED
    return _train(plan, *task, train, held_out)


def _train(
    plan: Plan, recipe: Recipe, seed: int, train: list[Scored], held_out: list[Scored]
) -> HeldOutQuality:
    """Train one student on all batches, in the order of its seed, and measure it."""
    preset = plan.preset
    student = Student(
        vocabulary_size=plan.vocabulary_size,
        row_tokens=preset.row_tokens,
        size=preset.student,
        learning_rate=preset.learning_rate,
        seed=seed,
        half=plan.dtype == "bfloat16",
    )
    chance = torch.Generator().manual_seed(seed)
    order: list[int] = []
    while len(order) < preset.steps:
        order += torch.randperm(len(train), generator=chance).tolist()
    for step, at in enumerate(order[: preset.steps]):
        batch = train[at]
        student.descend(batch.rows, loss_of(recipe, batch), progress=step / preset.steps)
    return measure(student, held_out)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
