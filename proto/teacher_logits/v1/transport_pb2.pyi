from teacher_logits.v1 import device_pb2 as _device_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Transport(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TRANSPORT_UNSPECIFIED: _ClassVar[Transport]
    TRANSPORT_LOCAL: _ClassVar[Transport]
    TRANSPORT_CUDA_IPC: _ClassVar[Transport]
    TRANSPORT_SHARED_MEMORY: _ClassVar[Transport]
    TRANSPORT_RAY_OBJECT: _ClassVar[Transport]
    TRANSPORT_STREAM: _ClassVar[Transport]
TRANSPORT_UNSPECIFIED: Transport
TRANSPORT_LOCAL: Transport
TRANSPORT_CUDA_IPC: Transport
TRANSPORT_SHARED_MEMORY: Transport
TRANSPORT_RAY_OBJECT: Transport
TRANSPORT_STREAM: Transport

class TransportRefusal(_message.Message):
    __slots__ = ("transport", "reason", "message", "writer_id")
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    WRITER_ID_FIELD_NUMBER: _ClassVar[int]
    transport: Transport
    reason: str
    message: str
    writer_id: str
    def __init__(self, transport: _Optional[_Union[Transport, str]] = ..., reason: _Optional[str] = ..., message: _Optional[str] = ..., writer_id: _Optional[str] = ...) -> None: ...

class SettledTransport(_message.Message):
    __slots__ = ("writer_id", "transport", "refusals", "probe")
    WRITER_ID_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    REFUSALS_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    writer_id: str
    transport: Transport
    refusals: _containers.RepeatedCompositeFieldContainer[TransportRefusal]
    probe: _device_pb2.DeviceProbe
    def __init__(self, writer_id: _Optional[str] = ..., transport: _Optional[_Union[Transport, str]] = ..., refusals: _Optional[_Iterable[_Union[TransportRefusal, _Mapping]]] = ..., probe: _Optional[_Union[_device_pb2.DeviceProbe, _Mapping]] = ...) -> None: ...
