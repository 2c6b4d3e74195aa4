"""Bytes as people write and read them. Programs read the JSON forms instead."""

from __future__ import annotations

import re
from fractions import Fraction

from teacher_logits.errors import ConfigError

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])i?)?B?\Z", re.IGNORECASE)
_UNITS = "KMGT"
_MOST_CHARS = 80
_TOO_MANY = 1 << 63
"""Bytes that no machine has."""


def size_text(size_bytes: int) -> str:
    """Return a number of bytes with three digits or so: ``0 B``, ``980 KiB``, ``12.4 MiB``."""
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1000 or (unit == "B" and size < 1024):
            return f"{size:.0f} B" if unit == "B" else f"{_three_digits(size)} {unit}"
        size /= 1024
    return f"{_three_digits(size)} TiB"


def size_of(text: str, *, flag: str) -> int:
    """Read a number of bytes: ``1048576``, ``256MiB``, ``1.5GiB``.

    Raises:
        ConfigError: it is none, naming the flag.
    """
    match = _SIZE.match(text.strip())
    if match is None:
        raise _none(text, flag=flag)
    unit = (match[2] or "").upper()
    power = _UNITS.index(unit) + 1 if unit else 0
    size = int(Fraction(match[1]) * 1024**power) if len(text) <= _MOST_CHARS else _TOO_MANY
    if size >= _TOO_MANY:
        raise _none(text, flag=flag)
    return size


def _none(text: str, *, flag: str) -> ConfigError:
    return ConfigError(
        f"{flag} {text[:80]!r} is no size: give bytes, or a number with KiB, MiB, GiB or TiB",
        facts={"flag": flag, "value": text[:80]},
    )


def _three_digits(value: float) -> str:
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}".removesuffix("0").removesuffix(".0")
