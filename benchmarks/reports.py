"""Two costs that users of other services complained of: of forms of text, and of a larger K.

    python -m benchmarks.reports                     R14 and R09 of the reports from the field
    python -m benchmarks.reports --shapes 64x4 --sizes-of-k 1,4 --bytes 20000 --rounds 2

The server is a process of its own. Text is written and read in one process, and not sent.

One JSON object a line:

`round_trip`  microseconds from ids and log-probabilities [P,K] to the same in other memory, by
              `form`. Ours is `raw`: columns laid out, copied into room that is there, and read
              as views of it; with its `ratio` to each form of text, which is a line of its own:
              `base64` of the arrays in JSON, `lists` of numbers, `dicts` of one entry each, and
              `by_id`, a dict of dicts a position. `shared_memory` is more than that: a whole
              lease of such a payload from the server, taken and given back.
`stream`      nanoseconds a byte of a streamed payload by its `top_k`, all of about the same
              size; with the `ratio` to that of the smallest K.
"""

from __future__ import annotations

import argparse
import base64
import json
import sys
import time
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch
from benchmarks.bulk import Streamed
from benchmarks.processes import ROOT
from benchmarks.report import report

import teacher_logits_client as tl
from teacher_logits.layout import ColumnKind, lay_out
from teacher_logits.tensors import ELEMENT_TYPES, column_tensor
from teacher_logits_client import testing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Form = Callable[[torch.Tensor, torch.Tensor], object]

VOCABULARY, ROW_TOKENS = 2048, 4096
OURS = "raw"


def make(config: object) -> testing.ToyTeacher:
    """Make the teacher; what ``serve`` calls."""
    del config
    torch.set_num_threads(1)
    sizes = testing.ToyProfile(vocabulary_size=VOCABULARY, head_rows=VOCABULARY)
    return testing.ToyTeacher(sizes)


def main(argv: list[str]) -> int:
    """Run all and write the figures."""
    options = _parser().parse_args(argv)
    flags = {"max_request_tokens": 1 << 18, "folder": ROOT}
    with testing.serve(f"{__spec__.name}:make", **flags) as server:  # type: ignore[arg-type]
        for shape in options.shapes.split(","):
            positions, k = map(int, shape.split("x"))
            _report_text(server.address, positions, k, options.rounds)
        sizes = [int(size) for size in options.sizes_of_k.split(",")]
        _report_sizes(server.address, sizes, options.bytes, options.rounds)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks.reports", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--shapes", default="32768x2,2048x64", help="positions and K of each")
    parser.add_argument("--sizes-of-k", default="1,4,16,64,256,1024")
    parser.add_argument("--bytes", type=int, default=2_000_000, help="about how large each is")
    parser.add_argument("--rounds", type=int, default=10)
    return parser


@contextmanager
def _scored(
    address: str, positions: int, k: int, transport: tl.Transport
) -> Iterator[tuple[tl.Session, tl.LeasedPayload]]:
    """Hold a payload of so many positions, in rows of all the tokens that one may have."""
    grid = tl.BatchGrid(global_batch_size=1, data_parallel_size=1, micro_batch_size=1)
    profile = tl.StudentProfile(batch_grid=grid, top_k=k, transports=(transport,))
    ids = torch.arange(positions).remainder(VOCABULARY).split(ROW_TOKENS)
    with (
        tl.connect(address) as client,
        client.open_session(profile) as session,
        session.score([row.tolist() for row in ids]).result() as leased,
    ):
        yield session, leased


def _report_text(address: str, positions: int, k: int, rounds: int) -> None:
    with _scored(address, positions, k, tl.Transport.SHARED_MEMORY) as (session, leased):
        ids = leased.columns["topk_ids"].clone()
        logprobs = leased.columns["topk_logprobs"].clone()
        payload_id = leased.payload.payload_id

        def lease() -> None:
            with session.acquire(payload_id=payload_id) as again:
                columns = again.columns
                assert columns["topk_ids"].shape == columns["topk_logprobs"].shape

        room = memoryview(bytearray(leased.payload.size_bytes))
        ways: dict[str, Callable[[], object]] = {
            "shared_memory": lease,
            OURS: lambda: _raw(ids, logprobs, room),
            **{name: partial(form, ids, logprobs) for name, form in FORMS.items()},
        }
        times: dict[str, list[float]] = {}
        for name, way in ways.items():
            way()
            times[name] = [_seconds(way) * 1e6 for _ in range(rounds)]
    figure = partial(report, "round_trip", "us", positions=positions, top_k=k)
    ours = times.pop(OURS)
    for name, theirs in times.items():
        figure(theirs, form=name)
        figure(ours, against=(name, theirs), form=OURS)


