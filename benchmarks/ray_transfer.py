"""What a step costs from a teacher's workers to a student's, under Ray, by each path.

    python -m benchmarks.ray_transfer                  0.25 and 1 GB (takes 10 GB of memory)
    python -m benchmarks.ray_transfer --size-bytes 4000000 --rounds 2

Teacher and student have `--ranks` data-parallel ranks each, a process a rank; this one is the
driver. A payload is fp32 values and int64 ids [N,S,K], of about the size in all ranks together,
and the same on every path. Paths take turns, after a round that is not counted.

`base`      the driver has all tensors, concatenates them, cuts them anew and puts the parts: as
            NeMo RL did
`deferred`  each worker puts its tensors and answers with a reference: as its pull request 3943
`views`     ours: `DeferredTeacher` puts a flat payload, `hand_over` hands the reference on, and
            `attach` views the object store
`slabs`     ours, through slabs of the teacher's workers (`SlabRoom`)
`calls`     the same calls with no payload: what Ray costs alone

One JSON object a line. `ray_transfer` is in GB/s, from the first call to a teacher's worker to the
student's last byte read, each once, and `ratio` says how many times the base's that is.
`median_ms` is the time. `driver_growth_bytes` is the most by which the driver's resident memory
grew, the object store's pages counted, and `spilled` whether Ray has written anything to disk so
far. Wrong bytes end the run. Every round starts with the payload where its teacher writes it:
tensors for the first two paths, checked room for ours, whose slabs are the same in every round.

Ray listens on every interface: the benchmark runs itself in a network namespace with loopback
alone, which takes `unshare` and the right to use it.
"""

from __future__ import annotations

import argparse
import gc
import logging
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from benchmarks.alone import is_alone, run_alone
from benchmarks.ray_actors import STEP, Student, Teacher
from benchmarks.report import report

from teacher_logits_client.ray import Side, StepPlan, agree, fetch, hand_over

if TYPE_CHECKING:
    from collections.abc import Callable

BASE = "base"
PATHS = (BASE, "deferred", "views", "slabs", "calls")
ENTRY_BYTES = 12


def main(argv: list[str]) -> int:
    """Run all and write the figures."""
    options = _parser().parse_args(argv)
    if not is_alone():
        return run_alone("benchmarks.ray_transfer", argv)
    import ray

    sizes = [int(size) for size in options.size_bytes.split(",")]
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        ray.init(
            "local",  # never the cluster that another left in the temporary folder
            num_cpus=2 * options.ranks,
            object_store_memory=max(4 * max(sizes), 100_000_000),
            object_spilling_directory=folder,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            _node_ip_address="127.0.0.1",
        )
        for size in sizes:
            transfer = _Transfer(size, options)
            for round_ in range(options.rounds + 1):
                for path in PATHS:
                    transfer.run(path, is_counted=round_ > 0)
            # Empty until something is spilled; what is made there then stays.
            transfer.report(has_spilled=any(Path(folder).iterdir()))
            transfer.end()
        ray.shutdown()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks.ray_transfer", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--size-bytes", default="250000000,1000000000", help="payloads of a step, about so large"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--positions", type=int, default=4096, help="of a row")
    parser.add_argument("--top-k", type=int, default=64)
    parser.add_argument(
        "--settle-seconds", type=float, default=0.5, help="before each, for Ray to free the last"
    )
    return parser


