"""Parity's reference: what somebody else computed for the same rows, asked by position and id.

    dense     logits or log-probabilities [P,V]       says something of every id
    entries   ids and log-probabilities [P,K]          says something of these ids alone

Promises: log-probabilities in fp32, never below ``ABSENT_LOGPROB``, and NaN for what the
reference does not say. The tensors are only read, and no copy of all of them is made.
"""

from __future__ import annotations

from typing import Protocol

import torch

from teacher_logits.errors import PayloadInvalidError
from teacher_logits_client.targets import ABSENT_LOGPROB

_CHUNK_ELEMENTS = 1 << 24


def check_width(values: torch.Tensor, vocabulary_size: int | None) -> None:
    """Refuse values of fewer ids than a vocabulary has: they are normalised over others.

    Raises:
        PayloadInvalidError: with both numbers.
    """
    columns = values.shape[-1] if values.dim() else 0
    if vocabulary_size is not None and columns < vocabulary_size:
        raise PayloadInvalidError(
            f"the reference has {columns:,} columns, and the teacher {vocabulary_size:,} ids: give "
            "whole rows of the head",
            facts={"reference_columns": columns, "vocabulary_size": vocabulary_size},
        )


class Reference(Protocol):
    """Log-probabilities of P positions, flat over the rows."""

    @property
    def positions(self) -> int:
        """How many positions it has."""

    def at(self, ids: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Return the log-probabilities [p,K] of ``ids`` [p,K] at the positions ``places`` [p]."""

    def first_ids(self, count: int) -> int:
        """Return how many of its own first ids ``shared`` looks at, for ``count`` ids."""

    def shared(self, ids: torch.Tensor) -> torch.Tensor:
        """Return which of ``ids`` [P,K] are among the reference's own first, bool [P,K]."""


class DenseReference:
    """Logits or log-probabilities [P,V], normalised here at a temperature.

    Which of the two does not matter: they differ by a number a position, which goes out.
    """

    def __init__(self, values: torch.Tensor, *, temperature: float) -> None:
        """Take the tensor.

        Raises:
            PayloadInvalidError: a position holds a NaN or +inf, or nothing finite.
        """
        self._values = values.contiguous()
        self._temperature = temperature
        self._pieces = max(1, _CHUNK_ELEMENTS // max(1, values.shape[1]))
        parts = [p.float().div(temperature).logsumexp(1) for p in values.split(self._pieces)]
        self._normaliser = torch.cat(parts) if parts else values.new_zeros(0).float()
        bad = (~self._normaliser.isfinite()).nonzero()
        if len(bad):
            raise PayloadInvalidError(
                f"the reference holds a NaN or +inf, or nothing finite, at position {int(bad[0])} "
                f"of {len(values)} ({len(bad)} such positions): nothing can be compared with it",
                facts={"position": int(bad[0]), "faulty_positions": len(bad)},
            )

    @property
    def positions(self) -> int:
        """How many positions it has."""
        return len(self._values)

    def at(self, ids: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Return log-probabilities [p,K]; NaN for an id below 0.

        Raises:
            PayloadInvalidError: an id that the reference has no column for.
        """
        columns = self._values.shape[1]
        highest = int(ids.max()) if ids.numel() else -1
        if highest >= columns:
            raise PayloadInvalidError(
                f"the service speaks of id {highest} and the reference has {columns} columns: give "
                "whole rows of the head, or open the session with that vocabulary_size and "
                "vocabulary_policy='truncate'",
                facts={"token_id": highest, "reference_columns": columns},
            )
        flat = self._values.view(-1)
        picked = flat[places.unsqueeze(1) * columns + ids.clamp_min(0)].float()
        logprobs = picked / self._temperature - self._normaliser[places].unsqueeze(1)
        return logprobs.clamp_min(ABSENT_LOGPROB).masked_fill(ids < 0, torch.nan)

    def first_ids(self, count: int) -> int:
        """Return as many, where it has them."""
        return min(count, self._values.shape[1])

    def shared(self, ids: torch.Tensor) -> torch.Tensor:
        """Return which ids have a value that is no smaller than the K-th largest."""
        width = self.first_ids(ids.shape[1])
        least = [p.topk(width, 1).values[:, -1:] for p in self._values.split(self._pieces)]
        own = self._values.gather(1, ids.clamp_min(0))
        return (own >= torch.cat(least)) & (ids >= 0) if least else ids >= 0


class EntryReference:
    """Ids [P,K] and their log-probabilities at temperature 1 [P,K], -1 where an entry is absent."""

    def __init__(self, ids: torch.Tensor, logprobs: torch.Tensor) -> None:
        """Take the tensors.

        Raises:
            PayloadInvalidError: they are not of one shape [P,K], or K is 0.
        """
        if ids.dim() != 2 or ids.shape != logprobs.shape or not ids.shape[1]:
            raise PayloadInvalidError(
                f"the reference's ids have shape {tuple(ids.shape)} and its log-probabilities "
                f"{tuple(logprobs.shape)}: give both as [P,K], K at least 1",
                facts={"ids": str(tuple(ids.shape)), "logprobs": str(tuple(logprobs.shape))},
            )
        self._ids = ids
        self._logprobs = logprobs.float().clamp_min(ABSENT_LOGPROB)
        self._pieces = max(1, _CHUNK_ELEMENTS // max(1, ids.shape[1] ** 2))

    @property
    def positions(self) -> int:
        """How many positions it has."""
        return len(self._ids)

    def at(self, ids: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Return log-probabilities [p,K]; NaN for an id that the reference does not name."""
        found = []
        for wanted, at in zip(ids.split(self._pieces), places.split(self._pieces), strict=True):
            match = self._ids[at].unsqueeze(1) == wanted.unsqueeze(2)
            named = match.any(2) & (wanted >= 0)
            values = self._logprobs[at].gather(1, match.int().argmax(2))
            found.append(values.masked_fill(~named, torch.nan))
        return torch.cat(found) if found else self._logprobs.new_zeros(ids.shape)

    def first_ids(self, count: int) -> int:
        """Return how many it names at a position, whatever was asked."""
        return self._ids.shape[1]

    def shared(self, ids: torch.Tensor) -> torch.Tensor:
        """Return which ids the reference names."""
        return ~self.at(ids, torch.arange(len(ids))).isnan()
