"""What the codecs of streams cost, in bytes, time and truth, on what a real teacher says.

    python -m benchmarks.codecs                        SmolLM2, as the demo has it
    python -m benchmarks.codecs --teacher PATH         another model: a folder, or a GGUF file
    python -m benchmarks.codecs --teacher toy --rows 2 --tokens 16 --rounds 1

The teacher runs in a server of its own, and scores the demo's texts in fp32 log-probabilities. Its
payload is encoded and decoded here, in chunks as a stream has them, on one thread.

One JSON object a line:

`bytes`       bytes a position, of ids and log-probabilities alone, by `codec`; `whole` with the
              other columns. Beside ours: `int32+float32` (the arrays), and what others send:
              `base64` of these arrays in JSON, `lists` of numbers, `triples`, and `dicts` by id.
`encode`, `decode`   million entries a second of processor time, of which a position has K; ours
              with the `ratio` to `base64`. Decoding ends in arrays.
`check`       million entries a second that are held against the invariants of a payload.
`refused`     entries of the first tile that a codec cannot carry; nothing else of it is measured.
`kl`          1e-9 nats: divergence of what is decoded from what was written, over K ids and tail,
              all positions; `certified` is the largest that the receiver certifies of them, and
              `session` what the handshake says of all positions there can be.
`gradient`    1e-6: L1 error of the gradient of `losses.forward_kl` by a student's logits; likewise.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING, TypedDict

import torch
from benchmarks.report import report
from benchmarks.teacher_rows import Scored, scored_rows
from benchmarks.text_forms import FORMS

from teacher_logits.codec.value_codecs import certify
from teacher_logits.encodings import (
    CodecError,
    IdCodec,
    StreamCodec,
    ValueCodec,
    encoding_of,
)
from teacher_logits.error_bounds import EXACT, ErrorBound, bound_of
from teacher_logits.layout import ColumnKind, ElementType
from teacher_logits.selection.invariants import check_invariants
from teacher_logits_client.losses import forward_kl
from teacher_logits_client.openers.decoder import Decoder
from teacher_logits_client.targets import make_targets
from teacher_logits_server.exporters.encoder import Encoder
from teacher_logits_server.exporters.stream import ENCODED_CHUNK_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from teacher_logits.encodings import Encoding

    Columns = Mapping[ColumnKind, torch.Tensor]

ENTRIES = (ColumnKind.TOPK_IDS, ColumnKind.TOPK_LOGPROBS)
OVER_POSITIONS = (*ENTRIES, ColumnKind.LOG_TAIL)
COMPARED = "base64"
STUDENT_POSITIONS = 32
CODECS = [
    StreamCodec(values=values, ids=ids)
    for values in (
        ValueCodec.AS_WRITTEN,
        ValueCodec.FLOAT16,
        ValueCodec.BFLOAT16,
        ValueCodec.BFLOAT16_EXACT,
        ValueCodec.UINT8,
    )
    for ids in IdCodec
]


class Varied(TypedDict):
    """What is varied."""

    codec: str
    top_k: int


def main(argv: list[str]) -> int:
    """Run all and write the figures."""
    options = _parser().parse_args(argv)
    torch.set_num_threads(1)
    scored = scored_rows(
        options.teacher, dtype=options.dtype, rows=options.rows, tokens=options.tokens
    )
    rates = {name: _measure_text(name, scored, options.rounds) for name in FORMS}
    _report_check(scored, options.rounds)
    for codec in CODECS:
        encoding = encoding_of(scored.payload, codec)
        if encoding is not None:
            _report_codec(scored, encoding, rates[COMPARED], options.rounds)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks.codecs", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--teacher", default="smollm2", help="smollm2, tiny, toy, or a model's path"
    )
    parser.add_argument("--dtype", default="bfloat16", help="the teacher's arithmetic")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=10)
    return parser


def _name(codec: StreamCodec) -> str:
    return f"{codec.values.value}+{codec.ids.value}"


def _rates(run: Callable[[], object], entries: int, rounds: int) -> list[float]:
    """Return million entries a second of each round, the first of them left out.

    Of this thread's own time, so that other work on the machine counts little.
    """
    taken = []
    for _ in range(rounds + 1):
        started = time.thread_time()
        run()
        taken.append(time.thread_time() - started)
    return [entries / each / 1e6 for each in taken[1:]]


def _measure_text(name: str, scored: Scored, rounds: int) -> tuple[list[float], list[float]]:
    """Report one of the others' forms; return its rates there and back."""
    form = FORMS[name]
    ids, logprobs = (scored.columns[kind] for kind in ENTRIES)
    text = form.encode(ids, logprobs)
    found = form.decode(text)
    if not (torch.equal(found[0], ids) and torch.equal(found[1], logprobs)):
        raise ValueError(f"{name} says something else")
    entries, varied = ids.numel(), Varied(codec=name, top_k=ids.shape[1])
    report("bytes", "B", [len(text) / len(ids)], **varied)
    there = _rates(lambda: form.encode(ids, logprobs), entries, rounds)
    back = _rates(lambda: form.decode(text), entries, rounds)
    report("encode", "M/s", there, **varied)
    report("decode", "M/s", back, **varied)
    return there, back


