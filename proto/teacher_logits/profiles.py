"""What each side says of itself before anything else: ``TeacherProfile`` and ``StudentProfile``.

Profiles are claims. The rules over them stand in ``grid``, ``locality`` and the server's
admission; node locality is proven apart (``transport``), and hints serve messages only.
"""

from __future__ import annotations

import enum
import reprlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from numbers import Real
from typing import TYPE_CHECKING

from teacher_logits.encodings import IdCodec, ValueCodec
from teacher_logits.errors import RequestInvalidError
from teacher_logits.grid import BatchGrid, is_whole
from teacher_logits.layout import VALUE_TYPES, ColumnKind, ElementType
from teacher_logits.locality import ModelGrid
from teacher_logits.selection_rules import (
    TOP_K,
    Nucleus,
    Sampled,
    SelectionRule,
    TopK,
    check_selection,
)
from teacher_logits.shard_parts import ShardedBy
from teacher_logits.transport import PREFERENCE, Locality, Transport
from teacher_logits.words import word_of, words_of

if TYPE_CHECKING:
    from collections.abc import Mapping

PROTOCOL_VERSION = 1


class VocabularyPolicy(enum.Enum):
    """What to do where teacher and student vocabularies differ in size."""

    STRICT = "strict"
    TRUNCATE = "truncate"


SCORED_COLUMNS = (
    ColumnKind.TOPK_IDS,
    ColumnKind.TOPK_LOGPROBS,
    ColumnKind.LOG_TAIL,
    ColumnKind.LOGSUMEXP,
    ColumnKind.ACTUAL_LOGPROB,
    ColumnKind.ROW_OFFSETS,
    ColumnKind.ROW_WINDOWS,
    ColumnKind.ROW_DIGESTS,
    ColumnKind.ROW_STATUS,
)
"""What an engine's payloads have, and a publisher's unless its profile says otherwise."""

PUBLISHED_COLUMNS = (*SCORED_COLUMNS, ColumnKind.TOPK_LOGITS)
"""What a publisher's payloads may have."""

NEEDED_COLUMNS = (
    ColumnKind.TOPK_IDS,
    ColumnKind.TOPK_LOGPROBS,
    ColumnKind.LOG_TAIL,
    ColumnKind.ROW_OFFSETS,
    ColumnKind.ROW_WINDOWS,
    ColumnKind.ROW_DIGESTS,
    ColumnKind.ROW_STATUS,
)
"""What each of a publisher's payloads has; other temperatures than 1 need ``logsumexp`` too."""


@dataclass(frozen=True, kw_only=True)
class NodeHints:
    """Where a process says it runs. Hints make refusals readable; they admit nobody.

    By ``ray_node_id`` what is computed for it is computed there, where that costs nothing.
    """

    host_name: str = ""
    boot_id: str = ""
    pid: int = 0
    namespaces: Mapping[str, int] = field(default_factory=dict)
    device_uuids: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    ray_node_id: str = ""


