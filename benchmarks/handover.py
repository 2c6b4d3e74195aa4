"""What it costs to have a registered step in hand, beside a bare gRPC call.

    python -m benchmarks.handover                    1 MB, 32 MB and 1 GB (takes 6 GB of memory)
    python -m benchmarks.handover --size-bytes 1000000 --rounds 2

Server, publishers and the anchor's server are processes of their own; this one is the student,
with default settings: memory mapped copy-on-write, one step asked for ahead. Sizes and the
anchor take turns. A step is in hand when there are tensors of its `topk_ids`, `topk_logprobs`
and `log_tail`, of all rows of this rank: that is what a loss takes, and nothing of it was read.

One JSON object a line, in microseconds unless it says otherwise:

`grpc_unary`       a small message to a bare gRPC server and back, over a Unix socket: 20 calls in
                   a row, or one in the place of an `acquire`, after the same work (`way`)
`grpc_unary_idle`  one such call after a moment in which neither side did anything, as the publisher
                   and the waiting reader of `seal_to_reader` do nothing before a seal
`bare_wake`        from a bare process that touches a file, after that rest, to another that waited
                   for it, with nothing done at either end: what a machine's wake-up costs alone
`handover`         from the call of `acquire` to a step in hand, which was sealed while the one
                   before was held and every byte of it written over in place; `after` says
                   what came right before: the close of that one, or its way back, done. What
                   the caches held is swept out before at every size, as a training step does
`close`            that close: what came of the next step meanwhile is opened there; dirtied pages
                   are dropped, and the room given back, by another thread
`seal_to_reader`   from the call of `seal` to the step in the hand of a reader in another
                   process that was waiting for it. The draft was checked before (`Draft.check`),
                   as one is that `select_top_k` writes: the seal reads no bytes of it. Beside its
                   `ratio`, `idle_ratio` is the one to `grpc_unary_idle`
`read_pages`       after that, a look at every page of the step (ms): its page faults
`write_pages`      one write to every byte of it, each page of which is copied by that (ms)

Ratios are to the calls in a row, which are the quicker.
"""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import ExitStack
from statistics import median
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING

import torch
from benchmarks.anchors import grpc_unary, touch
from benchmarks.bulk import serving
from benchmarks.processes import PATIENCE_SECONDS, Child, child
from benchmarks.publisher import A_MOMENT_SECONDS, ROWS, TOP_K, teacher_of, tokens_of
from benchmarks.report import report

import teacher_logits_client as tl

if TYPE_CHECKING:
    from collections.abc import Mapping

IN_HAND = ("topk_ids", "topk_logprobs", "log_tail")
CALLS_A_ROUND = 20
PAGE_BYTES = 4096
SWEPT_BYTES = 64_000_000


def main(argv: list[str]) -> int:
    """Run all and write the figures."""
    options = _parser().parse_args(argv)
    torch.set_num_threads(1)
    with ExitStack() as stack:
        told = stack.enter_context(serving(net="unix", tokens=1))
        anchor = stack.enter_context(child("benchmarks.anchors.grpc_unary"))
        caller = grpc_unary.Caller(str(anchor.hear()["unix"]))
        stack.callback(caller.close)
        touched = stack.enter_context(NamedTemporaryFile())
        toucher = stack.enter_context(child("benchmarks.anchors.touch", touched.name))
        woken = touch.Woken(toucher, touched.fileno())
        students = [
            _Student(stack, str(told["address"]), int(size))
            for size in options.size_bytes.split(",")
        ]
        calls: list[float] = []
        alone: list[float] = []
        idle: list[float] = []
        wakes: list[float] = []
        for _ in range(options.rounds):
            for student in students:
                calls += [_microseconds(caller) for _ in range(CALLS_A_ROUND)]
                student.hand_over(after="close")
                student.hand_over(after="return")
                student.wait_for_seal()
                time.sleep(A_MOMENT_SECONDS)
                idle.append(_microseconds(caller))
                wakes.append(woken.microseconds())
                student.hold(after="return")
                alone.append(_microseconds(caller))
                student.skip()
        report("grpc_unary", "us", calls, way="in_a_row", net="unix")
        report("grpc_unary", "us", alone, way="alone", net="unix")
        report("grpc_unary_idle", "us", idle, net="unix")
        report("bare_wake", "us", wakes)
        for student in students:
            student.report(("grpc_unary, in_a_row", calls), idle)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks.handover", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--size-bytes", default="1000000,32000000,1000000000", help="payloads, about so large"
    )
    parser.add_argument("--rounds", type=int, default=20)
    return parser


def _microseconds(caller: grpc_unary.Caller) -> float:
    started = time.perf_counter()
    caller.call()
    return (time.perf_counter() - started) * 1e6


