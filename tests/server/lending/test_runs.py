"""Which bytes payloads take in a slab of device memory, and that no two share one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.server.services.registry_rig import a_payload

from teacher_logits.device_memory import DeviceMemoryPart, ExportedMemory
from teacher_logits.errors import PayloadInvalidError
from teacher_logits.layout import is_on_device
from teacher_logits.payload import Extent, Payload
from teacher_logits_server.config import ServerConfig
from teacher_logits_server.lending.relays import Relays
from teacher_logits_server.lending.runs import Run, device_bytes, runs_of, touch
from teacher_logits_server.limits import ledger_caps

PAGE = 4096
SLAB = 64 * PAGE
PAYLOAD = a_payload()
"""Of 11 positions and 4 rows; its columns take less than a page."""

runs = st.lists(
    st.tuples(st.booleans(), st.integers(0, 30), st.integers(1, 6)).map(
        lambda each: Run(on_device=each[0], start=each[1], stop=each[1] + each[2])
    ),
    max_size=4,
)


def bytes_of(some: list[Run]) -> set[tuple[bool, int]]:
    return {(run.on_device, at) for run in some for at in range(run.start, run.stop)}


@given(some=runs, others=runs)
def test_runs_touch_where_they_share_a_byte_of_the_same_memory(
    some: list[Run], others: list[Run]
) -> None:
    assert touch(some, others) == bool(bytes_of(some) & bytes_of(others))


@pytest.mark.parametrize("host_copy", [False, True])
def test_a_payload_takes_each_column_where_it_lies(*, host_copy: bool) -> None:
    extent = Extent(slab_id="s", offset_bytes=PAGE, size_bytes=PAGE, slot=0, generation=2)
    own = runs_of(extent, PAYLOAD, host_copy=host_copy)

    on_device = [column for column in PAYLOAD.columns if is_on_device(column.kind)]
    assert device_bytes(own) == sum(column.size_bytes for column in on_device)
    on_host = [c for c in PAYLOAD.columns if host_copy or not is_on_device(c.kind)]
    assert {run.start - PAGE for run in own if not run.on_device} == {
        column.offset_bytes for column in on_host
    }


def registered(place: int) -> Payload:
    """A payload in memory that its owner registered: its rows lie behind the device's bytes."""
    columns, at = [], SLAB // 2 + place * PAGE
    for column in PAYLOAD.columns:
        if not is_on_device(column.kind):
            column, at = replace(column, offset_bytes=at), at + 256
        columns.append(column)
    return replace(PAYLOAD, columns=tuple(columns), size_bytes=SLAB // 2 + (place + 1) * PAGE)


class Slab:
    """A slab of device memory in a table, half of whose room is on the device."""

    def __init__(self) -> None:
        self.relays = Relays(ledger_caps(ServerConfig()).slabs)
        memory = ExportedMemory(
            handle=bytes(64), device_uuid="GPU-0", base_offset_bytes=0, allocation_bytes=SLAB
        )
        part = DeviceMemoryPart(memory=memory, size_bytes=SLAB // 2)
        self.relays.add("s", 2 * SLAB, session_id="p", writer_id="w", device=part)

    def take(
        self, payload: Payload, *, offset_bytes: int, slot: int, host_copy: bool = False
    ) -> Extent:
        extent = Extent(
            slab_id="s",
            offset_bytes=offset_bytes,
            size_bytes=payload.size_bytes,
            slot=slot,
            generation=2,
        )
        own = runs_of(extent, payload, host_copy=host_copy)
        self.relays.check_extent(extent, payload.size_bytes, session_id="p", runs=own)
        self.relays.take(extent, runs=own)
        return extent


class TestASlabOfDeviceMemory:
    def test_takes_extents_within_one_another_whose_columns_do_not_touch(self) -> None:
        slab = Slab()
        for place in range(4):
            slab.take(registered(0), offset_bytes=place * PAGE, slot=place)

        (view,) = slab.relays.device_slabs()
        own = runs_of(
            Extent(slab_id="s", offset_bytes=0, size_bytes=1, slot=0, generation=2),
            PAYLOAD,
            host_copy=False,
        )
        assert view.used_bytes == 4 * device_bytes(own)

    def test_refuses_columns_that_touch_on_the_device(self) -> None:
        slab = Slab()
        slab.take(registered(0), offset_bytes=0, slot=0)

        with pytest.raises(PayloadInvalidError, match="touches the one"):
            slab.take(registered(1), offset_bytes=0, slot=1)

    def test_refuses_a_host_copy_over_another_payloads_rows(self) -> None:
        slab = Slab()
        slab.take(PAYLOAD, offset_bytes=0, slot=0)
        rows_at = min(c.offset_bytes for c in PAYLOAD.columns if not is_on_device(c.kind))

        with pytest.raises(PayloadInvalidError, match="touches the one"):
            slab.take(registered(0), offset_bytes=rows_at, slot=1, host_copy=True)
        slab.take(registered(0), offset_bytes=rows_at, slot=1)

    def test_refuses_columns_behind_the_devices_last_byte(self) -> None:
        with pytest.raises(PayloadInvalidError, match="of the device's memory, which has 131072"):
            Slab().take(PAYLOAD, offset_bytes=SLAB // 2 - 256, slot=0)

    def test_has_its_room_back_once_an_extent_is_free(self) -> None:
        slab = Slab()
        extent = slab.take(PAYLOAD, offset_bytes=0, slot=0)
        slab.relays.free(extent)
        slab.take(PAYLOAD, offset_bytes=0, slot=1)

        assert slab.relays.usage().extent_count == 1
