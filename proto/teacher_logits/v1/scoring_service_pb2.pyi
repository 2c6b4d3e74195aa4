from teacher_logits.v1 import payload_pb2 as _payload_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class BadRowPolicy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BAD_ROW_POLICY_UNSPECIFIED: _ClassVar[BadRowPolicy]
    BAD_ROW_POLICY_REJECT: _ClassVar[BadRowPolicy]
    BAD_ROW_POLICY_MASK: _ClassVar[BadRowPolicy]
BAD_ROW_POLICY_UNSPECIFIED: BadRowPolicy
BAD_ROW_POLICY_REJECT: BadRowPolicy
BAD_ROW_POLICY_MASK: BadRowPolicy

class ScoreRequest(_message.Message):
    __slots__ = ("session_id", "request_id", "input_ids", "row_lengths", "prefix_ids", "prefix_lengths", "row_windows", "bad_rows", "seed")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    INPUT_IDS_FIELD_NUMBER: _ClassVar[int]
    ROW_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_IDS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    ROW_WINDOWS_FIELD_NUMBER: _ClassVar[int]
    BAD_ROWS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    request_id: str
    input_ids: bytes
    row_lengths: _containers.RepeatedScalarFieldContainer[int]
    prefix_ids: bytes
    prefix_lengths: _containers.RepeatedScalarFieldContainer[int]
    row_windows: _containers.RepeatedScalarFieldContainer[int]
    bad_rows: BadRowPolicy
    seed: int
    def __init__(self, session_id: _Optional[str] = ..., request_id: _Optional[str] = ..., input_ids: _Optional[bytes] = ..., row_lengths: _Optional[_Iterable[int]] = ..., prefix_ids: _Optional[bytes] = ..., prefix_lengths: _Optional[_Iterable[int]] = ..., row_windows: _Optional[_Iterable[int]] = ..., bad_rows: _Optional[_Union[BadRowPolicy, str]] = ..., seed: _Optional[int] = ...) -> None: ...

class ScoreResponse(_message.Message):
    __slots__ = ("lease",)
    LEASE_FIELD_NUMBER: _ClassVar[int]
    lease: _payload_pb2.Lease
    def __init__(self, lease: _Optional[_Union[_payload_pb2.Lease, _Mapping]] = ...) -> None: ...

class ScoredIdsRequest(_message.Message):
    __slots__ = ("session_id", "request_id", "input_ids", "row_lengths", "prefix_ids", "prefix_lengths", "row_windows", "bad_rows", "ids", "ids_per_position")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    INPUT_IDS_FIELD_NUMBER: _ClassVar[int]
    ROW_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_IDS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    ROW_WINDOWS_FIELD_NUMBER: _ClassVar[int]
    BAD_ROWS_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    IDS_PER_POSITION_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    request_id: str
    input_ids: bytes
    row_lengths: _containers.RepeatedScalarFieldContainer[int]
    prefix_ids: bytes
    prefix_lengths: _containers.RepeatedScalarFieldContainer[int]
    row_windows: _containers.RepeatedScalarFieldContainer[int]
    bad_rows: BadRowPolicy
    ids: bytes
    ids_per_position: int
    def __init__(self, session_id: _Optional[str] = ..., request_id: _Optional[str] = ..., input_ids: _Optional[bytes] = ..., row_lengths: _Optional[_Iterable[int]] = ..., prefix_ids: _Optional[bytes] = ..., prefix_lengths: _Optional[_Iterable[int]] = ..., row_windows: _Optional[_Iterable[int]] = ..., bad_rows: _Optional[_Union[BadRowPolicy, str]] = ..., ids: _Optional[bytes] = ..., ids_per_position: _Optional[int] = ...) -> None: ...

class ScoredIdsResponse(_message.Message):
    __slots__ = ("lease",)
    LEASE_FIELD_NUMBER: _ClassVar[int]
    lease: _payload_pb2.Lease
    def __init__(self, lease: _Optional[_Union[_payload_pb2.Lease, _Mapping]] = ...) -> None: ...
