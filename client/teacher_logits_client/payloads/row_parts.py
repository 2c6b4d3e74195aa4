"""Row parts: what holds a run of a batch's rows, be it one payload or several together."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from teacher_logits.layout import ColumnKind

if TYPE_CHECKING:
    from teacher_logits.error_bounds import ErrorBound
    from teacher_logits.payload import Payload


class RowPart(Mapping[ColumnKind, torch.Tensor]):
    """The columns of ``row_count`` rows that ``payload`` describes.

    ``is_copy`` says whether columns over positions are copied, or merged, rather than viewed.
    """

    payload: Payload
    row_count: int
    is_copy: bool = False

    @property
    @abstractmethod
    def first_row(self) -> int:
        """The global number of the first row."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where the columns over positions are."""

    @property
    @abstractmethod
    def bound(self) -> ErrorBound:
        """What the codec that they came in may have moved log-probabilities by."""

    @property
    @abstractmethod
    def status(self) -> memoryview:
        """The status of each row; where it lies unless this ``is_copy``."""

    @abstractmethod
    def rows(self, first: int, row_count: int) -> RowPart:
        """Return some of these rows."""

    @abstractmethod
    def look_again(self) -> None:
        """Refuse rows that were looked at before their seal, and are elsewhere now.

        Raises:
            PayloadInvalidError: naming both places.
        """
