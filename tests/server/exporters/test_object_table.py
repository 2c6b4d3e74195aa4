"""Objects, leases and room: which put, drop or refusal follows from which event."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from teacher_logits.errors import ObjectLostError, PoolFullError
from teacher_logits_server.exporters.object_table import Drop, ObjectTable, Put, Revoke

BUDGET = 100


@pytest.fixture
def table() -> ObjectTable:
    return ObjectTable(epoch="e", budget_bytes=BUDGET)


def put(table: ObjectTable, lease_id: str, payload_id: str, size_bytes: int = 40) -> str:
    """Have a payload in the store for its first lease; return the object."""
    work = table.ask(lease_id, payload_id, size_bytes)
    assert isinstance(work, Put)
    assert table.put_done(work.object_id) == []
    return work.object_id


def test_the_first_lease_has_its_payload_put_and_all_share_it(table: ObjectTable) -> None:
    work = table.ask("a", "p", 40)
    assert isinstance(work, Put)
    assert table.ask("b", "p", 40) is None
    assert table.find("a") is table.find("b") is None
    table.put_done(work.object_id)
    assert table.find("a") == table.find("b") == work.object_id
    assert table.ask("c", "p", 40) is None
    assert table.find("c") == work.object_id
    assert (len(table), table.used_bytes) == (1, 40)


def test_an_object_goes_with_its_last_lease(table: ObjectTable) -> None:
    made = put(table, "a", "p")
    table.ask("b", "p", 40)
    assert table.let_go(["a"]) == [Revoke(object_id=made, lease_id="a")]
    assert table.let_go(["b", "a", "never"]) == [Drop(object_id=made)]
    assert (len(table), table.used_bytes) == (0, 0)


def test_a_payload_that_is_leased_again_is_another_object(table: ObjectTable) -> None:
    first = put(table, "a", "p")
    table.let_go(["a"])
    assert put(table, "b", "p") != first


def test_an_object_whose_last_lease_ended_before_it_was_there_is_dropped_then(
    table: ObjectTable,
) -> None:
    work = table.ask("a", "p", 40)
    assert work is not None
    assert table.let_go(["a"]) == []
    assert table.used_bytes == 40
    assert table.put_done(work.object_id) == [Drop(object_id=work.object_id)]
    assert table.used_bytes == 0


def test_who_joins_an_object_that_lost_its_first_lease_has_it_and_the_first_has_not(
    table: ObjectTable,
) -> None:
    work = table.ask("a", "p", 40)
    assert work is not None
    table.let_go(["a"])
    assert table.ask("b", "p", 40) is None
    assert table.put_done(work.object_id) == [Revoke(object_id=work.object_id, lease_id="a")]
    assert table.find("b") == work.object_id


def test_who_finds_no_room_waits_and_is_not_overtaken_by_a_smaller_one(
    table: ObjectTable,
) -> None:
    put(table, "a", "p", 60)
    assert table.ask("b", "q", 50) is None
    assert table.ask("c", "r", 10) is None
    assert (table.waits("b"), table.waiting_count) == (50, 2)
    table.let_go(["a"])
    assert table.ask("c", "r", 10) is None
    assert isinstance(table.ask("b", "q", 50), Put)
    assert isinstance(table.ask("c", "r", 10), Put)
    assert table.waiting_count == 0


def test_who_gave_up_stands_in_nobodys_way(table: ObjectTable) -> None:
    put(table, "a", "p", 60)
    assert table.ask("b", "q", 50) is None
    table.give_up("b")
    assert isinstance(table.ask("c", "r", 10), Put)


def test_what_is_larger_than_the_budget_is_refused_with_the_numbers(table: ObjectTable) -> None:
    put(table, "a", "p", 60)
    with pytest.raises(PoolFullError, match="it never fits") as caught:
        table.ask("b", "q", BUDGET + 1)
    assert caught.value.facts["need_bytes"] == BUDGET + 1
    assert caught.value.facts["free_bytes"] == 40
    assert caught.value.retry_after is None
    assert table.waiting_count == 0


def test_a_put_that_failed_is_told_once_to_who_asked_for_it_and_all_may_ask_again(
    table: ObjectTable,
) -> None:
    work = table.ask("a", "p", 40)
    assert work is not None
    table.ask("b", "p", 40)
    table.put_failed(work.object_id, ObjectLostError("no"))
    with pytest.raises(ObjectLostError, match="no"):
        table.find("a")
    assert table.find("a") is table.find("b") is None
    assert table.used_bytes == 0
    assert isinstance(table.ask("b", "p", 40), Put)
    assert table.ask("a", "p", 40) is None


@given(st.data())
def test_the_budget_holds_and_nothing_is_left_whatever_comes(data: st.DataObject) -> None:
    table = ObjectTable(epoch="e", budget_bytes=BUDGET)
    sizes = {"p": 30, "q": 50, "r": 70}
    leases = {f"{name}{number}": name for name in sizes for number in range(3)}
    pending: list[str] = []
    dropped: list[str] = []
    for _ in range(data.draw(st.integers(1, 40))):
        kind = data.draw(st.sampled_from(["ask", "end", "done", "fail"]))
        lease_id = data.draw(st.sampled_from(sorted(leases)))
        if kind == "ask":
            work = table.ask(lease_id, leases[lease_id], sizes[leases[lease_id]])
            pending += [work.object_id] if work is not None else []
        elif kind == "end":
            dropped += _drops(table.let_go([lease_id]))
        elif pending and kind == "done":
            dropped += _drops(table.put_done(pending.pop(0)))
        elif pending:
            table.put_failed(pending.pop(0), ObjectLostError("no"))
        assert 0 <= table.used_bytes <= BUDGET
    for object_id in pending:
        dropped += _drops(table.put_done(object_id))
    dropped += _drops(table.let_go(sorted(leases)))
    assert (len(table), table.used_bytes, table.waiting_count) == (0, 0, 0)
    assert len(dropped) == len(set(dropped))


def _drops(undo: list[Revoke | Drop]) -> list[str]:
    return [each.object_id for each in undo if isinstance(each, Drop)]
