"""What a payload of the suite holds: every kind of column, filled with bits that mean trouble."""

import itertools
import random
import struct
from dataclasses import dataclass

import torch
from tests.transport_suite.dense_teacher import VOCABULARY_SIZE

from teacher_logits.layout import COLUMN_RULES, Column, ColumnKind, ElementType, lay_out
from teacher_logits.payload import Payload
from teacher_logits.tensors import DTYPES

#: All kinds but that which a part of a sequence has in place of its rows' windows.
KINDS = COLUMN_RULES.keys() - {ColumnKind.ROW_RUNS}
Windows = tuple[tuple[int, int], ...]

TOP_KS = (1, 2, 9, 10, 20, 21, 64, 65, 100, 256, 1024)
VALUE_TYPES = (ElementType.FLOAT16, ElementType.BFLOAT16, ElementType.FLOAT32)
TEMPERATURES = (1.0, 2.0)
#: Lengths of the axes that nothing else says.
AXES = {"V": 37, "H": 48, "M": 3, "R": 2, "T": len(TEMPERATURES)}

ROWS: dict[str, Windows] = {
    "ragged": ((0, 3), (2, 1), (0, 5)),
    "rectangular": ((0, 4), (0, 4), (0, 4)),
    "with_empty_rows": ((0, 0), (3, 2), (5, 0), (0, 1), (0, 0)),
}

#: NaNs quiet and signalling, with payload bits; -0.0; the least and the largest subnormal;
#: both infinities. Of the integers the ends, and what would be a sign.
TROUBLE: dict[ElementType, tuple[str, tuple[int, ...]]] = {
    ElementType.FLOAT16: (
        "H",
        (0x7E01, 0x7C01, 0xFEED, 0x8000, 0x0001, 0x83FF, 0x7C00, 0xFC00),
    ),
    ElementType.BFLOAT16: (
        "H",
        (0x7FC1, 0x7F81, 0xFFED, 0x8000, 0x0001, 0x807F, 0x7F80, 0xFF80),
    ),
    ElementType.FLOAT32: (
        "I",
        (
            *(0x7FC00001, 0x7F800001, 0xFFFEED01, 0x80000000),
            *(0x00000001, 0x807FFFFF, 0x7F800000, 0xFF800000),
        ),
    ),
    ElementType.INT32: ("I", (0, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)),
    ElementType.INT64: ("Q", (0, 2**63 - 1, 2**63, 2**64 - 1)),
    ElementType.UINT8: ("B", (0, 127, 128, 255)),
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Content:
    """A payload's description without its id, and the bytes of each column."""

    windows: Windows
    top_k: int
    columns: tuple[Column, ...]
    size_bytes: int
    data: dict[ColumnKind, bytes]

    def payload(self, payload_id: str) -> Payload:
        """Describe the payload under an id."""
        return Payload(
            payload_id=payload_id,
            teacher_id="teacher",
            teacher_revision="1",
            first_row=0,
            row_count=len(self.windows),
            position_count=sum(count for _, count in self.windows),
            top_k=self.top_k,
            temperatures=TEMPERATURES,
            vocabulary_size=VOCABULARY_SIZE,
            columns=self.columns,
            size_bytes=self.size_bytes,
        )

    def tensor(self, column: Column) -> torch.Tensor:
        """Return one column's elements, in memory of their own."""
        raw = torch.frombuffer(bytearray(self.data[column.kind] or b"\0" * 8), dtype=torch.uint8)
        return raw[: column.size_bytes].view(DTYPES[column.element_type]).view(column.shape)


def every_kind(
    *, top_k: int, windows: Windows, element_type: ElementType, seed: int = 0
) -> Content:
    """Make a payload with a column of every kind that a whole sequence has.

    Columns are of ``element_type`` where they may be, else of the first type they may have.
    """
    positions = sum(count for _, count in windows)
    axes = {**AXES, "P": positions, "N": len(windows), "N+1": len(windows) + 1, "K": top_k}
    specs = []
    for kind, (types, shape) in COLUMN_RULES.items():
        if kind not in KINDS:
            continue
        usual = min(types, key=lambda each: each.value)
        sizes = [axis if isinstance(axis, int) else axes[axis] for axis in shape]
        specs.append((kind, element_type if element_type in types else usual, sizes))
    columns, size_bytes = lay_out(specs)
    data = {column.kind: trouble(column, seed=seed) for column in columns}
    # What the rows are must be true, or nothing could be checked about them.
    data[ColumnKind.ROW_OFFSETS] = _offsets(windows)
    data[ColumnKind.ROW_WINDOWS] = b"".join(struct.pack("<2i", *window) for window in windows)
    return Content(windows=windows, top_k=top_k, columns=columns, size_bytes=size_bytes, data=data)


def trouble(column: Column, *, seed: int) -> bytes:
    """Return a column's bytes: the troublesome elements first, random bits behind them."""
    form, elements = TROUBLE[column.element_type]
    first = struct.pack(f"<{len(elements)}{form}", *elements)
    chance = random.Random(f"{column.kind.value} {seed}")
    return (first + chance.randbytes(column.size_bytes))[: column.size_bytes]


def _offsets(windows: Windows) -> bytes:
    starts = itertools.accumulate((count for _, count in windows), initial=0)
    return b"".join(struct.pack("<q", start) for start in starts)
