"""Which seeds are played: those that an environment variable names, or all there are."""

import os
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from _pytest.mark import ParameterSet


def seed_params(
    variable: str, few: Collection[int], many: Iterable[int], *, name: Callable[[int], str] = str
) -> "list[ParameterSet]":
    """Return the seeds that are asked for in an environment variable, as parameters of a test.

    Where none are, ``many``, of which all but a ``few`` are slow.
    """
    asked = seeds_in(os.environ.get(variable, ""))
    return [
        pytest.param(seed, marks=[] if asked or seed in few else [pytest.mark.slow], id=name(seed))
        for seed in asked or many
    ]


def seeds_in(text: str) -> list[int]:
    """Return the seeds of `7,31,100-199`."""
    seeds: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        seeds += range(int(first), int(last or first) + 1)
    return seeds
