"""What scoring costs, peak memory and time: in chunks, and all at once.

    python -m benchmarks.scoring                    V = 151,936, 512 and 4,096 tokens
    python -m benchmarks.scoring --vocabulary 2000 --tokens 64,256 --rounds 1

A small random model scores one row of so many tokens. Each way and each number of tokens runs
in a process of its own, so that no run finds another's memory warm:

    chunked       our engine: body once, head and selection a chunk at a time, into the payload
    all_at_once   the model's own logits [1,S,V], then the same selection from them

One JSON object a line. `scoring_memory`: MiB by which the process's resident set rose at its
highest, all rounds together, over what it was with model and libraries loaded and a row of 8
tokens scored. That is everything: what the body keeps, logits, selection, the payload itself.
`ratio` is to the fewest tokens of the same way.
`scoring`: microseconds a token; `ratio` is to all at once with as many tokens.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from array import array
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

from benchmarks.memory import forget_peak, resident_bytes
from benchmarks.report import report, write_line

ROOT = Path(__file__).parents[1]
WAYS = ("all_at_once", "chunked")
MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Run:
    """One child process."""

    way: str
    folder: str
    tokens: int
    k: int
    rounds: int
    threads: int


def main(argv: list[str]) -> int:
    """Run all and write the figures; `--child` is for the processes it starts."""
    options = _parser().parse_args(argv)
    if options.child:
        write_line(_child(Run(**json.loads(options.child))))
        return 0
    ways = options.ways.split(",")
    counts = sorted(int(each) for each in options.tokens.split(","))
    with tempfile.TemporaryDirectory() as folder:
        _save_model(folder, options)
        found = {
            (way, tokens): _start(
                Run(
                    way=way,
                    folder=folder,
                    tokens=tokens,
                    k=options.k,
                    rounds=options.rounds,
                    threads=options.threads,
                )
            )
            for tokens in counts
            for way in ways
        }
    shape = {"vocabulary": options.vocabulary, "hidden": options.hidden, "k": options.k}
    for way in ways:
        first = found[way, counts[0]]["rise_mib"]
        for tokens in counts:
            report(
                "scoring_memory",
                "MiB",
                found[way, tokens]["rise_mib"],
                against=(f"{way}, {counts[0]} tokens", first),
                tokens=tokens,
                way=way,
                budget_mib=found[way, tokens]["budget_mib"][0],
                **shape,
            )
    for tokens in counts:
        for way in ways:
            report(
                "scoring",
                "us/token",
                found[way, tokens]["us_a_token"],
                against=(f"{ways[0]}, {tokens} tokens", found[ways[0], tokens]["us_a_token"]),
                tokens=tokens,
                way=way,
                threads=options.threads,
                **shape,
            )
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks.scoring", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--vocabulary", type=int, default=151_936, help="columns of the head")
    parser.add_argument("--hidden", type=int, default=256, help="width of the model")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--tokens", default="512,4096", help="row lengths, with commas between")
    parser.add_argument("--ways", default=",".join(WAYS), help="the first is the anchor")
    parser.add_argument("--k", type=int, default=64, help="entries a position")
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds of each run")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    return parser


def _save_model(folder: str, options: argparse.Namespace) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=options.vocabulary,
        hidden_size=options.hidden,
        intermediate_size=3 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=max(1, options.hidden // 64),
        num_key_value_heads=1,
        max_position_embeddings=16_384,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def _start(run: Run) -> dict[str, list[float]]:
    """Run a child and return what it measured."""
    command = [sys.executable, "-m", "benchmarks.scoring", "--child", json.dumps(asdict(run))]
    child = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=900)
    if child.returncode:
        raise SystemExit(f"the run {run} failed, see above")
    measured: dict[str, list[float]] = json.loads(child.stdout.splitlines()[-1])
    return measured


# --- in the child ---------------------------------------------------------------------------


def _child(run: Run) -> dict[str, list[float]]:
    import torch

    torch.set_num_threads(run.threads)
    return _score(run)


def _score(run: Run) -> dict[str, list[float]]:
    import torch

    from teacher_logits_server.engines.head import CHUNK_BYTES

    way = _all_at_once(run) if run.way == "all_at_once" else _chunked(run)
    token_ids = [each * 7919 % 499 for each in range(run.tokens)]
    way(token_ids[:8])
    forget_peak()
    before = resident_bytes()
    seconds = []
    for _ in range(run.rounds):
        started = time.perf_counter()
        kept = way(token_ids)
        seconds.append(time.perf_counter() - started)
        del kept
    return {
        "us_a_token": [each / run.tokens * 1e6 for each in seconds],
        "rise_mib": [(resident_bytes("VmHWM") - before) / MIB],
        "budget_mib": [CHUNK_BYTES[torch.device("cpu").type] / MIB],
    }


def _all_at_once(run: Run) -> Callable[[list[int]], object]:
    import torch
    from transformers import AutoModelForCausalLM

    from teacher_logits.selection import select_top_k

    model = AutoModelForCausalLM.from_pretrained(run.folder, dtype=torch.float32)

    def score(token_ids: list[int]) -> object:
        ids = torch.tensor([token_ids])
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits
        following = torch.cat([ids[:, 1:], torch.tensor([[-1]])], 1)
        return select_top_k(logits, k=run.k, next_ids=following)

    return score


def _chunked(run: Run) -> Callable[[list[int]], object]:
    from teacher_logits.layout import ElementType, top_k_columns
    from teacher_logits.payload_room import HostRoom
    from teacher_logits.selection_rules import TopK
    from teacher_logits_server.engines.answers import Answer, Part, fill
    from teacher_logits_server.engines.keepers import Wanted
    from teacher_logits_server.engines.requests import read_request
    from teacher_logits_server.engines.transformers import load_engine

    engine = load_engine(run.folder, device="cpu")

    def score(token_ids: list[int]) -> object:
        ids = array("i", token_ids).tobytes()
        request = read_request(input_ids=ids, row_lengths=[len(token_ids)])
        columns, size_bytes = top_k_columns(
            row_count=1,
            position_count=request.position_count,
            top_k=run.k,
            temperature_count=1,
            value_type=ElementType.FLOAT16,
        )
        answer = Answer(
            request,
            room=HostRoom(memoryview(bytearray(size_bytes))),
            columns=columns,
            wanted=Wanted(
                selection=TopK(),
                temperatures=(1.0,),
                vocabulary_size=engine.profile.vocabulary_size,
            ),
        )
        fill(engine, [Part(answer=answer, first_row=0, row_count=1)], wanted=lambda: True)
        answer.finish(mask=False)
        return answer

    return score


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
