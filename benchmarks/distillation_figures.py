"""The figures of `distillation`: each recipe at each seed, their spread, and who won."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from benchmarks.distilling import HeldOutQuality, Recipe, prefix
from benchmarks.report import report, write_line

if TYPE_CHECKING:
    from collections.abc import Iterable

    from benchmarks.distilling import Scored

NO_TEACHER = Recipe(name="no_teacher", k=0)
"""What every recipe is held against."""

Results = dict[Recipe, list[HeldOutQuality]]
"""What came of each recipe, a student a seed."""


def report_quality(
    recipe: Recipe,
    found: list[HeldOutQuality],
    *,
    seed: int | str,
    steps: int,
    against: list[HeldOutQuality] | None = None,
) -> None:
    """Write `held_out` of some students of a recipe, in both units."""
    for unit, name in (("perplexity", "perplexity"), ("nats", "divergence")):
        values = [float(getattr(each, name)) for each in found]
        anchor = against and (str(NO_TEACHER), [float(getattr(each, name)) for each in against])
        report(
            "held_out",
            unit,
            values,
            against=anchor or None,
            recipe=recipe.name,
            k=recipe.k,
            seed=seed,
            steps=steps,
        )


def report_summary(results: Results, *, steps: int) -> set[Recipe]:
    """Write the spread of each recipe; return those that beat no teacher at every seed."""
    alone = results[NO_TEACHER]
    winners = set()
    for recipe, found in results.items():
        against = None if recipe == NO_TEACHER else alone
        report_quality(recipe, found, seed="all", steps=steps, against=against)
    for recipe, found in results.items():
        if recipe == NO_TEACHER:
            continue
        pairs = zip(found, alone, strict=True)
        count = sum(own.perplexity < other.perplexity for own, other in pairs)
        if count == len(alone):
            winners.add(recipe)
        write_line(
            {
                "figure": "teacher_better",
                "unit": "seeds",
                "median": count,
                "min": count,
                "max": count,
                "n": len(alone),
                "recipe": recipe.name,
                "k": recipe.k,
            }
        )
    return winners


def report_mass(recipes: Iterable[Recipe], held_out: list[Scored]) -> None:
    """Write how much of the teacher's probability the ids of each recipe hold."""
    for k in sorted({each.k for each in recipes if each.k}):
        held = [1 - prefix(each.targets, k).log_tail.exp() for each in held_out]
        report("teacher_mass", "share", [float(torch.cat(held).mean())], k=k)
