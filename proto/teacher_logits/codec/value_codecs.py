"""Value codecs: log-probabilities in two bytes or one, and what that costs.

    float16, bfloat16   rounded; what is finite stays so in bf16, down to its least number
    bfloat16_exact      | first log-probability, fp32 |   | K logits, bf16 |
                        logit_k - logit_1 + first, in fp32: how a log-softmax computes them
    uint8               | largest, step: two fp32 |       | K steps below the largest, uint8 |
                        largest - code * step, and step = range / 255

In ``uint8`` a position with absent entries has a step below zero (or -0.0), 254 steps, and the code
255 where an entry is -inf.

Everything works on runs of whole positions: ``values`` [R,K], and planes uint8 [R, bytes of a row].
Refuses (``CodecError``) what a codec cannot carry: a NaN, numbers beyond fp16, log-probabilities
that bf16 logits do not give. Malformed bytes are a ``PayloadInvalidError``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from teacher_logits.encodings import CODEC_FACT, CodecError, Plane, ValueCodec
from teacher_logits.errors import PayloadInvalidError

if TYPE_CHECKING:
    from teacher_logits.error_bounds import ErrorBound

_STEPS, _STEPS_BESIDE_ABSENT, _ABSENT = 255.0, 254.0, 255
_HALVES = {Plane.FLOAT16: torch.float16, Plane.BFLOAT16: torch.bfloat16}
#: Log-probabilities further down than this have no mass.
_FAR = 1e4
_WAY_OUT = "open the session with another codec, or with value_codecs=('as_written',)"


def encode_values(
    plane: Plane, values: torch.Tensor, out: torch.Tensor, *, logsumexp: torch.Tensor | None = None
) -> None:
    """Write one plane of ``values`` into ``out``; logits need ``logsumexp`` [R] beside them.

    Raises:
        CodecError: the codec cannot carry them, with the first position and value.
    """
    if plane in _HALVES:
        _round(values, out.view(_HALVES[plane]))
    elif plane is Plane.FIRST:
        out.view(torch.float32).copy_(values[:, :1])
    elif plane is Plane.RAW:
        if logsumexp is None:
            raise ValueError("logits are told from log-probabilities by their logsumexp")
        _write_logits(values.float(), logsumexp, out.view(torch.bfloat16))
    elif plane is Plane.SCALE:
        torch.stack(_scale(values.float()), 1, out=out.view(torch.float32))
    else:
        _write_codes(values.float(), out)


def decode_values(
    plane: Plane, data: torch.Tensor, out: torch.Tensor, *, head: torch.Tensor | None = None
) -> None:
    """Write what a plane says into ``out`` [R,K], in the type of that.

    ``head`` uint8 is the plane before it, where there are two; of that nothing is written.

    Raises:
        PayloadInvalidError: the bytes are not what the codec writes.
    """
    if plane in _HALVES:
        out.copy_(data.view(_HALVES[plane]))
    elif head is None:
        raise ValueError(f"plane {plane.value} is read by the one before it")
    elif plane is Plane.RAW:
        raw = data.view(torch.bfloat16).float()
        out.copy_(raw.sub_(raw[:, :1].clone()).add_(head.view(torch.float32)))
    else:
        _read_codes(data, head.view(torch.float32), out)


def certify(
    logprobs: torch.Tensor, bound: ErrorBound, *, temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what holds of decoded positions [P,K]: bounds on KL and on the gradient, fp64 [P].

    From the largest error that an entry of the position can have (docs/math.md, "What an encoding
    may cost"), and never above what holds for all positions. ``logprobs`` are those of
    temperature 1, as they came; ``temperature`` is that of the targets made of them, which divides
    their errors, and the gradient is by the student's logits over it. What holds for all positions
    does so from temperature 1 on; below, these alone do.
    """
    delta = entry_errors(logprobs.double(), bound).amax(1) / temperature
    kl, gradient = delta * delta / 2, delta
    if temperature >= 1 and bound.kl is not None and bound.gradient is not None:
        kl, gradient = kl.clamp_max(bound.kl), gradient.clamp_max(bound.gradient)
    return kl, gradient


def entry_errors(logprobs: torch.Tensor, bound: ErrorBound) -> torch.Tensor:
    """Return how far each decoded entry may be from what was written, [P,K]; 0 where absent."""
    values = logprobs if logprobs.dtype is torch.float64 else logprobs.float()
    if bound.is_exact:
        return torch.zeros_like(values)
    here = values > -torch.inf
    least = torch.where(here, values, torch.inf).amin(1, keepdim=True)
    spread = (values.amax(1, keepdim=True) - least).clamp_min(0.0)
    sizes = torch.where(here, values.abs(), 0.0)
    error = bound.relative * sizes + bound.of_range * spread + bound.absolute
    return torch.where(here, error / (1 - bound.relative), 0.0)


