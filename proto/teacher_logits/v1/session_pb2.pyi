import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from teacher_logits.v1 import profile_pb2 as _profile_pb2
from teacher_logits.v1 import tensor_pb2 as _tensor_pb2
from teacher_logits.v1 import transport_pb2 as _transport_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Verdict(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    VERDICT_UNSPECIFIED: _ClassVar[Verdict]
    VERDICT_PASSED: _ClassVar[Verdict]
    VERDICT_UNCHECKED: _ClassVar[Verdict]
VERDICT_UNSPECIFIED: Verdict
VERDICT_PASSED: Verdict
VERDICT_UNCHECKED: Verdict

class Check(_message.Message):
    __slots__ = ("name", "verdict", "detail")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    name: str
    verdict: Verdict
    detail: str
    def __init__(self, name: _Optional[str] = ..., verdict: _Optional[_Union[Verdict, str]] = ..., detail: _Optional[str] = ...) -> None: ...

class ErrorBound(_message.Message):
    __slots__ = ("relative", "of_range", "absolute", "kl", "gradient")
    RELATIVE_FIELD_NUMBER: _ClassVar[int]
    OF_RANGE_FIELD_NUMBER: _ClassVar[int]
    ABSOLUTE_FIELD_NUMBER: _ClassVar[int]
    KL_FIELD_NUMBER: _ClassVar[int]
    GRADIENT_FIELD_NUMBER: _ClassVar[int]
    relative: float
    of_range: float
    absolute: float
    kl: float
    gradient: float
    def __init__(self, relative: _Optional[float] = ..., of_range: _Optional[float] = ..., absolute: _Optional[float] = ..., kl: _Optional[float] = ..., gradient: _Optional[float] = ...) -> None: ...

class StreamTerms(_message.Message):
    __slots__ = ("values", "ids", "bound")
    VALUES_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    BOUND_FIELD_NUMBER: _ClassVar[int]
    values: _tensor_pb2.ValueCodec
    ids: _tensor_pb2.IdCodec
    bound: ErrorBound
    def __init__(self, values: _Optional[_Union[_tensor_pb2.ValueCodec, str]] = ..., ids: _Optional[_Union[_tensor_pb2.IdCodec, str]] = ..., bound: _Optional[_Union[ErrorBound, _Mapping]] = ...) -> None: ...

class Session(_message.Message):
    __slots__ = ("session_id", "epoch", "ttl", "renew_interval", "default_wait", "teacher", "checks", "transports", "vocabulary_size", "max_request_tokens", "stream", "protocol_version", "features")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TTL_FIELD_NUMBER: _ClassVar[int]
    RENEW_INTERVAL_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_WAIT_FIELD_NUMBER: _ClassVar[int]
    TEACHER_FIELD_NUMBER: _ClassVar[int]
    CHECKS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_REQUEST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    epoch: str
    ttl: _duration_pb2.Duration
    renew_interval: _duration_pb2.Duration
    default_wait: _duration_pb2.Duration
    teacher: _profile_pb2.TeacherProfile
    checks: _containers.RepeatedCompositeFieldContainer[Check]
    transports: _containers.RepeatedCompositeFieldContainer[_transport_pb2.SettledTransport]
    vocabulary_size: int
    max_request_tokens: int
    stream: StreamTerms
    protocol_version: int
    features: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, session_id: _Optional[str] = ..., epoch: _Optional[str] = ..., ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., renew_interval: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., default_wait: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., teacher: _Optional[_Union[_profile_pb2.TeacherProfile, _Mapping]] = ..., checks: _Optional[_Iterable[_Union[Check, _Mapping]]] = ..., transports: _Optional[_Iterable[_Union[_transport_pb2.SettledTransport, _Mapping]]] = ..., vocabulary_size: _Optional[int] = ..., max_request_tokens: _Optional[int] = ..., stream: _Optional[_Union[StreamTerms, _Mapping]] = ..., protocol_version: _Optional[int] = ..., features: _Optional[_Iterable[str]] = ...) -> None: ...
