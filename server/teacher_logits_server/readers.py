"""How the text of a flag, or of a line of YAML, becomes a value.

Refuses text that means nothing with a ``ValueError`` that says what would mean something;
whoever calls adds the name of the flag.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from datetime import timedelta
from fractions import Fraction
from typing import TYPE_CHECKING

from teacher_logits.grid import BatchGrid
from teacher_logits.locality import ModelGrid
from teacher_logits.transport import Transport

if TYPE_CHECKING:
    from collections.abc import Callable

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?B|B)?\Z", re.IGNORECASE)
_SPAN = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|min|h)?\Z")
_SIZE_UNITS = {"": 1, "b": 1}
_SIZE_UNITS |= {f"{p}ib": 1024**n for n, p in enumerate("kmgt", start=1)}
_SIZE_UNITS |= {f"{p}b": 1000**n for n, p in enumerate("kmgt", start=1)}
_SPAN_UNITS = {"": 1.0, "ms": 0.001, "s": 1.0, "min": 60.0, "h": 3600.0}


@dataclass(frozen=True)
class Reader:
    """A way to read text, the word that stands for such text in ``--help``, and what it makes.

    Where it makes ``many``, that is a tuple of ``makes``.
    """

    metavar: str
    parse: Callable[[str], object]
    makes: type
    many: bool = False


def size(text: str) -> int:
    """Read a number of bytes: ``1048576``, ``256MiB``, ``1.5GiB``, ``2GB``."""
    match = _SIZE.match(text.strip())
    if match is None:
        raise ValueError("give bytes, or a number with KiB, MiB, GiB, TiB (or KB, MB, GB, TB)")
    return int(Fraction(match[1]) * _SIZE_UNITS[(match[2] or "").lower()])


def span(text: str) -> timedelta:
    """Read a span of time: ``30``, ``30s``, ``500ms``, ``2min``, ``1h``."""
    match = _SPAN.match(text.strip())
    if match is None:
        raise ValueError("give seconds, or a number with ms, s, min or h")
    try:
        return timedelta(seconds=float(match[1]) * _SPAN_UNITS[match[2] or ""])
    except OverflowError:
        raise ValueError("give a span that a person can wait for") from None


def share(text: str) -> float:
    """Read a share of a whole: ``0.5``, ``50%``."""
    digits, _, rest = text.strip().partition("%")
    try:
        number = float(digits) / (100 if "%" in text else 1)
    except ValueError:
        number = -1.0
    if rest or not 0 <= number <= 1:
        raise ValueError("give a number from 0 to 1, or a percentage")
    return number


def whole(text: str) -> int:
    """Read a whole number."""
    try:
        return int(text.strip())
    except ValueError:
        raise ValueError("give a whole number") from None


def amount(text: str) -> float:
    """Read a number of things that can be shared: ``1``, ``0.5``."""
    try:
        number = float(text.strip())
    except ValueError:
        number = -1.0
    if not 0 <= number < math.inf:
        raise ValueError("give a number that is not negative, such as 1 or 0.5")
    return number


def switch(text: str) -> bool:
    """Read yes or no."""
    words = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
    try:
        return words[text.strip().lower()]
    except KeyError:
        raise ValueError("give true or false") from None


def choice(*names: str) -> Reader:
    """Return a reader of one of the names."""

    def parse(text: str) -> str:
        if text.strip() not in names:
            raise ValueError(f"choose from {', '.join(names)}")
        return text.strip()

    return Reader("|".join(names), parse, str)


def transports(text: str) -> tuple[Transport, ...]:
    """Read names of transports, with commas between them."""
    try:
        return tuple(Transport(name.strip()) for name in text.split(","))
    except ValueError:
        names = ", ".join(transport.value for transport in Transport)
        raise ValueError(f"give names with commas between them, out of {names}") from None


def batch_grid(text: str) -> BatchGrid:
    """Read a batch grid: global batch size, data-parallel size, micro batch size."""
    sizes = _numbers(text, 3, "GLOBAL,DATA_PARALLEL,MICRO, for example 64,4,2")
    return BatchGrid(
        global_batch_size=sizes[0], data_parallel_size=sizes[1], micro_batch_size=sizes[2]
    )


def model_grid(text: str) -> ModelGrid:
    """Read a model grid: nodes, GPUs a node, tensor-parallel size, context-parallel size."""
    sizes = _numbers(text, 4, "NODES,GPUS,TENSOR,CONTEXT, for example 2,8,4,1")
    return ModelGrid(
        node_count=sizes[0],
        gpus_per_node=sizes[1],
        tensor_parallel_size=sizes[2],
        context_parallel_size=sizes[3],
    )


def _numbers(text: str, count: int, form: str) -> list[int]:
    parts = text.split(",")
    if len(parts) != count or not all(part.strip().isdecimal() for part in parts):
        raise ValueError(f"give {form}")
    return [int(part) for part in parts]


def transports_setting(names: tuple[Transport, ...]) -> str:
    """Return transports as their flag takes them."""
    return ",".join(transport.value for transport in names)


def size_setting(size_bytes: int) -> str:
    """Return a number of bytes as their flag takes them, exactly."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if size_bytes and size_bytes % 1024**power == 0:
            return f"{size_bytes // 1024**power}{unit}"
    return str(size_bytes)


def span_setting(value: timedelta) -> str:
    """Return a span of time as its flag takes it, exactly."""
    return f"{value.total_seconds():.6f}".rstrip("0").rstrip(".") + "s"


SIZE = Reader("BYTES", size, int)
SPAN = Reader("SPAN", span, timedelta)
COUNT = Reader("N", whole, int)
AMOUNT = Reader("N", amount, float)
SHARE = Reader("SHARE", share, float)
UID = Reader("UID", whole, int)
SWITCH = Reader("", switch, bool)
NAME = Reader("NAME", str.strip, str)
PATH = Reader("PATH", str.strip, str)
ADDRESS = Reader("ADDRESS", str.strip, str)
TRANSPORTS = Reader("NAMES", transports, Transport, many=True)
BATCH_GRID = Reader("GLOBAL,DP,MICRO", batch_grid, BatchGrid)
MODEL_GRID = Reader("NODES,GPUS,TP,CP", model_grid, ModelGrid)
