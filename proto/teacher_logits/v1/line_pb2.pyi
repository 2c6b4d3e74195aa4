from teacher_logits.v1 import device_pb2 as _device_pb2
from teacher_logits.v1 import payload_pb2 as _payload_pb2
from teacher_logits.v1 import registry_service_pb2 as _registry_service_pb2
from teacher_logits.v1 import teacher_logits_service_pb2 as _teacher_logits_service_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LineRequest(_message.Message):
    __slots__ = ("call_id", "hello", "get_slab", "acquire", "release", "renew", "want_steps", "put_slab", "drop_slab", "reserve", "seal", "abandon", "announce", "traceparent")
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    GET_SLAB_FIELD_NUMBER: _ClassVar[int]
    ACQUIRE_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    RENEW_FIELD_NUMBER: _ClassVar[int]
    WANT_STEPS_FIELD_NUMBER: _ClassVar[int]
    PUT_SLAB_FIELD_NUMBER: _ClassVar[int]
    DROP_SLAB_FIELD_NUMBER: _ClassVar[int]
    RESERVE_FIELD_NUMBER: _ClassVar[int]
    SEAL_FIELD_NUMBER: _ClassVar[int]
    ABANDON_FIELD_NUMBER: _ClassVar[int]
    ANNOUNCE_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    call_id: int
    hello: HelloRequest
    get_slab: GetSlabRequest
    acquire: _teacher_logits_service_pb2.AcquirePayloadRequest
    release: _teacher_logits_service_pb2.ReleasePayloadRequest
    renew: _teacher_logits_service_pb2.RenewSessionRequest
    want_steps: WantStepsRequest
    put_slab: PutSlabRequest
    drop_slab: DropSlabRequest
    reserve: _registry_service_pb2.ReservePayloadRequest
    seal: _registry_service_pb2.SealPayloadRequest
    abandon: _registry_service_pb2.AbandonPayloadRequest
    announce: AnnouncePayloadRequest
    traceparent: str
    def __init__(self, call_id: _Optional[int] = ..., hello: _Optional[_Union[HelloRequest, _Mapping]] = ..., get_slab: _Optional[_Union[GetSlabRequest, _Mapping]] = ..., acquire: _Optional[_Union[_teacher_logits_service_pb2.AcquirePayloadRequest, _Mapping]] = ..., release: _Optional[_Union[_teacher_logits_service_pb2.ReleasePayloadRequest, _Mapping]] = ..., renew: _Optional[_Union[_teacher_logits_service_pb2.RenewSessionRequest, _Mapping]] = ..., want_steps: _Optional[_Union[WantStepsRequest, _Mapping]] = ..., put_slab: _Optional[_Union[PutSlabRequest, _Mapping]] = ..., drop_slab: _Optional[_Union[DropSlabRequest, _Mapping]] = ..., reserve: _Optional[_Union[_registry_service_pb2.ReservePayloadRequest, _Mapping]] = ..., seal: _Optional[_Union[_registry_service_pb2.SealPayloadRequest, _Mapping]] = ..., abandon: _Optional[_Union[_registry_service_pb2.AbandonPayloadRequest, _Mapping]] = ..., announce: _Optional[_Union[AnnouncePayloadRequest, _Mapping]] = ..., traceparent: _Optional[str] = ...) -> None: ...

