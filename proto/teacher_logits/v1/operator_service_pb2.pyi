import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from teacher_logits.v1 import profile_pb2 as _profile_pb2
from teacher_logits.v1 import transport_pb2 as _transport_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class InspectRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReclaimRequest(_message.Message):
    __slots__ = ("session_id", "lease_id", "quarantined", "teacher_id")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    TEACHER_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    lease_id: str
    quarantined: bool
    teacher_id: str
    def __init__(self, session_id: _Optional[str] = ..., lease_id: _Optional[str] = ..., quarantined: bool = ..., teacher_id: _Optional[str] = ...) -> None: ...

class ReclaimResponse(_message.Message):
    __slots__ = ("freed_bytes", "lease_count", "session_count")
    FREED_BYTES_FIELD_NUMBER: _ClassVar[int]
    LEASE_COUNT_FIELD_NUMBER: _ClassVar[int]
    SESSION_COUNT_FIELD_NUMBER: _ClassVar[int]
    freed_bytes: int
    lease_count: int
    session_count: int
    def __init__(self, freed_bytes: _Optional[int] = ..., lease_count: _Optional[int] = ..., session_count: _Optional[int] = ...) -> None: ...

class InspectResponse(_message.Message):
    __slots__ = ("epoch", "version", "uptime", "draining", "teachers", "sessions", "leases", "pool", "queue", "steps", "registered", "object_store", "replicas", "metrics", "queues")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    UPTIME_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    TEACHERS_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    REGISTERED_FIELD_NUMBER: _ClassVar[int]
    OBJECT_STORE_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    QUEUES_FIELD_NUMBER: _ClassVar[int]
    epoch: str
    version: str
    uptime: _duration_pb2.Duration
    draining: bool
    teachers: _containers.RepeatedCompositeFieldContainer[_profile_pb2.TeacherProfile]
    sessions: _containers.RepeatedCompositeFieldContainer[SessionState]
    leases: _containers.RepeatedCompositeFieldContainer[LeaseState]
    pool: PoolState
    queue: QueueState
    steps: _containers.RepeatedCompositeFieldContainer[StepState]
    registered: RegisteredState
    object_store: ObjectStoreState
    replicas: _containers.RepeatedCompositeFieldContainer[ReplicaState]
    metrics: _containers.RepeatedCompositeFieldContainer[MetricSample]
    queues: _containers.RepeatedCompositeFieldContainer[QueueState]
    def __init__(self, epoch: _Optional[str] = ..., version: _Optional[str] = ..., uptime: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., draining: bool = ..., teachers: _Optional[_Iterable[_Union[_profile_pb2.TeacherProfile, _Mapping]]] = ..., sessions: _Optional[_Iterable[_Union[SessionState, _Mapping]]] = ..., leases: _Optional[_Iterable[_Union[LeaseState, _Mapping]]] = ..., pool: _Optional[_Union[PoolState, _Mapping]] = ..., queue: _Optional[_Union[QueueState, _Mapping]] = ..., steps: _Optional[_Iterable[_Union[StepState, _Mapping]]] = ..., registered: _Optional[_Union[RegisteredState, _Mapping]] = ..., object_store: _Optional[_Union[ObjectStoreState, _Mapping]] = ..., replicas: _Optional[_Iterable[_Union[ReplicaState, _Mapping]]] = ..., metrics: _Optional[_Iterable[_Union[MetricSample, _Mapping]]] = ..., queues: _Optional[_Iterable[_Union[QueueState, _Mapping]]] = ...) -> None: ...

class MetricSample(_message.Message):
    __slots__ = ("name", "labels", "value")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    labels: _containers.ScalarMap[str, str]
    value: float
    def __init__(self, name: _Optional[str] = ..., labels: _Optional[_Mapping[str, str]] = ..., value: _Optional[float] = ...) -> None: ...

