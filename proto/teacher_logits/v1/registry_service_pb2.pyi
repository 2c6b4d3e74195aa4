from teacher_logits.v1 import device_pb2 as _device_pb2
from teacher_logits.v1 import payload_pb2 as _payload_pb2
from teacher_logits.v1 import profile_pb2 as _profile_pb2
from teacher_logits.v1 import session_pb2 as _session_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class OpenPublisherRequest(_message.Message):
    __slots__ = ("request_id", "protocol_version", "profile", "probe", "probe_challenge", "newest_protocol_version", "features")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    PROBE_CHALLENGE_FIELD_NUMBER: _ClassVar[int]
    NEWEST_PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    protocol_version: int
    profile: _profile_pb2.TeacherProfile
    probe: _device_pb2.DeviceProbe
    probe_challenge: bytes
    newest_protocol_version: int
    features: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, request_id: _Optional[str] = ..., protocol_version: _Optional[int] = ..., profile: _Optional[_Union[_profile_pb2.TeacherProfile, _Mapping]] = ..., probe: _Optional[_Union[_device_pb2.DeviceProbe, _Mapping]] = ..., probe_challenge: _Optional[bytes] = ..., newest_protocol_version: _Optional[int] = ..., features: _Optional[_Iterable[str]] = ...) -> None: ...

class OpenPublisherResponse(_message.Message):
    __slots__ = ("session", "broker_path", "nonce")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    BROKER_PATH_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    session: _session_pb2.Session
    broker_path: str
    nonce: bytes
    def __init__(self, session: _Optional[_Union[_session_pb2.Session, _Mapping]] = ..., broker_path: _Optional[str] = ..., nonce: _Optional[bytes] = ...) -> None: ...

class ReservePayloadRequest(_message.Message):
    __slots__ = ("session_id", "request_id", "payload", "row_positions", "real_rows")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    ROW_POSITIONS_FIELD_NUMBER: _ClassVar[int]
    REAL_ROWS_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    request_id: str
    payload: _payload_pb2.Payload
    row_positions: _containers.RepeatedScalarFieldContainer[int]
    real_rows: int
    def __init__(self, session_id: _Optional[str] = ..., request_id: _Optional[str] = ..., payload: _Optional[_Union[_payload_pb2.Payload, _Mapping]] = ..., row_positions: _Optional[_Iterable[int]] = ..., real_rows: _Optional[int] = ...) -> None: ...

class ReservePayloadResponse(_message.Message):
    __slots__ = ("payload_id", "is_repeat", "lowest_open_step", "host_copy")
    PAYLOAD_ID_FIELD_NUMBER: _ClassVar[int]
    IS_REPEAT_FIELD_NUMBER: _ClassVar[int]
    LOWEST_OPEN_STEP_FIELD_NUMBER: _ClassVar[int]
    HOST_COPY_FIELD_NUMBER: _ClassVar[int]
    payload_id: str
    is_repeat: bool
    lowest_open_step: int
    host_copy: bool
    def __init__(self, payload_id: _Optional[str] = ..., is_repeat: bool = ..., lowest_open_step: _Optional[int] = ..., host_copy: bool = ...) -> None: ...

class WritePayloadRequest(_message.Message):
    __slots__ = ("session_id", "payload_id", "offset_bytes", "crc32c", "data")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_ID_FIELD_NUMBER: _ClassVar[int]
    OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    payload_id: str
    offset_bytes: int
    crc32c: int
    data: bytes
    def __init__(self, session_id: _Optional[str] = ..., payload_id: _Optional[str] = ..., offset_bytes: _Optional[int] = ..., crc32c: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class WritePayloadResponse(_message.Message):
    __slots__ = ("offset_bytes",)
    OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    offset_bytes: int
    def __init__(self, offset_bytes: _Optional[int] = ...) -> None: ...

class SealPayloadRequest(_message.Message):
    __slots__ = ("session_id", "payload_id", "extent", "bad_row_count", "valid_count", "digest", "host_copy")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_ID_FIELD_NUMBER: _ClassVar[int]
    EXTENT_FIELD_NUMBER: _ClassVar[int]
    BAD_ROW_COUNT_FIELD_NUMBER: _ClassVar[int]
    VALID_COUNT_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    HOST_COPY_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    payload_id: str
    extent: _payload_pb2.Extent
    bad_row_count: int
    valid_count: int
    digest: str
    host_copy: bool
    def __init__(self, session_id: _Optional[str] = ..., payload_id: _Optional[str] = ..., extent: _Optional[_Union[_payload_pb2.Extent, _Mapping]] = ..., bad_row_count: _Optional[int] = ..., valid_count: _Optional[int] = ..., digest: _Optional[str] = ..., host_copy: bool = ...) -> None: ...

class SealPayloadResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AbandonPayloadRequest(_message.Message):
    __slots__ = ("session_id", "payload_id")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    payload_id: str
    def __init__(self, session_id: _Optional[str] = ..., payload_id: _Optional[str] = ...) -> None: ...

class AbandonPayloadResponse(_message.Message):
    __slots__ = ("is_sealed",)
    IS_SEALED_FIELD_NUMBER: _ClassVar[int]
    is_sealed: bool
    def __init__(self, is_sealed: bool = ...) -> None: ...