def mass_error(logprobs: torch.Tensor, masses: torch.Tensor, bound: ErrorBound) -> torch.Tensor:
    """Return how far from 1 the decoded mass of each position may lie for its codec, fp32 [P].

    Each of ``masses`` [P,K] is off by a factor of e^error, where the error is that of its entry in
    ``logprobs`` [P,K]; taken twice, which covers what e^error is above 1 + error.
    """
    values = logprobs.float()
    error = bound.relative * (masses * values.abs().clamp_max(_FAR)).sum(1) + bound.absolute
    if bound.of_range:
        here = values > -torch.inf
        least = torch.where(here, values, torch.inf).amin(1)
        error = error + bound.of_range * (values.amax(1) - least).clamp_min(0.0)
    return 2 * error / (1 - bound.relative)


def _round(values: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(values)
    least = torch.finfo(out.dtype).min
    if not bool((values.amin(1) < least).any()):
        return
    if out.dtype is torch.bfloat16:
        # The least fp32 number, by which models mask, is less than half a step below bf16's.
        out.masked_fill_((out == -torch.inf) & (values > -torch.inf), least)
    else:
        _refuse((out == -torch.inf) & (values > -torch.inf), values, ValueCodec.FLOAT16)


def _write_logits(values: torch.Tensor, logsumexp: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(values + logsumexp.float().unsqueeze(1))
    back = out.float()
    back = back.sub_(back[:, :1].clone()).add_(values[:, :1])
    same = back == values
    if not bool(same.all()):
        _refuse(~same, values, ValueCodec.BFLOAT16_EXACT)


def _scale(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return largest and step [R] each; the step says whether entries are absent."""
    largest, least = values.amax(1), values.amin(1)
    absent = least == -torch.inf
    if bool(absent.any()):
        here = values.masked_fill(values == -torch.inf, torch.inf).amin(1)
        nothing = largest == -torch.inf
        largest = largest.masked_fill(nothing, 0.0)
        least = torch.where(absent, here, least).masked_fill(nothing, 0.0)
    spread = largest - least
    if not bool(spread.isfinite().all()):
        _refuse((~spread.isfinite()).unsqueeze(1), values, ValueCodec.UINT8)
    step = spread / torch.where(absent, _STEPS_BESIDE_ABSENT, _STEPS).to(spread.dtype)
    return largest, torch.where(absent, -step, step)


def _write_codes(values: torch.Tensor, out: torch.Tensor) -> None:
    largest, step = _scale(values)
    absent, size = step.signbit(), step.abs()
    size = torch.where(size > 0, size, 1.0).unsqueeze(1)
    codes = (largest.unsqueeze(1) - values).div_(size).round_()
    if bool(absent.any()):
        most = torch.where(absent, _STEPS_BESIDE_ABSENT, _STEPS).to(size.dtype).unsqueeze(1)
        codes = torch.where(values == -torch.inf, _ABSENT, torch.minimum(codes, most))
    out.copy_(codes.clamp_(0, _ABSENT))


def _read_codes(codes: torch.Tensor, scale: torch.Tensor, out: torch.Tensor) -> None:
    if not bool(scale.isfinite().all()):
        row = int((~scale.isfinite()).any(1).nonzero()[0])
        raise PayloadInvalidError(
            f"a position's scale is {scale[row].tolist()}: a stream in uint8 has finite ones; it "
            "is malformed",
            facts={"position": row},
        )
    step = scale[:, 1:]
    decoded = scale[:, :1] - codes.float().mul_(step.abs())
    least = torch.finfo(torch.float32).min
    if bool((scale[:, 0] < least / 2).any()) or bool((step.abs() > -least / 512).any()):
        decoded.clamp_min_(least)  # a step is rounded, and all of them together may overflow
    absent = step.signbit()
    if bool(absent.any()):
        decoded.masked_fill_(absent & (codes == _ABSENT), -torch.inf)
    out.copy_(decoded)


def _refuse(faulty: torch.Tensor, values: torch.Tensor, codec: ValueCodec) -> None:
    places = faulty.nonzero()
    if not len(places):
        return
    row, entry = (int(at) for at in places[0])
    value = float(values[row, entry])
    why = {
        ValueCodec.FLOAT16: "beyond what fp16 holds",
        ValueCodec.BFLOAT16_EXACT: "not what bf16 logits give",
        ValueCodec.UINT8: "in a position with a NaN or an infinite range",
    }[codec]
    raise CodecError(
        f"a log-probability of {value:g} is {why}, and codec {codec.value} cannot carry it "
        f"({len(places)} such): {_WAY_OUT}",
        facts={CODEC_FACT: codec.value, "value": value, "faulty": len(places)},
    )
