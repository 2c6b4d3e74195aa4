"""Payloads whose columns over positions are on a device, and those over rows on the host.

On a machine without a device all tensors are on the CPU, and nothing shows that two devices are
mixed. Here one is pretended (``elsewhere``), and the numbers are those of the CPU.
"""

from collections.abc import Iterator, Sequence
from dataclasses import fields

import pytest
import torch
from tests.client.losses.shards import K, Shard, shard_of, some_ids
from tests.client.sessions.elsewhere import ELSEWHERE, Elsewhere, TwoDevices, elsewhere

from teacher_logits.errors import AlignmentError
from teacher_logits.grid import BatchGrid
from teacher_logits.layout import Column, ColumnKind, is_on_device
from teacher_logits.profiles import StudentProfile
from teacher_logits.tensors import column_tensor
from teacher_logits.terms import Verdict
from teacher_logits_client import losses
from teacher_logits_client.openers import View
from teacher_logits_client.openers.host_payload import HostPayload
from teacher_logits_client.payloads import columns
from teacher_logits_client.payloads.columns import LeasedColumns
from teacher_logits_client.payloads.guards import check_scored
from teacher_logits_client.payloads.micro_batches import RowTargets
from teacher_logits_client.payloads.row_columns import Part, RowColumns, Shape
from teacher_logits_client.payloads.step_guards import check_step
from teacher_logits_client.rows import RowBatch, make_row_batch
from teacher_logits_client.targets import Targets, make_targets
from teacher_logits_client.targets.leased_targets import Made

IDS = some_ids(6, seed=4)
TEMPERATURES = (1.0, 2.0)
PROFILE = StudentProfile(
    batch_grid=BatchGrid(global_batch_size=8, data_parallel_size=1, micro_batch_size=2),
    top_k=K,
    temperatures=TEMPERATURES[1:],
)


class DeviceBytes(HostPayload):
    """Bytes of the host that are taken for a device's, where a column over positions is asked."""

    device = ELSEWHERE


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> Iterator[Elsewhere]:
    with elsewhere() as mode:

        def made(view: View, column: Column) -> torch.Tensor:
            tensor = column_tensor(view, column)
            is_there = is_on_device(column.kind) and view in devices
            return mode(tensor) if is_there else tensor

        devices: list[View] = []

        def view_of(self: DeviceBytes, column: Column) -> View:
            devices.append(memoryview(self.buffer))
            return devices[-1]

        monkeypatch.setattr(columns, "column_tensor", made)
        monkeypatch.setattr(DeviceBytes, "view_of", view_of)
        yield mode


def columns_of(shard: Shard, kind: type[HostPayload] = DeviceBytes) -> LeasedColumns:
    made = Made(what="it", again="it", facts={})
    return LeasedColumns(shard.payload, kind(memoryview(shard.data)), made, watch=None)


def part_of(shard: Shard, kind: type[HostPayload] = DeviceBytes) -> Part:
    return Part(shard.payload, columns_of(shard, kind), first=0, row_count=shard.payload.row_count)


def a_shard(ids: list[list[int]] = IDS, *, first_row: int = 0, bad: Sequence[int] = ()) -> Shard:
    return shard_of(ids, first_row=first_row, temperatures=TEMPERATURES, bad_rows=bad)


def row_targets(parts: Sequence[Part], *, padding: int = 0) -> RowTargets:
    shape = Shape.of(parts, PROFILE)
    return RowTargets(
        RowColumns(parts, padding_rows=padding, shape=shape),
        temperatures=TEMPERATURES,
        lengths=None,
        made=Made(what="it", again="it", facts={}),
    )


def plain(targets: Targets) -> dict[str, object]:
    """The targets' values on the CPU."""
    values = {each.name: getattr(targets, each.name) for each in fields(Targets)}
    return {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in values.items()}


def assert_same(found: Targets, expected: Targets) -> None:
    got, wanted = plain(found), plain(expected)
    for name, value in wanted.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(got[name], value), name  # type: ignore[arg-type]
        else:
            assert got[name] == value, name


def on(targets: Targets) -> set[torch.device]:
    values = (getattr(targets, each.name) for each in fields(Targets))
    return {each.device for each in values if isinstance(each, torch.Tensor)}


def batch_of(ids: list[list[int]]) -> RowBatch:
    return make_row_batch(
        [torch.tensor(row) for row in ids], vocabulary_size=16, prefix_vocabulary_size=16
    )


def test_the_pretended_device_refuses_to_be_mixed() -> None:
    with elsewhere() as there:
        assert (there(torch.ones(2)) + 1).cpu().tolist() == [2, 2]
        with pytest.raises(TwoDevices, match="add"):
            there(torch.ones(2)) + torch.ones(2)
        with pytest.raises(TwoDevices, match="cat"):
            torch.cat([torch.ones(2), there(torch.ones(2))])


