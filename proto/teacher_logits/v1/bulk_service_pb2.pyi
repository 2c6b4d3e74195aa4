from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class ReadPayloadRequest(_message.Message):
    __slots__ = ("session_id", "lease_id", "offset_bytes", "as_written")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    AS_WRITTEN_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    lease_id: str
    offset_bytes: int
    as_written: bool
    def __init__(self, session_id: _Optional[str] = ..., lease_id: _Optional[str] = ..., offset_bytes: _Optional[int] = ..., as_written: bool = ...) -> None: ...

class ReadPayloadResponse(_message.Message):
    __slots__ = ("offset_bytes", "crc32c", "data")
    OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    offset_bytes: int
    crc32c: int
    data: bytes
    def __init__(self, offset_bytes: _Optional[int] = ..., crc32c: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...
