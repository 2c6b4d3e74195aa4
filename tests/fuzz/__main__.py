"""Fuzz one surface: `make fuzz SURFACE=rpc RUNS=10000`, or `python -m tests.fuzz SURFACE`.

Atheris mutates by what the product's code does with an input; without it, or with
`--engine own`, inputs are mutated blindly from a seed of the random numbers, the same each time.
Either ends with one JSON object; an input that broke something is named, and exits with 1.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import sys
import tempfile
import time
import traceback
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.fuzz.running import Run

ATHERIS_BYTES = 256 << 20
"""What libFuzzer may take for inputs and coverage: `--engine own` shows what we take."""
PACKAGES = ["teacher_logits", "teacher_logits_server", "teacher_logits_client"]


def main(argv: Sequence[str]) -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("surface")
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--engine", choices=["atheris", "own"], default="atheris")
    given = parser.parse_args(argv)
    has_atheris = given.engine == "atheris" and find_spec("atheris") is not None
    with _instrumented(has_atheris):
        from tests.fuzz.house import House
        from tests.fuzz.running import running
        from tests.fuzz.surfaces import NAMES
    if given.surface not in NAMES:
        parser.error(f"no surface {given.surface}: there are {', '.join(NAMES)}")
    houses: list[House] = []

    def house() -> House:
        houses.append(House())
        return houses[-1]

    try:
        with running(given.surface, house) as run:
            fuzz = _by_atheris if has_atheris else _blindly
            fuzz(run, runs=given.runs, seed=given.seed, tell=_teller(run, given, has_atheris))
    finally:
        for each in houses:
            each.close()
    return 0


def _instrumented(has_atheris: bool) -> contextlib.AbstractContextManager[object]:
    if not has_atheris:
        return contextlib.nullcontext()
    import atheris

    found: contextlib.AbstractContextManager[object] = atheris.instrument_imports(include=PACKAGES)
    return found


def _teller(run: Run, given: argparse.Namespace, has_atheris: bool) -> Callable[[], None]:
    """Return what checks and prints the figures, at the end."""
    from tests.fuzz.running import MORE_RSS_BYTES

    start = time.monotonic()

    def tell() -> None:
        run.check()
        room = ATHERIS_BYTES if has_atheris else MORE_RSS_BYTES
        before, after = run.check_growth(more_rss_bytes=room)
        figures: dict[str, Any] = {
            "surface": given.surface,
            "engine": "atheris" if has_atheris else "own",
            "seed": given.seed,
            "inputs": run.count,
            "seconds": round(time.monotonic() - start, 1),
            "slowest_seconds": round(run.slowest_seconds, 3),
            "answers": dict(run.tally.counts.most_common()),
            "before": vars(before),
            "after": vars(after),
        }
        sys.stdout.write(json.dumps(figures) + "\n")
        sys.stdout.flush()

    return tell


def _blindly(run: Run, *, runs: int, seed: int, tell: Callable[[], None]) -> None:
    from tests.fuzz.corpus import corpus_of
    from tests.fuzz.mutation import mutated

    dice = random.Random(seed)
    seeds = [*run.surface.seeds(), *corpus_of(run.surface.name)]
    for _ in range(runs):
        run.one(mutated(dice, seeds))
    tell()


def _by_atheris(run: Run, *, runs: int, seed: int, tell: Callable[[], None]) -> None:
    """Have libFuzzer choose the inputs; it ends the process by itself, so `tell` comes before."""
    import atheris
    from tests.fuzz.corpus import corpus_of
    from tests.fuzz.mutation import MOST_BYTES

    with tempfile.TemporaryDirectory(prefix="tl-fuzz-") as folder:
        for number, each in enumerate([*run.surface.seeds(), *corpus_of(run.surface.name)]):
            (Path(folder) / str(number)).write_bytes(each)
        # Twice as many executions as inputs are due: libFuzzer counts its own look at the seeds.
        flags = [f"-runs={2 * runs + 1000}", f"-seed={seed}", f"-max_len={MOST_BYTES}"]
        flags += ["-timeout=60", "-rss_limit_mb=4096", "-print_final_stats=0"]

        def one(data: bytes) -> None:
            try:
                run.one(data)
                if run.count < runs:
                    return
                tell()
            except Exception:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)  # the server's threads run still, and nobody waits for them

        atheris.Setup([sys.argv[0], *flags, folder], one)
        atheris.Fuzz()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