class LineReply(_message.Message):
    __slots__ = ("call_id", "status", "hello", "get_slab", "acquire", "release", "renew", "want_steps", "put_slab", "drop_slab", "reserve", "seal", "abandon", "step", "freed", "slabs_gone", "writers_came", "announce", "withdrawn")
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    GET_SLAB_FIELD_NUMBER: _ClassVar[int]
    ACQUIRE_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    RENEW_FIELD_NUMBER: _ClassVar[int]
    WANT_STEPS_FIELD_NUMBER: _ClassVar[int]
    PUT_SLAB_FIELD_NUMBER: _ClassVar[int]
    DROP_SLAB_FIELD_NUMBER: _ClassVar[int]
    RESERVE_FIELD_NUMBER: _ClassVar[int]
    SEAL_FIELD_NUMBER: _ClassVar[int]
    ABANDON_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    FREED_FIELD_NUMBER: _ClassVar[int]
    SLABS_GONE_FIELD_NUMBER: _ClassVar[int]
    WRITERS_CAME_FIELD_NUMBER: _ClassVar[int]
    ANNOUNCE_FIELD_NUMBER: _ClassVar[int]
    WITHDRAWN_FIELD_NUMBER: _ClassVar[int]
    call_id: int
    status: bytes
    hello: HelloResponse
    get_slab: GetSlabResponse
    acquire: _teacher_logits_service_pb2.AcquirePayloadResponse
    release: _teacher_logits_service_pb2.ReleasePayloadResponse
    renew: _teacher_logits_service_pb2.RenewSessionResponse
    want_steps: WantStepsResponse
    put_slab: PutSlabResponse
    drop_slab: DropSlabResponse
    reserve: _registry_service_pb2.ReservePayloadResponse
    seal: _registry_service_pb2.SealPayloadResponse
    abandon: _registry_service_pb2.AbandonPayloadResponse
    step: _payload_pb2.StepGrant
    freed: RoomFreed
    slabs_gone: SlabsGone
    writers_came: WritersCame
    announce: AnnouncePayloadResponse
    withdrawn: StepWithdrawn
    def __init__(self, call_id: _Optional[int] = ..., status: _Optional[bytes] = ..., hello: _Optional[_Union[HelloResponse, _Mapping]] = ..., get_slab: _Optional[_Union[GetSlabResponse, _Mapping]] = ..., acquire: _Optional[_Union[_teacher_logits_service_pb2.AcquirePayloadResponse, _Mapping]] = ..., release: _Optional[_Union[_teacher_logits_service_pb2.ReleasePayloadResponse, _Mapping]] = ..., renew: _Optional[_Union[_teacher_logits_service_pb2.RenewSessionResponse, _Mapping]] = ..., want_steps: _Optional[_Union[WantStepsResponse, _Mapping]] = ..., put_slab: _Optional[_Union[PutSlabResponse, _Mapping]] = ..., drop_slab: _Optional[_Union[DropSlabResponse, _Mapping]] = ..., reserve: _Optional[_Union[_registry_service_pb2.ReservePayloadResponse, _Mapping]] = ..., seal: _Optional[_Union[_registry_service_pb2.SealPayloadResponse, _Mapping]] = ..., abandon: _Optional[_Union[_registry_service_pb2.AbandonPayloadResponse, _Mapping]] = ..., step: _Optional[_Union[_payload_pb2.StepGrant, _Mapping]] = ..., freed: _Optional[_Union[RoomFreed, _Mapping]] = ..., slabs_gone: _Optional[_Union[SlabsGone, _Mapping]] = ..., writers_came: _Optional[_Union[WritersCame, _Mapping]] = ..., announce: _Optional[_Union[AnnouncePayloadResponse, _Mapping]] = ..., withdrawn: _Optional[_Union[StepWithdrawn, _Mapping]] = ...) -> None: ...

class HelloRequest(_message.Message):
    __slots__ = ("session_id", "nonce", "shows_secret")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    SHOWS_SECRET_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    nonce: bytes
    shows_secret: bool
    def __init__(self, session_id: _Optional[str] = ..., nonce: _Optional[bytes] = ..., shows_secret: bool = ...) -> None: ...

class HelloResponse(_message.Message):
    __slots__ = ("challenge_size_bytes", "secret")
    CHALLENGE_SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    challenge_size_bytes: int
    secret: str
    def __init__(self, challenge_size_bytes: _Optional[int] = ..., secret: _Optional[str] = ...) -> None: ...

