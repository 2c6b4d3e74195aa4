from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DeviceMemory(_message.Message):
    __slots__ = ("handle", "device_uuid", "base_offset_bytes", "allocation_bytes", "size_bytes")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_UUID_FIELD_NUMBER: _ClassVar[int]
    BASE_OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    ALLOCATION_BYTES_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    handle: bytes
    device_uuid: str
    base_offset_bytes: int
    allocation_bytes: int
    size_bytes: int
    def __init__(self, handle: _Optional[bytes] = ..., device_uuid: _Optional[str] = ..., base_offset_bytes: _Optional[int] = ..., allocation_bytes: _Optional[int] = ..., size_bytes: _Optional[int] = ...) -> None: ...

class DeviceProbe(_message.Message):
    __slots__ = ("writer_id", "memory", "pid_namespace", "host")
    WRITER_ID_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    PID_NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    writer_id: str
    memory: DeviceMemory
    pid_namespace: int
    host: str
    def __init__(self, writer_id: _Optional[str] = ..., memory: _Optional[_Union[DeviceMemory, _Mapping]] = ..., pid_namespace: _Optional[int] = ..., host: _Optional[str] = ...) -> None: ...