class SessionState(_message.Message):
    __slots__ = ("session_id", "student_id", "teacher_id", "data_parallel_rank", "transports", "liveness", "age", "silent", "pid", "host_name", "lease_count", "leased_bytes", "kind", "state")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    STUDENT_ID_FIELD_NUMBER: _ClassVar[int]
    TEACHER_ID_FIELD_NUMBER: _ClassVar[int]
    DATA_PARALLEL_RANK_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    LIVENESS_FIELD_NUMBER: _ClassVar[int]
    AGE_FIELD_NUMBER: _ClassVar[int]
    SILENT_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    HOST_NAME_FIELD_NUMBER: _ClassVar[int]
    LEASE_COUNT_FIELD_NUMBER: _ClassVar[int]
    LEASED_BYTES_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    student_id: str
    teacher_id: str
    data_parallel_rank: int
    transports: _containers.RepeatedCompositeFieldContainer[_transport_pb2.SettledTransport]
    liveness: str
    age: _duration_pb2.Duration
    silent: _duration_pb2.Duration
    pid: int
    host_name: str
    lease_count: int
    leased_bytes: int
    kind: str
    state: str
    def __init__(self, session_id: _Optional[str] = ..., student_id: _Optional[str] = ..., teacher_id: _Optional[str] = ..., data_parallel_rank: _Optional[int] = ..., transports: _Optional[_Iterable[_Union[_transport_pb2.SettledTransport, _Mapping]]] = ..., liveness: _Optional[str] = ..., age: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., silent: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., pid: _Optional[int] = ..., host_name: _Optional[str] = ..., lease_count: _Optional[int] = ..., leased_bytes: _Optional[int] = ..., kind: _Optional[str] = ..., state: _Optional[str] = ...) -> None: ...

class LeaseState(_message.Message):
    __slots__ = ("lease_id", "session_id", "payload_id", "size_bytes", "age", "quarantined", "doubt")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_ID_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    AGE_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    DOUBT_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    session_id: str
    payload_id: str
    size_bytes: int
    age: _duration_pb2.Duration
    quarantined: bool
    doubt: str
    def __init__(self, lease_id: _Optional[str] = ..., session_id: _Optional[str] = ..., payload_id: _Optional[str] = ..., size_bytes: _Optional[int] = ..., age: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., quarantined: bool = ..., doubt: _Optional[str] = ...) -> None: ...

class PoolState(_message.Message):
    __slots__ = ("budget_bytes", "committed_bytes", "used_bytes", "quarantined_bytes", "free_bytes", "slab_count", "extent_count")
    BUDGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_BYTES_FIELD_NUMBER: _ClassVar[int]
    FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SLAB_COUNT_FIELD_NUMBER: _ClassVar[int]
    EXTENT_COUNT_FIELD_NUMBER: _ClassVar[int]
    budget_bytes: int
    committed_bytes: int
    used_bytes: int
    quarantined_bytes: int
    free_bytes: int
    slab_count: int
    extent_count: int
    def __init__(self, budget_bytes: _Optional[int] = ..., committed_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., quarantined_bytes: _Optional[int] = ..., free_bytes: _Optional[int] = ..., slab_count: _Optional[int] = ..., extent_count: _Optional[int] = ...) -> None: ...

class StepState(_message.Message):
    __slots__ = ("teacher_id", "step", "stage", "sealed_rows", "real_rows", "waiting_ranks", "waits_for")
    TEACHER_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    SEALED_ROWS_FIELD_NUMBER: _ClassVar[int]
    REAL_ROWS_FIELD_NUMBER: _ClassVar[int]
    WAITING_RANKS_FIELD_NUMBER: _ClassVar[int]
    WAITS_FOR_FIELD_NUMBER: _ClassVar[int]
    teacher_id: str
    step: int
    stage: str
    sealed_rows: int
    real_rows: int
    waiting_ranks: int
    waits_for: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, teacher_id: _Optional[str] = ..., step: _Optional[int] = ..., stage: _Optional[str] = ..., sealed_rows: _Optional[int] = ..., real_rows: _Optional[int] = ..., waiting_ranks: _Optional[int] = ..., waits_for: _Optional[_Iterable[str]] = ...) -> None: ...

class RegisteredState(_message.Message):
    __slots__ = ("payload_count", "payload_bytes", "slab_count", "committed_bytes", "used_bytes", "quarantined_bytes", "device_slabs")
    PAYLOAD_COUNT_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    SLAB_COUNT_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_BYTES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_SLABS_FIELD_NUMBER: _ClassVar[int]
    payload_count: int
    payload_bytes: int
    slab_count: int
    committed_bytes: int
    used_bytes: int
    quarantined_bytes: int
    device_slabs: _containers.RepeatedCompositeFieldContainer[DeviceSlabState]
    def __init__(self, payload_count: _Optional[int] = ..., payload_bytes: _Optional[int] = ..., slab_count: _Optional[int] = ..., committed_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., quarantined_bytes: _Optional[int] = ..., device_slabs: _Optional[_Iterable[_Union[DeviceSlabState, _Mapping]]] = ...) -> None: ...

