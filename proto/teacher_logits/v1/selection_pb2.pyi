from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Selection(_message.Message):
    __slots__ = ("top_k", "nucleus", "sampled", "client_ids")
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    NUCLEUS_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_FIELD_NUMBER: _ClassVar[int]
    CLIENT_IDS_FIELD_NUMBER: _ClassVar[int]
    top_k: TopK
    nucleus: Nucleus
    sampled: Sampled
    client_ids: ClientIds
    def __init__(self, top_k: _Optional[_Union[TopK, _Mapping]] = ..., nucleus: _Optional[_Union[Nucleus, _Mapping]] = ..., sampled: _Optional[_Union[Sampled, _Mapping]] = ..., client_ids: _Optional[_Union[ClientIds, _Mapping]] = ...) -> None: ...

class TopK(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Nucleus(_message.Message):
    __slots__ = ("mass", "least")
    MASS_FIELD_NUMBER: _ClassVar[int]
    LEAST_FIELD_NUMBER: _ClassVar[int]
    mass: float
    least: int
    def __init__(self, mass: _Optional[float] = ..., least: _Optional[int] = ...) -> None: ...

class Sampled(_message.Message):
    __slots__ = ("seed",)
    SEED_FIELD_NUMBER: _ClassVar[int]
    seed: int
    def __init__(self, seed: _Optional[int] = ...) -> None: ...

class ClientIds(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
