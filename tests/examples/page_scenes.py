"""What the snippets of README.md and docs take as given: a *scene* for each, by how it begins."""

from __future__ import annotations

import itertools
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist

import teacher_logits_client as tl
from teacher_logits_client import testing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

NUMBERS = itertools.count()
V = 256
LENGTHS = torch.tensor([5, 3])
IDS = torch.tensor([[1, 2, 3, 4, 5], [6, 7, 8, 0, 0]])
MASK = torch.arange(5) < LENGTHS[:, None] - 1
GRID = tl.BatchGrid(global_batch_size=2, data_parallel_size=1, micro_batch_size=2)


@dataclass(frozen=True, kw_only=True)
class House:
    """A server of the example's engine, one of several, one for publishers, and a folder."""

    address: str
    registry: str
    several: str
    engine: object
    folder: Path

    def profile(self, **wants: object) -> tl.StudentProfile:
        return tl.StudentProfile(batch_grid=GRID, **{"top_k": 8, **wants})  # type: ignore[arg-type]

    @contextmanager
    def session(self, **wants: object) -> Iterator[tl.Session]:
        with tl.connect(self.address) as client, client.open_session(self.profile(**wants)) as it:
            yield it


@contextmanager
def one_rank(house: House) -> Iterator[dist.ProcessGroup | None]:
    meeting = f"file://{house.folder}/group-{next(NUMBERS)}"
    dist.init_process_group("gloo", meeting, rank=0, world_size=1)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def some_targets() -> tl.Targets:
    kept = tl.select_top_k(torch.randn(8, V), k=8)
    return tl.Targets(
        topk_ids=kept.topk_ids,
        topk_logprobs=kept.topk_logprobs.float(),
        log_tail=kept.log_tail[:, 0],
        actual_logprob=None,
        temperature=1.0,
        valid=torch.tensor([True] * 4 + [False, True, True, False]),
        row_offsets=torch.tensor([0, 5, 8]),
    )


@contextmanager
def of_losses(_: House) -> Iterator[dict[str, object]]:
    head = torch.nn.Linear(4, V)
    yield {
        "targets": some_targets(),
        "logits": torch.randn(8, V),
        "mask": torch.ones(8),
        "hidden": torch.randn(8, 4, requires_grad=True),
        "model": SimpleNamespace(lm_head=head),
        "teacher_logits": torch.randn(8, V),
        "own_logits": torch.randn(8, V),
        "valid": torch.ones(8, dtype=torch.bool),
        "row_offsets": torch.tensor([0, 5, 8]),
    }


@contextmanager
def of_a_group(house: House) -> Iterator[dict[str, object]]:
    """One rank that has all of the vocabulary."""
    with one_rank(house) as group, of_losses(house) as names:
        yield {
            **names,
            "first_column": 0,
            "own_columns": V,
            "tensor_parallel_group": group,
            "tensor_parallel_rank": 0,
            "shard_logits": torch.randn(8, 151_936),
            "first": 0,
            "next_ids": torch.ones(8, dtype=torch.int64),
            "draft": SimpleNamespace(write=dict),
        }


@contextmanager
def of_dense(_: House) -> Iterator[dict[str, object]]:
    draft = torch.randn(3, V, requires_grad=True)
    loss = tl.StepLoss(name="draft", parameters=[draft], bin_weights=(1.0, 0.5, 0.25))
    with tl.StepNormaliser(loss).begin(step=0) as step:
        yield {
            "draft_logits": draft,
            "policy_logits": torch.randn(3, V),
            "mask": torch.ones(3),
            "passes": torch.tensor([0, 1, 2]),
            "step": step,
            "number": 0,
        }
        assert step.finish().should_step


@contextmanager
def of_a_step(house: House) -> Iterator[dict[str, object]]:
    model = torch.nn.Embedding(V, V)
    model.no_sync = nullcontext  # type: ignore[assignment]  # DDP's
    parts = [SimpleNamespace(index=slice(0, 2), targets=some_targets())]
    names: dict[str, object] = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters()),
        "micro_batches": parts,
        "input_ids": IDS,
        "mask": MASK,
        "world_size": 1,
    }
    with one_rank(house) as names["group"]:
        yield names
    assert "report" in names


@contextmanager
def of_a_session(house: House) -> Iterator[dict[str, object]]:
    wants = {"transports": ("stream",), "value_codecs": ("uint8",), "top_k": 64}
    seen = torch.nn.functional.one_hot(IDS, V).cumsum(1).float()  # what the teacher answers
    with house.session(**wants) as session, session.score(IDS, LENGTHS).result() as payload:
        yield {
            "session": session,
            "payload": payload,
            "input_ids": IDS,
            "lengths": LENGTHS,
            "mask": MASK,
            "student_logits": torch.randn(2, 5, V),
            "own_logits": torch.cat([seen[0], seen[1, :3]]),
            "next_ids": torch.tensor([2, 3, 4, 5, -1, 7, 8, -1]),
            "batch": {"input_ids": IDS, "input_lengths": LENGTHS},
        }


