"""What a server holds at one instant, for whoever looks: inspection, metrics, drain.

Plain values, in the server's words. ``wire_views`` takes them over the wire; a field added
here is added there in both directions and in ``operator_service.proto``, and a test walks
the messages for one that was forgotten.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datetime import timedelta

    from teacher_logits.pool import PoolUsage
    from teacher_logits.profiles import TeacherProfile
    from teacher_logits.transport import Settlement


@dataclass(frozen=True, kw_only=True)
class SessionView:
    """One session. ``settlements`` is empty while it opens; ``liveness`` is how its end is learnt.

    ``kind`` is ``student`` or ``publisher``, and the latter has no ``student_id``. ``silent``
    counts from the last sign of life. ``pid`` is 0 where the server does not know
    it, which is so without a broker line. ``state`` is one of

        opening        has not settled its transports
        alive          and nothing speaks against it
        unresponsive   its process is stopped, by a signal or a debugger
        silent         has no line, and missed a renewal
        closed         takes no new leases; those that are out are awaited
        died           its process is gone, and a child of that holds its line and leases
        ended          only room in quarantine is left of it
    """

    session_id: str
    student_id: str
    teacher_id: str
    data_parallel_rank: int
    settlements: tuple[Settlement, ...]
    liveness: str
    age: timedelta
    silent: timedelta
    pid: int
    host_name: str
    lease_count: int
    leased_bytes: int
    kind: str = "student"
    state: str = "alive"


@dataclass(frozen=True, kw_only=True)
class LeaseView:
    """One lease; ``size_bytes`` is the room it holds.

    ``quarantined``: its session is gone, and a reader may be left. ``doubt`` says why:
    ``line_ended`` while its process lived, or ``ttl_passed`` without a word.
    """

    lease_id: str
    session_id: str
    payload_id: str
    size_bytes: int
    age: timedelta
    quarantined: bool
    doubt: str = ""


@dataclass(frozen=True, kw_only=True)
class StepView:
    """One step of a published teacher that is not retired.

    ``stage`` is ``open``, ``complete`` or ``lost``; or ``deserted``, where all publishers and
    students have left its teacher, and it goes after a while. ``waits_for`` names the first of the
    ``waiting_ranks`` that have not read it, as ``student:rank``.
    """

    teacher_id: str
    step: int
    stage: str
    sealed_rows: int
    real_rows: int
    waiting_ranks: int
    waits_for: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class DeviceSlabView:
    """A slab in device memory: a publisher's, by its word, or the server's own, of its engine.

    ``session_id`` is the publisher's, and empty for the server's own. ``used_bytes`` are those of
    columns in use; ``reader_count`` counts the sessions that were passed the slab.
    """

    slab_id: str
    writer_id: str
    session_id: str
    device_uuid: str
    size_bytes: int
    used_bytes: int
    reader_count: int


@dataclass(frozen=True, kw_only=True)
class RegisteredView:
    """Payloads that publishers registered, wherever they lie, and the publishers' own slabs.

    Slabs in device memory count with the others, and stand in ``device_slabs`` besides.
    """

    payload_count: int = 0
    payload_bytes: int = 0
    slab_count: int = 0
    committed_bytes: int = 0
    used_bytes: int = 0
    quarantined_bytes: int = 0
    device_slabs: tuple[DeviceSlabView, ...] = ()


@dataclass(frozen=True, kw_only=True)
class QueueView:
    """Scoring requests that wait or run, and what was scored since the server's start.

    ``teacher_id`` is empty in the sum of several, of which ``serving`` is not said: whether that
    teacher takes requests.
    """

    waiting_requests: int
    waiting_tokens: int
    running_requests: int
    scored_requests: int
    scored_tokens: int
    teacher_id: str = ""
    serving: bool = False


@dataclass(frozen=True, kw_only=True)
class NodeStoreView:
    """Payloads that stay in the store of one node of replicas, ``used_bytes`` of ``budget_bytes``.

    ``holder`` is the actor that hands out references there, the ``holder_restarts``-th after the
    first; ``object_count`` are those that it has.
    """

    node_id: str
    budget_bytes: int
    used_bytes: int
    object_count: int
    holder: str
    holder_restarts: int


@dataclass(frozen=True, kw_only=True)
class ObjectStoreView:
    """Payloads in a Ray cluster's object store, and the store on the server's node.

    ``state`` is ``joined``, or ``lost`` once the cluster is gone. ``used_bytes`` of
    ``budget_bytes`` are those of ``object_count`` payloads; ``waiting_count`` wait for room.
    ``store_used_bytes`` and ``spilled_bytes`` are everybody's, as of the last look; spilled ones
    since the store was started. ``holder`` is the actor that hands out references, the
    ``holder_restarts``-th after the first. ``nodes`` are those with replicas, where what they
    compute stays; it counts apart.
    """

    state: str
    budget_bytes: int
    used_bytes: int
    object_count: int
    waiting_count: int
    store_bytes: int
    store_used_bytes: int
    spilled_bytes: int
    holder: str
    holder_restarts: int
    nodes: tuple[NodeStoreView, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ReplicaView:
    """One replica of a teacher of the server's own, and what it has to compute.

    ``state`` is one of

        starting       a life of it has begun, or is about to
        ready          takes passes
        unresponsive   did not answer by a deadline, and takes none until it does
        down           its last start came to nothing; it is tried again after a pause

    ``reason`` is why its last life ended, or its last start came to nothing; ``node_id``,
    ``host_name`` and ``pid`` are those of its last life that was ready. Each teacher numbers its
    own; ``teacher_id`` is empty from a server that does not say.
    """

    number: int
    state: str
    node_id: str
    host_name: str
    pid: int
    outstanding_passes: int
    outstanding_tokens: int
    restarts: int
    reason: str = ""
    teacher_id: str = ""


@dataclass(frozen=True, kw_only=True)
class MetricView:
    """One number that a server counts since its start, by the name that Prometheus has it under.

    ``labels`` are in the order of their names.
    """

    name: str
    labels: tuple[tuple[str, str], ...]
    value: float

    def label(self, name: str) -> str:
        """Return the value of a label; empty where there is none of that name."""
        return dict(self.labels).get(name, "")


@dataclass(frozen=True, kw_only=True)
class ServerView:
    """A server at one instant.

    ``queues`` are those of its own teachers, and ``queue`` is their sum; a server of an older
    release tells the sum alone, and no ``metrics``.
    """

    epoch: str
    version: str
    uptime: timedelta
    draining: bool
    teachers: tuple[TeacherProfile, ...]
    sessions: tuple[SessionView, ...]
    leases: tuple[LeaseView, ...]
    pool: PoolUsage
    queue: QueueView
    steps: tuple[StepView, ...] = ()
    registered: RegisteredView = RegisteredView()
    object_store: ObjectStoreView | None = None
    replicas: tuple[ReplicaView, ...] = ()
    metrics: tuple[MetricView, ...] = ()
    queues: tuple[QueueView, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Reclaimed:
    """What an operator's forced reclaim has ended, and the room that came free with it.

    Room that other leases hold, or a step that is not retired, is not free with that.
    """

    freed_bytes: int = 0
    lease_count: int = 0
    session_count: int = 0
