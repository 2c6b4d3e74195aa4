"""Labels and masks: which token each position predicts, and which positions count.

Logits and targets at position s are the distribution of token s+1, so the label of s is
ids[s+1] and its mask is that of token s+1. The last position of a sequence has no next token,
even where another sequence follows in the array: a plain roll would teach a student to
continue one document with another (docs/math.md, "Positions").

Sequences lie packed: sequence i owns ids[cu_seqlens[i]:cu_seqlens[i+1]]. Where each is padded
to some multiple, ``padded_cu_seqlens`` says where it starts, and ``cu_seqlens`` how long it is.
"""

from __future__ import annotations

import torch

from teacher_logits.errors import PayloadInvalidError

_WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def next_token_labels(
    ids: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    token_mask: torch.Tensor | None = None,
    padded_cu_seqlens: torch.Tensor | None = None,
    ignore_index: int = -100,
) -> torch.Tensor:
    """Return the label of each position [P], ``ignore_index`` where there is none.

    ``ids`` [P] integers, ``cu_seqlens`` [N+1]. With ``token_mask`` [P], a label that it masks is
    ignored as well. ``ignore_index=-1`` gives the next ids that ``select_top_k`` and the lookup
    identity take.

    Raises:
        PayloadInvalidError: sequence bounds that do not fit the array, or no tensors.
    """
    _check_tokens("ids", ids)
    if token_mask is not None:
        _check_mask(token_mask, len(ids))
    has_next = _has_next(len(ids), cu_seqlens, padded_cu_seqlens).to(ids.device)
    if token_mask is not None:
        has_next &= token_mask.roll(-1).to(ids.device) != 0
    return ids.roll(-1).masked_fill(~has_next, ignore_index)


def position_mask(
    token_mask: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    padded_cu_seqlens: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the mask of each position [P]: that of its next token, 0 where there is none.

    ``token_mask`` [P] of any type says which tokens are learnt; the result has its type.

    Raises:
        PayloadInvalidError: sequence bounds that do not fit the array, or no tensors.
    """
    _check_mask(token_mask)
    has_next = _has_next(len(token_mask), cu_seqlens, padded_cu_seqlens)
    return token_mask.roll(-1).masked_fill(~has_next.to(token_mask.device), 0)


def labels_mask(labels: torch.Tensor, *, ignore_index: int = -100) -> torch.Tensor:
    """Return which positions count, bool [N,S], by the labels of the tokens themselves.

    ``labels`` [N,S] (or [S], of one row) are as trainers of ``transformers`` and TRL have them:
    beside ``input_ids`` and not shifted, ``ignore_index`` where a token is none to learn.
    Position s predicts token s+1, so it counts where ``labels[:, s + 1]`` does; a row's last
    position has no next token, and never counts. It is the ``mask`` that a loss takes.

    Raises:
        PayloadInvalidError: labels that are no tensor of whole numbers.
    """
    _check_tokens("labels", labels, most=2)
    mask = torch.zeros_like(labels, dtype=torch.bool)
    mask[..., :-1] = labels[..., 1:] != ignore_index
    return mask


def _check_tokens(name: str, tokens: object, *, most: int = 1) -> None:
    """Let a tensor of whole numbers pass, of one dimension or up to ``most``."""
    if isinstance(tokens, torch.Tensor) and tokens.dtype in _WHOLE and 1 <= tokens.dim() <= most:
        return
    given = tokens.dtype if isinstance(tokens, torch.Tensor) else type(tokens).__name__
    shape = f" of shape {tuple(tokens.shape)}" if isinstance(tokens, torch.Tensor) else ""
    raise PayloadInvalidError(
        f"{name} are a {given}{shape}; give a tensor of whole numbers in "
        f"{'one dimension' if most == 1 else 'one or two dimensions'}",
        facts={"name": name, "given": str(given)},
    )


def _check_mask(mask: object, positions: int | None = None) -> None:
    if not isinstance(mask, torch.Tensor) or mask.dim() != 1:
        given = tuple(mask.shape) if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise PayloadInvalidError(
            f"token_mask is of shape or type {given}; give a tensor [P], one number a token",
            facts={"given": str(given)},
        )
    if positions is not None and len(mask) != positions:
        raise PayloadInvalidError(
            f"token_mask has {len(mask)} numbers and there are {positions} ids; give one a token",
            facts={"mask_positions": len(mask), "positions": positions},
        )


def _has_next(
    positions: int, cu_seqlens: torch.Tensor, padded_cu_seqlens: torch.Tensor | None
) -> torch.Tensor:
    """Return bool [P], on the CPU: the positions that have a next token in their sequence."""
    starts, _ = _bounds(cu_seqlens, positions if padded_cu_seqlens is None else None)
    lengths = cu_seqlens.cpu().long().diff()
    if padded_cu_seqlens is not None:
        starts, room = _bounds(padded_cu_seqlens, positions)
        if len(room) != len(lengths) or bool((lengths > room).any()):
            raise PayloadInvalidError(
                f"{len(lengths)} sequences are in cu_seqlens and {len(room)} in "
                "padded_cu_seqlens; both name the same sequences, and none is longer than its room",
                facts={"sequences": len(lengths), "padded_sequences": len(room)},
            )
    # +1 where a sequence starts, -1 at its last token: the running sum is 1 in between.
    edges = torch.zeros(positions + 1, dtype=torch.int64)
    edges.scatter_add_(0, starts, torch.ones_like(starts))
    edges.scatter_add_(0, starts + (lengths - 1).clamp_min(0), -torch.ones_like(starts))
    return edges.cumsum(0)[:-1] > 0


def _bounds(cu_seqlens: torch.Tensor, positions: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return where each sequence starts and how much room it has, int64 [N]."""
    _check_tokens("sequence bounds", cu_seqlens)
    bounds = cu_seqlens.cpu().long()
    if len(bounds) == 0:
        raise PayloadInvalidError("no sequence bounds are given; N sequences have N+1 of them")
    room, first, last = bounds.diff(), int(bounds[0]), int(bounds[-1])
    end = last if positions is None else positions
    if first != 0 or last != end or bool((room < 0).any()):
        raise PayloadInvalidError(
            f"sequence bounds run from {first} to {last}; they start at 0, never fall, and end at "
            f"the number of positions, {end}",
            facts={"first": first, "last": last, "positions": end},
        )
    return bounds[:-1], room
