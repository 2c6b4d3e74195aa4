"""What a worker does: the calls of the client, with what they give as plain values."""

from __future__ import annotations

import ctypes
import gc
import hashlib
import os
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from tests.cuda.scoring import Scoring, scoring_student
from tests.cuda.teaching import Teaching, bits
from tests.fake_cuda.spec import Spec
from tests.transport_suite.contents import trouble

import teacher_logits_client as tl
from teacher_logits.device_memory import MemoryKind
from teacher_logits.device_views import DeviceView, device_tensor
from teacher_logits.errors import TeacherLogitsError
from teacher_logits.left_over import free_left_over

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.fake_cuda.driver import FakeCuda

    from teacher_logits.device_memory import Device

PATIENCE_SECONDS = 30.0
READ_SECONDS = 10.0

Facts = dict[str, object]


class Work:
    """One process's driver, client, publisher and session."""

    def __init__(self) -> None:
        self.fake: FakeCuda | None = None
        self.teaching = Teaching()
        self._stack = ExitStack()
        self._client: tl.Client | None = None
        self._publisher: tl.Publisher | None = None
        self._session: tl.Session | None = None
        self._other: tl.Session | None = None
        self._rank = 0
        self._batches: dict[int, tl.Batch] = {}
        self._kept: dict[str, torch.Tensor] = {}
        self._late: dict[int, torch.Tensor] = {}
        self.scores = Scoring()

    # --- both sides ---------------------------------------------------------

    def connect(self, address: str, spec: str | None, timeout: float = PATIENCE_SECONDS) -> None:
        """Connect, with a driver that a spec describes, or none."""
        given: Facts = {"timeout": timeout}
        if spec is not None:
            told = Spec.loads(spec)
            self.fake = told.fake()
            given["device_memory"] = told.around(self.fake)
        self._client = self._stack.enter_context(
            tl.connect(address, **given)  # type: ignore[arg-type]
        )

    def stop_reading(self) -> None:
        """Close what is read, and the session."""
        for batch in self._batches.values():
            batch.close()
        self._batches.clear()
        self.scores.close_all_scored()
        self._kept.clear()
        self._late.clear()
        gc.collect()
        for session in (self._session, self._other):
            if session is not None:
                session.close()

    def stop_writing(self) -> None:
        """Wait until the publisher knows that all was read: what is not, it keeps to its end."""
        if self._publisher is not None:
            with suppress(TeacherLogitsError):
                self._publisher.wait_free(timeout=READ_SECONDS)

    def reset(self) -> None:
        """Close all, the last first, and forget it."""
        self._stack.close()
        self.__init__()  # type: ignore[misc]
        gc.collect()

    def sweep(self) -> int:
        """Free what waited for its readers; return how many wait on."""
        gc.collect()
        return free_left_over()

    def settle(self) -> None:
        """Wait until all that is to be given back was."""
        self._stack.close()
        gc.collect()

    def statistics(self) -> Facts:
        """Return the client's statistics."""
        return asdict(self.client.statistics())

    def census(self) -> Facts:
        """Return how many descriptors are open, and what device memory and slabs are mapped."""
        gc.collect()
        names = [
            line.split(maxsplit=5)[5]
            for line in Path("/proc/self/maps").read_text().splitlines()
            if "memfd:" in line
        ]
        return {
            "descriptors": len(os.listdir("/proc/self/fd")),
            "device": sum("fake-cuda" in name for name in names),
            "slabs": sum("teacher-logits" in name for name in names),
        }

    # --- a publisher --------------------------------------------------------

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

    def close_buffer(self) -> None:
        """Take it back."""
        self._buffer.close(timeout=PATIENCE_SECONDS)

    def wait_free(self) -> None:
        """Wait until all that was published is read."""
        self.publisher.wait_free(timeout=PATIENCE_SECONDS)

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

    def close_publisher(self) -> None:
        """Close it."""
        self.publisher.close()

    # --- a student ----------------------------------------------------------

    def open_session(
        self, teaching: Teaching, *, settings: Facts | None = None, **wishes: object
    ) -> Facts:
        """Be admitted as a student of one rank."""
        self.teaching = teaching
        self._other = self._session
        given: Facts = {"timeout": PATIENCE_SECONDS, **(settings or {})}
        self._session = self._stack.enter_context(
            self.client.open_session(teaching.student(**wishes), **given)  # type: ignore[arg-type]
        )
        return self.terms()

    def open_scoring(self, *, settings: Facts | None = None, **wishes: object) -> Facts:
        """Be admitted as a student of the server's own engine."""
        given: Facts = {"timeout": PATIENCE_SECONDS, **(settings or {})}
        profile = scoring_student(**wishes)
        self._session = self._stack.enter_context(
            self.client.open_session(profile, **given)  # type: ignore[arg-type]
        )
        return self.terms()

    def score(self, rows: Sequence[Sequence[int]], name: str = "scored", **given: object) -> Facts:
        """Have rows scored and keep the lease; return how they came, and their bytes."""
        self.scores.score_rows(self.session, rows, name, **given)
        return self.scores.scored(name)

    def scored(self, name: str = "scored") -> Facts:
        """Return what the lease shows now."""
        return self.scores.scored(name)

    def close_scored(self, name: str = "scored") -> None:
        """Give it back."""
        self.scores.close_scored(name)

    def switch_session(self) -> None:
        """Go back to the session that was opened before this one, or on to it again."""
        assert self._session is not None
        self._session, self._other = self._other, self._session

    def terms(self) -> Facts:
        """Return what the session came to."""
        session = self.session
        return {
            "session_id": session.terms.session_id,
            "transport": session.transport.value if session.transport else None,
            "transports": {
                writer: transport.value if transport else None
                for writer, transport in session.transports.items()
            },
            "refusals": plain(session.refusals),
        }

    def read(self, *steps: int) -> list[str]:
        """Read steps whole, hold each against the bits; return how their shards came."""
        return self.read_rows(range(self.teaching.rows), *steps)

    def read_rows(self, rows: Sequence[int], *steps: int) -> list[str]:
        """The same for some rows of a step, those of this rank."""
        came: set[str] = set()
        for step in steps:
            with self.acquire(step, rows) as batch:
                self.teaching.check(batch.columns, step, rows)
                assert bool(batch.targets.topk_logprobs.isfinite().all())
                came |= {each.value for each in batch.transports.values()}
        return sorted(came)

    def read_window(self, step: int, positions: int) -> None:
        """Read some first positions of a step's one row."""
        with self.session.acquire(step=step, timeout=PATIENCE_SECONDS) as batch:
            right = replace(self.teaching, row_tokens=(positions,)).right(step, [0])
            for name in ("topk_ids", "topk_logprobs", "logsumexp"):
                assert torch.equal(batch.columns[name], right[name]), name

    def digest(self, step: int) -> str:
        """Return one digest over a held step's columns, names and bits."""
        columns = self._batches[step].columns
        found = hashlib.sha256()
        for name in sorted(columns):
            found.update(name.encode())
            found.update(bits(columns[name]).numpy().tobytes())
        return found.hexdigest()

    def hold(self, step: int, *, compare: bool = True) -> list[str]:
        """Acquire a step and keep its lease; without ``compare``, whatever is written there."""
        acquire = self.acquire if compare else self._acquire_blindly
        batch = self._batches[step] = acquire(step)
        return sorted({each.value for each in batch.transports.values()})

    def row_status(self, step: int) -> list[int]:
        """Return the status of a held step's rows."""
        found: list[int] = self._batches[step].columns["row_status"].tolist()
        return found

    def raw(self, step: int) -> dict[str, bytes]:
        """Return the bytes of a held step's columns."""
        columns = self._batches[step].columns
        return {name: bits(column).numpy().tobytes() for name, column in columns.items()}

    def spoil(self, step: int, name: str) -> None:
        """Write into a column of a held step, in place."""
        self._batches[step].columns[name].view(-1).view(torch.uint8).bitwise_not_()

    def check(self, step: int) -> None:
        """Hold the columns of a held step against the bits."""
        self.teaching.check(self._batches[step].columns, step)

    def keep(self, step: int, name: str) -> int:
        """Keep a view of a held step's column; return its address."""
        self._kept[name] = self._batches[step].columns[name]
        return self._kept[name].data_ptr()

    def check_kept(self, step: int, name: str) -> bool:
        """Say whether a kept view still shows what was written."""
        right = self.teaching.right(step, range(self.teaching.rows))[name]
        return torch.equal(self._kept[name], right)

    def drop(self, name: str) -> None:
        """Drop a kept view."""
        del self._kept[name]
        gc.collect()

    def read_late(self, step: int, name: str) -> None:
        """Give the stream a read of a held step's column; it is done when it is waited for."""
        self._enqueue_read(step, self._batches[step].columns[name])

    def read_late_kept(self, step: int, name: str) -> None:
        """Give the stream a read of a kept view."""
        self._enqueue_read(step, self._kept[name])

    def _enqueue_read(self, step: int, column: torch.Tensor) -> None:
        # By address, as a kernel has it: what a stream was given keeps no tensor alive.
        address, size, dtype = column.data_ptr(), column.nbytes, column.dtype

        def read() -> None:
            raw = bytearray(ctypes.string_at(address, size))
            self._late[step] = torch.frombuffer(raw, dtype=dtype)

        self.driver.enqueue(read, device=self.device)

    def check_late(self, step: int, name: str) -> None:
        """Wait for such a read, and hold what it saw against the bits."""
        self.driver.synchronise(device=self.device)
        right = self.teaching.right(step, range(self.teaching.rows))[name]
        seen = self._late.pop(step)
        assert torch.equal(seen, right.flatten()), f"step {step}: {name} was read as {seen}"

    def late(self) -> list[list[float]]:
        """Return what such reads that were done saw."""
        return [each.tolist() for each in self._late.values()]

    def release(self, step: int) -> None:
        """Close a held step."""
        self._batches.pop(step).close()

    def acquire(self, step: int, rows: Sequence[int] = ()) -> tl.Batch:
        """Acquire a step; ``rows`` are this rank's, by default all."""
        rows = rows or range(self.teaching.rows)
        return self.session.acquire(
            step=step,
            input_ids=[self.teaching.tokens(step, row) for row in rows],
            windows=[self.teaching.window(step, row) for row in rows],
            timeout=PATIENCE_SECONDS,
        )

    def _acquire_blindly(self, step: int) -> tl.Batch:
        return self.session.acquire(step=step, timeout=PATIENCE_SECONDS)

    def close_session(self) -> None:
        """Close it."""
        self.session.close()

    # --- within -------------------------------------------------------------

    @property
    def client(self) -> tl.Client:
        """The client."""
        assert self._client is not None
        return self._client

    @property
    def publisher(self) -> tl.Publisher:
        """The publisher."""
        assert self._publisher is not None
        return self._publisher

    @property
    def session(self) -> tl.Session:
        """The session."""
        assert self._session is not None
        return self._session

    @property
    def driver(self) -> FakeCuda:
        """The driver."""
        assert self.fake is not None
        return self.fake

    @property
    def device(self) -> Device:
        """The first device."""
        return self.driver.devices()[0]


def plain(refusals: tuple[tl.Refusal, ...]) -> list[Facts]:
    """Return refusals as plain values."""
    return [
        {
            "transport": each.transport.value,
            "reason": each.reason.value,
            "message": each.message,
            "writer_id": each.writer_id,
        }
        for each in refusals
    ]
