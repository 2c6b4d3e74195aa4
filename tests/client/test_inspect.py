"""`teacher-logits inspect`: what a running server holds, for people and for programs."""

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import teacher_logits_client as tl
from teacher_logits.errors import ConfigError, ServerUnreachableError
from teacher_logits.keys import new_id
from teacher_logits.pool import PoolUsage
from teacher_logits.transport import Settlement
from teacher_logits.views import (
    DeviceSlabView,
    LeaseView,
    NodeStoreView,
    ObjectStoreView,
    QueueView,
    RegisteredView,
    ReplicaView,
    ServerView,
    SessionView,
    StepView,
)
from teacher_logits_client import cli
from teacher_logits_client.inspecting import as_json as inspect_json
from teacher_logits_client.inspecting import text as inspect_view
from teacher_logits_client.inspecting.text import table

from .conftest import STREAM, Service

ROWS = torch.arange(48).view(4, 12)

Shown = Callable[..., str]


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str]) -> Shown:
    """What the command writes; it must have succeeded."""

    def run(*argv: str) -> str:
        capsys.readouterr()
        assert cli.inspect(argv) == 0
        return capsys.readouterr().out

    return run


def a_view(**given: object) -> ServerView:
    """A server with one session and one lease, that has been up for a day and an hour."""
    session = SessionView(
        session_id="s-1",
        student_id="trainer",
        teacher_id="teacher",
        data_parallel_rank=3,
        settlements=(Settlement(writer_id="server", transport=tl.Transport.STREAM),),
        liveness="ttl",
        age=timedelta(minutes=4, seconds=5),
        silent=timedelta(seconds=2),
        pid=0,
        host_name="node-7",
        lease_count=1,
        leased_bytes=3 << 20,
    )
    lease = LeaseView(
        lease_id="l-1",
        session_id="s-1",
        payload_id="p-1",
        size_bytes=3 << 20,
        age=timedelta(seconds=9),
        quarantined=False,
    )
    values = {
        "epoch": "e1",
        "version": "0.1.0",
        "uptime": timedelta(days=1, hours=1),
        "draining": False,
        "teachers": (),
        "sessions": (session,),
        "leases": (lease,),
        "pool": PoolUsage(
            budget_bytes=1 << 30,
            committed_bytes=256 << 20,
            used_bytes=3 << 20,
            quarantined_bytes=0,
            slab_count=1,
            extent_count=1,
        ),
        "queue": QueueView(
            waiting_requests=2,
            waiting_tokens=2048,
            running_requests=1,
            scored_requests=7,
            scored_tokens=4096,
        ),
        **given,
    }
    return ServerView(**values)  # type: ignore[arg-type]


def as_text(view: ServerView) -> str:
    return inspect_view.as_text(view, address="unix:/run/t.sock")


def as_json(view: ServerView) -> str:
    return inspect_json.as_json(view, address="unix:/run/t.sock")


def shown_session(document: dict[str, Any], session: tl.Session) -> dict[str, Any]:
    """A session among those that are shown; one of another test may be on its way out."""
    by_id: dict[str, dict[str, Any]] = {each["session_id"]: each for each in document["sessions"]}
    return by_id[session.terms.session_id]


