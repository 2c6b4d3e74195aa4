"""Mutations of inputs: bit flips, numbers at their edges, cuts, repeats and splices."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence

_EDGES = [
    b"\x00", b"\x01", b"\x7f", b"\x80", b"\xff", b"\xff\xff", b"\xff\xff\xff\xff\x0f",
    b"\xff\xff\xff\xff\xff\xff\xff\xff\x7f", b"\xff" * 9 + b"\x01", b"\x80" * 11, b"\x00" * 8,
    b"\x00\x00\xc0\x7f", b"\x00\x00\x80\x7f", b"\x00\x7e", b"\x00\x7c",
    b"\xc3\x28", b"\0", b"../", b"%s", b"\r\n", b"\xed\xa0\x80",
]  # fmt: skip
_MOST_CHANGES = 6
MOST_BYTES = 1 << 16


def mutated(dice: random.Random, seeds: Sequence[bytes]) -> bytes:
    """Return a seed after a few changes."""
    data = bytearray(dice.choice(seeds))
    for _ in range(dice.randrange(_MOST_CHANGES)):
        dice.choice(_CHANGES)(dice, data, seeds)
    return bytes(data[:MOST_BYTES])


def _flip(dice: random.Random, data: bytearray, seeds: Sequence[bytes]) -> None:
    if data:
        data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)


def _set_edge(dice: random.Random, data: bytearray, seeds: Sequence[bytes]) -> None:
    at, edge = dice.randrange(len(data) + 1), dice.choice(_EDGES)
    data[at : at + (len(edge) if dice.random() < 0.5 else 0)] = edge


def _cut(dice: random.Random, data: bytearray, seeds: Sequence[bytes]) -> None:
    at = dice.randrange(len(data) + 1)
    del data[at : at + dice.choice((1, 2, 8, len(data)))]


def _repeat(dice: random.Random, data: bytearray, seeds: Sequence[bytes]) -> None:
    if data:
        at = dice.randrange(len(data))
        part = bytes(data[at : at + dice.choice((1, 4, 16, 64))])
        data[at:at] = part * dice.choice((1, 2, 16, 64))


def _splice(dice: random.Random, data: bytearray, seeds: Sequence[bytes]) -> None:
    other = dice.choice(seeds)
    if other:
        start = dice.randrange(len(other))
        data[dice.randrange(len(data) + 1) :] = other[start:]


def _noise(dice: random.Random, data: bytearray, seeds: Sequence[bytes]) -> None:
    at = dice.randrange(len(data) + 1)
    data[at : at + 8] = dice.randbytes(dice.choice((1, 4, 8, 64)))


_CHANGES: list[Callable[[random.Random, bytearray, Sequence[bytes]], None]] = [
    _flip, _flip, _flip, _set_edge, _set_edge, _cut, _repeat, _splice, _noise,
]  # fmt: skip
