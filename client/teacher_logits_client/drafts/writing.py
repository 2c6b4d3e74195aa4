"""The writing of a draft: what it holds, and what its teacher writes into it while it is open.

Tensors lie where readers will read them. What is written through a draft or its parts is known to
its checks (``draft_checks``); views that it hands out are too. A draft that is not open any more
is not written to. A forked child is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from teacher_logits_client.drafts.parts import DraftPart
from teacher_logits_client.forks import Home
from teacher_logits_client.slabs.claims import DraftStage, lapsed

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import torch

    from teacher_logits.payload import Payload
    from teacher_logits.selection import Selection
    from teacher_logits_client.drafts.columns import DraftColumns
    from teacher_logits_client.drafts.rows import DraftRows


class DraftWriting:
    """The rows of one payload, and their columns until its end."""

    _stage = DraftStage.ABANDONED

    def __init__(
        self, payload: Payload, rows: DraftRows, columns: DraftColumns, *, micro_batch_size: int
    ) -> None:
        self.payload = payload
        self._rows = rows
        self._columns: DraftColumns | None = columns
        self._micro_batch_size = micro_batch_size
        self._home = Home()
        self._stage = DraftStage.OPEN

    @property
    def payload_id(self) -> str:
        """The payload's id, which it keeps once it is sealed."""
        return self.payload.payload_id

    @property
    def step(self) -> int:
        """The step that it is of."""
        return self.payload.key.step if self.payload.key is not None else -1

    @property
    def rows(self) -> range:
        """The step's rows that it holds."""
        return self._rows.rows

    @property
    def position_count(self) -> int:
        """P: the positions that are to be written."""
        return self._rows.position_count

    @property
    def stage(self) -> str:
        """``open``, ``sealed`` or ``abandoned``; or that a seal was not answered."""
        return self._stage.value

    @property
    def selection(self) -> Selection:
        """The tensors that ``select_top_k`` fills, flat over the positions."""
        return self._whole().selection

    @property
    def columns(self) -> Mapping[str, torch.Tensor]:
        """Views of the columns that a teacher fills, by name: ``topk_ids`` int32 [P,K], ...

        They lie where readers will read them, in the teacher's ``value_type`` where they are
        ``topk_logprobs``. ``write`` takes a teacher's own tensors in more forms.
        """
        return self._whole().columns

    def part(self, rows: range) -> DraftPart:
        """Return some of its rows, by their numbers in the step.

        Raises:
            PayloadInvalidError: they are not among the draft's.
        """
        return self._part(self._rows.part(rows))

    def micro_batches(self, size: int | None = None) -> Iterator[DraftPart]:
        """Yield its rows in order, ``size`` at a time: the grid's micro batches by default.

        Raises:
            PayloadInvalidError: the size is no whole number of at least 1.
        """
        size = self._micro_batch_size if size is None else size
        return map(self._part, self._rows.micro_batches(size))

    def select(
        self,
        logits: torch.Tensor,
        *,
        k: int | None = None,
        temperatures: Sequence[float] | None = None,
        vocab_size: int | None = None,
        next_ids: torch.Tensor | None = None,
    ) -> Selection:
        """Select from the logits of all its rows, [P,V] or [N,S,V]; see ``DraftPart.select``."""
        return self._whole().select(
            logits, k=k, temperatures=temperatures, vocab_size=vocab_size, next_ids=next_ids
        )

    def write(self, **columns: torch.Tensor | None) -> None:
        """Write columns of all its rows; see ``DraftPart.write``."""
        self._whole().write(**columns)

    def _whole(self) -> DraftPart:
        return self._part(self.rows)

    def _part(self, rows: range) -> DraftPart:
        self._check_open()
        if self._columns is None:
            raise ValueError("an open draft has columns")
        return DraftPart(
            rows,
            draft_rows=self._rows,
            columns=self._columns,
            payload=self.payload,
            check_open=self._check_open,
        )

    def _check_open(self) -> None:
        self._check_held()
        if self._stage is DraftStage.DOUBTFUL:
            raise lapsed(self._stage, payload_id=self.payload_id, step=self.step)

    def _check_held(self) -> None:
        self._home.check("draft")
        if self._stage in (DraftStage.SEALED, DraftStage.ABANDONED):
            raise lapsed(self._stage, payload_id=self.payload_id, step=self.step)