class TestARunningServer:
    def test_names_its_teacher_and_its_budget(self, service: Service, shown: Shown) -> None:
        document = json.loads(shown(service.address, "--json"))

        assert [teacher["vocabulary_size"] for teacher in document["teachers"]] == [256]
        assert document["pool"]["free_bytes"] == document["pool"]["budget_bytes"] > 0
        assert document["address"] == service.address
        assert document["draining"] is False

    def test_shows_a_session_with_its_transport_and_process(
        self, service: Service, shown: Shown
    ) -> None:
        with service.session(student_id="trainer") as (_, session):
            document = json.loads(shown(service.address, "--json"))

        found = shown_session(document, session)
        assert found["student_id"] == "trainer"
        assert found["transports"][0]["transport"] == "shared_memory"
        assert found["liveness"] == "line"
        assert found["pid"] > 0

    def test_shows_an_open_lease_and_the_room_it_takes(
        self, service: Service, shown: Shown
    ) -> None:
        service.await_that(lambda view: not view.leases)  # those of other tests
        with service.session() as (_, session), session.score(ROWS).result(timeout=30) as payload:
            document = json.loads(shown(service.address, "--json"))

            (lease,) = document["leases"]
            assert lease["lease_id"] == payload.lease_id
            assert lease["size_bytes"] >= payload.payload.size_bytes
            assert document["pool"]["used_bytes"] >= lease["size_bytes"]
            assert shown_session(document, session)["leased_bytes"] == lease["size_bytes"]

    def test_counts_what_was_scored(self, service: Service, shown: Shown) -> None:
        before = json.loads(shown(service.address, "--json"))["queue"]
        with service.session() as (_, session), session.score(ROWS).result(timeout=30):
            pass

        after = json.loads(shown(service.address, "--json"))["queue"]

        assert after["scored_requests"] - before["scored_requests"] == 1
        assert after["scored_tokens"] - before["scored_tokens"] == ROWS.numel()

    def test_says_why_a_better_transport_was_refused(self, service: Service, shown: Shown) -> None:
        with service.session((tl.Transport.CUDA_IPC, *STREAM)) as (_, session):
            document = json.loads(shown(service.address, "--json"))

        (settled,) = shown_session(document, session)["transports"]
        (refusal,) = settled["refusals"]
        assert settled["transport"] == "stream"
        assert (refusal["transport"], refusal["reason"]) == ("cuda_ipc", "NOT_OFFERED")
        assert refusal["message"]

    def test_is_shown_to_people_too(self, service: Service, shown: Shown) -> None:
        service.await_that(lambda view: not view.leases)  # those of other tests
        with service.session(student_id="trainer") as (_, session):
            text = shown(service.address)

        assert session.terms.session_id in text
        assert "trainer" in text
        assert "no leases" in text


class TestTheTables:
    def test_columns_are_aligned(self) -> None:
        lines = table([["NAME", "SIZE"], ["a", "1 B"], ["longer", "20 B"]])

        assert lines == ["NAME    SIZE", "a       1 B", "longer  20 B"]

    def test_units_are_those_of_people(self) -> None:
        text = as_text(a_view())

        assert "3 MiB" in text
        assert "up 1 d 1 h" in text
        assert "4 min 5 s" in text
        assert "2,048 tokens" in text

    def test_fit_a_terminal_of_100_columns_with_ids_as_long_as_servers_make_them(self) -> None:
        epoch, (session,), (lease,) = "0123456789ab", a_view().sessions, a_view().leases
        session_id, lease_id = (new_id(kind, epoch) for kind in "sl")
        both = ("shared_memory", "stream")
        settlements = tuple(
            Settlement(writer_id=name, transport=tl.Transport(name)) for name in both
        )
        session = replace(
            session,
            session_id=session_id,
            settlements=settlements,
            state="unresponsive",
            host_name="trainer-7f9c-worker-12.some-namespace.svc",
            teacher_id="qwen3-32b-instruct",
            pid=1234567,
        )
        held = replace(
            lease, lease_id=lease_id, session_id=session_id, quarantined=True, payload_id="p" * 37
        )
        step = StepView(
            teacher_id="qwen3-32b-instruct",
            step=123456,
            stage="complete",
            sealed_rows=1024,
            real_rows=1024,
            waiting_ranks=64,
            waits_for=tuple(f"trainer:{rank}" for rank in range(8)),
        )
        view = a_view(
            epoch=epoch, sessions=(session, session), leases=(held, held), steps=(step, step)
        )

        lines = as_text(view).splitlines()

        tables = [line for line in lines if "inspect" not in line]  # commands stay in one piece
        assert max(map(len, tables)) <= 100
        for needed in (session_id, lease_id, "unresponsive", "quarantine", "process 1234567"):
            assert any(needed in line for line in tables)
        assert any(session_id[-22:] in line and lease_id in line for line in tables)

    def test_the_queues_of_several_teachers_show_each_and_the_one_that_does_not_serve(self) -> None:
        own = a_view().queue
        math = replace(own, teacher_id="math", serving=True)
        code = replace(own, teacher_id="code", serving=False, waiting_requests=0)
        view = a_view(queues=(math, code))
        document = json.loads(as_json(view))

        assert "queue     math: 2 requests waiting" in as_text(view)
        assert "queue     code: NOT SERVING, 0 requests waiting" in as_text(view)
        assert "queue     2 requests waiting" in as_text(a_view(queues=(math,)))
        assert "queue     code: NOT SERVING" in as_text(a_view(queues=(code,)))
        assert document["queue"]["waiting_requests"] == 2
        assert document["queues"] == [
            {"teacher_id": "math", "serving": True, **document["queue"]},
            {"teacher_id": "code", "serving": False, **document["queue"], "waiting_requests": 0},
        ]

    def test_an_idle_server_has_no_empty_tables(self) -> None:
        text = as_text(a_view(sessions=(), leases=()))

        assert "no sessions" in text
        assert "no leases" in text
        assert "STUDENT" not in text

    def test_a_draining_server_says_so(self) -> None:
        assert "draining" in as_text(a_view(draining=True))
        assert "draining" not in as_text(a_view())

    def test_a_session_still_in_its_handshake_is_opening(self) -> None:
        (session,) = a_view().sessions
        opening = SessionView(**{**vars(session), "settlements": ()})

        assert "opening" in as_text(a_view(sessions=(opening,)))

    def test_what_a_client_named_is_not_obeyed_by_a_terminal(self) -> None:
        (session,) = a_view().sessions
        named = replace(session, host_name="node\x1b]0;mine\x07root")

        text = as_text(a_view(sessions=(named,)))

        assert not set(text) & set("\x1b\x07")
        assert "node?]0;mine?root" in text

    def test_quarantine_shows(self) -> None:
        (lease,) = a_view().leases
        held = LeaseView(**{**vars(lease), "quarantined": True})

        assert "quarantine" in as_text(a_view(leases=(held,))).splitlines()[-1]

    def test_of_many_leases_the_text_says_how_many_it_leaves_out(self) -> None:
        leases = a_view().leases * 25

        text, document = as_text(a_view(leases=leases)), as_json(a_view(leases=leases))

        assert text.count("l-1") == 20
        assert "5 leases more" in text
        assert len(json.loads(document)["leases"]) == 25

    def test_the_json_has_bytes_and_seconds(self) -> None:
        document = json.loads(as_json(a_view()))

        assert document["uptime_seconds"] == 90000.0
        assert document["sessions"][0]["age_seconds"] == 245.0
        assert document["leases"][0]["size_bytes"] == 3 << 20
        assert document["queue"]["waiting_requests"] == 2


