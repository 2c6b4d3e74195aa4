from teacher_logits.v1 import device_pb2 as _device_pb2
from teacher_logits.v1 import payload_pb2 as _payload_pb2
from teacher_logits.v1 import profile_pb2 as _profile_pb2
from teacher_logits.v1 import ray_pb2 as _ray_pb2
from teacher_logits.v1 import session_pb2 as _session_pb2
from teacher_logits.v1 import transport_pb2 as _transport_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class OpenSessionRequest(_message.Message):
    __slots__ = ("request_id", "protocol_version", "profile", "newest_protocol_version", "features")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    NEWEST_PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    protocol_version: int
    profile: _profile_pb2.StudentProfile
    newest_protocol_version: int
    features: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, request_id: _Optional[str] = ..., protocol_version: _Optional[int] = ..., profile: _Optional[_Union[_profile_pb2.StudentProfile, _Mapping]] = ..., newest_protocol_version: _Optional[int] = ..., features: _Optional[_Iterable[str]] = ...) -> None: ...

class OpenSessionResponse(_message.Message):
    __slots__ = ("session", "broker_path", "nonce", "device_probes", "ray_holder")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    BROKER_PATH_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_PROBES_FIELD_NUMBER: _ClassVar[int]
    RAY_HOLDER_FIELD_NUMBER: _ClassVar[int]
    session: _session_pb2.Session
    broker_path: str
    nonce: bytes
    device_probes: _containers.RepeatedCompositeFieldContainer[_device_pb2.DeviceProbe]
    ray_holder: _ray_pb2.RayHolder
    def __init__(self, session: _Optional[_Union[_session_pb2.Session, _Mapping]] = ..., broker_path: _Optional[str] = ..., nonce: _Optional[bytes] = ..., device_probes: _Optional[_Iterable[_Union[_device_pb2.DeviceProbe, _Mapping]]] = ..., ray_holder: _Optional[_Union[_ray_pb2.RayHolder, _Mapping]] = ...) -> None: ...

class LocalityProof(_message.Message):
    __slots__ = ("transport", "writer_id", "mac")
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    WRITER_ID_FIELD_NUMBER: _ClassVar[int]
    MAC_FIELD_NUMBER: _ClassVar[int]
    transport: _transport_pb2.Transport
    writer_id: str
    mac: bytes
    def __init__(self, transport: _Optional[_Union[_transport_pb2.Transport, str]] = ..., writer_id: _Optional[str] = ..., mac: _Optional[bytes] = ...) -> None: ...

class ProveLocalityRequest(_message.Message):
    __slots__ = ("session_id", "proofs", "failures")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PROOFS_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    proofs: _containers.RepeatedCompositeFieldContainer[LocalityProof]
    failures: _containers.RepeatedCompositeFieldContainer[_transport_pb2.TransportRefusal]
    def __init__(self, session_id: _Optional[str] = ..., proofs: _Optional[_Iterable[_Union[LocalityProof, _Mapping]]] = ..., failures: _Optional[_Iterable[_Union[_transport_pb2.TransportRefusal, _Mapping]]] = ...) -> None: ...

class ProveLocalityResponse(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: _session_pb2.Session
    def __init__(self, session: _Optional[_Union[_session_pb2.Session, _Mapping]] = ...) -> None: ...

class RenewSessionRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class RenewSessionResponse(_message.Message):
    __slots__ = ("draining",)
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    draining: bool
    def __init__(self, draining: bool = ...) -> None: ...

class CloseSessionRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class CloseSessionResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AcquirePayloadRequest(_message.Message):
    __slots__ = ("session_id", "request_id", "payload_id")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    request_id: str
    payload_id: str
    def __init__(self, session_id: _Optional[str] = ..., request_id: _Optional[str] = ..., payload_id: _Optional[str] = ...) -> None: ...

class AcquirePayloadResponse(_message.Message):
    __slots__ = ("lease",)
    LEASE_FIELD_NUMBER: _ClassVar[int]
    lease: _payload_pb2.Lease
    def __init__(self, lease: _Optional[_Union[_payload_pb2.Lease, _Mapping]] = ...) -> None: ...

class AcquireStepRequest(_message.Message):
    __slots__ = ("session_id", "request_id", "step")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    request_id: str
    step: int
    def __init__(self, session_id: _Optional[str] = ..., request_id: _Optional[str] = ..., step: _Optional[int] = ...) -> None: ...

class AcquireStepResponse(_message.Message):
    __slots__ = ("grant",)
    GRANT_FIELD_NUMBER: _ClassVar[int]
    grant: _payload_pb2.StepGrant
    def __init__(self, grant: _Optional[_Union[_payload_pb2.StepGrant, _Mapping]] = ...) -> None: ...

class ReleasePayloadRequest(_message.Message):
    __slots__ = ("session_id", "lease_id", "request_id", "unread")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    UNREAD_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    lease_id: str
    request_id: str
    unread: bool
    def __init__(self, session_id: _Optional[str] = ..., lease_id: _Optional[str] = ..., request_id: _Optional[str] = ..., unread: bool = ...) -> None: ...

class ReleasePayloadResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
