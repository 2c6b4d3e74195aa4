"""Columns of a leased payload as tensors, each made when it is first asked for.

A tensor is a view of the leased memory, on the host or on a device, and costs a few
microseconds to make and to watch: a reader that takes two columns of nine pays for two. ``empty``
ends it all: from then on nothing is made, and whoever kept the mapping has a ``LeaseLostError``
from it.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING

from teacher_logits.error_bounds import EXACT, bound_of
from teacher_logits.errors import PayloadInvalidError
from teacher_logits.layout import ColumnKind
from teacher_logits.tensors import column_tensor

if TYPE_CHECKING:
    import weakref
    from collections.abc import Callable, Iterable, Iterator

    import torch

    from teacher_logits.encodings import Encoding
    from teacher_logits.layout import Column
    from teacher_logits.payload import Payload
    from teacher_logits_client.openers import ColumnMemory, View
    from teacher_logits_client.targets.leased_targets import Made

    Watch = Callable[[str, View], weakref.ref[View] | None]
    WatchAhead = Callable[[str, View], weakref.ref[View]]


_KINDS = {kind.value: kind for kind in ColumnKind}


class UnknownColumnError(PayloadInvalidError, KeyError):
    """A name that no column here has; a ``KeyError`` too, as a mapping's callers expect."""

    def __str__(self) -> str:
        return self.message  # a ``KeyError`` would quote it


class LeasedColumns(Mapping[ColumnKind, "torch.Tensor"]):
    """The columns of one payload in the memory of its lease, by their kind.

    Args:
        watch: told of each view that is made, by the column's name, unless the memory is the
            owner's for good and nobody needs to know of views.
        encoding: what they were streamed in; None for their own bytes.

    ``bound`` is what that may have moved log-probabilities by.
    """

    def __init__(
        self,
        payload: Payload,
        memory: ColumnMemory,
        made: Made,
        *,
        watch: Watch | None,
        encoding: Encoding | None = None,
    ) -> None:
        self.bound = EXACT
        if encoding is not None:
            written = payload.column(ColumnKind.TOPK_LOGPROBS).element_type
            self.bound = bound_of(encoding.codec, written=written, top_k=payload.top_k)
        self._columns = payload.columns
        self._memory = memory
        self._made = made
        self._watch = watch
        self._lock = threading.Lock()
        self._tensors: dict[ColumnKind, torch.Tensor] = {}
        self._views: dict[str, weakref.ref[View]] = {}

    @property
    def device(self) -> torch.device:
        """Where the columns over positions are; those over rows are on the host."""
        return self._memory.device

    def __getitem__(self, kind: ColumnKind) -> torch.Tensor:
        self._made.check_open()
        tensor = self._tensors.get(kind)
        return self._make(self._find(kind)) if tensor is None else tensor

    def __iter__(self) -> Iterator[ColumnKind]:
        self._made.check_open()
        return iter([column.kind for column in self._columns])

    def __len__(self) -> int:
        self._made.check_open()
        return len(self._columns)

    def __contains__(self, kind: object) -> bool:
        self._made.check_open()
        return any(column.kind is kind for column in self._columns)

    def raw(self, kind: ColumnKind) -> memoryview:
        """Return the bytes of a column, which nobody watches: look at them and let go.

        Of a column on a device they are a copy.
        """
        self._made.check_open()
        return self._memory.bytes_of(self._find(kind))

    def make(self, kinds: Iterable[ColumnKind], *, watch: WatchAhead | None) -> set[str]:
        """Make some columns before anybody may ask for one; return the names of those watched.

        ``watch`` is told of each view, as for the whole.
        """
        names = set()
        for kind in kinds:
            column = self._find(kind)
            view = self._memory.view_of(column)
            if watch is not None and column.size_bytes:
                names.add(kind.value)
                self._views[kind.value] = watch(kind.value, view)
            self._tensors[kind] = column_tensor(view, column)
        return names

    def empty(self) -> list[str]:
        """Let go of all tensors; return the names of columns that others still view."""
        with self._lock:  # so that no other thread is making one
            self._made.empty_all()
            self._tensors.clear()
            return [name for name, view in self._views.items() if view() is not None]

    def _find(self, kind: ColumnKind) -> Column:
        for column in self._columns:  # nine at most, and hashing a kind takes longer
            if column.kind is kind:
                return column
        raise KeyError(kind)

    def _make(self, column: Column) -> torch.Tensor:
        with self._lock:
            self._made.check_open()
            if column.kind in self._tensors:
                return self._tensors[column.kind]
            # An object of its own, which the column's tensors keep alive, and nothing else.
            view = self._memory.view_of(column)
            if self._watch is not None and column.size_bytes:
                name = column.kind.value
                reference = self._watch(name, view)
                if reference is None:  # it was dropped a moment ago
                    raise self._made.lost()
                self._views[name] = reference
            tensor = self._tensors[column.kind] = column_tensor(view, column)
            return tensor


class NamedColumns(Mapping[str, "torch.Tensor"]):
    """Columns by their names."""

    def __init__(self, columns: Mapping[ColumnKind, torch.Tensor], made: Made) -> None:
        self._columns = columns
        self._made = made

    def __getitem__(self, name: str) -> torch.Tensor:
        self._made.check_open()
        kind = _KINDS.get(name)
        if kind is None or kind not in self._columns:
            has = ", ".join(self)
            raise UnknownColumnError(
                f"there is no column {name!r} here: the payload has {has}",
                facts={"column": str(name), "columns": has},
            )
        return self._columns[kind]

    def __iter__(self) -> Iterator[str]:
        self._made.check_open()
        return iter([kind.value for kind in self._columns])

    def __len__(self) -> int:
        self._made.check_open()
        return len(self._columns)

    def __repr__(self) -> str:
        return "<columns of a closed lease>" if self._made.is_over else repr(dict(self))
