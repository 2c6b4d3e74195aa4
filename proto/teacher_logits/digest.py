"""Digests: short names for token rows, whole payloads and tokenizers.

All are BLAKE2b of 16 bytes, each kind under its own personalisation, so that one never passes
for another. They find mistakes, not attackers: anyone can compute them.

    row        uint32 LE token count | int32 LE ids                           tls-row-v1
    payload    per column: name | element type | shape | bytes                tls-payload-v1
    tokenizer  vocabulary | added tokens | normaliser                         tls-tokenizer-v1

Promises: equal content has an equal digest on every host, whichever transport or container it
came in. Refuses ids that int32 cannot hold, and bytes that do not fill their column's shape.
A row digest finds wrong rows, order, truncation, a doubled first token; it is blind to a shift
of the scores against the tokens, which the causality probe finds.
"""

from __future__ import annotations

import hashlib
import math
import operator
import reprlib
import struct
import sys
from array import array
from typing import TYPE_CHECKING

from teacher_logits.errors import PayloadInvalidError
from teacher_logits.layout import ElementType

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence
    from typing import Protocol, SupportsIndex

    class Buffer(Protocol):
        """What ``memoryview`` takes; ``collections.abc`` has it from Python 3.12 on."""

        def __buffer__(self, flags: int, /) -> memoryview: ...


DIGEST_BYTES = 16

_ROW = b"tls-row-v1"
_PAYLOAD = b"tls-payload-v1"
_TOKENIZER = b"tls-tokenizer-v1"

_INTEGER_FORMATS = frozenset("hHiIlLqQ")
_INT32_MIN, _INT32_MAX = -(1 << 31), (1 << 31) - 1


def row_digest(ids: Collection[int] | Buffer) -> bytes:
    """Return the 16-byte digest of one row's token ids, padding left out.

    Any one-dimensional buffer of integers will do (``array``, NumPy, ``tensor.numpy()``), and an
    int32 one is read in place; so will a list or tuple of ints. Layout: the table above.

    Raises:
        PayloadInvalidError: an id that int32 cannot hold, no integers, or more than one row.
    """
    count, data = _int32_bytes(ids)
    digest = hashlib.blake2b(struct.pack("<I", count), digest_size=DIGEST_BYTES, person=_ROW)
    digest.update(data)
    return digest.digest()


def payload_digest(columns: Iterable[tuple[str, str, Sequence[int], Buffer]]) -> str:
    """Return the digest of a payload's columns, as 32 hex digits.

    Each column is (kind, element type, shape, bytes as they lie), the names being those of
    ``ColumnKind`` and ``ElementType``; columns come in the payload's own order. One column is
    looked at after the other, so a generator need hold only one at a time. Where a column lies
    in its slab takes no part: payloads equal in content have equal digests.

    Raises:
        PayloadInvalidError: the bytes of a column do not fill its shape, its element type is
            not known, or its buffer is not contiguous.
    """
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES, person=_PAYLOAD)
    for kind, element_type, shape, buffer in columns:
        data = _column_bytes(kind, element_type, shape, buffer)
        for name in (kind, element_type):
            digest.update(_framed(name.encode()))
        digest.update(struct.pack(f"<I{len(shape)}QQ", len(shape), *shape, data.nbytes))
        digest.update(data)
    return digest.hexdigest()


def tokenizer_fingerprint(
    *,
    vocabulary: Mapping[str, int] | Mapping[bytes, int],
    added_tokens: Mapping[str, int] | Mapping[bytes, int],
    normalizer: str = "",
) -> str:
    """Return the fingerprint of a tokenizer, as 32 hex digits. Equal means: the same ids.

    ``vocabulary`` maps every token to its id, as the tokenizer itself spells it (for a
    byte-level vocabulary the printable stand-ins); text counts as its UTF-8 bytes.
    ``added_tokens`` are the added and special ones, whether or not they stand in the vocabulary
    too. ``normalizer`` describes what is done to text before it is cut; any text that both sides
    write alike, e.g. the JSON of a ``tokenizers`` normaliser, and empty where there is none.
    The order of the mappings takes no part.

    Raises:
        PayloadInvalidError: an id is no whole number from 0 to 2**31 - 1.
    """
    added = _token_entries(added_tokens)
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES, person=_TOKENIZER)
    for entries in (_token_entries(vocabulary) | added, added):
        digest.update(struct.pack("<I", len(entries)))
        for token, token_id in sorted(entries):
            digest.update(_framed(token) + struct.pack("<I", token_id))
    digest.update(_framed(normalizer.encode()))
    return digest.hexdigest()


