from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ElementType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ELEMENT_TYPE_UNSPECIFIED: _ClassVar[ElementType]
    ELEMENT_TYPE_BFLOAT16: _ClassVar[ElementType]
    ELEMENT_TYPE_FLOAT16: _ClassVar[ElementType]
    ELEMENT_TYPE_FLOAT32: _ClassVar[ElementType]
    ELEMENT_TYPE_INT32: _ClassVar[ElementType]
    ELEMENT_TYPE_INT64: _ClassVar[ElementType]
    ELEMENT_TYPE_UINT8: _ClassVar[ElementType]

class ColumnKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    COLUMN_KIND_UNSPECIFIED: _ClassVar[ColumnKind]
    COLUMN_KIND_TOPK_IDS: _ClassVar[ColumnKind]
    COLUMN_KIND_TOPK_LOGPROBS: _ClassVar[ColumnKind]
    COLUMN_KIND_TOPK_LOGITS: _ClassVar[ColumnKind]
    COLUMN_KIND_LOG_TAIL: _ClassVar[ColumnKind]
    COLUMN_KIND_LOGSUMEXP: _ClassVar[ColumnKind]
    COLUMN_KIND_ACTUAL_LOGPROB: _ClassVar[ColumnKind]
    COLUMN_KIND_ROW_OFFSETS: _ClassVar[ColumnKind]
    COLUMN_KIND_ROW_WINDOWS: _ClassVar[ColumnKind]
    COLUMN_KIND_ROW_DIGESTS: _ClassVar[ColumnKind]
    COLUMN_KIND_ROW_STATUS: _ClassVar[ColumnKind]
    COLUMN_KIND_LOGITS: _ClassVar[ColumnKind]
    COLUMN_KIND_HIDDEN_STATES: _ClassVar[ColumnKind]
    COLUMN_KIND_SAMPLED_IDS: _ClassVar[ColumnKind]
    COLUMN_KIND_SAMPLED_WEIGHTS: _ClassVar[ColumnKind]
    COLUMN_KIND_SCORED_IDS: _ClassVar[ColumnKind]
    COLUMN_KIND_SCORED_LOGPROBS: _ClassVar[ColumnKind]
    COLUMN_KIND_ENTROPY: _ClassVar[ColumnKind]
    COLUMN_KIND_ROW_RUNS: _ClassVar[ColumnKind]

