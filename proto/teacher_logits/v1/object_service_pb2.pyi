import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from teacher_logits.v1 import ray_pb2 as _ray_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
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
    __slots__ = ("holder", "object_id", "token")
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    OBJECT_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    holder: _ray_pb2.RayHolder
    object_id: str
    token: bytes
    def __init__(self, holder: _Optional[_Union[_ray_pb2.RayHolder, _Mapping]] = ..., object_id: _Optional[str] = ..., token: _Optional[bytes] = ...) -> None: ...
