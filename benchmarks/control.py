"""What a control call waits for: alone, under bulk streams, and with health watchers beside them.

    python -m benchmarks.control           4 streams of 50 MB, 64 sessions, then 100 watchers too
    python -m benchmarks.control --rows 1 --tokens 64 --streams 1 --calls 20 --idle-seconds 0.2

The server is a process of its own, and so is each reader of a stream, which reads one payload
again and again at full speed; so are all watchers of its health together, which do nothing else, a
connection each. One client renews its session, one call after the other, while the other sessions
are open; calls alone, under bulk, and under bulk with watchers take turns.

One JSON object a line. `control_p50`, `control_p99`: milliseconds a call, one value a round, by the
`streams` under way and the `watchers` beside; with `ratio` to no streams, and to no watchers where
there are some. `bulk`: GB/s that all streams brought together meanwhile. `idle_sessions`: percent
of one core that `sessions` cost the server (its own CPU time) while nothing is asked of them; they
are open, and renew as they always do.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from benchmarks.bulk import TOP_K, scored, serving, session_of
from benchmarks.processes import PATIENCE_SECONDS, Child, child, cpu_seconds
from benchmarks.report import report

import teacher_logits_client as tl
from teacher_logits_client.calls import Calls
from teacher_logits_client.config import parse_address

if TYPE_CHECKING:
    from collections.abc import Callable


def main(argv: list[str]) -> int:
    """Run all and write the figures."""
    options = _parser().parse_args(argv)
    tokens = options.rows * options.tokens
    with serving(net=options.net, tokens=tokens) as told:
        _report_control(str(told["address"]), options)
    with serving(net=options.net, tokens=tokens) as told:
        _report_idle(str(told["address"]), int(str(told["pid"])), options)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks.control", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--rows", type=int, default=32, help="rows of the streamed payload")
    parser.add_argument("--tokens", type=int, default=3968, help="tokens a row")
    parser.add_argument("--net", default="unix", help="how the processes are connected")
    parser.add_argument("--streams", type=int, default=4, help="bulk streams at a time")
    parser.add_argument("--watchers", type=int, default=100, help="clients that watch its health")
    parser.add_argument("--calls", type=int, default=500, help="control calls a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sessions", type=int, default=64, help="sessions open at a time")
    parser.add_argument("--idle-seconds", type=float, default=10.0, help="how long they idle")
    return parser


@dataclass(kw_only=True)
class _Load:
    """So many streams and watchers, and what was measured under them: milliseconds, and GB/s."""

    streams: int
    watchers: int
    rounds: list[list[float]] = field(default_factory=list)
    brought: list[float] = field(default_factory=list)

    def percentiles(self, percent: int) -> list[float]:
        return [_percentile(each, percent) for each in self.rounds]

    def measure(self, call: Callable[[], None], count: int, *, where: tuple[str, str]) -> None:
        """Measure a round; ``where`` is the server's address and the payload that is streamed."""
        address, payload_id = where
        with ExitStack() as stack:
            if self.watchers:
                watching = child("benchmarks.watchers", address, str(self.watchers))
                stack.enter_context(watching).hear()
            reading = [
                stack.enter_context(child("benchmarks.bulk", address, payload_id))
                for _ in range(self.streams)
            ]
            for each in reading:
                each.hear()
            self.rounds.append(_milliseconds(call, count))
            if reading:
                self.brought.append(_brought(reading))


def _report_control(address: str, options: argparse.Namespace) -> None:
    alone = _Load(streams=0, watchers=0)
    streams = _Load(streams=options.streams, watchers=0)
    watched = _Load(streams=options.streams, watchers=options.watchers)
    calls = Calls(parse_address(address))
    with ExitStack() as stack:
        stack.callback(calls.close)
        session = stack.enter_context(
            session_of(address, transport=tl.Transport.STREAM, rows=options.rows)
        )
        for _ in range(options.sessions - 1):
            stack.enter_context(session_of(address, transport=tl.Transport.SHARED_MEMORY))
        held = stack.enter_context(scored(session, rows=options.rows, tokens=options.tokens))
        payload = held.payload

        def renew() -> None:
            calls.renew(session.terms.session_id, timeout=PATIENCE_SECONDS)

        renew()
        for _ in range(options.rounds):
            for load in (alone, streams, watched):
                load.measure(renew, options.calls, where=(address, payload.payload_id))
    for name, percent in (("control_p50", 50), ("control_p99", 99)):
        for load, anchor, what in (
            (alone, None, ""),
            (streams, alone, "no streams"),
            (watched, streams, "no watchers"),
        ):
            against = (f"{name}, {what}", anchor.percentiles(percent)) if anchor else None
            varied = {"streams": load.streams, "watchers": load.watchers, "net": options.net}
            values = load.percentiles(percent)
            report(name, "ms", values, against=against, sessions=options.sessions, **varied)
    for load in (streams, watched):
        varied = {"streams": load.streams, "watchers": load.watchers, "net": options.net}
        report("bulk", "GB/s", load.brought, size_bytes=payload.size_bytes, **varied)


def _milliseconds(call: Callable[[], None], count: int) -> list[float]:
    times = []
    for _ in range(count):
        started = time.perf_counter()
        call()
        times.append((time.perf_counter() - started) * 1e3)
    return times


def _percentile(values: list[float], percent: int) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def _brought(streams: list[Child]) -> float:
    """End the readers; return GB/s of all of them together."""
    for stream in streams:
        stream.finish()
    return sum(float(str(stream.hear()["gbps"])) for stream in streams)


def _report_idle(address: str, pid: int, options: argparse.Namespace) -> None:
    grid = tl.BatchGrid(global_batch_size=1, data_parallel_size=1, micro_batch_size=1)
    kinds = ((tl.Transport.SHARED_MEMORY, "line"), (tl.Transport.STREAM, "ttl"))
    for transport, liveness in kinds:
        profile = tl.StudentProfile(batch_grid=grid, top_k=TOP_K, transports=(transport,))
        with ExitStack() as stack:
            client = stack.enter_context(tl.connect(address))
            for _ in range(options.sessions):
                stack.enter_context(client.open_session(profile))
            before, started = cpu_seconds(pid), time.perf_counter()
            time.sleep(options.idle_seconds)
            seconds = time.perf_counter() - started
            percent = (cpu_seconds(pid) - before) / seconds * 100
        report("idle_sessions", "%", [percent], sessions=options.sessions, liveness=liveness)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