@contextmanager
def of_a_client(house: House) -> Iterator[dict[str, object]]:
    with tl.connect(house.address) as client:
        yield {
            "client": client,
            "address": house.address,
            "profile": house.profile(),
            "given": {"batch_grid": GRID, "transports": ("stream",), "value_type": "float32"},
            "engine": house.engine,
            "own_address": f"unix:{house.folder}/another",
            "step": 0,
            "last_step": 2,
            "train": lambda session, first: first + 1,
            "restore_checkpoint": lambda: 0,
        }


@contextmanager
def of_several(house: House) -> Iterator[dict[str, object]]:
    with tl.connect(house.several) as client:
        yield {
            "client": client,
            "profile": house.profile(),
            "input_ids": IDS,
            "lengths": LENGTHS,
            "mask": MASK,
            "student_logits": torch.randn(2, 5, V),
        }


@contextmanager
def of_published(house: House) -> Iterator[dict[str, object]]:
    """Steps of a teacher in this process, and a rank that has them to read."""
    teacher_id = f"published-{next(NUMBERS)}"
    teacher = tl.TeacherProfile(
        teacher_id=teacher_id,
        vocabulary_size=V,
        head_rows=V,
        top_k=8,
        max_row_tokens=5,
        batch_grid=GRID,
    )
    student = torch.nn.Embedding(V, V)
    with tl.connect(house.registry) as client, client.open_publisher(teacher) as publisher:
        for step in (0, 1, 7):
            rows = {"input_ids": IDS, "lengths": LENGTHS, "loss_mask": MASK}
            with publisher.reserve(step, **rows) as draft:  # type: ignore[arg-type]
                tl.select_top_k(torch.randn(2, 5, V), out=draft)
        yield {
            "client": client,
            "profile": house.profile(teacher_id=teacher_id),
            "loader": [(IDS, LENGTHS)] * 2,
            "input_ids": IDS,
            "lengths": LENGTHS,
            "mask": MASK,
            "student": student,
            "optimizer": torch.optim.SGD(student.parameters()),
            "world_size": 1,
        }


@contextmanager
def of_a_publisher(house: House) -> Iterator[dict[str, object]]:
    yield {
        "address": house.registry,
        "rank": 0,
        "input_ids": torch.ones(32, 3, dtype=torch.int64),
        "lengths": [3] * 32,
        "mask": torch.ones(32, 3),
        "model": lambda ids: torch.randn(1, 1, 152_064).expand(*ids.shape, -1),
    }


@contextmanager
def of_a_part(house: House) -> Iterator[dict[str, object]]:
    with tl.connect(house.registry) as client:
        yield {
            "client": client,
            "given": {
                "teacher_id": f"divided-{next(NUMBERS)}",
                "vocabulary_size": V,
                "head_rows": V,
                "top_k": 8,
                "max_row_tokens": 16,
                "batch_grid": GRID,
            },
            "tensor_rank": 1,
            "context_rank": 2,
            "input_ids": torch.ones(2, 16, dtype=torch.int64),
            "lengths": [16, 9],
            "local_logits": torch.randn(2, 4, V // 2),
        }


@contextmanager
def of_tests(house: House) -> Iterator[dict[str, object]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(testing, "serve", lambda: nullcontext(house))
        yield {}


SCENES: dict[str, Callable[[House], AbstractContextManager[dict[str, object]]]] = {
    "import torch": lambda _: nullcontext({}),
    "import teacher_logits_client as tl\nfrom teacher_logits_client import testing": of_tests,
    "with tl.connect(address) as client, client.open_session": of_a_client,
    "while step < last_step": of_a_client,
    "profile = tl.StudentProfile": of_a_client,
    "from teacher_logits_server.app import": of_a_client,
    "future = session.score": of_a_session,
    "from teacher_logits.codec": of_a_session,
    "parity = tl.compare_with_reference": of_a_session,
    "from teacher_logits_client.trainers import nemo_rl": of_a_session,
    "tags_of = ": of_several,
    "from teacher_logits_client.data_plane.jagged": of_a_session,
    "with client.open_session": of_published,
    "teacher = tl.TeacherProfile": of_a_publisher,
    "from teacher_logits.profiles import PUBLISHED_COLUMNS": of_a_part,
    "loss_sum, count = ": of_losses,
    "logits = tl.losses.from_hidden": of_losses,
    "kept = tl.select_top_k": of_losses,
    "sums, counts = ": of_dense,
    "from contextlib import": of_a_step,
    "shard = tl.losses.VocabShard": of_a_group,
    "part = tl.select_partial": of_a_group,
}
