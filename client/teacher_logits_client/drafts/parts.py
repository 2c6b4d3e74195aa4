"""Parts of a draft: some of its rows, as a teacher takes them to score in one go.

A part takes logits, and columns that a teacher has already, in each form that a teacher has
them in, and keeps the real positions only; nothing of the size of the logits is copied:

    [P, ...]      flat: the positions that are written, row after row
    [L, ...]      packed: all positions of every row, where windows leave some out
    [N, S, ...]   a rectangle as wide as the rows were given, each row padded at its right
    [N, C, ...]   a rectangle of the windows, where all rows have C positions

Of a context-parallel rank, L and S are what it holds of each row, padding included
(``shard_rows``).
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from teacher_logits.errors import PayloadInvalidError
from teacher_logits_client.drafts.checks import check_kind, check_tensor, narrowed
from teacher_logits_client.drafts.columns import NOT_SELECTED
from teacher_logits_client.drafts.shard_ids import select_own

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from teacher_logits.errors import Fact
    from teacher_logits.payload import Payload
    from teacher_logits.selection import Selection
    from teacher_logits_client.drafts.columns import DraftColumns
    from teacher_logits_client.drafts.rows import DraftRows

    Index = slice | tuple[int | slice, slice]
    #: Where something of a caller's array belongs: (its place there, positions of the part).
    Piece = tuple[Index, slice]


class DraftPart:
    """Some rows of a draft. ``Draft.micro_batches`` and ``Draft.part`` make them.

    ``rows`` are the step's, and ``index`` is where they stand in the arrays that were given to
    ``reserve``.
    """

    def __init__(
        self,
        rows: range,
        *,
        draft_rows: DraftRows,
        columns: DraftColumns,
        payload: Payload,
        check_open: Callable[[], None],
    ) -> None:
        """Take some rows of a draft; the draft does this.

        ``check_open`` raises where the draft must not be written.
        """
        first = rows.start - draft_rows.rows.start
        self.rows = rows
        self.index = slice(first, first + len(rows))
        self._draft_rows = draft_rows
        self._columns = columns
        self._payload = payload
        self._check_open = check_open
        self._windows = draft_rows.windows[self.index]
        self._lengths = draft_rows.lengths[self.index]
        self._offsets = draft_rows.offsets[first : first + len(rows) + 1] - int(
            draft_rows.offsets[first]
        )
        start = int(draft_rows.offsets[first])
        self._positions = slice(start, start + int(self._offsets[-1]))
        held = draft_rows.held
        self._held = None if held is None else held.part(self.index, self._positions)

    @property
    def position_count(self) -> int:
        """P of these rows."""
        return self._positions.stop - self._positions.start

    @property
    def selection(self) -> Selection:
        """The tensors that ``select_top_k`` fills, flat over the positions."""
        self._check_open()
        self._columns.begin(self.index, self._positions)
        return self._columns.selection[self._positions]

    @property
    def columns(self) -> Mapping[str, torch.Tensor]:
        """Views of the columns that a teacher fills, by name: ``topk_ids`` int32 [P,K], ..."""
        self._check_open()
        self._columns.touch(self.index, self._positions)
        return self._columns.writable(self._positions)

    def select(
        self,
        logits: torch.Tensor,
        *,
        k: int | None = None,
        temperatures: Sequence[float] | None = None,
        vocab_size: int | None = None,
        next_ids: torch.Tensor | None = None,
    ) -> Selection:
        """Select from logits in one of the module's forms; ``select_top_k(logits, out=part)``.

        ``next_ids`` are flat, or of the form of the logits; those of the token ids that were
        given to ``reserve`` where not given. What is returned is to be read.

        Raises:
            PayloadInvalidError: the logits are of other rows, positions or columns than
                these, or no next ids are known.
        """
        self._check_open()
        self._check_settings(k, temperatures, vocab_size)
        check_tensor(logits, "logits")
        self._check_head(logits)
        pieces = self._pieces(logits, what="logits", axes=1)
        following = self._following(next_ids, logits)
        self._columns.begin(self.index, self._positions)
        out = self._columns.selection[self._positions]
        out.status.fill_(NOT_SELECTED)  # until it is: what is interrupted is looked at in full
        for index, positions in pieces:
            next_here = None
            if following is not None:
                is_flat = following.shape == (self.position_count,)
                next_here = following[positions if is_flat else index].reshape(-1)
            select_own(out[positions], logits[index], payload=self._payload, next_ids=next_here)
        self._columns.note_selected(self.index, self._positions, self._offsets)
        return out

    def write(self, **columns: torch.Tensor | None) -> None:
        """Write columns that a teacher has already, by name, each in one of the module's forms.

        ``topk_ids``, ``topk_logprobs`` and ``topk_logits`` [...,K], ``log_tail`` and ``logsumexp``
        [...,T], ``actual_logprob`` [...], those that the profile promises; None is none. Values are
        looked at by ``Draft.check``.

        Raises:
            PayloadInvalidError: a column that the payload does not have, of other positions or of
                another kind of number, or a value that the column's type cannot hold.
        """
        targets = self.columns
        for name, values in columns.items():
            if values is None:
                continue
            target = targets.get(name)
            if target is None:
                raise _invalid(
                    f"{name!r} is no column that is written here: there are {', '.join(targets)}",
                    column=name,
                )
            check_tensor(values, name)
            check_kind(values, target, name)
            axes = target.dim() - 1
            width = target.shape[1:]
            if values.dim() and values.shape[values.dim() - axes :] != width:
                raise _invalid(
                    f"{name} of shape {tuple(values.shape)} has {values.shape[-1]} entries a "
                    f"position, and the payload {width[0]}: give [..., {width[0]}]",
                    column=name,
                    entries=int(values.shape[-1]),
                    wanted_entries=int(width[0]),
                )
            pieces = self._pieces(values, what=name, axes=axes)
            for index, positions in pieces:
                place = target[positions]
                part = values[index].detach().reshape(place.shape)
                place.copy_(narrowed(part, place, name))

    def _check_settings(
        self, k: int | None, temperatures: Sequence[float] | None, vocab_size: int | None
    ) -> None:
        payload = self._payload
        for name, given, has in (
            ("k", k, payload.top_k),
            (
                "temperatures",
                None if temperatures is None else tuple(temperatures),
                payload.temperatures,
            ),
            ("vocab_size", vocab_size, payload.vocabulary_size),
        ):
            if given is not None and given != has:
                raise _invalid(
                    f"{name} is {given}, and the teacher's profile says {has}: leave it out, since "
                    "a draft knows it",
                    **{name: str(given), f"profile_{name}": str(has)},
                )

    def _check_head(self, logits: torch.Tensor) -> None:
        """Refuse another head than the profile's: of a wider one, the wrong columns were masked."""
        width, says = int(logits.shape[-1]), self._draft_rows.head_rows
        if logits.dim() > 1 and width > says:
            raise _invalid(
                f"logits have {width} columns, and by the teacher's profile (head_rows, and what "
                f"its ranks divide) this rank has {says}: give the logits of that part of the "
                "head, or open the publisher with the head that it has",
                columns=width,
                head_rows=says,
                vocabulary_size=self._payload.vocabulary_size,
            )

    def _following(
        self, next_ids: torch.Tensor | None, logits: torch.Tensor
    ) -> torch.Tensor | None:
        """Return the next ids [P], or of the logits' form."""
        if self._columns.selection.actual_logprob is None:
            return None
        if next_ids is not None:
            check_tensor(next_ids, "next_ids")
            shape = tuple(next_ids.shape)
            if shape in ((self.position_count,), tuple(logits.shape[:-1])):
                return next_ids
            raise _invalid(
                f"next_ids have shape {shape}; give one a position, {self.position_count}, or in "
                f"the form of the logits, {tuple(logits.shape[:-1])}",
                positions=self.position_count,
            )
        known = self._draft_rows.next_ids
        if known is None:
            raise _invalid(
                "the token that comes next is not known, and actual_logprob needs it: give "
                "input_ids to reserve, or next_ids to select_top_k"
            )
        return known[self._positions]

    def _pieces(self, given: torch.Tensor, *, what: str, axes: int) -> list[Piece]:
        """Return which part of an array belongs to which positions of this part."""
        shape = tuple(given.shape[: given.dim() - axes])
        if len(shape) == 1 and shape[0] == self.position_count:
            return [(slice(0, shape[0]), slice(0, shape[0]))]
        if self._held is not None:
            pieces = self._held.pieces(shape, self._row_counts())
            if pieces is not None:
                return pieces
            raise self._wrong_shape(tuple(given.shape), what)
        if len(shape) == 1 and shape[0] == int(self._lengths.sum()):
            starts = (self._lengths.cumsum(0) - self._lengths + self._windows[:, 0]).tolist()
            return [
                (slice(start, start + part.stop - part.start), part)
                for start, part in zip(starts, self._row_parts(), strict=True)
                if part.stop > part.start
            ]
        if len(shape) == 2 and shape[0] in self._row_counts():
            counts = self._windows[:, 1]
            if bool((counts == shape[1]).all()):
                return [((slice(0, len(self.rows)), slice(None)), slice(0, self.position_count))]
            if shape[1] == self._draft_rows.width:
                return self._pieces_of_rectangle()
        raise self._wrong_shape(tuple(given.shape), what)

    def _pieces_of_rectangle(self) -> list[Piece]:
        first, counts = self._windows[:, 0], self._windows[:, 1]
        if bool((first == first[0]).all()) and bool((counts == counts[0]).all()):
            window = slice(int(first[0]), int(first[0] + counts[0]))
            return [((slice(0, len(self.rows)), window), slice(0, self.position_count))]
        return [
            ((row, slice(start, start + part.stop - part.start)), part)
            for row, (start, part) in enumerate(zip(first.tolist(), self._row_parts(), strict=True))
            if part.stop > part.start
        ]

    def _row_parts(self) -> list[slice]:
        bounds: list[int] = self._offsets.tolist()
        return [slice(a, b) for a, b in pairwise(bounds)]

    def _row_counts(self) -> tuple[int, ...]:
        """Rows that a caller's rectangle may have: padding rows may stand behind the last."""
        draft = self._draft_rows
        padding = draft.padded_count - len(draft.rows)
        is_last = self.rows.stop == draft.rows.stop
        return (len(self.rows), len(self.rows) + padding) if is_last else (len(self.rows),)

    def _wrong_shape(self, shape: tuple[int, ...], what: str) -> PayloadInvalidError:
        rows, width, positions = len(self.rows), self._draft_rows.width, self.position_count
        share, flat = "", str(positions)
        if self._held is not None:
            widths = self._held.spans[:, :, 1].sum(1)
            width, flat = int(widths.amax()), f"{int(widths.sum())} or {positions}"
            share = " on this context-parallel rank"
        facts: dict[str, Fact] = {
            "shape": str(shape),
            "row_count": rows,
            "width": width,
            "position_count": positions,
        }
        if len(shape) >= 2:
            facts |= {"given_rows": shape[0], "given_width": shape[1]}
        return PayloadInvalidError(
            f"{what} have shape {shape}, and the {rows} rows that they are of are {width} wide"
            f"{share}, with {positions} positions to be written: give [{flat}, ...], or "
            f"[{rows}, {width}, ...] of rows padded at their right; cut padding beyond {width} off",
            facts=facts,
        )


def _invalid(message: str, **facts: int | str) -> PayloadInvalidError:
    return PayloadInvalidError(message, facts=facts)