class _Student:
    """The one rank of a student, its publisher, and what was measured of both."""

    def __init__(self, stack: ExitStack, address: str, size_bytes: int) -> None:
        tokens = tokens_of(size_bytes)
        self._publisher: Child = stack.enter_context(
            child("benchmarks.publisher", address, str(tokens))
        )
        self._publisher.hear()
        self._client = stack.enter_context(tl.connect(address))
        profile = tl.StudentProfile(
            teacher_id=teacher_of(tokens).teacher_id,
            batch_grid=tl.BatchGrid(
                global_batch_size=ROWS, data_parallel_size=1, micro_batch_size=1
            ),
            top_k=TOP_K,
        )
        self._session = stack.enter_context(self._client.open_session(profile))
        self._step = -1
        self._size_bytes = 0
        self._swept = torch.zeros(SWEPT_BYTES, dtype=torch.uint8)
        self._figures: dict[tuple[str, str, str], list[float]] = {}
        self._publish("publish")
        with self._session.acquire(step=self._step, timeout=PATIENCE_SECONDS) as batch:
            _look(batch.columns)

    def hold(self, *, after: str) -> None:
        """Hold a step and write over it, while the one behind it is sealed; close it."""
        self._publish("publish")
        returned = self._client.statistics().returned_leases
        batch = self._session.acquire(step=self._step, timeout=PATIENCE_SECONDS)
        self._publish("publish")
        started = time.perf_counter()
        _write_over(batch.columns)
        self._note("write_pages", "ms", (time.perf_counter() - started) * 1e3)
        self._swept.add_(1)
        started = time.perf_counter()
        batch.close()
        self._note("close", "us", (time.perf_counter() - started) * 1e6)
        while after == "return" and self._client.statistics().returned_leases == returned:
            time.sleep(0.001)

    def hand_over(self, *, after: str) -> None:
        """Time the acquisition of the step behind one that was written over."""
        self.hold(after=after)
        started = time.perf_counter()
        batch = self._session.acquire(step=self._step, timeout=PATIENCE_SECONDS)
        columns = batch.columns
        in_hand = [columns[name] for name in IN_HAND]
        self._note("handover", "us", (time.perf_counter() - started) * 1e6, after=after)
        del in_hand
        self._check(batch)

    def skip(self) -> None:
        """Take the step that is sealed, and do nothing with it."""
        self._check(self._session.acquire(step=self._step, timeout=PATIENCE_SECONDS))

    def wait_for_seal(self) -> None:
        """Wait for a step that is sealed a moment later, and look at every page of it."""
        self._publish("write")
        self._publisher.tell("seal")
        batch = self._session.acquire(step=self._step, timeout=PATIENCE_SECONDS)
        columns = batch.columns
        in_hand = [columns[name] for name in IN_HAND]
        ended_ns = time.monotonic_ns()
        called_ns = int(str(self._publisher.hear()["called_ns"]))
        del in_hand
        self._note("seal_to_reader", "us", (ended_ns - called_ns) / 1e3)
        started = time.perf_counter()
        _look(columns)
        self._note("read_pages", "ms", (time.perf_counter() - started) * 1e3)
        self._check(batch)

    def report(self, anchor: tuple[str, list[float]], idle: list[float]) -> None:
        """Write the figures."""
        for (figure, unit, after), values in self._figures.items():
            varied = {"transport": self._transport, "size_bytes": self._size_bytes}
            if after:
                varied["after"] = after
            if figure == "seal_to_reader":
                varied["idle_ratio"] = round(median(values) / median(idle), 3)
            report(figure, unit, values, against=anchor if unit == "us" else None, **varied)

    def _note(self, figure: str, unit: str, value: float, *, after: str = "") -> None:
        self._figures.setdefault((figure, unit, after), []).append(value)

    def _publish(self, command: str) -> None:
        self._step += 1
        self._publisher.tell(f"{command} {self._step}")
        self._size_bytes = int(str(self._publisher.hear()["size_bytes"]))

    def _check(self, batch: tl.Batch) -> None:
        """Refuse a step that is not as its publisher wrote it, and close it."""
        with batch:
            (self._transport,) = {each.value for each in batch.transports.values()}
            ids = batch.columns["topk_ids"]
            if int(ids[0, 1]) != 1 or int(ids[-1, -1]) != TOP_K - 1:
                raise SystemExit(f"step {self._step} shows what was written over another")
            del ids


def _look(columns: Mapping[str, torch.Tensor]) -> None:
    for column in columns.values():
        _pages(column).sum()


def _write_over(columns: Mapping[str, torch.Tensor]) -> None:
    for column in columns.values():
        column.view(torch.uint8).fill_(255)


def _pages(column: torch.Tensor) -> torch.Tensor:
    """Return a byte of each page."""
    return column.reshape(-1).view(torch.uint8)[::PAGE_BYTES]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
