"""A long story by chance: readers come, read by any way, keep views and die; publishers follow one
another. The pool holds one step, so that each is written where the last one lay.

Whatever is read is held against the bits, and at the end nothing is open, allocated or wrong.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.cuda.node import Node
    from tests.cuda.workers import Worker

WISHES = (("cuda_ipc",), ("cuda_ipc", "shared_memory"), ("shared_memory",))
NAMES = ("cuda_ipc", "shared_memory", "doomed")


class Story:
    """Who is there; the reader that streams never leaves, so that no step waits for nobody."""

    def __init__(self, node: Node, seed: int) -> None:
        self.node = node
        self.chance = random.Random(seed)
        self.publisher = self._publisher()
        self.streaming, _ = node.student(name="stream", student_id="stays", transports=("stream",))
        self.readers: dict[str, Worker] = {}
        self.modes: dict[str, str] = {}
        #: Of which step a reader's device was told to read behind the lease's end.
        self.late: dict[str, int] = {}

    def step(self, step: int) -> None:
        """Publish a step, and have all that are there read it, each in its way."""
        absent = [name for name in NAMES if name not in self.readers]
        if absent and self.chance.random() < 0.5:
            self._join(self.chance.choice(absent), step)
        how = self.chance.choice(["publish", "publish_late"])
        late, self.late = self.late, {}
        self.publisher.start(how, step)
        self.streaming.ask("read", step)
        for name in list(self.readers):
            getattr(self, self.chance.choice(["_read", "_read_late", "_keep", "_die"]))(name, step)
        self.publisher.answer()
        for name, before in late.items():  # the room has other bytes by now
            if name in self.readers:
                self.readers[name].ask("check_late", before, "topk_ids")
        if self.chance.random() < 0.1:
            self.publisher.kill()
            self.publisher = self._publisher()

    def _publisher(self) -> Worker:
        return self.node.publisher(pool_size_bytes=4096, slab_size_bytes=4096)

    def _join(self, name: str, step: int) -> None:
        self.modes[name] = self.chance.choice(["cow", "copy", "read_only"])
        self.readers[name], _ = self.node.student(
            name=name,
            student_id=f"{name}-{step}",
            transports=self.chance.choice(WISHES),
            settings={"prefetch": self.chance.choice([0, 1]), "mode": self.modes[name]},
        )

    def _read(self, name: str, step: int) -> None:
        self.readers[name].ask("read", step)

    def _read_late(self, name: str, step: int) -> None:
        """What the device reads behind the lease's end must be there until it has read it."""
        reader = self.readers[name]
        came = reader.ask("hold", step)
        on_device = came == ["cuda_ipc"] and self.modes[name] != "copy"
        reader.ask("check", step)
        if on_device:
            reader.ask("read_late", step, "topk_ids")
        reader.ask("release", step)
        if on_device:
            self.late[name] = step

    def _keep(self, name: str, step: int) -> None:
        reader = self.readers[name]
        reader.ask("hold", step)
        reader.ask("keep", step, "topk_ids")
        reader.ask("release", step)
        assert reader.ask("check_kept", step, "topk_ids") is True
        reader.ask("drop", "topk_ids")

    def _die(self, name: str, step: int) -> None:
        self.late.pop(name, None)
        self.readers[name].ask("hold", step)
        self.readers.pop(name).kill()


@pytest.mark.parametrize(
    ("seed", "steps"),
    [
        pytest.param(1, 12, id="12-steps"),
        *(pytest.param(seed, 80, id=f"80-steps-{seed}", marks=pytest.mark.slow) for seed in (2, 3)),
    ],
)
def test_whatever_happens_what_is_read_is_right_and_nothing_is_left(
    node: Node, seed: int, steps: int
) -> None:
    story = Story(node, seed)
    for step in range(steps):
        story.step(step)