@dataclass(frozen=True, kw_only=True)
class TeacherProfile:
    """What a teacher says of itself.

    ``batch_grid`` and ``model_grid`` are None where the teacher takes any grid;
    ``tokenizer_fingerprint`` is empty where unknown. ``vocabulary_size`` counts the ids
    that the tokenizer can produce, ``head_rows`` the rows of the output head: columns past
    the first are masked. ``temperatures`` empty means any. ``max_row_tokens`` counts a
    row's prefix too.

    A publisher also says which of the teacher's data-parallel ranks it is
    (``data_parallel_rank``, which is the shard it writes), and in which element type it
    writes log-probabilities (``value_type``) and how it selects (``selection``, the K best or a
    nucleus of them); it needs a ``batch_grid``. An engine selects as each student asks.

    ``sharded_by`` says what the publishers of one data-parallel rank divide (``shard_parts``):
    ``"vocabulary"`` among the tensor-parallel ranks of ``model_grid``, ``"sequence"`` or
    ``"zigzag"`` among the context-parallel ones, where each of them is a publisher. Empty where
    one publisher a data-parallel rank writes whole rows.

    Raises:
        RequestInvalidError: as for ``StudentProfile``.
    """

    teacher_id: str
    vocabulary_size: int
    head_rows: int
    top_k: int
    max_row_tokens: int
    revision: str = ""
    batch_grid: BatchGrid | None = None
    model_grid: ModelGrid | None = None
    tokenizer_fingerprint: str = ""
    temperatures: tuple[float, ...] = ()
    columns: tuple[ColumnKind, ...] = SCORED_COLUMNS
    engine: str = ""
    arithmetic_type: str = ""
    data_parallel_rank: int = 0
    value_type: ElementType = ElementType.FLOAT16
    selection: SelectionRule = TOP_K
    sharded_by: tuple[ShardedBy, ...] = ()
    hints: NodeHints = field(default_factory=NodeHints)

    def __post_init__(self) -> None:
        _check_types(self, _TEACHER_TYPES)
        sharded_by = words_of(ShardedBy, self.sharded_by, what="sharded_by")
        object.__setattr__(self, "sharded_by", tuple(dict.fromkeys(sharded_by)))
        object.__setattr__(self, "temperatures", _temperatures(self.temperatures))
        value_type = word_of(ElementType, self.value_type, what="value_type", fit=VALUE_TYPES)
        object.__setattr__(self, "value_type", value_type)
        check_selection(self.selection, (TopK, Nucleus), whose="a teacher")
        object.__setattr__(self, "columns", words_of(ColumnKind, self.columns, what="columns"))


