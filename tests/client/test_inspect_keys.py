"""The keys of `inspect --json`, which scripts rely on: none vanishes, and each is written down."""

import json
import re
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

from tests.full_view import FULL

from teacher_logits.views import ServerView
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
    document = json.loads(as_json(FULL, address="unix:/s"))

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
        pool=FULL.pool,
        queue=FULL.queue,
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
