"""Error bounds: what a codec may cost, certified before the first byte is sent.

Let p be a position's K entries and tail as they were written, and q the same decoded, each
renormalised jointly. If the decoded log-probabilities are off by at most d, then (docs/math.md,
"What an encoding may cost")

    KL(p || q) <= d^2 / 2            |p - q|_1 <= d

and the second is the L1 bound of the error of any student's forward-KL gradient, since that is the
student's probabilities less p. A codec is off by at most

    relative * |log-probability|  +  of_range * (largest - smallest of the position)  +  absolute

Where nothing depends on the range, one number holds for every position there can be, however far
down its entries go: what is far down weighs little. With n = K + 1 categories and relative = c, the
variance of the error under any tilt of p towards q is at most c^2 n^(2c) max(ln n, 2 / (1 - c))^2,
since the sum of p^(1-c) ln^2 p is largest where p is flat and that of p^(1+c) smallest there. So
d = c n^c max(ln n, 2 / (1 - c)) + absolute stands in the place of d above.

At temperature t an entry is off by its error over t. From t = 1 on that is no more than c times its
|log-probability| there, since the p-norm of exp(logits / t) falls with p, and the same d holds.
Below 1 it need not: a flat position is off by up to d / t, and ``value_codecs.certify`` is asked.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from teacher_logits.encodings import StreamCodec, ValueCodec
from teacher_logits.layout import ElementType

_ROUNDING = {
    ElementType.FLOAT32: 2.0**-21,  # a few roundings, of step and difference
    ElementType.FLOAT16: 2.0**-11,
    ElementType.BFLOAT16: 2.0**-8,
}
"""What rounding to a type can move a value by, relative to it."""

_ABSOLUTE = 1e-6
"""Beside that: fp16 near 0, and that what was written sums to one but for its own rounding."""

_OF_RANGE = 1 / 508
"""Half a step of ``uint8``: 255 steps, or 254 where some entries are absent."""


@dataclass(frozen=True, kw_only=True)
class ErrorBound:
    """What a codec may cost. All numbers are 0 where it loses nothing.

    ``kl`` (nats) and ``gradient`` (L1) hold for every position, at temperature 1 and above; None
    where that hangs on its range: ``value_codecs.certify`` then says what holds of those that
    came, and at lower temperatures as well.
    """

    relative: float = 0.0
    of_range: float = 0.0
    absolute: float = 0.0
    kl: float | None = 0.0
    gradient: float | None = 0.0

    @property
    def is_exact(self) -> bool:
        """Whether what is decoded is what was written, bit for bit."""
        return not (self.relative or self.of_range or self.absolute)

    def delta(self, *, furthest: float, spread: float) -> float:
        """Return how far entries may be off, seen from what was decoded.

        ``furthest`` is the largest |log-probability| among them and ``spread`` their range.
        """
        error = self.relative * furthest + self.of_range * spread + self.absolute
        return error / (1 - self.relative)


EXACT = ErrorBound()
"""The bound of what loses nothing."""


def bound_of(codec: StreamCodec, *, written: ElementType, top_k: int) -> ErrorBound:
    """Return the bound of a codec over ``top_k`` entries that were written in a type.

    What is decoded is rounded to that type again. Ids lose nothing under any codec.
    """
    values = codec.values
    exact = (ValueCodec.AS_WRITTEN, ValueCodec.BFLOAT16_EXACT)
    if values in exact or values.value == written.value:
        return EXACT
    if values is ValueCodec.UINT8:
        return ErrorBound(
            relative=_ROUNDING[written],
            of_range=_OF_RANGE,
            absolute=_ABSOLUTE,
            kl=None,
            gradient=None,
        )
    relative = _ROUNDING[ElementType(values.value)]
    most = max(math.log(top_k + 1), 2 / (1 - relative))
    delta = (relative * (top_k + 1) ** relative * most + _ABSOLUTE) * math.exp(_ABSOLUTE)
    return ErrorBound(relative=relative, absolute=_ABSOLUTE, kl=delta * delta / 2, gradient=delta)
