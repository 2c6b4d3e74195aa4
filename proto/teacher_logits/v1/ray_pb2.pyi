from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class RayHolder(_message.Message):
    __slots__ = ("ray_namespace", "name", "cluster_address", "node_id")
    RAY_NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    ray_namespace: str
    name: str
    cluster_address: str
    node_id: str
    def __init__(self, ray_namespace: _Optional[str] = ..., name: _Optional[str] = ..., cluster_address: _Optional[str] = ..., node_id: _Optional[str] = ...) -> None: ...
