"""Last reads: every stream that was noted is waited for on its own device."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pytest
from tests.fake_cuda.driver import FakeCuda
from tests.fake_cuda.faulty import Fault, FaultyMemory
from tests.fake_cuda.visible import ONE_GPU, OTHER_GPU

from teacher_logits_client.openers import last_reads
from teacher_logits_client.openers.last_reads import LastRead

if TYPE_CHECKING:
    from pathlib import Path

    from teacher_logits.device_memory import DeviceMemory


@pytest.mark.parametrize("how", ["closed", "outlived", "not recorded"])
def test_a_siblings_stream_is_waited_for_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """A student may read the teacher's device by a kernel of another one."""
    cuda = FakeCuda(tmp_path, devices=(ONE_GPU, OTHER_GPU))
    own, sibling = cuda.devices()
    monkeypatch.setattr(last_reads, "current", cuda.in_stream)
    broken = (Fault(call="record", error=999),) if how == "not recorded" else ()
    memory: DeviceMemory = FaultyMemory(cuda, broken)
    seen: list[str] = []
    stream = cuda.new_stream(device=sibling)
    with cuda.in_stream(stream):
        cuda.enqueue(partial(seen.append, "sibling"), device=sibling)
    cuda.enqueue(partial(seen.append, "own"), device=own)
    last = LastRead(memory, own)
    last.note_stream(stream)  # type: ignore[arg-type]
    last.finish(outlived=how == "outlived")

    last.wait()

    assert sorted(seen) == ["own", "sibling"]
