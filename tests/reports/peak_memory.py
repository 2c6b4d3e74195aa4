"""Scores one row of each length given, and writes how far memory rose: a process of its own.

    python peak_memory.py TOKENS...       a JSON object: chunk_bytes, and peaks by tokens

Run by path; it is no test. The model is small in all but its vocabulary.
"""

import json
import re
import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from teacher_logits.layout import ElementType, top_k_columns
from teacher_logits.payload_room import HostRoom
from teacher_logits.selection_rules import TopK
from teacher_logits_server.engines import EngineProfile
from teacher_logits_server.engines.answers import Answer, Part, fill
from teacher_logits_server.engines.head import chunk_positions
from teacher_logits_server.engines.keepers import Wanted
from teacher_logits_server.engines.requests import read_request
from teacher_logits_server.engines.transformers import TransformersEngine

VOCABULARY_SIZE = 150_000
CHUNK_BYTES = 64 << 20
TOP_K = 64


def an_engine() -> TransformersEngine:
    config = LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=8192,
    )
    profile = EngineProfile(
        name="small",
        vocabulary_size=VOCABULARY_SIZE,
        head_rows=VOCABULARY_SIZE,
        max_row_tokens=8192,
        arithmetic_type="float32",
    )
    torch.manual_seed(0)
    return TransformersEngine(LlamaForCausalLM(config), profile=profile, chunk_bytes=CHUNK_BYTES)


def peak_of(engine: TransformersEngine, tokens: int) -> int:
    """Return the bytes by which scoring rose above what was there before."""
    request = read_request(input_ids=bytes(4 * tokens), row_lengths=[tokens])
    columns, size_bytes = top_k_columns(
        row_count=1,
        position_count=tokens,
        top_k=TOP_K,
        temperature_count=1,
        value_type=ElementType.FLOAT16,
    )
    room = bytearray(b"\1" * size_bytes)  # touched: a slab is there before the teacher runs
    answer = Answer(
        request,
        room=HostRoom(memoryview(room)),
        columns=columns,
        wanted=Wanted(selection=TopK(), temperatures=(1.0,), vocabulary_size=VOCABULARY_SIZE),
    )
    before = status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    fill(engine, [Part(answer=answer, first_row=0, row_count=1)], wanted=lambda: True)
    return status_bytes("VmHWM") - before


def status_bytes(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.M)
    assert found is not None
    return int(found[1]) * 1024


def main(lengths: list[int]) -> None:
    torch.set_num_threads(1)
    peak_of(an_engine(), 64)  # whatever is made once is made now
    peaks = {tokens: peak_of(an_engine(), tokens) for tokens in lengths}
    positions = chunk_positions(CHUNK_BYTES, width=VOCABULARY_SIZE, weight_bytes=4)
    result = {"chunk_bytes": positions * VOCABULARY_SIZE * 4, "peaks": peaks}
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main([int(each) for each in sys.argv[1:]])
