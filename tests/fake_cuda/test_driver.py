"""The fake driver keeps CUDA's rules, between processes; else what runs over it proves nothing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.fake_cuda.addresses import POISON
from tests.fake_cuda.child import Child, Refused, child
from tests.fake_cuda.faulty import Fault, gate, let_go
from tests.fake_cuda.log import done, faults, read_log, still_allocated, still_open
from tests.fake_cuda.spec import Spec
from tests.fake_cuda.visible import MIG_GPU, ONE_GPU, OTHER_GPU

from teacher_logits.device_memory import DeviceError, MemoryKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SIZE = 10_000
HELLO = b"the very bytes"


@pytest.fixture
def node(tmp_path: Path) -> Spec:
    """A process that sees one device."""
    return Spec(folder=str(tmp_path))


@pytest.fixture
def writer(node: Spec) -> Iterator[Child]:
    with child(node) as process:
        yield process


@pytest.fixture
def reader(node: Spec) -> Iterator[Child]:
    with child(node) as process:
        yield process


def refused(ask: Callable[[], object]) -> int:
    """Return the number that a call is refused with."""
    with pytest.raises(Refused) as caught:
        ask()
    return caught.value.number


def handed_over(writer: Child, size_bytes: int = SIZE) -> tuple[int, bytes]:
    """Allocate, write and export; return address and handle."""
    address = writer.number("allocate", size_bytes)
    writer.ask("write", address, HELLO, device=None)
    return address, writer.export(address).handle


def test_a_reader_sees_the_writers_bytes_and_every_later_change(
    writer: Child, reader: Child
) -> None:
    there, handle = handed_over(writer)
    here = reader.number("open", handle)
    assert reader.read(here, len(HELLO)) == HELLO
    writer.ask("write", there, b"THE", device=None)
    assert reader.read(here, 3) == b"THE"
    assert reader.ask("copy_to_host", here, 5) == b"THE v".hex()


def test_an_inner_address_exports_the_whole_allocation_with_its_base_and_offset(
    writer: Child, reader: Child
) -> None:
    there, handle = handed_over(writer)
    inner = writer.export(there + 4)
    assert (len(inner.handle), inner.handle) == (64, handle)
    assert (inner.base_offset_bytes, inner.allocation_bytes) == (4, SIZE)
    here = reader.number("open", inner.handle)
    assert reader.read(here, len(HELLO)) == HELLO
    assert reader.read(here + inner.base_offset_bytes, 4) == HELLO[4:8]


def test_no_process_opens_a_handle_of_its_own(writer: Child) -> None:
    _, handle = handed_over(writer)
    assert refused(lambda: writer.ask("open", handle)) == 201


@pytest.mark.parametrize("handle", [b"", bytes(64), b"FAKE" * 17])
def test_what_is_no_handle_opens_nothing(reader: Child, handle: bytes) -> None:
    assert refused(lambda: reader.ask("open", handle)) == 1


def test_a_handle_opened_again_gives_the_same_address_and_closes_must_match(
    writer: Child, reader: Child
) -> None:
    _, handle = handed_over(writer)
    here = reader.number("open", handle)
    assert reader.number("open", handle) == here
    reader.ask("close", here)
    assert reader.read(here, len(HELLO)) == HELLO
    reader.ask("close", here)
    assert reader.read(here, 4) == bytes([POISON]) * 4
    assert refused(lambda: reader.ask("close", here)) == 1
    assert refused(lambda: reader.ask("copy_to_host", here, 4)) == 1


def test_nothing_is_read_past_an_allocations_end(writer: Child, reader: Child) -> None:
    there, handle = handed_over(writer)
    here = reader.number("open", handle)
    assert refused(lambda: reader.ask("copy_to_host", here + SIZE - 3, 4)) == 1
    assert refused(lambda: writer.ask("copy_to_device", there + SIZE - 3, b"four")) == 1


def test_freed_memory_has_no_handle_even_where_address_and_descriptor_are_used_anew(
    writer: Child, reader: Child
) -> None:
    there, handle = handed_over(writer)
    writer.ask("free", there)
    assert refused(lambda: reader.ask("open", handle)) == 1
    again, other = handed_over(writer)
    assert again == there
    assert other != handle
    assert refused(lambda: reader.ask("open", handle)) == 1
    reader.ask("open", other)


def test_an_importer_that_knows_memory_by_its_address_reads_the_wrong_mapping(
    writer: Child, reader: Child, node: Spec
) -> None:
    there, handle = handed_over(writer)
    kept = reader.number("open", handle)
    writer.ask("free", there)
    again, other = handed_over(writer)
    assert again == there
    assert reader.read(kept, 4) == bytes([POISON]) * 4
    assert reader.number("open", other) != kept
    (fault,) = faults(read_log(Path(node.folder)))
    assert "freed while a reader has it open" in fault


def test_memory_that_a_dead_reader_had_open_is_freed_without_a_fault(
    writer: Child, reader: Child, node: Spec
) -> None:
    there, handle = handed_over(writer)
    reader.ask("open", handle)
    reader.end()
    writer.ask("free", there)
    assert faults(read_log(Path(node.folder))) == []


def test_a_dead_processs_handle_opens_nothing(writer: Child, reader: Child) -> None:
    _, handle = handed_over(writer)
    writer.end()
    assert refused(lambda: reader.ask("open", handle)) == 201


def test_a_handle_reaches_nobody_in_another_pid_namespace(writer: Child, node: Spec) -> None:
    _, handle = handed_over(writer)
    with child(node, wrapper=("unshare", "-Urpf", "--mount-proc", "--kill-child")) as stranger:
        try:
            number = refused(lambda: stranger.ask("open", handle))
        except AssertionError:
            pytest.skip("no user namespaces here")
    assert number == 201


def test_a_process_may_pretend_to_be_in_another_pid_namespace(writer: Child, node: Spec) -> None:
    _, handle = handed_over(writer)
    with child(Spec(folder=node.folder, pid_namespace=7)) as stranger:
        assert refused(lambda: stranger.ask("open", handle)) == 201


def test_ordinals_are_a_processs_own_and_uuids_are_not(node: Spec) -> None:
    first = Spec(folder=node.folder, devices=(ONE_GPU, OTHER_GPU))
    second = Spec(folder=node.folder, devices=(OTHER_GPU, ONE_GPU))
    with child(first) as writer, child(second) as reader:
        address = writer.number("allocate", SIZE, device=1)
        exported = writer.export(address)
        assert exported.device_uuid == OTHER_GPU[0]
        assert refused(lambda: writer.ask("free", address, device=0)) == 1
        here = reader.number("open", exported.handle, device=0)
        assert refused(lambda: reader.ask("close", here, device=1)) == 1
        reader.ask("close", here, device=0)


def test_a_device_of_another_process_is_refused(tmp_path: Path) -> None:
    one = Spec(folder=str(tmp_path), devices=(ONE_GPU, OTHER_GPU)).fake()
    turned = Spec(folder=str(tmp_path), devices=(OTHER_GPU, ONE_GPU)).fake()
    with pytest.raises(DeviceError) as caught:
        one.allocate(SIZE, device=turned.devices()[0])
    assert (caught.value.number, caught.value.name) == (101, "CUDA_ERROR_INVALID_DEVICE")


@pytest.mark.parametrize("error", [101, 217])
def test_memory_without_peer_access_is_refused(node: Spec, error: int) -> None:
    apart = Spec(
        folder=node.folder,
        devices=(ONE_GPU, OTHER_GPU),
        no_peer_access=((ONE_GPU[0], OTHER_GPU[0]),),
        peer_error=error,
    )
    with child(node) as writer, child(apart) as reader:
        _, handle = handed_over(writer)
        assert refused(lambda: reader.ask("open", handle, device=1)) == error
        reader.ask("open", handle, device=0)


def test_memory_of_a_device_that_the_reader_does_not_see_is_refused(node: Spec) -> None:
    with child(node) as writer, child(Spec(folder=node.folder, devices=(OTHER_GPU,))) as reader:
        _, handle = handed_over(writer)
        assert refused(lambda: reader.ask("open", handle)) == 1


def test_mig_devices_hand_nothing_over(node: Spec) -> None:
    with child(Spec(folder=node.folder, devices=(MIG_GPU,))) as writer:
        address = writer.number("allocate", SIZE)
        assert refused(lambda: writer.export(address)) == 801


@pytest.mark.parametrize(
    "kind", [MemoryKind.POOL, MemoryKind.VIRTUAL, MemoryKind.MANAGED, MemoryKind.HOST]
)
def test_other_kinds_of_memory_are_told_apart_and_not_exported(
    node: Spec, kind: MemoryKind
) -> None:
    fake = node.fake()
    (device,) = fake.devices()
    address = fake.allocate(SIZE, device=device, kind=kind)
    found = fake.locate(address + 1)
    assert (found.kind, found.base, found.allocation_bytes) == (kind, address, SIZE)
    assert (found.device is None) == (kind is MemoryKind.HOST)
    with pytest.raises(DeviceError, match="CUDA_ERROR_INVALID_VALUE"):
        fake.export(address)
    fake.free(address, device=device)
    assert fake.locate(address).kind is MemoryKind.UNKNOWN


def test_memory_that_was_opened_is_plain_and_exported_by_its_owner_alone(
    writer: Child, reader: Child
) -> None:
    _, handle = handed_over(writer)
    here = reader.number("open", handle)
    assert reader.ask("kind_of", here, device=None) == "PLAIN"
    assert refused(lambda: reader.ask("export", here, device=None)) == 1


def test_a_devices_memory_runs_out(tmp_path: Path) -> None:
    fake = Spec(folder=str(tmp_path), memory_bytes=2 * SIZE).fake()
    (device,) = fake.devices()
    first = fake.allocate(2 * SIZE, device=device)
    with pytest.raises(DeviceError, match="OUT_OF_MEMORY"):
        fake.allocate(1, device=device)
    fake.free(first, device=device)
    fake.allocate(1, device=device)


def test_what_a_stream_was_given_is_done_when_it_or_a_later_event_is_waited_for(
    writer: Child, reader: Child
) -> None:
    there, handle = handed_over(writer)
    here = reader.number("open", handle)
    before = writer.number("record")
    writer.ask("delay", there, b"new")
    behind = writer.number("record")
    writer.ask("delay", there, b"NEW")

    writer.ask("wait", before, device=None)
    assert reader.read(here, 3) == HELLO[:3]
    assert writer.ask("copy_to_host", there, 3) == HELLO[:3].hex()
    assert writer.ask("is_past", behind, device=None) is False
    writer.ask("wait", behind, device=None)
    assert writer.ask("is_past", behind, device=None) is True
    assert reader.read(here, 3) == b"new"
    writer.ask("synchronise")
    assert reader.read(here, 3) == b"NEW"


def test_an_event_of_one_stream_says_nothing_about_another(tmp_path: Path) -> None:
    fake = Spec(folder=str(tmp_path)).fake()
    (device,) = fake.devices()
    found: list[str] = []
    with fake.in_stream(fake.new_stream(device=device)):
        fake.enqueue(lambda: found.append("side"), device=device)
        side = fake.record(device=device)
    fake.enqueue(lambda: found.append("main"), device=device)
    fake.record(device=device).wait()
    assert (found, side.is_past()) == (["main"], False)
    fake.synchronise(device=device)
    assert (found, side.is_past()) == (["main", "side"], True)


def test_a_forked_child_has_no_driver(tmp_path: Path) -> None:
    fake = Spec(folder=str(tmp_path)).fake()
    (device,) = fake.devices()
    fake.allocate(1, device=device)
    pid = os.fork()
    if pid == 0:
        number = 0
        try:
            fake.allocate(1, device=device)
        except DeviceError as error:
            number = error.number
        os._exit(number)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3


def test_a_context_is_made_at_the_first_use_of_a_device_and_not_before(tmp_path: Path) -> None:
    fake = Spec(folder=str(tmp_path), devices=(ONE_GPU, OTHER_GPU)).fake()
    device = fake.devices()[1]
    fake.locate(4096)
    assert fake.log.operations == []
    for _ in range(2):
        fake.allocate(1, device=device)
    (made,) = done(fake.log.operations, "context")
    assert made.uuid == device.uuid


def test_the_log_of_all_processes_says_what_is_open_and_what_was_refused(
    writer: Child, reader: Child, node: Spec
) -> None:
    there, handle = handed_over(writer)
    here = reader.number("open", handle)
    reader.number("open", handle)
    refused(lambda: writer.ask("open", handle))
    log = read_log(Path(node.folder))
    ((key, count),) = still_open(log).items()
    assert (key[0], count) == (reader.pid, 2)
    assert still_allocated(log) == {(writer.pid, key[1])}
    assert [each.error for each in log if each.call == "open" and each.pid == writer.pid] == [201]

    for _ in range(2):
        reader.ask("close", here)
    writer.ask("free", there)
    log = read_log(Path(node.folder))
    assert (not still_open(log), not still_allocated(log), faults(log)) == (True, True, [])


@pytest.mark.parametrize("number", [1, 101, 201, 801, 999])
def test_a_fault_refuses_the_calls_that_it_names(writer: Child, node: Spec, number: int) -> None:
    _, handle = handed_over(writer)
    faulty = Spec(folder=node.folder, faults=(Fault(call="open", error=number, after=1, times=1),))
    with child(faulty) as reader:
        here = reader.number("open", handle)
        assert refused(lambda: reader.ask("open", handle)) == number
        assert reader.number("open", handle) == here


def test_a_fault_makes_an_open_wait_until_it_is_let_go(
    writer: Child, node: Spec, tmp_path: Path
) -> None:
    _, handle = handed_over(writer)
    shut = gate(tmp_path / "gate")
    with child(Spec(folder=node.folder, faults=(Fault(call="open", hang=shut),))) as reader:
        reader.start("open", handle)
        assert done(read_log(tmp_path), "open") == []
        let_go(shut)
        here = reader.answer()
        assert isinstance(here, int)
        assert reader.read(here, len(HELLO)) == HELLO


def test_a_fault_gives_other_bytes_than_are_there(writer: Child, node: Spec) -> None:
    _, handle = handed_over(writer)
    with child(Spec(folder=node.folder, faults=(Fault(call="copy_to_host", flip=True),))) as reader:
        here = reader.number("open", handle)
        read = bytes.fromhex(str(reader.ask("copy_to_host", here, 4)))
        assert (read[0] ^ 0xFF, read[1:]) == (HELLO[0], HELLO[1:4])
