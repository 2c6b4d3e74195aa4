"""What a teacher says about the demo's texts, as a payload in memory of this process.

The teacher runs in a server of its own, as anybody would run it, and ends when its rows are here.
"""

from __future__ import annotations

import sys
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import teacher_logits_client as tl
from teacher_logits.cuts import Segment
from teacher_logits.payload import Extent, Payload
from teacher_logits.tensors import column_tensors
from teacher_logits_client.demo.config import default_cache_folder
from teacher_logits_client.demo.smollm2 import fetch_model
from teacher_logits_client.demo.teacher import TEACHER_ID, TeacherProcess
from teacher_logits_client.demo.texts import load_tokenizer, make_texts
from teacher_logits_client.demo.tiny_teacher import make_tiny_teacher
from teacher_logits_server.lending.rooms import Pinned

if TYPE_CHECKING:
    from collections.abc import Iterator

    from teacher_logits.layout import ColumnKind

TOP_K = 64
LOAD_SECONDS = 300.0
SCORE_SECONDS = 900.0


@dataclass(frozen=True, kw_only=True, eq=False)
class Scored:
    """A payload and its bytes."""

    payload: Payload
    room: memoryview

    @property
    def columns(self) -> dict[ColumnKind, torch.Tensor]:
        """The columns, as views."""
        return column_tensors(self.room, self.payload.columns)

    @property
    def pinned(self) -> Pinned:
        """The payload as a stream's encoder is given it."""
        size = self.payload.size_bytes
        whole = Segment(source_offset_bytes=0, offset_bytes=0, size_bytes=size)
        extent = Extent(slab_id="s", offset_bytes=0, size_bytes=size, slot=0, generation=2)
        return Pinned(payload=self.payload, extent=extent, writer_id="w", segments=(whole,))


def scored_rows(teacher: str, *, dtype: str, rows: int, tokens: int) -> Scored:
    """Return what a teacher says about rows of text, K = 64, in fp32.

    ``teacher`` is `smollm2`, `tiny`, `toy` (which needs no model and no text), or a model's path.
    """
    if teacher == "toy":
        chance = torch.Generator().manual_seed(0)
        ids = torch.randint(0, 256, (rows, tokens), generator=chance)
        with tl.testing.serve(max_request_tokens=1 << 18) as server:
            return _score(server.address, "teacher", ids)
    with tempfile.TemporaryDirectory() as folder:
        model = _model(teacher)
        texts = make_texts(load_tokenizer(model), row_tokens=tokens, held_out_rows=rows)
        ids = torch.cat([texts.held_out, texts.train])[:rows]
        with _running(model, dtype, Path(folder)) as address:
            return _score(address, TEACHER_ID, ids)


def _model(teacher: str) -> Path:
    if teacher == "tiny":
        return make_tiny_teacher(default_cache_folder() / "tiny-teacher")
    if teacher == "smollm2":
        return fetch_model(default_cache_folder(), say=_say)
    return Path(teacher)


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")


@contextmanager
def _running(model: Path, dtype: str, folder: Path) -> Iterator[str]:
    with TeacherProcess(model=model, threads=1, dtype=dtype, log=folder / "log") as process:
        process.wait_until_ready(LOAD_SECONDS)
        yield process.address


def _score(address: str, teacher_id: str, ids: torch.Tensor) -> Scored:
    grid = tl.BatchGrid(global_batch_size=len(ids), data_parallel_size=1, micro_batch_size=1)
    profile = tl.StudentProfile(
        batch_grid=grid,
        teacher_id=teacher_id,
        top_k=TOP_K,
        value_type=tl.ElementType.FLOAT32,
    )
    with (
        tl.connect(address) as client,
        client.open_session(profile) as session,
        session.score(ids, timeout=SCORE_SECONDS).result(SCORE_SECONDS) as leased,
    ):
        room = memoryview(bytearray(leased.payload.size_bytes))
        scored = Scored(payload=leased.payload, room=room)
        for kind, column in scored.columns.items():
            column.copy_(leased.columns[kind.value])
        return scored
