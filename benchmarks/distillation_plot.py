"""The picture of `distillation`: each recipe's held-out perplexity and divergence, a dot a seed."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.distilling import HeldOutQuality, Recipe
    from matplotlib.axes import Axes


def draw(results: dict[Recipe, list[HeldOutQuality]], path: Path) -> None:
    """Draw into an SVG or a PNG, by the name's ending; the same bytes for the same figures."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = "distillation"
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    names = [str(recipe).replace("_", " ") for recipe in results]
    _dots(left, names, [[each.perplexity for each in found] for found in results.values()])
    _dots(right, names, [[each.divergence for each in found] for found in results.values()])
    left.set_xscale("log")
    left.set_xlabel("perplexity of held-out text")
    right.set_xlabel("KL (teacher ‖ student) a token, nats")
    right.set_xlim(left=0)
    left.invert_yaxis()
    metadata = {"Date": None} if path.suffix == ".svg" else None
    figure.savefig(path, dpi=120, metadata=metadata)


def _dots(axes: Axes, names: list[str], values: list[list[float]]) -> None:
    for place, each in enumerate(values):
        axes.plot(each, [place] * len(each), "o", color="tab:blue" if place else "tab:red")
    axes.set_yticks(range(len(names)), names)
    axes.grid(axis="x", color="0.9")