class _Transfer:
    """The workers of one size, and what was measured of each path."""

    def __init__(self, size_bytes: int, options: argparse.Namespace) -> None:
        import ray

        entries = size_bytes // ENTRY_BYTES // options.ranks
        positions = min(options.positions, max(1, entries // options.top_k))
        self._rows = max(1, round(entries / positions / options.top_k))
        self._settle_seconds = options.settle_seconds
        shape = (self._rows, positions, options.top_k)
        teacher: Any = ray.remote(num_cpus=1)(Teacher)
        student: Any = ray.remote(num_cpus=1)(Student)
        self._teachers = [teacher.remote(rank, *shape) for rank in range(options.ranks)]
        self._students = [student.remote(*shape[:2]) for _ in range(options.ranks)]
        count = options.ranks * self._rows
        self._size_bytes = count * positions * options.top_k * ENTRY_BYTES
        side = Side(data_parallel_size=options.ranks, global_batch_size=count)
        self._plan = StepPlan(
            row_count=count, student=side, teacher=side, sequence_length=positions,
            top_k=options.top_k,
        )  # fmt: skip
        self._wanted = ray.get([each.checksum.remote() for each in self._teachers])
        self._seconds: dict[str, list[float]] = {path: [] for path in PATHS}
        self._growth: dict[str, int] = {}

    def run(self, path: str, *, is_counted: bool) -> None:
        """Bring the step over by one path, and refuse it if it is another."""
        import ray

        ways: dict[str, Callable[[], list[Any]]] = {BASE: self._base, "deferred": self._deferred}
        way = ways.get(path, self._ours if path != "calls" else self._calls)
        ray.get([each.prepare.remote(path) for each in self._teachers])
        gc.collect()
        time.sleep(self._settle_seconds)
        Path("/proc/self/clear_refs").write_text("5")
        before = _resident_bytes("VmRSS")
        started = time.perf_counter()
        found = way()
        seconds = time.perf_counter() - started
        grown = _resident_bytes("VmHWM") - before
        ray.get([each.put_away.remote() for each in self._teachers])
        if path != "calls" and found != self._wanted:
            raise SystemExit(f"{path}: the student read {found}, and {self._wanted} were sent")
        if is_counted:
            self._seconds[path].append(seconds)
            self._growth[path] = max(grown, self._growth.get(path, 0))

    def report(self, *, has_spilled: bool) -> None:
        """Write the figures."""
        rates = {
            path: [self._size_bytes / each / 1e9 for each in seconds]
            for path, seconds in self._seconds.items()
        }
        for path in PATHS:
            report(
                "ray_transfer" if path != "calls" else "ray_calls",
                "GB/s" if path != "calls" else "ms",
                rates[path] if path != "calls" else [1e3 * each for each in self._seconds[path]],
                against=(BASE, rates[BASE]) if path != "calls" else None,
                path=path,
                size_bytes=self._size_bytes,
                ranks=len(self._teachers),
                median_ms=round(1e3 * median(self._seconds[path]), 3),
                driver_growth_bytes=self._growth[path],
                spilled=has_spilled,
            )

    def end(self) -> None:
        """Let go of the workers."""
        import ray

        for each in [*self._teachers, *self._students]:
            ray.kill(each)

    def _base(self) -> list[Any]:
        import ray

        told = ray.get([each.materialised.remote() for each in self._teachers])
        whole = {name: torch.cat([each[name] for each in told]) for name in told[0]}
        parts = [
            ray.put({name: each[at : at + self._rows] for name, each in whole.items()})
            for at in range(0, self._rows * len(self._students), self._rows)
        ]
        return self._read("take_tensors", parts)

    def _deferred(self) -> list[Any]:
        import ray

        wrappers = ray.get([each.deferred.remote() for each in self._teachers])
        return self._read("take_tensors", [each["payload_ref"] for each in wrappers])

    def _ours(self) -> list[Any]:
        agreement = agree(self._plan)
        answers = [
            worker.sealed.remote(rows)
            for worker, rows in zip(self._teachers, agreement.teacher_rows, strict=True)
        ]
        return self._read("attach", hand_over(answers, agreement, step=STEP).arguments)

    def _calls(self) -> list[Any]:
        import ray

        ray.get([each.nothing.remote() for each in self._teachers])
        found: list[Any] = ray.get([each.nothing.remote() for each in self._students])
        return found

    def _read(self, method: str, arguments: Any) -> list[Any]:
        reads = [
            getattr(worker, method).remote(argument)
            for worker, argument in zip(self._students, arguments, strict=True)
        ]
        return fetch(reads, what="the student's reads")


def _resident_bytes(field: str) -> int:
    text = Path("/proc/self/status").read_text()
    return 1024 * int(text.partition(f"{field}:")[2].split()[0])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
