"""A teacher of several ranks that divide their rows, beside one that has them whole. No test.

Logits are coarse, so that values tie across the ranks' ids; rows have 3 to 12 tokens of a
rectangle of 12, and some are so short that a context-parallel rank holds nothing of them.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

import teacher_logits_client as tl
from teacher_logits.layout import ColumnKind
from teacher_logits.locality import ModelGrid
from teacher_logits.profiles import SCORED_COLUMNS
from teacher_logits.shard_parts import columns_of_rank, part_grid, runs_of_part

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from teacher_logits_client.drafts import Draft
    from teacher_logits_client.publishing.publisher import Publisher

ROWS, WIDTH = 4, 12
VOCABULARY, HEAD, K = 27, 32, 5
LENGTHS = torch.tensor([12, 3, 7, 10])
GRID = tl.BatchGrid(global_batch_size=ROWS, data_parallel_size=1, micro_batch_size=2)
TEMPERATURES = (2.0,)


def whole_teacher(name: str, **changes: object) -> tl.TeacherProfile:
    """A teacher of one rank, with the columns that merging needs."""
    profile = tl.TeacherProfile(
        teacher_id=name,
        vocabulary_size=VOCABULARY,
        head_rows=HEAD,
        top_k=K,
        max_row_tokens=WIDTH,
        batch_grid=GRID,
        temperatures=TEMPERATURES,
        columns=(*SCORED_COLUMNS, ColumnKind.TOPK_LOGITS),
    )
    return replace(profile, **changes)  # type: ignore[arg-type]


def ranks(
    profile: tl.TeacherProfile, *sharded_by: str, tensor: int = 1, context: int = 1
) -> list[tl.TeacherProfile]:
    """The profiles of the ranks that hold the teacher's rows together."""
    return [
        replace(
            profile,
            sharded_by=sharded_by,  # type: ignore[arg-type]
            model_grid=ModelGrid(
                node_count=1,
                gpus_per_node=8,
                tensor_parallel_size=tensor,
                context_parallel_size=context,
                tensor_parallel_rank=t,
                context_parallel_rank=c,
            ),
        )
        for c in range(context)
        for t in range(tensor)
    ]


def a_student(name: str, **changes: object) -> tl.StudentProfile:
    """A student that reads all rows."""
    profile = tl.StudentProfile(
        batch_grid=GRID, teacher_id=name, top_k=K, temperatures=TEMPERATURES
    )
    return replace(profile, **changes)  # type: ignore[arg-type]


def ids_of(step: int) -> torch.Tensor:
    """Token ids [N,S] of a step, padding included."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, VOCABULARY, (ROWS, WIDTH), generator=generator)


def logits_of(step: int) -> torch.Tensor:
    """The whole head's logits [N,S,V] of a step, its padding large."""
    generator = torch.Generator().manual_seed(100 + step)
    logits = (torch.randn(ROWS, WIDTH, HEAD, generator=generator) * 4).round() / 2
    logits[:, :, VOCABULARY:] = 50.0
    return logits


def own_logits(profile: tl.TeacherProfile, logits: torch.Tensor) -> torch.Tensor:
    """What a rank's forward pass leaves it with of the whole head's logits [N,S,V]."""
    model, grid = profile.model_grid, part_grid(profile)
    columns = columns_of_rank(profile)
    own = logits[:, :, columns.start : columns.stop]
    if model is None or grid.sequence_parts == 1:
        return own
    runs = runs_of_part(
        logits.shape[1],
        part=model.context_parallel_rank,
        parts=grid.sequence_parts,
        sharded_by=profile.sharded_by,
    )
    return torch.cat([own[:, run.start : run.stop] for run in runs], 1)


def reserve(publisher: Publisher, step: int, **given: object) -> Draft:
    """Reserve a step's rows as all ranks do alike."""
    rows = {"input_ids": ids_of(step), "lengths": LENGTHS, **given}
    return publisher.reserve(step, **rows)  # type: ignore[arg-type]


def publish(
    publishers: Sequence[Publisher], step: int, logits: torch.Tensor, **given: object
) -> None:
    """Publish a step of every rank."""
    for publisher in publishers:
        with reserve(publisher, step, **given) as draft:
            tl.select_top_k(own_logits(publisher.profile, logits), out=draft)


def publish_row_by_row(publishers: Sequence[Publisher], step: int, logits: torch.Tensor) -> None:
    """Publish a step of every rank, each of whose forward passes takes one row."""
    for publisher in publishers:
        own = own_logits(publisher.profile, logits)
        with reserve(publisher, step) as draft:
            for part in draft.micro_batches(1):
                tl.select_top_k(own[part.index], out=part)


@contextmanager
def opened(
    client: tl.Client, profiles: Sequence[tl.TeacherProfile], **given: object
) -> Iterator[list[Publisher]]:
    """Publishers of these profiles."""
    with ExitStack() as stack:
        yield [
            stack.enter_context(client.open_publisher(each, **given))  # type: ignore[arg-type]
            for each in profiles
        ]