@dataclass(frozen=True, kw_only=True)
class StudentProfile:
    """What a student rank says of itself.

    Words may stand for their enums: ``value_type="float32"``, ``transports=("stream",)``; one
    transport alone is a tuple of one.

    Args:
        batch_grid: how this side cuts the global batch.
        data_parallel_rank: this rank's place, from 0.
        teacher_id: may stay empty where the server has one teacher only.
        model_grid: nodes, GPUs a node, tensor and context parallel sizes and ranks; without
            it the arithmetic locality rule is ``unchecked``.
        tokenizer_fingerprint: of this side's tokenizer (``fingerprint_of``); without it the
            vocabularies are ``unchecked``.
        vocabulary_size: ids this side's head can take; 0 where not given.
        vocabulary_policy: ``strict`` refuses differing sizes, ``truncate`` has the
            teacher's columns beyond ``vocabulary_size`` masked before selection.
        top_k: entries a position, at least: registered payloads have what was published.
        temperatures: besides temperature 1, which is always there; four at most. A number
            alone is a tuple of one.
        columns: columns that this side cannot do without.
        value_type: element type of the log-probabilities; None for what was published, and
            float16 of an engine.
        selection: how entries are selected: ``TopK()``, ``Nucleus(mass=0.99)`` or, of an engine,
            ``Sampled(seed=7)``; None for what was published, and ``TopK()`` of an engine.
            ``top_k`` says how many entries a position, at most.
        student_id: shared by all ranks of one training job.
        readers_per_rank: sessions that read each data-parallel rank's rows.
        engine, arithmetic_type: provenance insisted on; empty where any will do.
        transports: most wanted first.
        value_codecs, id_codecs: how streams may be encoded, most wanted first; the first that
            the teacher's payloads allow counts (``encodings``). By default they come bit for bit
            as they were written. Other transports move nothing, and encode nothing.
        locality: ``prefer``, ``require`` or ``rule``; see ``Locality``.
        hints: where this process runs; the client fills in what is not given.

    Raises:
        RequestInvalidError: a word is none of its choices, which it names, or a field holds
            something of another type. Sizes that are none are the handshake's to refuse.
    """

    batch_grid: BatchGrid
    data_parallel_rank: int = 0
    teacher_id: str = ""
    model_grid: ModelGrid | None = None
    tokenizer_fingerprint: str = ""
    vocabulary_size: int = 0
    vocabulary_policy: VocabularyPolicy = VocabularyPolicy.STRICT
    top_k: int = 64
    temperatures: tuple[float, ...] = ()
    columns: tuple[ColumnKind, ...] = ()
    value_type: ElementType | None = None
    selection: SelectionRule | None = None
    student_id: str = "student"
    readers_per_rank: int = 1
    engine: str = ""
    arithmetic_type: str = ""
    transports: tuple[Transport, ...] = PREFERENCE
    value_codecs: tuple[ValueCodec, ...] = ()
    id_codecs: tuple[IdCodec, ...] = ()
    locality: Locality = Locality.PREFER
    hints: NodeHints = field(default_factory=NodeHints)

    def __post_init__(self) -> None:
        _check_types(self, _STUDENT_TYPES)
        self._take("temperatures", _temperatures(self.temperatures))
        self._take(
            "vocabulary_policy",
            word_of(VocabularyPolicy, self.vocabulary_policy, what="vocabulary_policy"),
        )
        if self.value_type is not None:
            taken = word_of(ElementType, self.value_type, what="value_type", fit=VALUE_TYPES)
            self._take("value_type", taken)
        if self.selection is not None:
            check_selection(self.selection, (TopK, Nucleus, Sampled), whose="a student")
        self._take("locality", word_of(Locality, self.locality, what="locality"))
        self._take("columns", words_of(ColumnKind, self.columns, what="columns"))
        self._take("transports", words_of(Transport, self.transports, what="transports"))
        self._take("value_codecs", words_of(ValueCodec, self.value_codecs, what="value_codecs"))
        self._take("id_codecs", words_of(IdCodec, self.id_codecs, what="id_codecs"))

    def _take(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    @property
    def all_temperatures(self) -> tuple[float, ...]:
        """Temperature 1, then the others asked for, without repeats."""
        return tuple(dict.fromkeys((1.0, *self.temperatures)))


_STUDENT_TYPES: dict[str, type | None] = {
    "batch_grid": BatchGrid,
    "model_grid": ModelGrid,
    **dict.fromkeys(("data_parallel_rank", "vocabulary_size", "top_k", "readers_per_rank")),
    **dict.fromkeys(("teacher_id", "tokenizer_fingerprint", "student_id"), str),
    **dict.fromkeys(("engine", "arithmetic_type"), str),
}
_TEACHER_TYPES: dict[str, type | None] = {
    "batch_grid": BatchGrid,
    "model_grid": ModelGrid,
    **dict.fromkeys(("vocabulary_size", "head_rows", "top_k", "max_row_tokens")),
    "data_parallel_rank": None,
    **dict.fromkeys(("teacher_id", "revision", "tokenizer_fingerprint"), str),
    **dict.fromkeys(("engine", "arithmetic_type"), str),
}
"""What the fields hold that are no words; None for a whole number, NumPy's included."""


def _check_types(
    profile: TeacherProfile | StudentProfile, types: Mapping[str, type | None]
) -> None:
    may_lack = {"model_grid", "batch_grid"} if types is _TEACHER_TYPES else {"model_grid"}
    for name, kind in types.items():
        value: object = getattr(profile, name)
        if value is None and name in may_lack:
            continue
        if not (is_whole(value) if kind is None else isinstance(value, kind)):
            raise _wrong_type(name, value, kind)
        for field_name, size in vars(value).items() if kind in (BatchGrid, ModelGrid) else ():
            if isinstance(size, bool):  # as a message it would be 0 or 1, and break no rule
                raise _wrong_type(f"{name}.{field_name}", size, None)


def _wrong_type(name: str, value: object, kind: type | None) -> RequestInvalidError:
    return RequestInvalidError(
        f"{name} is {_shown(value)}: give a {'whole number' if kind is None else kind.__name__}",
        facts={"argument": name, "given": type(value).__name__},
    )


def _temperatures(given: object) -> tuple[float, ...]:
    """Return the numbers that ``given`` lists; one alone is a tuple of one."""
    listed: Iterable[object] = (given,)
    if isinstance(given, Iterable) and not isinstance(given, str):
        listed = given
    found: list[float] = []
    for each in listed:
        if not isinstance(each, Real) or isinstance(each, bool):
            raise RequestInvalidError(
                f"temperatures has {_shown(each)}: give numbers, such as temperatures=(2.0,)",
                facts={"argument": "temperatures", "given": type(each).__name__},
            )
        found.append(float(each))
    return tuple(found)


def _shown(value: object) -> str:
    return f"{reprlib.repr(value)}, a {type(value).__name__}"