class DeviceSlabState(_message.Message):
    __slots__ = ("slab_id", "writer_id", "session_id", "device_uuid", "size_bytes", "used_bytes", "reader_count")
    SLAB_ID_FIELD_NUMBER: _ClassVar[int]
    WRITER_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    DEVICE_UUID_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    READER_COUNT_FIELD_NUMBER: _ClassVar[int]
    slab_id: str
    writer_id: str
    session_id: str
    device_uuid: str
    size_bytes: int
    used_bytes: int
    reader_count: int
    def __init__(self, slab_id: _Optional[str] = ..., writer_id: _Optional[str] = ..., session_id: _Optional[str] = ..., device_uuid: _Optional[str] = ..., size_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., reader_count: _Optional[int] = ...) -> None: ...

class ObjectStoreState(_message.Message):
    __slots__ = ("state", "budget_bytes", "used_bytes", "object_count", "waiting_count", "store_bytes", "store_used_bytes", "spilled_bytes", "holder", "holder_restarts", "nodes")
    STATE_FIELD_NUMBER: _ClassVar[int]
    BUDGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    OBJECT_COUNT_FIELD_NUMBER: _ClassVar[int]
    WAITING_COUNT_FIELD_NUMBER: _ClassVar[int]
    STORE_BYTES_FIELD_NUMBER: _ClassVar[int]
    STORE_USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    SPILLED_BYTES_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    HOLDER_RESTARTS_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
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
    nodes: _containers.RepeatedCompositeFieldContainer[NodeStoreState]
    def __init__(self, state: _Optional[str] = ..., budget_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., object_count: _Optional[int] = ..., waiting_count: _Optional[int] = ..., store_bytes: _Optional[int] = ..., store_used_bytes: _Optional[int] = ..., spilled_bytes: _Optional[int] = ..., holder: _Optional[str] = ..., holder_restarts: _Optional[int] = ..., nodes: _Optional[_Iterable[_Union[NodeStoreState, _Mapping]]] = ...) -> None: ...

class NodeStoreState(_message.Message):
    __slots__ = ("node_id", "budget_bytes", "used_bytes", "object_count", "holder", "holder_restarts")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    BUDGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    OBJECT_COUNT_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    HOLDER_RESTARTS_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    budget_bytes: int
    used_bytes: int
    object_count: int
    holder: str
    holder_restarts: int
    def __init__(self, node_id: _Optional[str] = ..., budget_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., object_count: _Optional[int] = ..., holder: _Optional[str] = ..., holder_restarts: _Optional[int] = ...) -> None: ...

class ReplicaState(_message.Message):
    __slots__ = ("number", "state", "node_id", "host_name", "pid", "outstanding_passes", "outstanding_tokens", "restarts", "reason", "teacher_id")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    HOST_NAME_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    OUTSTANDING_PASSES_FIELD_NUMBER: _ClassVar[int]
    OUTSTANDING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    TEACHER_ID_FIELD_NUMBER: _ClassVar[int]
    number: int
    state: str
    node_id: str
    host_name: str
    pid: int
    outstanding_passes: int
    outstanding_tokens: int
    restarts: int
    reason: str
    teacher_id: str
    def __init__(self, number: _Optional[int] = ..., state: _Optional[str] = ..., node_id: _Optional[str] = ..., host_name: _Optional[str] = ..., pid: _Optional[int] = ..., outstanding_passes: _Optional[int] = ..., outstanding_tokens: _Optional[int] = ..., restarts: _Optional[int] = ..., reason: _Optional[str] = ..., teacher_id: _Optional[str] = ...) -> None: ...

class QueueState(_message.Message):
    __slots__ = ("waiting_requests", "waiting_tokens", "running_requests", "scored_requests", "scored_tokens", "teacher_id", "serving")
    WAITING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    SCORED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    SCORED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEACHER_ID_FIELD_NUMBER: _ClassVar[int]
    SERVING_FIELD_NUMBER: _ClassVar[int]
    waiting_requests: int
    waiting_tokens: int
    running_requests: int
    scored_requests: int
    scored_tokens: int
    teacher_id: str
    serving: bool
    def __init__(self, waiting_requests: _Optional[int] = ..., waiting_tokens: _Optional[int] = ..., running_requests: _Optional[int] = ..., scored_requests: _Optional[int] = ..., scored_tokens: _Optional[int] = ..., teacher_id: _Optional[str] = ..., serving: bool = ...) -> None: ...
