"""The conformance suite for `cuda_ipc`, whose writer and reader are never one process.

What `tests/transport_suite` asks of every transport is asked here of payloads that a publisher
wrote on its device: bits, digests, generations, room, and what a reader's own writes do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import pytest
from tests.cuda.workers import WorkerError
from tests.transport_suite.contents import TOP_KS, VALUE_TYPES

from teacher_logits_client import MapMode, cli

if TYPE_CHECKING:
    from tests.cuda.node import Node

#: Row lengths, and each how many rows are empty windows.
FORMS = {"ragged": ((3, 1, 5), 0), "rectangular": ((4,), 0), "with_empty_rows": ((2, 6), 2)}
WAYS = ("cuda_ipc", "shared_memory", "stream")


@pytest.mark.parametrize("top_k", TOP_KS)
def test_every_k_and_form_of_rows_comes_bit_by_bit(node: Node, top_k: int) -> None:
    for turn, (tokens, empty_every) in enumerate(FORMS.values()):
        teaching = node.teach(
            teacher_id=f"{node.teaching.teacher_id}-{turn}",
            rows=3,
            top_k=top_k,
            vocabulary_size=1200,
            value_type=VALUE_TYPES[(turn + top_k) % 3].value,
            row_tokens=tokens,
            empty_every=empty_every,
        )
        publisher = node.publisher(teaching, pool_size_bytes=1 << 20)
        student, terms = node.student(teaching, transports=("cuda_ipc",))
        assert terms.transport == "cuda_ipc"
        publisher.ask("publish", 0, 1)
        assert student.ask("read", 0, 1) == ["cuda_ipc"]


@pytest.mark.parametrize("value_type", VALUE_TYPES, ids=lambda each: each.value)
def test_whatever_bits_lie_on_the_device_are_read(node: Node, value_type: object) -> None:
    """NaNs with their payload bits, -0.0, subnormals and infinities: no teacher seals them."""
    teaching = node.teach(value_type=value_type.value)  # type: ignore[attr-defined]
    publisher = node.publisher(teaching)
    student, _ = node.student(teaching, transports=("cuda_ipc",), settings={"prefetch": 0})
    for step in range(3):
        written = cast("dict[str, bytes]", publisher.ask("publish_trouble", step, step))
        student.ask("hold", step, compare=False)
        read = cast("dict[str, bytes]", student.ask("raw", step))
        assert {name: read[name] for name in written} == written
        student.ask("release", step)


def test_rows_without_a_single_position_come_too(node: Node) -> None:
    teaching = node.teach(empty_every=1)
    publisher = node.publisher(teaching)
    student, _ = node.student(teaching, transports=("cuda_ipc",))
    publisher.ask("publish", 0)
    assert student.ask("read", 0) == ["cuda_ipc"]


@pytest.mark.parametrize("mode", [*MapMode], ids=lambda each: each.value)
def test_every_way_of_mapping_shows_the_same_bits(node: Node, mode: MapMode) -> None:
    publisher = node.publisher()
    student, _ = node.student(transports=("cuda_ipc",), settings={"mode": mode.value})
    publisher.ask("publish", 0, 1)
    assert student.ask("read", 0, 1) == ["cuda_ipc"]


def test_one_payload_has_one_digest_over_every_transport(node: Node) -> None:
    publisher = node.publisher()
    readers = {way: node.student(name=way, student_id=way, transports=(way,))[0] for way in WAYS}
    for step in range(3):
        publisher.ask("publish", step)
        digests = set()
        for way, worker in readers.items():
            assert worker.ask("hold", step) == [way]
            worker.ask("check", step)
            digests.add(worker.ask("digest", step))
            worker.ask("release", step)
        assert len(digests) == 1


def test_a_copy_outlives_its_lease_and_the_room(node: Node) -> None:
    publisher = node.publisher(pool_size_bytes=4096, slab_size_bytes=4096)
    settings = {"prefetch": 0, "mode": "copy"}
    student, _ = node.student(transports=("cuda_ipc",), settings=settings)
    publisher.ask("publish", 0)
    student.ask("hold", 0)
    student.ask("keep", 0, "topk_ids")
    student.ask("release", 0)
    publisher.ask("publish", 1)  # in the same room
    assert student.ask("check_kept", 0, "topk_ids") is True
    assert student.ask("read", 1) == ["cuda_ipc"]


@pytest.mark.parametrize("is_spoilt", [False, True], ids=["as it was", "written into"])
def test_a_readers_own_writes_are_found_where_that_is_asked_for(
    node: Node, is_spoilt: bool
) -> None:
    publisher = node.publisher()
    settings = {"prefetch": 0, "check_digest": True}
    student, _ = node.student(transports=("cuda_ipc",), settings=settings)
    publisher.ask("publish", 0)
    student.ask("hold", 0)
    if not is_spoilt:
        student.ask("release", 0)
        return
    student.ask("spoil", 0, "topk_ids")
    with pytest.raises(WorkerError, match="changed") as caught:
        student.ask("release", 0)
    assert caught.value.told.kind == "StalePayloadError"


def test_room_that_was_taken_back_by_force_is_found_at_the_leases_end(
    node: Node, capsys: pytest.CaptureFixture[str]
) -> None:
    publisher = node.publisher(pool_size_bytes=4096, slab_size_bytes=4096)
    student, terms = node.student(transports=("cuda_ipc",), settings={"prefetch": 0})
    publisher.ask("publish", 0)
    student.ask("hold", 0)
    assert cli.inspect([node.address, "--reclaim", terms.session_id, "--yes"]) == 0
    capsys.readouterr()
    with pytest.raises(WorkerError) as caught:
        student.ask("release", 0)
    assert caught.value.told.kind == "StalePayloadError"
    publisher.kill()  # its step waits for a reader, and so keeps its memory to its end


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["first", "last"])
def test_room_is_taken_while_one_of_two_readers_is_left(node: Node, order: tuple[int, ...]) -> None:
    publisher = node.publisher(pool_size_bytes=4096, slab_size_bytes=4096)
    readers = [
        node.student(
            name=WAYS[number],
            student_id=f"reader-{number}",
            transports=("cuda_ipc",),
            settings={"prefetch": 0},
        )[0]
        for number in range(2)
    ]
    publisher.ask("publish", 0)
    publisher.start("publish", 1)  # waits for the room
    for reader in readers:
        reader.ask("hold", 0)
    early, late = (readers[number] for number in order)
    early.ask("release", 0)
    late.ask("check", 0)
    late.ask("release", 0)
    publisher.answer()
    for reader in readers:
        assert reader.ask("read", 1) == ["cuda_ipc"]
