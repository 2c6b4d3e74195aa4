from teacher_logits.v1 import teacher_logits_service_pb2 as _teacher_logits_service_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LineRequest(_message.Message):
    __slots__ = ("call_id", "hello", "get_slab", "acquire", "release", "renew")
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    GET_SLAB_FIELD_NUMBER: _ClassVar[int]
    ACQUIRE_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    RENEW_FIELD_NUMBER: _ClassVar[int]
    call_id: int
    hello: HelloRequest
    get_slab: GetSlabRequest
    acquire: _teacher_logits_service_pb2.AcquirePayloadRequest
    release: _teacher_logits_service_pb2.ReleasePayloadRequest
    renew: _teacher_logits_service_pb2.RenewSessionRequest
    def __init__(self, call_id: _Optional[int] = ..., hello: _Optional[_Union[HelloRequest, _Mapping]] = ..., get_slab: _Optional[_Union[GetSlabRequest, _Mapping]] = ..., acquire: _Optional[_Union[_teacher_logits_service_pb2.AcquirePayloadRequest, _Mapping]] = ..., release: _Optional[_Union[_teacher_logits_service_pb2.ReleasePayloadRequest, _Mapping]] = ..., renew: _Optional[_Union[_teacher_logits_service_pb2.RenewSessionRequest, _Mapping]] = ...) -> None: ...

class LineReply(_message.Message):
    __slots__ = ("call_id", "status", "hello", "get_slab", "acquire", "release", "renew")
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    GET_SLAB_FIELD_NUMBER: _ClassVar[int]
    ACQUIRE_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    RENEW_FIELD_NUMBER: _ClassVar[int]
    call_id: int
    status: bytes
    hello: HelloResponse
    get_slab: GetSlabResponse
    acquire: _teacher_logits_service_pb2.AcquirePayloadResponse
    release: _teacher_logits_service_pb2.ReleasePayloadResponse
    renew: _teacher_logits_service_pb2.RenewSessionResponse
    def __init__(self, call_id: _Optional[int] = ..., status: _Optional[bytes] = ..., hello: _Optional[_Union[HelloResponse, _Mapping]] = ..., get_slab: _Optional[_Union[GetSlabResponse, _Mapping]] = ..., acquire: _Optional[_Union[_teacher_logits_service_pb2.AcquirePayloadResponse, _Mapping]] = ..., release: _Optional[_Union[_teacher_logits_service_pb2.ReleasePayloadResponse, _Mapping]] = ..., renew: _Optional[_Union[_teacher_logits_service_pb2.RenewSessionResponse, _Mapping]] = ...) -> None: ...

class HelloRequest(_message.Message):
    __slots__ = ("session_id", "nonce")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    nonce: bytes
    def __init__(self, session_id: _Optional[str] = ..., nonce: _Optional[bytes] = ...) -> None: ...

class HelloResponse(_message.Message):
    __slots__ = ("challenge_size_bytes",)
    CHALLENGE_SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    challenge_size_bytes: int
    def __init__(self, challenge_size_bytes: _Optional[int] = ...) -> None: ...

class GetSlabRequest(_message.Message):
    __slots__ = ("slab_id",)
    SLAB_ID_FIELD_NUMBER: _ClassVar[int]
    slab_id: str
    def __init__(self, slab_id: _Optional[str] = ...) -> None: ...

class GetSlabResponse(_message.Message):
    __slots__ = ("slab_id", "size_bytes")
    SLAB_ID_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    slab_id: str
    size_bytes: int
    def __init__(self, slab_id: _Optional[str] = ..., size_bytes: _Optional[int] = ...) -> None: ...