def _report_sizes(address: str, sizes: list[int], size_bytes: int, rounds: int) -> None:
    first: list[float] = []
    for k in sizes:
        positions = max(1, size_bytes // (6 * k + 12))
        with ExitStack() as stack:
            session, leased = stack.enter_context(
                _scored(address, positions, k, tl.Transport.STREAM)
            )
            streamed = Streamed(address, session.terms.session_id, leased.payload.payload_id)
            stack.callback(streamed.close)
            streamed.fetch()
            spent = [_seconds(streamed.fetch) / streamed.size_bytes * 1e9 for _ in range(rounds)]
            first = first or spent
            against = (f"top_k {sizes[0]}", first)
            report(
                "stream", "ns/B", spent, against=against, top_k=k, size_bytes=streamed.size_bytes
            )


def _seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _raw(ids: torch.Tensor, logprobs: torch.Tensor, room: memoryview) -> list[torch.Tensor]:
    columns, _ = lay_out(
        (kind, ELEMENT_TYPES[each.dtype], list(each.shape))
        for kind, each in ((ColumnKind.TOPK_IDS, ids), (ColumnKind.TOPK_LOGPROBS, logprobs))
    )
    for column, each in zip(columns, (ids, logprobs), strict=True):
        column_tensor(room, column).copy_(each)
    return [column_tensor(room, column) for column in columns]


def _by_base64(ids: torch.Tensor, logprobs: torch.Tensor) -> list[torch.Tensor]:
    arrays = [(each.numpy().tobytes(), each.dtype, list(each.shape)) for each in (ids, logprobs)]
    text = json.dumps([(base64.b64encode(data).decode(), shape) for data, _, shape in arrays])
    return [
        torch.frombuffer(bytearray(base64.b64decode(data)), dtype=kind).view(shape)
        for (data, shape), (_, kind, _) in zip(json.loads(text), arrays, strict=True)
    ]


def _by_lists(ids: torch.Tensor, logprobs: torch.Tensor) -> list[torch.Tensor]:
    found = json.loads(json.dumps([ids.tolist(), logprobs.tolist()]))
    return [torch.tensor(found[0], dtype=ids.dtype), torch.tensor(found[1], dtype=logprobs.dtype)]


def _by_dicts(ids: torch.Tensor, logprobs: torch.Tensor) -> list[torch.Tensor]:
    rows = zip(ids.tolist(), logprobs.tolist(), strict=True)
    text = json.dumps(
        [[{"token_id": i, "logprob": v} for i, v in zip(*row, strict=True)] for row in rows]
    )
    found = json.loads(text)
    return [
        torch.tensor([[entry[name] for entry in row] for row in found], dtype=kind)
        for name, kind in (("token_id", ids.dtype), ("logprob", logprobs.dtype))
    ]


def _by_id(ids: torch.Tensor, logprobs: torch.Tensor) -> list[torch.Tensor]:
    rows = zip(ids.tolist(), logprobs.tolist(), strict=True)
    text = json.dumps([{str(i): {"logprob": v} for i, v in zip(*row, strict=True)} for row in rows])
    found = json.loads(text)
    return [
        torch.tensor([[int(name) for name in row] for row in found], dtype=ids.dtype),
        torch.tensor(
            [[entry["logprob"] for entry in row.values()] for row in found], dtype=logprobs.dtype
        ),
    ]


FORMS: dict[str, Form] = {
    "base64": _by_base64,
    "lists": _by_lists,
    "dicts": _by_dicts,
    "by_id": _by_id,
}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