class ValueCodec(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    VALUE_CODEC_UNSPECIFIED: _ClassVar[ValueCodec]
    VALUE_CODEC_AS_WRITTEN: _ClassVar[ValueCodec]
    VALUE_CODEC_FLOAT32: _ClassVar[ValueCodec]
    VALUE_CODEC_FLOAT16: _ClassVar[ValueCodec]
    VALUE_CODEC_BFLOAT16: _ClassVar[ValueCodec]
    VALUE_CODEC_BFLOAT16_EXACT: _ClassVar[ValueCodec]
    VALUE_CODEC_UINT8: _ClassVar[ValueCodec]

class IdCodec(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ID_CODEC_UNSPECIFIED: _ClassVar[IdCodec]
    ID_CODEC_INT32: _ClassVar[IdCodec]
    ID_CODEC_PLANES24: _ClassVar[IdCodec]
    ID_CODEC_PACKED18: _ClassVar[IdCodec]

class Plane(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PLANE_UNSPECIFIED: _ClassVar[Plane]
    PLANE_AS_WRITTEN: _ClassVar[Plane]
    PLANE_FLOAT16: _ClassVar[Plane]
    PLANE_BFLOAT16: _ClassVar[Plane]
    PLANE_FIRST: _ClassVar[Plane]
    PLANE_RAW: _ClassVar[Plane]
    PLANE_SCALE: _ClassVar[Plane]
    PLANE_CODES: _ClassVar[Plane]
    PLANE_LOW16: _ClassVar[Plane]
    PLANE_HIGH8: _ClassVar[Plane]
    PLANE_PACKED18: _ClassVar[Plane]
ELEMENT_TYPE_UNSPECIFIED: ElementType
ELEMENT_TYPE_BFLOAT16: ElementType
ELEMENT_TYPE_FLOAT16: ElementType
ELEMENT_TYPE_FLOAT32: ElementType
ELEMENT_TYPE_INT32: ElementType
ELEMENT_TYPE_INT64: ElementType
ELEMENT_TYPE_UINT8: ElementType
COLUMN_KIND_UNSPECIFIED: ColumnKind
COLUMN_KIND_TOPK_IDS: ColumnKind
COLUMN_KIND_TOPK_LOGPROBS: ColumnKind
COLUMN_KIND_TOPK_LOGITS: ColumnKind
COLUMN_KIND_LOG_TAIL: ColumnKind
COLUMN_KIND_LOGSUMEXP: ColumnKind
COLUMN_KIND_ACTUAL_LOGPROB: ColumnKind
COLUMN_KIND_ROW_OFFSETS: ColumnKind
COLUMN_KIND_ROW_WINDOWS: ColumnKind
COLUMN_KIND_ROW_DIGESTS: ColumnKind
COLUMN_KIND_ROW_STATUS: ColumnKind
COLUMN_KIND_LOGITS: ColumnKind
COLUMN_KIND_HIDDEN_STATES: ColumnKind
COLUMN_KIND_SAMPLED_IDS: ColumnKind
COLUMN_KIND_SAMPLED_WEIGHTS: ColumnKind
COLUMN_KIND_SCORED_IDS: ColumnKind
COLUMN_KIND_SCORED_LOGPROBS: ColumnKind
COLUMN_KIND_ENTROPY: ColumnKind
COLUMN_KIND_ROW_RUNS: ColumnKind
VALUE_CODEC_UNSPECIFIED: ValueCodec
VALUE_CODEC_AS_WRITTEN: ValueCodec
VALUE_CODEC_FLOAT32: ValueCodec
VALUE_CODEC_FLOAT16: ValueCodec
VALUE_CODEC_BFLOAT16: ValueCodec
VALUE_CODEC_BFLOAT16_EXACT: ValueCodec
VALUE_CODEC_UINT8: ValueCodec
ID_CODEC_UNSPECIFIED: IdCodec
ID_CODEC_INT32: IdCodec
ID_CODEC_PLANES24: IdCodec
ID_CODEC_PACKED18: IdCodec
PLANE_UNSPECIFIED: Plane
PLANE_AS_WRITTEN: Plane
PLANE_FLOAT16: Plane
PLANE_BFLOAT16: Plane
PLANE_FIRST: Plane
PLANE_RAW: Plane
PLANE_SCALE: Plane
PLANE_CODES: Plane
PLANE_LOW16: Plane
PLANE_HIGH8: Plane
PLANE_PACKED18: Plane

class Column(_message.Message):
    __slots__ = ("kind", "element_type", "shape", "offset_bytes")
    KIND_FIELD_NUMBER: _ClassVar[int]
    ELEMENT_TYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    kind: ColumnKind
    element_type: ElementType
    shape: _containers.RepeatedScalarFieldContainer[int]
    offset_bytes: int
    def __init__(self, kind: _Optional[_Union[ColumnKind, str]] = ..., element_type: _Optional[_Union[ElementType, str]] = ..., shape: _Optional[_Iterable[int]] = ..., offset_bytes: _Optional[int] = ...) -> None: ...

class EncodedColumn(_message.Message):
    __slots__ = ("kind", "plane", "row_count", "row_bytes", "offset_bytes")
    KIND_FIELD_NUMBER: _ClassVar[int]
    PLANE_FIELD_NUMBER: _ClassVar[int]
    ROW_COUNT_FIELD_NUMBER: _ClassVar[int]
    ROW_BYTES_FIELD_NUMBER: _ClassVar[int]
    OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    kind: ColumnKind
    plane: Plane
    row_count: int
    row_bytes: int
    offset_bytes: int
    def __init__(self, kind: _Optional[_Union[ColumnKind, str]] = ..., plane: _Optional[_Union[Plane, str]] = ..., row_count: _Optional[int] = ..., row_bytes: _Optional[int] = ..., offset_bytes: _Optional[int] = ...) -> None: ...
