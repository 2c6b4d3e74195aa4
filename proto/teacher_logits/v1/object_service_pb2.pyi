import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from teacher_logits.v1 import ray_pb2 as _ray_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PutObjectRequest(_message.Message):
    __slots__ = ("session_id", "lease_id", "room_wait")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    ROOM_WAIT_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    lease_id: str
    room_wait: _duration_pb2.Duration
    def __init__(self, session_id: _Optional[str] = ..., lease_id: _Optional[str] = ..., room_wait: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class PutObjectResponse(_message.Message):
    __slots__ = ("holder", "object_id", "token", "parts")
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    OBJECT_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    holder: _ray_pb2.RayHolder
    object_id: str
    token: bytes
    parts: _containers.RepeatedCompositeFieldContainer[ObjectPart]
    def __init__(self, holder: _Optional[_Union[_ray_pb2.RayHolder, _Mapping]] = ..., object_id: _Optional[str] = ..., token: _Optional[bytes] = ..., parts: _Optional[_Iterable[_Union[ObjectPart, _Mapping]]] = ...) -> None: ...

class ObjectPart(_message.Message):
    __slots__ = ("holder", "object_id", "token", "first_row", "row_count", "first_position", "position_count")
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    OBJECT_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    FIRST_ROW_FIELD_NUMBER: _ClassVar[int]
    ROW_COUNT_FIELD_NUMBER: _ClassVar[int]
    FIRST_POSITION_FIELD_NUMBER: _ClassVar[int]
    POSITION_COUNT_FIELD_NUMBER: _ClassVar[int]
    holder: _ray_pb2.RayHolder
    object_id: str
    token: bytes
    first_row: int
    row_count: int
    first_position: int
    position_count: int
    def __init__(self, holder: _Optional[_Union[_ray_pb2.RayHolder, _Mapping]] = ..., object_id: _Optional[str] = ..., token: _Optional[bytes] = ..., first_row: _Optional[int] = ..., row_count: _Optional[int] = ..., first_position: _Optional[int] = ..., position_count: _Optional[int] = ...) -> None: ...
