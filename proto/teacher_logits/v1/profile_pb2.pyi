from teacher_logits.v1 import grid_pb2 as _grid_pb2
from teacher_logits.v1 import selection_pb2 as _selection_pb2
from teacher_logits.v1 import tensor_pb2 as _tensor_pb2
from teacher_logits.v1 import transport_pb2 as _transport_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Locality(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LOCALITY_UNSPECIFIED: _ClassVar[Locality]
    LOCALITY_PREFER: _ClassVar[Locality]
    LOCALITY_REQUIRE: _ClassVar[Locality]
    LOCALITY_RULE: _ClassVar[Locality]

class VocabularyPolicy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    VOCABULARY_POLICY_UNSPECIFIED: _ClassVar[VocabularyPolicy]
    VOCABULARY_POLICY_STRICT: _ClassVar[VocabularyPolicy]
    VOCABULARY_POLICY_TRUNCATE: _ClassVar[VocabularyPolicy]

class ShardedBy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SHARDED_BY_UNSPECIFIED: _ClassVar[ShardedBy]
    SHARDED_BY_VOCABULARY: _ClassVar[ShardedBy]
    SHARDED_BY_SEQUENCE: _ClassVar[ShardedBy]
    SHARDED_BY_ZIGZAG: _ClassVar[ShardedBy]
LOCALITY_UNSPECIFIED: Locality
LOCALITY_PREFER: Locality
LOCALITY_REQUIRE: Locality
LOCALITY_RULE: Locality
VOCABULARY_POLICY_UNSPECIFIED: VocabularyPolicy
VOCABULARY_POLICY_STRICT: VocabularyPolicy
VOCABULARY_POLICY_TRUNCATE: VocabularyPolicy
SHARDED_BY_UNSPECIFIED: ShardedBy
SHARDED_BY_VOCABULARY: ShardedBy
SHARDED_BY_SEQUENCE: ShardedBy
SHARDED_BY_ZIGZAG: ShardedBy

class TeacherProfile(_message.Message):
    __slots__ = ("teacher_id", "revision", "batch_grid", "model_grid", "tokenizer_fingerprint", "vocabulary_size", "head_rows", "top_k", "temperatures", "columns", "engine", "arithmetic_type", "hints", "max_row_tokens", "data_parallel_rank", "value_type", "selection", "sharded_by")
    TEACHER_ID_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    BATCH_GRID_FIELD_NUMBER: _ClassVar[int]
    MODEL_GRID_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_SIZE_FIELD_NUMBER: _ClassVar[int]
    HEAD_ROWS_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURES_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    ARITHMETIC_TYPE_FIELD_NUMBER: _ClassVar[int]
    HINTS_FIELD_NUMBER: _ClassVar[int]
    MAX_ROW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DATA_PARALLEL_RANK_FIELD_NUMBER: _ClassVar[int]
    VALUE_TYPE_FIELD_NUMBER: _ClassVar[int]
    SELECTION_FIELD_NUMBER: _ClassVar[int]
    SHARDED_BY_FIELD_NUMBER: _ClassVar[int]
    teacher_id: str
    revision: str
    batch_grid: _grid_pb2.BatchGrid
    model_grid: _grid_pb2.ModelGrid
    tokenizer_fingerprint: str
    vocabulary_size: int
    head_rows: int
    top_k: int
    temperatures: _containers.RepeatedScalarFieldContainer[float]
    columns: _containers.RepeatedScalarFieldContainer[_tensor_pb2.ColumnKind]
    engine: str
    arithmetic_type: str
    hints: _grid_pb2.NodeHints
    max_row_tokens: int
    data_parallel_rank: int
    value_type: _tensor_pb2.ElementType
    selection: _selection_pb2.Selection
    sharded_by: _containers.RepeatedScalarFieldContainer[ShardedBy]
    def __init__(self, teacher_id: _Optional[str] = ..., revision: _Optional[str] = ..., batch_grid: _Optional[_Union[_grid_pb2.BatchGrid, _Mapping]] = ..., model_grid: _Optional[_Union[_grid_pb2.ModelGrid, _Mapping]] = ..., tokenizer_fingerprint: _Optional[str] = ..., vocabulary_size: _Optional[int] = ..., head_rows: _Optional[int] = ..., top_k: _Optional[int] = ..., temperatures: _Optional[_Iterable[float]] = ..., columns: _Optional[_Iterable[_Union[_tensor_pb2.ColumnKind, str]]] = ..., engine: _Optional[str] = ..., arithmetic_type: _Optional[str] = ..., hints: _Optional[_Union[_grid_pb2.NodeHints, _Mapping]] = ..., max_row_tokens: _Optional[int] = ..., data_parallel_rank: _Optional[int] = ..., value_type: _Optional[_Union[_tensor_pb2.ElementType, str]] = ..., selection: _Optional[_Union[_selection_pb2.Selection, _Mapping]] = ..., sharded_by: _Optional[_Iterable[_Union[ShardedBy, str]]] = ...) -> None: ...

class StudentProfile(_message.Message):
    __slots__ = ("teacher_id", "batch_grid", "model_grid", "data_parallel_rank", "tokenizer_fingerprint", "vocabulary_size", "vocabulary_policy", "top_k", "temperatures", "columns", "value_type", "student_id", "readers_per_rank", "engine", "arithmetic_type", "transports", "locality", "hints", "selection", "value_codecs", "id_codecs")
    TEACHER_ID_FIELD_NUMBER: _ClassVar[int]
    BATCH_GRID_FIELD_NUMBER: _ClassVar[int]
    MODEL_GRID_FIELD_NUMBER: _ClassVar[int]
    DATA_PARALLEL_RANK_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_SIZE_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_POLICY_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURES_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    VALUE_TYPE_FIELD_NUMBER: _ClassVar[int]
    STUDENT_ID_FIELD_NUMBER: _ClassVar[int]
    READERS_PER_RANK_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    ARITHMETIC_TYPE_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    LOCALITY_FIELD_NUMBER: _ClassVar[int]
    HINTS_FIELD_NUMBER: _ClassVar[int]
    SELECTION_FIELD_NUMBER: _ClassVar[int]
    VALUE_CODECS_FIELD_NUMBER: _ClassVar[int]
    ID_CODECS_FIELD_NUMBER: _ClassVar[int]
    teacher_id: str
    batch_grid: _grid_pb2.BatchGrid
    model_grid: _grid_pb2.ModelGrid
    data_parallel_rank: int
    tokenizer_fingerprint: str
    vocabulary_size: int
    vocabulary_policy: VocabularyPolicy
    top_k: int
    temperatures: _containers.RepeatedScalarFieldContainer[float]
    columns: _containers.RepeatedScalarFieldContainer[_tensor_pb2.ColumnKind]
    value_type: _tensor_pb2.ElementType
    student_id: str
    readers_per_rank: int
    engine: str
    arithmetic_type: str
    transports: _containers.RepeatedScalarFieldContainer[_transport_pb2.Transport]
    locality: Locality
    hints: _grid_pb2.NodeHints
    selection: _selection_pb2.Selection
    value_codecs: _containers.RepeatedScalarFieldContainer[_tensor_pb2.ValueCodec]
    id_codecs: _containers.RepeatedScalarFieldContainer[_tensor_pb2.IdCodec]
    def __init__(self, teacher_id: _Optional[str] = ..., batch_grid: _Optional[_Union[_grid_pb2.BatchGrid, _Mapping]] = ..., model_grid: _Optional[_Union[_grid_pb2.ModelGrid, _Mapping]] = ..., data_parallel_rank: _Optional[int] = ..., tokenizer_fingerprint: _Optional[str] = ..., vocabulary_size: _Optional[int] = ..., vocabulary_policy: _Optional[_Union[VocabularyPolicy, str]] = ..., top_k: _Optional[int] = ..., temperatures: _Optional[_Iterable[float]] = ..., columns: _Optional[_Iterable[_Union[_tensor_pb2.ColumnKind, str]]] = ..., value_type: _Optional[_Union[_tensor_pb2.ElementType, str]] = ..., student_id: _Optional[str] = ..., readers_per_rank: _Optional[int] = ..., engine: _Optional[str] = ..., arithmetic_type: _Optional[str] = ..., transports: _Optional[_Iterable[_Union[_transport_pb2.Transport, str]]] = ..., locality: _Optional[_Union[Locality, str]] = ..., hints: _Optional[_Union[_grid_pb2.NodeHints, _Mapping]] = ..., selection: _Optional[_Union[_selection_pb2.Selection, _Mapping]] = ..., value_codecs: _Optional[_Iterable[_Union[_tensor_pb2.ValueCodec, str]]] = ..., id_codecs: _Optional[_Iterable[_Union[_tensor_pb2.IdCodec, str]]] = ...) -> None: ...
