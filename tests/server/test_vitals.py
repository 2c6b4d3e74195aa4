"""What the log is told of a server's health: teachers' names are in texts, and no fact's name."""

from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

from teacher_logits.errors import NotAvailable
from teacher_logits_server.vitals import Vitals

if TYPE_CHECKING:
    from teacher_logits_server.broker import Broker
    from teacher_logits_server.engines.passes import PassEngine
    from teacher_logits_server.scorer import Scorer


def test_health_has_few_names_whatever_teachers_there_are() -> None:
    replicas = (SimpleNamespace(state="ready"), SimpleNamespace(state="starting"))
    passes = SimpleNamespace(
        replicas=lambda: replicas, is_alive=False, refusal=NotAvailable("no node has a GPU")
    )
    scorers = {"math": SimpleNamespace(healthy=True), "code": SimpleNamespace(healthy=False)}
    vitals = Vitals(
        scorers=cast("dict[str, Scorer]", scorers),
        passes={"code": cast("PassEngine", passes)},
        broker=cast("Broker", SimpleNamespace(is_alive=True)),
    )

    assert vitals.health() == {
        "broker": True,
        "scorers": "math: alive; code: gone",
        "replicas": "code: gone, 1 of 2 ready (no node has a GPU)",
    }


def test_a_server_without_teachers_of_its_own_tells_of_none() -> None:
    assert Vitals(scorers={}, passes={}, broker=None).health() == {}
