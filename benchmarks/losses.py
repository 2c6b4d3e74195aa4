"""What a loss and its gradients cost from hidden states, and how exact they are at tiny tails.

    python -m benchmarks.losses                     V = 128,256, 512 tokens, one thread
    python -m benchmarks.losses --vocabulary 999 --tokens 32 --hidden 16 --k 8 --rounds 1

Forward KL against the K ids and the tail, with gradients for hidden states [P,H] and weight
[V,H] in fp32: ours, straight from hidden states, beside `benchmarks/anchors/hidden_losses.py`.
Each runs in a process of its own, and the processes take turns. `pip install --group peers`
brings the peers; one that is not there is named on standard error, and the rest go on.

One JSON object a line. `hidden_loss`: seconds of forward and backward, and `cpu_s` the median of
what the process computed, which other work on the machine moves less; `extra_mb` is the
highest that the resident set rose in all rounds, over what it was with inputs and libraries
loaded and a few positions done, less the weight's gradient: in 10^6 bytes. `loss` is a
position's; `liger_chunked_jsd` and `trl_chunked_dense` compute the dense divergence. `ratio` is
to `dense_autograd`.
`tail_gradient_error`: see `benchmarks/tail_gradients.py`.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from benchmarks.anchors.hidden_losses import Case

from benchmarks.memory import forget_peak, resident_bytes
from benchmarks.report import report, write_line

ROOT = Path(__file__).parents[1]
OURS, ANCHOR = "ours", "dense_autograd"
IMPLEMENTATIONS = (OURS, ANCHOR, "trl_sparse_tail", "liger_chunked_jsd", "trl_chunked_dense")
FEW = 16


@dataclass(frozen=True, kw_only=True)
class Run:
    """One child process."""

    implementation: str
    tokens: int
    hidden: int
    vocabulary: int
    k: int
    threads: int


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a child process told."""

    seconds: list[float]
    cpu_seconds: list[float]
    rise_bytes: int
    loss: float


def main(argv: list[str]) -> int:
    """Run all and write the figures; `--child` is for the processes it starts."""
    options = _parser().parse_args(argv)
    if options.child:
        _child(Run(**json.loads(options.child)))
        return 0
    names = options.implementations.split(",")
    runs = [
        Run(
            implementation=name,
            tokens=options.tokens,
            hidden=options.hidden,
            vocabulary=options.vocabulary,
            k=options.k,
            threads=options.threads,
        )
        for name in names
    ]
    found = _in_turns(runs, options.rounds)
    anchored = found.get(ANCHOR)
    for run in runs:
        if run.implementation in found:
            _report(run, found[run.implementation], anchored)
    if options.tail_positions:
        from benchmarks.tail_gradients import tail_gradient_errors

        tail_gradient_errors(options.tail_positions)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks.losses", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--hidden", type=int, default=128, help="width of the hidden states")
    parser.add_argument("--vocabulary", type=int, default=128_256, help="columns of the head")
    parser.add_argument("--k", type=int, default=64, help="entries a position")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds of each")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--implementations", default=",".join(IMPLEMENTATIONS))
    parser.add_argument("--tail-positions", type=int, default=16, help="0 for no such figures")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    return parser


def _report(run: Run, found: Found, anchored: Found | None) -> None:
    of_weight = run.vocabulary * run.hidden * 4
    report(
        "hidden_loss",
        "s",
        found.seconds,
        against=None if anchored is None else (ANCHOR, anchored.seconds),
        cpu_s=round(statistics.median(found.cpu_seconds), 3),
        extra_mb=round((found.rise_bytes - of_weight) / 1e6, 1),
        loss=round(found.loss / run.tokens, 6),
        **asdict(run),
    )


def _in_turns(runs: list[Run], rounds: int) -> dict[str, Found]:
    """Let a child of each run, a round of one after a round of the other."""
    children = {run.implementation: _Child(run) for run in runs}
    try:
        ready = {name: each for name, each in children.items() if each.is_there()}
        rounds_of: dict[str, list[dict[str, float]]] = {name: [] for name in ready}
        for _ in range(rounds):
            for name, child in ready.items():
                rounds_of[name].append(child.ask("round"))
        ends = {name: child.ask("end") for name, child in ready.items()}
    finally:
        for child in children.values():
            child.stop()
    return {
        name: Found(
            seconds=[each["seconds"] for each in rounds_of[name]],
            cpu_seconds=[each["cpu_seconds"] for each in rounds_of[name]],
            rise_bytes=int(end["rise"]),
            loss=end["loss"],
        )
        for name, end in ends.items()
    }


