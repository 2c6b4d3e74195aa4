"""The teacher and student workers of `ray_transfer`, as Ray actors.

A teacher worker has its step as torch tensors, as `torch.topk` gives them, and puts it in the form
that a path asks for when it is told to: that is not timed, for a teacher that computes writes there
in the first place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from teacher_logits.layout import ElementType
from teacher_logits_client.ray import DeferredTeacher, SlabRoom, attach

if TYPE_CHECKING:
    from collections.abc import Sequence

    from teacher_logits_client.ray import DeferredDraft

VOCABULARY = 151_936
STEP = 1


class Teacher:
    """One data-parallel rank of the teacher: `topk_logits` fp32, `topk_indices` int64 [N,S,K]."""

    def __init__(self, rank: int, rows: int, positions: int, top_k: int) -> None:
        torch.set_num_threads(1)
        generator = torch.Generator().manual_seed(rank)
        self._shape = (rows, positions, top_k)
        self._rank = rank
        self._told = {
            "topk_logits": torch.rand(self._shape, generator=generator),
            "topk_indices": torch.randint(0, VOCABULARY, self._shape, generator=generator),
        }
        self._draft: DeferredDraft | None = None
        self._slabs: SlabRoom | None = None

    def checksum(self) -> int:
        """Return the sum of all bits, as the student works it out."""
        return checksum(self._told.values())

    def prepare(self, path: str) -> None:
        """Have the step where the path needs it."""
        if path not in ("views", "slabs"):
            return
        if self._slabs is None:
            self._slabs = SlabRoom(budget_bytes=3 * 12 * self._told["topk_logits"].numel())
        teacher = DeferredTeacher(
            data_parallel_rank=self._rank,
            vocabulary_size=VOCABULARY,
            room=self._slabs if path == "slabs" else None,
        )
        self._draft = teacher.reserve(
            shape=self._shape, value_type=ElementType.FLOAT32, id_type=ElementType.INT64
        )
        for name, tensor in self._draft.tensors.items():
            tensor.copy_(self._told[name])
        self._draft.check()

    def put_away(self) -> None:
        """Have nothing but the step again, and the slab that it was put into."""
        self._draft = None
        if self._slabs is not None:
            self._slabs.retire()

    def materialised(self) -> dict[str, torch.Tensor]:
        """Return the tensors, through the driver."""
        return self._told

    def deferred(self) -> dict[str, Any]:
        """Return a reference to the tensors, in a wrapper."""
        import ray

        return {"payload_ref": ray.put(self._told)}

    def sealed(self, rows: Sequence[int]) -> object:
        """Return what our driver takes for a step."""
        assert self._draft is not None
        return self._draft.seal(step=STEP, rows=rows)

    def nothing(self) -> None:
        """Return nothing, for what the calls cost alone."""


class Student:
    """One data-parallel rank of the student: it reads every byte of its payload once."""

    def __init__(self, rows: int, positions: int) -> None:
        torch.set_num_threads(1)
        self._tokens = torch.zeros(rows, positions, dtype=torch.int64)

    def take_tensors(self, told: dict[str, torch.Tensor]) -> int:
        """Read a payload of torch tensors."""
        return checksum(told.values())

    def attach(self, payload: object) -> int:
        """Read a payload of ours."""
        batch: dict[str, object] = {"input_ids": self._tokens}
        attach(batch, payload, step=STEP, vocabulary_size=VOCABULARY)
        del batch["input_ids"]
        return checksum(each for each in batch.values() if isinstance(each, torch.Tensor))

    def nothing(self) -> None:
        """Return nothing, for what the calls cost alone."""


def checksum(tensors: Any) -> int:
    """Return the sum of tensors' bits, eight bytes a number."""
    return sum(int(each.contiguous().view(-1).view(torch.int64).sum()) for each in tensors)
