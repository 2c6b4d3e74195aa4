from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class BatchGrid(_message.Message):
    __slots__ = ("global_batch_size", "data_parallel_size", "micro_batch_size")
    GLOBAL_BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    DATA_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    MICRO_BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    global_batch_size: int
    data_parallel_size: int
    micro_batch_size: int
    def __init__(self, global_batch_size: _Optional[int] = ..., data_parallel_size: _Optional[int] = ..., micro_batch_size: _Optional[int] = ...) -> None: ...

class ModelGrid(_message.Message):
    __slots__ = ("node_count", "gpus_per_node", "tensor_parallel_size", "context_parallel_size", "tensor_parallel_rank", "context_parallel_rank")
    NODE_COUNT_FIELD_NUMBER: _ClassVar[int]
    GPUS_PER_NODE_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_RANK_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_PARALLEL_RANK_FIELD_NUMBER: _ClassVar[int]
    node_count: int
    gpus_per_node: int
    tensor_parallel_size: int
    context_parallel_size: int
    tensor_parallel_rank: int
    context_parallel_rank: int
    def __init__(self, node_count: _Optional[int] = ..., gpus_per_node: _Optional[int] = ..., tensor_parallel_size: _Optional[int] = ..., context_parallel_size: _Optional[int] = ..., tensor_parallel_rank: _Optional[int] = ..., context_parallel_rank: _Optional[int] = ...) -> None: ...

class NodeHints(_message.Message):
    __slots__ = ("host_name", "boot_id", "pid", "namespaces", "device_uuids", "versions", "ray_node_id")
    class NamespacesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class VersionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    HOST_NAME_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_UUIDS_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    RAY_NODE_ID_FIELD_NUMBER: _ClassVar[int]
    host_name: str
    boot_id: str
    pid: int
    namespaces: _containers.ScalarMap[str, int]
    device_uuids: _containers.RepeatedScalarFieldContainer[str]
    versions: _containers.ScalarMap[str, str]
    ray_node_id: str
    def __init__(self, host_name: _Optional[str] = ..., boot_id: _Optional[str] = ..., pid: _Optional[int] = ..., namespaces: _Optional[_Mapping[str, int]] = ..., device_uuids: _Optional[_Iterable[str]] = ..., versions: _Optional[_Mapping[str, str]] = ..., ray_node_id: _Optional[str] = ...) -> None: ...