def _token_entries(tokens: Mapping[str, int] | Mapping[bytes, int]) -> set[tuple[bytes, int]]:
    entries: set[tuple[bytes, int]] = set()
    for token, token_id in tokens.items():
        if type(token_id) is not int or not 0 <= token_id <= _INT32_MAX:
            raise PayloadInvalidError(
                f"token {token!r} has the id {token_id!r}; ids are whole numbers from 0 to "
                f"{_INT32_MAX}",
                facts={"token": repr(token), "token_id": repr(token_id)},
            )
        # Some vocabularies hold lone surrogates, which plain UTF-8 refuses.
        spelled = token if isinstance(token, bytes) else token.encode("utf-8", "surrogatepass")
        entries.add((spelled, token_id))
    return entries


def _framed(text: bytes) -> bytes:
    """Return ``text`` behind its length, so that neighbours cannot run into one another."""
    return struct.pack("<I", len(text)) + text


def _int32_bytes(ids: Collection[int] | Buffer) -> tuple[int, Buffer]:
    """Return the number of ids and their little-endian int32 bytes, uncopied where that can be."""
    try:
        view = memoryview(ids)  # type: ignore[arg-type]  # a list falls through
    except TypeError:
        values = _as_int32(ids)  # type: ignore[arg-type]
    else:
        if view.ndim != 1 or view.format not in _INTEGER_FORMATS:
            raise PayloadInvalidError(
                f"row ids have {view.ndim} axes of elements {view.format!r}; give one row at a "
                "time, as integers of 16 bits or more in this host's byte order",
                facts={"axes": view.ndim, "format": view.format},
            )
        if view.format == "i" and view.c_contiguous and sys.byteorder == "little":
            return len(view), view
        values = _as_int32(view.tolist())
    if sys.byteorder == "big":
        values.byteswap()
    return len(values), values


def _as_int32(ids: Collection[int]) -> array[int]:
    try:
        return array("i", ids)
    except (OverflowError, TypeError):
        misfits = ((place, token_id) for place, token_id in enumerate(ids) if not _fits(token_id))
        place, token_id = next(misfits, (0, ids))
    shown = reprlib.repr(token_id)
    raise PayloadInvalidError(
        f"token id {shown} at place {place} is no whole number that int32 can hold",
        facts={"place": place, "token_id": shown},
    )


def _fits(token_id: SupportsIndex) -> bool:
    try:
        return _INT32_MIN <= operator.index(token_id) <= _INT32_MAX
    except TypeError:
        return False


def _column_bytes(kind: str, element_type: str, shape: Sequence[int], buffer: Buffer) -> memoryview:
    view = memoryview(buffer)
    if element_type not in {known.value for known in ElementType}:
        raise PayloadInvalidError(
            f"column {kind} has elements of type {element_type!r}, which no payload has",
            facts={"column": kind, "element_type": element_type},
        )
    expected = math.prod(shape) * ElementType(element_type).size_bytes
    if view.nbytes != expected or not view.c_contiguous or min(shape, default=0) < 0:
        raise PayloadInvalidError(
            f"column {kind} has {view.nbytes} bytes"
            f"{'' if view.c_contiguous else ', not in one piece'}; its shape {tuple(shape)} of "
            f"{element_type} takes {expected} in one piece",
            facts={"column": kind, "size_bytes": view.nbytes, "expected_bytes": expected},
        )
    # A view with a zero in its shape cannot be cast.
    return view.cast("B") if view.nbytes else memoryview(b"")
