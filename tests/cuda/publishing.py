"""What a worker does as a publisher; a part of ``work.Work``."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from tests.cuda.desk import PATIENCE_SECONDS, Desk, Facts, plain
from tests.transport_suite.contents import trouble

import teacher_logits_client as tl
from teacher_logits.device_memory import MemoryKind
from teacher_logits.devices.views import DeviceView, device_tensor

if TYPE_CHECKING:
    from tests.cuda.teaching import Teaching


class Publishing(Desk):
    """A publisher, and a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self._publisher: tl.Publisher | None = None
        self._rank = 0

    def open_publisher(self, teaching: Teaching, rank: int = 0, **settings: object) -> Facts:
        """Be admitted as a publisher, by default with slabs on the first device."""
        self.teaching, self._rank = teaching, rank
        given: dict[str, object] = {
            "device": "cuda:0",
            "pool_size_bytes": 64 << 10,
            "slab_size_bytes": 64 << 10,
            "timeout": PATIENCE_SECONDS,
            **settings,
        }
        self._publisher = self._stack.enter_context(
            self.client.open_publisher(teaching.teacher(rank), **given)  # type: ignore[arg-type]
        )
        return {
            "transport": self._publisher.transport.value,
            "refusals": plain(self._publisher.refusals),
        }

    def publish(self, *steps: int) -> None:
        """Write and seal some steps' rows of this rank."""
        for step in steps:
            with self.reserve(step) as draft:
                tl.select_top_k(self.teaching.logits(step, draft.rows), out=draft)

    def publish_part(self, *steps: int) -> None:
        """Write and seal what this context-parallel rank holds of some steps' rows."""
        for step in steps:
            with self.reserve(step) as draft:
                own = self.teaching.logits_of_part(step, draft.rows, self._rank)
                tl.select_top_k(own, out=draft)

    def publish_window(self, step: int, positions: int) -> None:
        """Write and seal some first positions of a step's one row."""
        teaching = replace(self.teaching, row_tokens=(positions,))
        with self.reserve(step, windows=[(0, positions)]) as draft:
            tl.select_top_k(teaching.logits(step, [0]), out=draft)

    def publish_with_bad_row(self, step: int, row: int) -> None:
        """Write and seal a step in which one row has a NaN, which is masked."""
        with self.reserve(step, bad_rows="mask") as draft:
            for number, part in zip(draft.rows, draft.micro_batches(1), strict=True):
                logits = self.teaching.logits(step, [number])
                if number == row:
                    logits[0, 0] = float("nan")
                tl.select_top_k(logits, out=part)

    def publish_late(self, step: int) -> None:
        """Write a step's rows by work that the stream does when it is waited for.

        What lies there until then is the step behind: whole and well-formed, and wrong.
        """
        with self.reserve(step) as draft:
            tl.select_top_k(self.teaching.logits(step + 1, draft.rows), out=draft)
            right = self.teaching.right(step, draft.rows)
            for name, column in draft.columns.items():
                self.driver.enqueue(
                    lambda column=column, name=name: column.copy_(right[name]),  # type: ignore[misc]
                    device=self.device,
                )

    def publish_trouble(self, step: int, seed: int) -> dict[str, bytes]:
        """Write bits that mean trouble over what was sealed, as no teacher may; return them."""
        with self.reserve(step) as draft:
            tl.select_top_k(self.teaching.logits(step, draft.rows), out=draft)
            views, columns = dict(draft.columns), draft.payload.columns
        written = {}
        for name, view in views.items():
            data = trouble(next(c for c in columns if c.kind.value == name), seed=seed)
            if data:
                raw = torch.frombuffer(bytearray(data), dtype=torch.uint8)
                view.view(-1).view(torch.uint8).copy_(raw)
            written[name] = data
        return written

    def reserve(self, step: int, **given: object) -> tl.Draft:
        """Reserve a step's rows of this rank."""
        rows = self.teaching.rows_of(self._rank)
        asked: dict[str, object] = {
            "input_ids": [self.teaching.tokens(step, row) for row in rows],
            "windows": [self.teaching.window(step, row) for row in rows],
            "timeout": PATIENCE_SECONDS,
            **given,
        }
        return self.publisher.reserve(step, **asked)  # type: ignore[arg-type]

    def reserve_within(self, step: int, seconds: float) -> None:
        """Reserve with a deadline of one's own, and give it up again."""
        self.reserve(step, timeout=seconds).abandon()

    def wait_free(self) -> None:
        """Wait until all that was published is read."""
        self.publisher.wait_free(timeout=PATIENCE_SECONDS)

    def close_publisher(self) -> None:
        """Close it."""
        self.publisher.close()

    @property
    def publisher(self) -> tl.Publisher:
        """The publisher."""
        assert self._publisher is not None
        return self._publisher

    # --- a buffer that it owns ----------------------------------------------

    def allocate_buffer(self, size_bytes: int, kind: str = "PLAIN") -> None:
        """Allocate memory as an owner's allocator would, and view it as a tensor."""
        address = self.driver.allocate(size_bytes, device=self.device, kind=MemoryKind[kind])
        place = self.driver.view_device(self.device)
        view = DeviceView(address, size_bytes, device=place)
        self._kept["buffer"] = device_tensor(view, dtype=torch.uint8, shape=(size_bytes,))
        self._stack.callback(self.driver.free, address, device=self.device)

    def register(self) -> None:
        """Register it."""
        self._buffer = self.publisher.register(self._kept["buffer"])

    def publish_placed(self, step: int) -> None:
        """Write a step's columns into the buffer, and publish them where they lie."""
        self._buffer.wait_free(timeout=PATIENCE_SECONDS)
        rows = self.teaching.rows_of(self._rank)
        right = self.teaching.right(step, rows)
        placed, end = {}, 0
        for name, column in right.items():
            if not name.startswith("row_"):
                raw = self._kept["buffer"][end : end + column.nbytes]
                placed[name] = raw.view(column.dtype).view(column.shape)
                placed[name].copy_(column)
                end += -(-column.nbytes // 512) * 512
        with self.reserve(step, columns=placed):
            pass

    def is_buffer_open_elsewhere(self) -> bool:
        """Say whether some reader has it open."""
        return self._buffer.is_open_elsewhere

    def close_buffer(self) -> None:
        """Take it back."""
        self._buffer.close(timeout=PATIENCE_SECONDS)
