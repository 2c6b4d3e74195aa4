"""Id codecs: int32 ids in three bytes, or in 18 bits each.

    planes24   | low 16 bits of K ids | ...      | high 8 bits of K ids | ...
    packed18   18 bits an id, the lowest bit first, each position in whole bytes

Little-endian throughout. An absent id, -1, is all ones. A vocabulary of 2^18 ids has one that is
all ones too: there ``restore_absent`` tells the two apart, by their log-probabilities.

Everything works on runs of whole positions: ``ids`` int32 [R,K], contiguous, and planes uint8
[R, bytes of a row]. Refuses (``CodecError``) ids that have more bits: cut off, they would be others
of the vocabulary. What the bits of a stream say is for ``invariants`` to judge.
"""

from __future__ import annotations

import torch

from teacher_logits.encodings import CODEC_FACT, CodecError, IdCodec, Plane, packed_bytes

_LOW = (1 << 18) - 1
_HIGH = _LOW << 18
_ABSENT24 = (1 << 24) - 1
#: Four ids make nine bytes.
_GROUP_IDS, _GROUP_BYTES = 4, 9


def encode_ids(plane: Plane, ids: torch.Tensor, out: torch.Tensor) -> None:
    """Write one plane of ``ids`` into ``out``.

    Raises:
        CodecError: an id is below -1, or has more bits than the codec carries.
    """
    if plane is Plane.LOW16:
        _check(ids, _ABSENT24 - 1, IdCodec.PLANES24)
        out.view(torch.int16).copy_(ids.view(torch.int16)[:, 0::2])
    elif plane is Plane.HIGH8:
        out.copy_(ids.view(torch.uint8)[:, 2::4])
    else:
        _check(ids, _LOW, IdCodec.PACKED18)
        _pack(ids, out)


def decode_ids(plane: Plane, data: torch.Tensor, out: torch.Tensor) -> None:
    """Write what a plane says into ``out`` [R,K]; of two planes the low one comes first."""
    if plane is Plane.LOW16:
        out.zero_().view(torch.int16)[:, 0::2] = data.view(torch.int16)
    elif plane is Plane.HIGH8:
        out.view(torch.uint8)[:, 2::4] = data
        if int(out.amax()) == _ABSENT24:
            out.masked_fill_(out == _ABSENT24, -1)
    else:
        _unpack(data, out)


def mark_absent(ids: torch.Tensor) -> None:
    """Have ids of 18 bits that are all ones say that they are absent."""
    if int(ids.amax()) == _LOW:
        ids.masked_fill_(ids == _LOW, -1)


def restore_absent(ids: torch.Tensor, logprobs: torch.Tensor, scored: torch.Tensor) -> None:
    """Mark ids of 18 bits as absent where they have no log-probability, or no score (bool [R])."""
    absent = (logprobs == -torch.inf) | ~scored.unsqueeze(1)
    ids.masked_fill_((ids == _LOW) & absent, -1)


def _check(ids: torch.Tensor, most: int, codec: IdCodec) -> None:
    least, largest = (int(each) for each in ids.aminmax())
    if -1 <= least and largest <= most:
        return
    wrong = least if least < -1 else largest
    raise CodecError(
        f"an id of {wrong} is none that codec {codec.value} can carry, which are -1 to {most}: its "
        "writer gave ids beyond its vocabulary",
        facts={CODEC_FACT: codec.value, "token_id": wrong, "limit": most},
    )


def _pack(ids: torch.Tensor, out: torch.Tensor) -> None:
    rows, k = ids.shape
    groups = -(-k // _GROUP_IDS)
    if k % _GROUP_IDS:
        ids = torch.nn.functional.pad(ids, (0, groups * _GROUP_IDS - k))
    # Two ids at a time, since an int64 holds two: 36 bits of each pair, then two pairs a group.
    words = ids.contiguous().view(torch.int64)
    pairs = (words >> 14).bitwise_and_(_HIGH).bitwise_or_(words.bitwise_and(_LOW)).view(-1, 2)
    first, second = pairs[:, 0], pairs[:, 1]
    is_whole = packed_bytes(k) == groups * _GROUP_BYTES
    target = out if is_whole else out.new_empty(rows, groups * _GROUP_BYTES)
    grouped = target.view(-1, _GROUP_BYTES)
    low = (second << 36).bitwise_or_(first)
    grouped[:, :8] = low.view(torch.uint8).view(-1, 8)
    grouped[:, 8] = second >> 28
    if not is_whole:
        out.copy_(target[:, : out.shape[1]])


def _unpack(data: torch.Tensor, out: torch.Tensor) -> None:
    rows, k = out.shape
    groups = -(-k // _GROUP_IDS)
    if data.shape[1] != groups * _GROUP_BYTES:
        data = torch.nn.functional.pad(data, (0, groups * _GROUP_BYTES - data.shape[1]))
    grouped = data.view(-1, _GROUP_BYTES)
    low = torch.empty(len(grouped), dtype=torch.int64)
    low.view(torch.uint8).view(-1, 8).copy_(grouped[:, :8])
    pairs = low.new_empty(len(grouped), 2)
    pairs[:, 0] = low
    torch.bitwise_or(
        (low >> 36).bitwise_and_((1 << 28) - 1),
        grouped[:, 8].to(torch.int64) << 28,
        out=pairs[:, 1],
    )
    words = (pairs << 14).bitwise_and_(_LOW << 32).bitwise_or_(pairs.bitwise_and(_LOW))
    out.copy_(words.view(torch.int32).view(rows, -1)[:, :k])