class TestTargets:
    @pytest.mark.parametrize("temperature", TEMPERATURES)
    @pytest.mark.parametrize("bad", [(), (1, 4)], ids=["all good", "bad rows"])
    def test_are_on_the_device_with_the_numbers_of_the_host(
        self, there: Elsewhere, temperature: float, bad: tuple[int, ...]
    ) -> None:
        shard = a_shard(bad=bad)
        lengths = torch.tensor([len(row) for row in IDS])

        def make(kind: type[HostPayload]) -> Targets:
            return make_targets(
                columns_of(shard, kind),
                temperature=temperature,
                temperatures=TEMPERATURES,
                lengths=lengths,
            )

        found = make(DeviceBytes)

        assert on(found) == {ELSEWHERE}
        assert_same(found, make(HostPayload))

    def test_of_rows_that_span_shards_are_one_copy_on_the_device(self, there: Elsewhere) -> None:
        first, second = a_shard(IDS[:4]), a_shard(IDS[4:], first_row=4)
        expected = row_targets([part_of(s, HostPayload) for s in (first, second)], padding=2)
        before = there.copied

        found = row_targets([part_of(first), part_of(second)], padding=2)
        taken = found.columns["topk_ids"]

        assert (found.copied, taken.device, there.copied) == (True, ELSEWHERE, before)
        for temperature in TEMPERATURES:
            assert on(found.at(temperature)) == {ELSEWHERE}
            assert_same(found.at(temperature), expected.at(temperature))

    @pytest.mark.parametrize("order", [1, -1], ids=["device first", "host first"])
    def test_of_a_device_and_of_the_host_come_together_on_the_device(
        self, there: Elsewhere, order: int
    ) -> None:
        shards = a_shard(IDS[:3]), a_shard(IDS[3:], first_row=3)
        kinds = (DeviceBytes, HostPayload)[::order]
        expected = row_targets([part_of(shard, HostPayload) for shard in shards]).at(1.0)

        found = row_targets([part_of(s, kind) for s, kind in zip(shards, kinds, strict=True)])

        assert on(found.at(1.0)) == {ELSEWHERE}
        assert_same(found.at(1.0), expected)

    def test_of_padding_alone_are_where_the_others_are(self, there: Elsewhere) -> None:
        shape = Shape.of([part_of(a_shard())], PROFILE)
        padding = RowTargets(
            RowColumns([], padding_rows=2, shape=shape),
            temperatures=TEMPERATURES,
            lengths=None,
            made=Made(what="it", again="it", facts={}),
        )

        assert on(padding.at(1.0)) == {ELSEWHERE}
        assert padding.at(1.0).valid.shape == (0,)

    def test_some_rows_of_a_payload_are_views_of_it(self, there: Elsewhere) -> None:
        shard = a_shard()
        some = row_targets([part_of(shard).rows(1, 3)])
        expected = row_targets([part_of(shard, HostPayload).rows(1, 3)])

        assert_same(some.at(2.0), expected.at(2.0))
        assert not some.copied

    def test_clones_and_rectangles_stay_on_the_device(self, there: Elsewhere) -> None:
        ids = [[1, 2, 3], [4, 5, 6]]
        targets = row_targets([part_of(a_shard(ids))]).at(1.0)

        assert on(targets.clone()) == {ELSEWHERE}
        assert targets.rectangular().topk_ids.shape == (2, 3, K)
        assert on(targets.to("cpu")) == {torch.device("cpu")}


class TestGuards:
    def test_a_scored_payload_is_held_against_the_rows_that_were_sent(
        self, there: Elsewhere
    ) -> None:
        shard = a_shard()

        checks = check_scored(
            shard.payload,
            columns_of(shard),
            batch=batch_of(IDS),
            profile=PROFILE,
            reject_bad_rows=True,
        )

        assert [each.verdict for each in checks] == [Verdict.PASSED] * 3

    def test_a_step_is_held_against_the_ranks_own_rows(self, there: Elsewhere) -> None:
        parts = [part_of(a_shard(IDS[:4])), part_of(a_shard(IDS[4:], first_row=4))]

        checks = check_step(parts, rows=range(6), batch=batch_of(IDS))

        assert [each.verdict for each in checks] == [Verdict.PASSED] * 3

    def test_a_shift_is_named(self, there: Elsewhere) -> None:
        shard = a_shard()
        shifted = [[*row[1:], row[0]] for row in IDS]
        late = shard_of(shifted, temperatures=TEMPERATURES)
        data = bytearray(late.data)
        column = shard.payload.column(ColumnKind.ROW_DIGESTS)
        data[column.offset_bytes : column.end_bytes] = shard.data[
            column.offset_bytes : column.end_bytes
        ]
        wrong = Shard(payload=shard.payload, data=bytes(data), positions=shard.positions)

        with pytest.raises(AlignmentError, match=r"row \d, position \d"):
            check_step([part_of(wrong)], rows=range(6), batch=batch_of(IDS))


def test_a_loss_over_logits_of_the_device_is_that_of_the_host(there: Elsewhere) -> None:
    shard = a_shard()
    logits = torch.randn(shard.payload.position_count, 16, generator=torch.manual_seed(1))
    expected, count = losses.forward_kl(logits, row_targets([part_of(shard, HostPayload)]).at(1.0))

    found, found_count = losses.forward_kl(there(logits), row_targets([part_of(shard)]).at(1.0))

    assert found.device == ELSEWHERE
    assert torch.equal(found.cpu(), expected)
    assert int(found_count) == int(count)
