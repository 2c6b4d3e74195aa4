from teacher_logits.v1 import selection_pb2 as _selection_pb2
from teacher_logits.v1 import tensor_pb2 as _tensor_pb2
from teacher_logits.v1 import transport_pb2 as _transport_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PayloadKey(_message.Message):
    __slots__ = ("teacher_id", "step", "shard")
    TEACHER_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    teacher_id: str
    step: int
    shard: int
    def __init__(self, teacher_id: _Optional[str] = ..., step: _Optional[int] = ..., shard: _Optional[int] = ...) -> None: ...

class ShardPart(_message.Message):
    __slots__ = ("sequence_part", "sequence_parts", "first_id", "stop_id")
    SEQUENCE_PART_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_PARTS_FIELD_NUMBER: _ClassVar[int]
    FIRST_ID_FIELD_NUMBER: _ClassVar[int]
    STOP_ID_FIELD_NUMBER: _ClassVar[int]
    sequence_part: int
    sequence_parts: int
    first_id: int
    stop_id: int
    def __init__(self, sequence_part: _Optional[int] = ..., sequence_parts: _Optional[int] = ..., first_id: _Optional[int] = ..., stop_id: _Optional[int] = ...) -> None: ...

class Payload(_message.Message):
    __slots__ = ("payload_id", "key", "teacher_id", "teacher_revision", "first_row", "row_count", "position_count", "top_k", "temperatures", "vocabulary_size", "columns", "size_bytes", "bad_row_count", "whole_rows", "selection", "part")
    PAYLOAD_ID_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    TEACHER_ID_FIELD_NUMBER: _ClassVar[int]
    TEACHER_REVISION_FIELD_NUMBER: _ClassVar[int]
    FIRST_ROW_FIELD_NUMBER: _ClassVar[int]
    ROW_COUNT_FIELD_NUMBER: _ClassVar[int]
    POSITION_COUNT_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURES_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_SIZE_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    BAD_ROW_COUNT_FIELD_NUMBER: _ClassVar[int]
    WHOLE_ROWS_FIELD_NUMBER: _ClassVar[int]
    SELECTION_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    payload_id: str
    key: PayloadKey
    teacher_id: str
    teacher_revision: str
    first_row: int
    row_count: int
    position_count: int
    top_k: int
    temperatures: _containers.RepeatedScalarFieldContainer[float]
    vocabulary_size: int
    columns: _containers.RepeatedCompositeFieldContainer[_tensor_pb2.Column]
    size_bytes: int
    bad_row_count: int
    whole_rows: bool
    selection: _selection_pb2.Selection
    part: ShardPart
    def __init__(self, payload_id: _Optional[str] = ..., key: _Optional[_Union[PayloadKey, _Mapping]] = ..., teacher_id: _Optional[str] = ..., teacher_revision: _Optional[str] = ..., first_row: _Optional[int] = ..., row_count: _Optional[int] = ..., position_count: _Optional[int] = ..., top_k: _Optional[int] = ..., temperatures: _Optional[_Iterable[float]] = ..., vocabulary_size: _Optional[int] = ..., columns: _Optional[_Iterable[_Union[_tensor_pb2.Column, _Mapping]]] = ..., size_bytes: _Optional[int] = ..., bad_row_count: _Optional[int] = ..., whole_rows: bool = ..., selection: _Optional[_Union[_selection_pb2.Selection, _Mapping]] = ..., part: _Optional[_Union[ShardPart, _Mapping]] = ...) -> None: ...

class Extent(_message.Message):
    __slots__ = ("slab_id", "offset_bytes", "size_bytes", "slot", "generation")
    SLAB_ID_FIELD_NUMBER: _ClassVar[int]
    OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    slab_id: str
    offset_bytes: int
    size_bytes: int
    slot: int
    generation: int
    def __init__(self, slab_id: _Optional[str] = ..., offset_bytes: _Optional[int] = ..., size_bytes: _Optional[int] = ..., slot: _Optional[int] = ..., generation: _Optional[int] = ...) -> None: ...

class Lease(_message.Message):
    __slots__ = ("lease_id", "payload", "writer_id", "slab", "stream", "object")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    WRITER_ID_FIELD_NUMBER: _ClassVar[int]
    SLAB_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    OBJECT_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    payload: Payload
    writer_id: str
    slab: SlabSource
    stream: StreamSource
    object: ObjectSource
    def __init__(self, lease_id: _Optional[str] = ..., payload: _Optional[_Union[Payload, _Mapping]] = ..., writer_id: _Optional[str] = ..., slab: _Optional[_Union[SlabSource, _Mapping]] = ..., stream: _Optional[_Union[StreamSource, _Mapping]] = ..., object: _Optional[_Union[ObjectSource, _Mapping]] = ...) -> None: ...

class SlabSource(_message.Message):
    __slots__ = ("extent", "on_device")
    EXTENT_FIELD_NUMBER: _ClassVar[int]
    ON_DEVICE_FIELD_NUMBER: _ClassVar[int]
    extent: Extent
    on_device: bool
    def __init__(self, extent: _Optional[_Union[Extent, _Mapping]] = ..., on_device: bool = ...) -> None: ...

class ObjectSource(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StreamSource(_message.Message):
    __slots__ = ("values", "ids", "columns", "size_bytes")
    VALUES_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    values: _tensor_pb2.ValueCodec
    ids: _tensor_pb2.IdCodec
    columns: _containers.RepeatedCompositeFieldContainer[_tensor_pb2.EncodedColumn]
    size_bytes: int
    def __init__(self, values: _Optional[_Union[_tensor_pb2.ValueCodec, str]] = ..., ids: _Optional[_Union[_tensor_pb2.IdCodec, str]] = ..., columns: _Optional[_Iterable[_Union[_tensor_pb2.EncodedColumn, _Mapping]]] = ..., size_bytes: _Optional[int] = ...) -> None: ...

class StepGrant(_message.Message):
    __slots__ = ("step", "leases", "real_rows", "global_count", "settlements", "status", "awaited")
    STEP_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    REAL_ROWS_FIELD_NUMBER: _ClassVar[int]
    GLOBAL_COUNT_FIELD_NUMBER: _ClassVar[int]
    SETTLEMENTS_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    AWAITED_FIELD_NUMBER: _ClassVar[int]
    step: int
    leases: _containers.RepeatedCompositeFieldContainer[Lease]
    real_rows: int
    global_count: int
    settlements: _containers.RepeatedCompositeFieldContainer[_transport_pb2.SettledTransport]
    status: bytes
    awaited: _containers.RepeatedCompositeFieldContainer[Extent]
    def __init__(self, step: _Optional[int] = ..., leases: _Optional[_Iterable[_Union[Lease, _Mapping]]] = ..., real_rows: _Optional[int] = ..., global_count: _Optional[int] = ..., settlements: _Optional[_Iterable[_Union[_transport_pb2.SettledTransport, _Mapping]]] = ..., status: _Optional[bytes] = ..., awaited: _Optional[_Iterable[_Union[Extent, _Mapping]]] = ...) -> None: ...
