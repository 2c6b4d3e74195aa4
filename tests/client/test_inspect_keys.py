"""The keys of `inspect --json`, which scripts rely on: none vanishes, and each is written down."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from teacher_logits.pool import PoolUsage
from teacher_logits.profiles import TeacherProfile
from teacher_logits.transport import Refusal, RefusalReason, Settlement, Transport
from teacher_logits.views import (
    DeviceSlabView,
    LeaseView,
    MetricView,
    NodeStoreView,
    ObjectStoreView,
    QueueView,
    RegisteredView,
    ReplicaView,
    ServerView,
    SessionView,
    StepView,
)
from teacher_logits_client.inspecting.as_json import as_json

PAGE = Path(__file__).parents[2] / "docs" / "inspect.md"
GOLDEN = """
address draining epoch uptime_seconds version
leases[].age_seconds leases[].doubt leases[].lease_id leases[].payload_id leases[].quarantined
leases[].session_id leases[].size_bytes
metrics[].labels metrics[].labels.transport metrics[].name metrics[].value
object_store.budget_bytes object_store.holder object_store.holder_restarts
object_store.nodes[].budget_bytes object_store.nodes[].holder
object_store.nodes[].holder_restarts object_store.nodes[].node_id
object_store.nodes[].object_count object_store.nodes[].used_bytes
object_store.object_count object_store.spilled_bytes object_store.state object_store.store_bytes
object_store.store_used_bytes object_store.used_bytes object_store.waiting_count
pool.budget_bytes pool.committed_bytes pool.extent_count pool.free_bytes pool.quarantined_bytes
pool.slab_count pool.used_bytes
queue.running_requests queue.scored_requests queue.scored_tokens queue.waiting_requests
queue.waiting_tokens
queues[].running_requests queues[].scored_requests queues[].scored_tokens queues[].serving
queues[].teacher_id queues[].waiting_requests queues[].waiting_tokens
registered.committed_bytes registered.device_slabs[].device_uuid
registered.device_slabs[].reader_count registered.device_slabs[].session_id
registered.device_slabs[].size_bytes registered.device_slabs[].slab_id
registered.device_slabs[].used_bytes registered.device_slabs[].writer_id
registered.payload_bytes registered.payload_count registered.quarantined_bytes
registered.slab_count registered.used_bytes
replicas[].host_name replicas[].node_id replicas[].number replicas[].outstanding_passes
replicas[].outstanding_tokens replicas[].pid replicas[].reason replicas[].restarts
replicas[].state replicas[].teacher_id
sessions[].age_seconds sessions[].data_parallel_rank sessions[].host_name sessions[].kind
sessions[].lease_count sessions[].leased_bytes sessions[].liveness sessions[].pid
sessions[].session_id sessions[].silent_seconds sessions[].state sessions[].student_id
sessions[].teacher_id sessions[].transports[].refusals[].message
sessions[].transports[].refusals[].reason sessions[].transports[].refusals[].transport
sessions[].transports[].transport sessions[].transports[].writer_id
steps[].real_rows steps[].sealed_rows steps[].stage steps[].step steps[].teacher_id
steps[].waiting_ranks steps[].waits_for[]
teachers[].arithmetic_type teachers[].engine teachers[].head_rows teachers[].max_row_tokens
teachers[].revision teachers[].teacher_id teachers[].tokenizer_fingerprint teachers[].top_k
teachers[].vocabulary_size
""".split()
"""Every path to a value. A line is added here, and none is taken away."""

NODE_STORE = NodeStoreView(
    node_id="n", budget_bytes=1, used_bytes=1, object_count=1, holder="h", holder_restarts=0
)
QUEUE = QueueView(
    waiting_requests=1,
    waiting_tokens=1,
    running_requests=1,
    scored_requests=1,
    scored_tokens=1,
)
VIEW = ServerView(
    epoch="e",
    version="1",
    uptime=timedelta(seconds=1.5),
    draining=False,
    teachers=(
        TeacherProfile(teacher_id="t", vocabulary_size=9, head_rows=9, top_k=2, max_row_tokens=5),
    ),
    sessions=(
        SessionView(
            session_id="s",
            student_id="trainer",
            teacher_id="t",
            data_parallel_rank=3,
            settlements=(
                Settlement(
                    writer_id="server",
                    transport=None,
                    refusals=(
                        Refusal(
                            transport=Transport.STREAM,
                            reason=RefusalReason.NOT_OFFERED,
                            message="m",
                        ),
                    ),
                ),
            ),
            liveness="line",
            age=timedelta(seconds=2),
            silent=timedelta(0),
            pid=1,
            host_name="node",
            lease_count=1,
            leased_bytes=4096,
        ),
    ),
    leases=(
        LeaseView(
            lease_id="l",
            session_id="s",
            payload_id="p",
            size_bytes=4096,
            age=timedelta(seconds=1),
            quarantined=False,
        ),
    ),
    pool=PoolUsage(
        budget_bytes=1,
        committed_bytes=1,
        used_bytes=1,
        quarantined_bytes=0,
        slab_count=1,
        extent_count=1,
    ),
    queue=QUEUE,
    queues=(replace(QUEUE, teacher_id="t", serving=True),),
    steps=(
        StepView(
            teacher_id="t",
            step=7,
            stage="open",
            sealed_rows=1,
            real_rows=1,
            waiting_ranks=1,
            waits_for=("trainer:0",),
        ),
    ),
    registered=RegisteredView(
        device_slabs=(
            DeviceSlabView(
                slab_id="a",
                writer_id="w",
                session_id="s",
                device_uuid="GPU-0",
                size_bytes=1,
                used_bytes=1,
                reader_count=1,
            ),
        )
    ),
    object_store=ObjectStoreView(
        state="joined",
        budget_bytes=1,
        used_bytes=1,
        object_count=1,
        waiting_count=0,
        store_bytes=1,
        store_used_bytes=1,
        spilled_bytes=0,
        holder="h",
        holder_restarts=0,
        nodes=(NODE_STORE,),
    ),
    replicas=(
        ReplicaView(
            number=0,
            state="ready",
            node_id="n",
            host_name="node",
            pid=1,
            outstanding_passes=0,
            outstanding_tokens=0,
            restarts=0,
        ),
    ),
    metrics=(MetricView(name="m", labels=(("transport", "stream"),), value=1.0),),
)


def paths(value: object, path: str = "") -> Iterator[str]:
    """Every path to a value of a document."""
    if isinstance(value, dict):
        if path.endswith("labels"):
            yield path
        for key, each in value.items():
            yield from paths(each, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        assert value, f"{path} has nothing to look into"
        yield from paths(value[0], f"{path}[]")
    else:
        yield path


def test_each_key_is_there_and_a_new_one_is_written_down_here() -> None:
    document = json.loads(as_json(VIEW, address="unix:/s"))

    assert sorted(paths(document)) == sorted(GOLDEN)


def test_what_is_not_there_is_empty_and_its_key_is_not_missing() -> None:
    bare = ServerView(
        epoch="e",
        version="1",
        uptime=timedelta(0),
        draining=True,
        teachers=(),
        sessions=(),
        leases=(),
        pool=VIEW.pool,
        queue=VIEW.queue,
    )
    document = json.loads(as_json(bare, address="unix:/s"))

    assert set(document) == {re.split(r"[.\[]", each)[0] for each in GOLDEN}
    assert document["object_store"] is None
    assert document["metrics"] == document["sessions"] == []


def test_each_key_is_on_the_page() -> None:
    quoted = re.findall(r"`([\w.\[\]]+)`", PAGE.read_text("utf-8"))
    told = {part for each in quoted for part in re.split(r"[.\[\]]+", each)}
    keys = {part for each in GOLDEN for part in re.split(r"[.\[\]]+", each)}

    assert sorted(keys - told) == []