def _report_check(scored: Scored, rounds: int) -> None:
    payload = scored.payload

    def check() -> None:
        check_invariants(
            scored.columns, vocab_size=payload.vocabulary_size, temperatures=payload.temperatures
        )

    entries = scored.columns[ColumnKind.TOPK_IDS].numel()
    report("check", "M/s", _rates(check, entries, rounds), top_k=payload.top_k)


def _report_codec(
    scored: Scored,
    encoding: Encoding,
    others: tuple[list[float], list[float]],
    rounds: int,
) -> None:
    payload = scored.payload
    varied = Varied(codec=_name(encoding.codec), top_k=payload.top_k)
    try:
        chunks = _encode(scored, encoding)
    except CodecError as error:
        report("refused", "entries", [int(error.facts["faulty"])], **varied, why=error.message)
        return
    room = memoryview(bytearray(payload.size_bytes))
    entries, positions = payload.position_count * payload.top_k, payload.position_count
    size = sum(
        each.end_bytes - each.offset_bytes for each in encoding.columns if each.kind in ENTRIES
    )
    whole = round(encoding.size_bytes / positions, 1)
    report("bytes", "B", [size / positions], **varied, whole=whole)
    there = _rates(lambda: _encode(scored, encoding), entries, rounds)
    back = _rates(lambda: _decode(scored, encoding, chunks, room), entries, rounds)
    report("encode", "M/s", there, **varied, against=(COMPARED, others[0]))
    report("decode", "M/s", back, **varied, against=(COMPARED, others[1]))
    if encoding.codec.ids is not IdCodec.PACKED18:
        return  # ids lose nothing: once for each way of the values
    decoder = _decode(scored, encoding, chunks, room)
    decoder.finish()
    _report_truth(scored, encoding.codec, Scored(payload=payload, room=room).columns, varied)


def _encode(scored: Scored, encoding: Encoding) -> list[bytes]:
    encoder = Encoder(scored.pinned, encoding, scored.room)
    starts = range(0, encoding.size_bytes, ENCODED_CHUNK_BYTES)
    stops = [min(start + ENCODED_CHUNK_BYTES, encoding.size_bytes) for start in starts]
    return [b"".join(encoder.parts(start, stop)) for start, stop in zip(starts, stops, strict=True)]


def _decode(scored: Scored, encoding: Encoding, chunks: list[bytes], room: memoryview) -> Decoder:
    decoder, at = Decoder(scored.payload, encoding, room), 0
    for chunk in chunks:
        decoder.take(memoryview(chunk), at)
        at += len(chunk)
    return decoder


def _report_truth(scored: Scored, codec: StreamCodec, found: Columns, varied: Varied) -> None:
    """Report what the codec changed, beside what was certified."""
    payload, name = scored.payload, ColumnKind.TOPK_LOGPROBS
    bound = bound_of(codec, written=ElementType.FLOAT32, top_k=payload.top_k)
    kls, gradients = certify(found[name], bound)
    true, near = _coarse(scored.columns), _coarse(found)
    here = true > -torch.inf
    divergence = torch.where(here, true.exp() * (true - near), 0.0).sum(1)
    error = _gradient_error(scored, found, bound)
    kept = slice(0, len(error))
    for figure, unit, scale, measured, certified, session in (
        ("kl", "1e-9 nats", 1e9, divergence, kls, bound.kl),
        ("gradient", "1e-6", 1e6, error, gradients[kept], bound.gradient),
    ):
        # What fp32 arithmetic moves by itself is no codec's doing.
        slack = 1e-12 if figure == "kl" else 2e-6
        report(
            figure,
            unit,
            (measured * scale).tolist(),
            **varied,
            certified=round(float(certified.max()) * scale, 3),
            session=None if session is None else round(session * scale, 3),
            inside=bool((measured <= certified + slack).all()),
        )


def _coarse(columns: Columns) -> torch.Tensor:
    """Return entries and tail [P,K+1] that sum to one, in fp64."""
    logprobs, tail = columns[ColumnKind.TOPK_LOGPROBS], columns[ColumnKind.LOG_TAIL][:, :1]
    return torch.cat([logprobs.double(), tail.double()], 1).log_softmax(1)


def _gradient_error(scored: Scored, found: Columns, bound: ErrorBound) -> torch.Tensor:
    """Return the L1 error of a student's gradient at the first positions, fp64."""
    true, count = scored.columns, min(STUDENT_POSITIONS, scored.payload.position_count)
    chance = torch.Generator().manual_seed(0)
    size = (count, scored.payload.vocabulary_size)
    logits = torch.randn(size, generator=chance, dtype=torch.float64)
    gradients: list[torch.Tensor] = []
    for columns, its_bound in ((true, EXACT), (found, bound)):
        few = {kind: columns[kind][:count] for kind in OVER_POSITIONS}
        few[ColumnKind.ROW_OFFSETS] = torch.tensor([0, count])
        student = logits.clone().requires_grad_(True)
        loss_sum, _ = forward_kl(student, make_targets(few, bound=its_bound))
        gradients += torch.autograd.grad(loss_sum, student)
    return (gradients[0] - gradients[1]).abs().sum(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