class TestWhatCallsForAHand:
    def test_publishers_steps_and_their_room_show(self) -> None:
        (session,) = a_view().sessions
        publisher = SessionView(
            **{**vars(session), "session_id": "s-2", "kind": "publisher", "student_id": ""}
        )
        steps = tuple(
            StepView(
                teacher_id="teacher",
                step=number,
                stage="complete",
                sealed_rows=64,
                real_rows=64,
                waiting_ranks=3,
                waits_for=("trainer:0", "trainer:2"),
            )
            for number in range(7, 30)
        )
        registered = RegisteredView(
            payload_count=46,
            payload_bytes=5 << 20,
            slab_count=2,
            committed_bytes=8 << 20,
            used_bytes=5 << 20,
            quarantined_bytes=1 << 20,
        )
        view = a_view(sessions=(session, publisher), steps=steps, registered=registered)

        text, document = as_text(view), json.loads(as_json(view))

        assert "46 payloads of 5 MiB; in publishers' own 2 slabs of 8 MiB" in text
        assert "64 of 64" in text
        assert "trainer:0, trainer:2 and 1 more" in text
        assert "3 steps more" in text
        assert [each["kind"] for each in document["sessions"]] == ["student", "publisher"]
        assert [each["step"] for each in document["steps"]] == [*range(7, 30)]
        assert document["steps"][0]["waits_for"] == ["trainer:0", "trainer:2"]
        assert document["registered"]["quarantined_bytes"] == 1 << 20

    def test_slabs_in_device_memory_show_by_writer_and_device(self) -> None:
        slabs = tuple(
            DeviceSlabView(
                slab_id=f"slab-{number}",
                writer_id="publisher-0-1a",
                session_id="s-2",
                device_uuid="GPU-0",
                size_bytes=4 << 20,
                used_bytes=1 << 20,
                reader_count=number,
            )
            for number in (1, 2)
        )
        view = a_view(registered=RegisteredView(slab_count=2, device_slabs=slabs))

        assert (
            "device    GPU-0: 2 slabs of publisher-0-1a, 2 MiB used of 8 MiB; passed to 2 sessions"
            in as_text(view)
        )
        shown = json.loads(as_json(view))["registered"]["device_slabs"]
        assert [each["slab_id"] for each in shown] == ["slab-1", "slab-2"]
        assert shown[0]["device_uuid"] == "GPU-0"

    def test_objects_of_a_ray_cluster_show_with_what_was_spilled(self) -> None:
        store = ObjectStoreView(
            state="joined",
            budget_bytes=8 << 20,
            used_bytes=5 << 20,
            object_count=2,
            waiting_count=1,
            store_bytes=9 << 20,
            store_used_bytes=6 << 20,
            spilled_bytes=1 << 20,
            holder="teacher-logits-holder/e/n",
            holder_restarts=1,
        )
        view = a_view(object_store=store)

        text = " ".join(as_text(view).split())
        assert "objects 5 MiB of 8 MiB in 2 objects, 1 wait for room" in text
        assert "6 MiB of 9 MiB, 1 MiB SPILLED to disk; holder" in text
        assert json.loads(as_json(view))["object_store"]["spilled_bytes"] == 1 << 20
        node = NodeStoreView(
            node_id="n0123456789abcdef",
            budget_bytes=4 << 20,
            used_bytes=3 << 20,
            object_count=7,
            holder="teacher-logits-holder/e/n/replicas",
            holder_restarts=0,
        )
        staying = a_view(object_store=ObjectStoreView(**{**vars(store), "nodes": (node,)}))
        line = "3 MiB of 4 MiB stay on node n0123456789a, in 7 objects; holder "
        assert line in " ".join(as_text(staying).split())
        lost = a_view(object_store=ObjectStoreView(**{**vars(store), "state": "lost"}))
        assert "the Ray cluster is gone" in as_text(lost)
        assert "objects" not in as_text(a_view())

    def test_a_server_without_publishers_speaks_of_none(self) -> None:
        assert "STEP" not in as_text(a_view())
        assert "publishers" not in as_text(a_view())

    def test_a_stopped_process_comes_with_what_to_do(self) -> None:
        (session,) = a_view().sessions
        stopped = SessionView(**{**vars(session), "state": "unresponsive", "pid": 4711})
        view = a_view(sessions=(stopped,))

        last = as_text(view).splitlines()[-1]

        assert last.startswith("unresponsive: process 4711 of session s-1 is stopped")
        assert "1 lease of 3 MiB stay taken" in last
        assert "kill -CONT 4711" in last
        assert "--reclaim s-1 --yes" in last
        assert json.loads(as_json(view))["sessions"][0]["state"] == "unresponsive"

    def test_a_process_that_died_before_its_child_comes_with_what_to_do(self) -> None:
        (session,) = a_view().sessions
        died = SessionView(**{**vars(session), "state": "died", "pid": 4711})

        last = as_text(a_view(sessions=(died,))).splitlines()[-1]

        assert last.startswith("died: process 4711 of session s-1 is gone, and its 1 lease")
        assert "end the child" in last
        assert "--reclaim s-1 --yes" in last

    def test_a_teacher_that_everybody_left_comes_with_what_to_do(self) -> None:
        step = StepView(
            teacher_id="old",
            step=3,
            stage="deserted",
            sealed_rows=4,
            real_rows=4,
            waiting_ranks=0,
            waits_for=(),
        )

        (last,) = [
            line
            for line in as_text(a_view(steps=(step, step))).splitlines()
            if line.startswith("deserted:")
        ]

        assert "--keep-deserted" in last
        assert "--reclaim teacher:old --yes" in last

    @pytest.mark.parametrize(
        ("doubt", "pid", "said"),
        [
            ("line_ended", 4711, "while process 4711 lived: end that, and the room is free"),
            ("line_ended", 0, "while its process lived"),
            ("ttl_passed", 0, "passed its TTL without proof"),
        ],
    )
    def test_quarantine_comes_with_its_reason_and_what_to_do(
        self, doubt: str, pid: int, said: str
    ) -> None:
        view = a_view()
        held = LeaseView(**{**vars(view.leases[0]), "quarantined": True, "doubt": doubt})
        ended = SessionView(**{**vars(view.sessions[0]), "state": "ended", "pid": pid})
        view = a_view(sessions=(ended,), leases=(held, held))

        (last,) = [line for line in as_text(view).splitlines() if line.startswith("quarantine:")]

        assert said in last
        assert "--reclaim s-1 --yes" in last
        assert json.loads(as_json(view))["leases"][0]["doubt"] == doubt