class _Child:
    """A process that does one round for each line that it is sent, and answers with one."""

    def __init__(self, run: Run) -> None:
        argv = [sys.executable, "-m", "benchmarks.losses", "--child", json.dumps(asdict(run))]
        self._name = run.implementation
        self._process = subprocess.Popen(
            argv, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def is_there(self) -> bool:
        """Wait until it is ready; False where what it measures is not installed."""
        first = self._line()
        if "missing" in first:
            say = f"{self._name}: not measured, {first['missing']}; pip install --group peers\n"
            sys.stderr.write(say)
        return "missing" not in first

    def ask(self, what: str) -> dict[str, float]:
        """Send a line and return the answer."""
        stdin = self._process.stdin
        if stdin is None:
            raise SystemExit(f"{self._name} has no standard input")
        stdin.write(what + "\n")
        stdin.flush()
        return self._line()

    def stop(self) -> None:
        """End it, whatever it does."""
        self._process.kill()
        self._process.communicate()

    def _line(self) -> dict[str, float]:
        stdout: IO[str] | None = self._process.stdout
        line = "" if stdout is None else stdout.readline()
        if not line:
            raise SystemExit(f"{self._name} ended with {self._process.wait()}")
        answer: dict[str, float] = json.loads(line)
        return answer


def _child(run: Run) -> None:
    """Answer each line of standard input: a round's seconds, and at the end what they took."""
    import torch

    torch.set_num_threads(run.threads)
    case = _case(run)
    loss_of = _implementation(run.implementation)
    try:
        _round(loss_of, case.first(FEW))
    except ImportError as error:
        write_line({"missing": str(error)})
        return
    # What the allocator has kept of the preparations would hide as much of the rounds.
    ctypes.CDLL(None).malloc_trim(0)
    before, loss = resident_bytes(), 0.0
    forget_peak()
    write_line({"ready": 1})
    for line in sys.stdin:
        if line.strip() == "end":
            write_line({"rise": resident_bytes("VmHWM") - before, "loss": loss})
            return
        begun, computed = time.perf_counter(), time.process_time()
        loss = _round(loss_of, case)
        took = {"seconds": time.perf_counter() - begun}
        write_line(took | {"cpu_seconds": time.process_time() - computed})


def _round(loss_of: Callable[[Case], torch.Tensor], case: Case) -> float:
    loss = loss_of(case)
    loss.backward()
    value = loss.item()
    case.hidden.grad = case.weight.grad = None
    return value


def _implementation(name: str) -> Callable[[Case], torch.Tensor]:
    from benchmarks.anchors.hidden_losses import HIDDEN_LOSSES

    return _ours if name == OURS else HIDDEN_LOSSES[name]


def _ours(case: Case) -> torch.Tensor:
    import torch

    from teacher_logits_client import losses
    from teacher_logits_client.targets import Targets

    count = len(case.hidden)
    targets = Targets(
        topk_ids=case.ids.int(),
        topk_logprobs=case.logprobs,
        log_tail=case.log_tail,
        actual_logprob=None,
        valid=torch.ones(count, dtype=torch.bool),
        temperature=1.0,
        row_offsets=torch.tensor([0, count]),
    )
    return losses.forward_kl(losses.from_hidden(case.hidden, case.weight), targets)[0]


def _case(run: Run) -> Case:
    """A teacher whose hidden states lie near the student's, over the same head."""
    import torch
    from benchmarks.anchors.hidden_losses import Case

    from teacher_logits.selection import select_top_k

    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(run.tokens, run.hidden, generator=generator) * 4 / run.hidden**0.5
    weight = torch.randn(run.vocabulary, run.hidden, generator=generator)
    teacher = hidden + 0.3 * torch.randn(run.tokens, run.hidden, generator=generator)
    kept = [select_top_k(part @ weight.t(), k=run.k) for part in teacher.split(FEW)]
    return Case(
        hidden=hidden.requires_grad_(),
        weight=weight.requires_grad_(),
        ids=torch.cat([each.topk_ids for each in kept]).long(),
        logprobs=torch.cat([each.topk_logprobs for each in kept]).float(),
        log_tail=torch.cat([each.log_tail[:, 0] for each in kept]),
        teacher_hidden=teacher,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