class GetSlabRequest(_message.Message):
    __slots__ = ("slab_id",)
    SLAB_ID_FIELD_NUMBER: _ClassVar[int]
    slab_id: str
    def __init__(self, slab_id: _Optional[str] = ...) -> None: ...

class GetSlabResponse(_message.Message):
    __slots__ = ("slab_id", "size_bytes", "device")
    SLAB_ID_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    slab_id: str
    size_bytes: int
    device: _device_pb2.DeviceMemory
    def __init__(self, slab_id: _Optional[str] = ..., size_bytes: _Optional[int] = ..., device: _Optional[_Union[_device_pb2.DeviceMemory, _Mapping]] = ...) -> None: ...

class WantStepsRequest(_message.Message):
    __slots__ = ("session_id", "first_step", "count")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_STEP_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    first_step: int
    count: int
    def __init__(self, session_id: _Optional[str] = ..., first_step: _Optional[int] = ..., count: _Optional[int] = ...) -> None: ...

class WantStepsResponse(_message.Message):
    __slots__ = ("lacking",)
    LACKING_FIELD_NUMBER: _ClassVar[int]
    lacking: str
    def __init__(self, lacking: _Optional[str] = ...) -> None: ...

class PutSlabRequest(_message.Message):
    __slots__ = ("slab_id", "size_bytes", "device")
    SLAB_ID_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    slab_id: str
    size_bytes: int
    device: _device_pb2.DeviceMemory
    def __init__(self, slab_id: _Optional[str] = ..., size_bytes: _Optional[int] = ..., device: _Optional[_Union[_device_pb2.DeviceMemory, _Mapping]] = ...) -> None: ...

class PutSlabResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DropSlabRequest(_message.Message):
    __slots__ = ("slab_id",)
    SLAB_ID_FIELD_NUMBER: _ClassVar[int]
    slab_id: str
    def __init__(self, slab_id: _Optional[str] = ...) -> None: ...

class DropSlabResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AnnouncePayloadRequest(_message.Message):
    __slots__ = ("session_id", "payload_id", "extent", "valid_count")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_ID_FIELD_NUMBER: _ClassVar[int]
    EXTENT_FIELD_NUMBER: _ClassVar[int]
    VALID_COUNT_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    payload_id: str
    extent: _payload_pb2.Extent
    valid_count: int
    def __init__(self, session_id: _Optional[str] = ..., payload_id: _Optional[str] = ..., extent: _Optional[_Union[_payload_pb2.Extent, _Mapping]] = ..., valid_count: _Optional[int] = ...) -> None: ...

class AnnouncePayloadResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StepWithdrawn(_message.Message):
    __slots__ = ("step",)
    STEP_FIELD_NUMBER: _ClassVar[int]
    step: int
    def __init__(self, step: _Optional[int] = ...) -> None: ...

class RoomFreed(_message.Message):
    __slots__ = ("payload_ids", "lowest_open_step")
    PAYLOAD_IDS_FIELD_NUMBER: _ClassVar[int]
    LOWEST_OPEN_STEP_FIELD_NUMBER: _ClassVar[int]
    payload_ids: _containers.RepeatedScalarFieldContainer[str]
    lowest_open_step: int
    def __init__(self, payload_ids: _Optional[_Iterable[str]] = ..., lowest_open_step: _Optional[int] = ...) -> None: ...

class WritersCame(_message.Message):
    __slots__ = ("probes",)
    PROBES_FIELD_NUMBER: _ClassVar[int]
    probes: _containers.RepeatedCompositeFieldContainer[_device_pb2.DeviceProbe]
    def __init__(self, probes: _Optional[_Iterable[_Union[_device_pb2.DeviceProbe, _Mapping]]] = ...) -> None: ...

class SlabsGone(_message.Message):
    __slots__ = ("slab_ids",)
    SLAB_IDS_FIELD_NUMBER: _ClassVar[int]
    slab_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, slab_ids: _Optional[_Iterable[str]] = ...) -> None: ...