class TestMistakes:
    @pytest.mark.parametrize("target", ["everything", "quarantined-too", "teacher:"])
    def test_what_is_no_target_of_a_reclaim_is_a_usage_error(self, target: str) -> None:
        with pytest.raises(ConfigError, match=f"--reclaim '{target}'"):
            cli.inspect(["unix:/run/t.sock", "--reclaim", target])

    @pytest.mark.parametrize("kind", ["s-", "l-", "teacher:"])
    def test_a_target_that_cannot_be_sent_is_a_usage_error(self, kind: str) -> None:
        with pytest.raises(ConfigError, match="--reclaim"):
            cli.inspect(["unix:/run/t.sock", "--yes", "--reclaim", f"{kind}\udcff"])

    def test_yes_to_nothing_is_a_usage_error(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as left:
            cli.inspect(["unix:/run/t.sock", "--yes"])

        assert left.value.code == 2
        assert "--reclaim" in capsys.readouterr().err

    def test_an_address_where_nobody_is_is_a_typed_error(self, tmp_path: Path) -> None:
        with pytest.raises(ServerUnreachableError, match="nobody"):
            cli.inspect([f"unix:{tmp_path / 'nobody'}"])

    def test_something_that_is_no_address_is_a_usage_error(self) -> None:
        with pytest.raises(ConfigError, match="nonsense"):
            cli.inspect(["nonsense"])

    def test_another_host_needs_the_word(self) -> None:
        with pytest.raises(ConfigError, match="insecure"):
            cli.inspect(["192.0.2.1:5555"])

    def test_no_address_is_a_usage_error(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as left:
            cli.inspect([])

        assert left.value.code == 2
        assert "address" in capsys.readouterr().err

    def test_a_timeout_must_be_one(self) -> None:
        with pytest.raises(ConfigError, match="--timeout"):
            cli.inspect(["unix:/run/t.sock", "--timeout", "-1"])


def test_replicas_are_counted_and_each_says_what_it_does_and_why_it_ended_last() -> None:
    one = ReplicaView(
        number=0,
        state="ready",
        node_id="0123456789abcdef",
        host_name="node-1",
        pid=12,
        outstanding_passes=2,
        outstanding_tokens=16384,
        restarts=0,
    )
    other = replace(
        one, number=1, state="down", pid=13, outstanding_passes=0, restarts=2, reason="gone"
    )
    text = inspect_view.as_text(a_view(replicas=(one, other)), address="unix:/s")
    joined = " ".join(text.split())
    assert "replicas 1 of 2 ready" in joined
    assert (
        "replica 0, ready: process 12 on node-1, node 0123456789ab, 16,384 tokens in 2 passes to "
        "compute replica 1, down"
    ) in joined
    assert "started anew 2 times (gone)" in joined
    document = json.loads(inspect_json.as_json(a_view(replicas=(other,)), address="unix:/s"))
    assert document["replicas"][0]["reason"] == "gone"


def test_replicas_of_several_teachers_are_told_apart() -> None:
    one = ReplicaView(
        number=0,
        state="ready",
        node_id="0123456789abcdef",
        host_name="node-1",
        pid=12,
        outstanding_passes=0,
        outstanding_tokens=0,
        restarts=0,
        teacher_id="math",
    )
    view = a_view(replicas=(one, replace(one, teacher_id="code", state="down")))
    text = inspect_view.as_text(view, address="unix:/s")
    assert "replica   0 of math, ready" in text
    assert "replica   0 of code, down" in text
    document = json.loads(inspect_json.as_json(view, address="unix:/s"))
    assert [each["teacher_id"] for each in document["replicas"]] == ["math", "code"]
