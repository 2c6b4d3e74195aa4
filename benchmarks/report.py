"""Lines of figures: one JSON object each, the same form from every benchmark.

    {"figure": ..., "unit": ..., "median": ..., "min": ..., "max": ..., "n": ...,
     what was varied ..., "ratio": ..., "anchor": ...}

`ratio` and `anchor` are there where the figure is compared: the median over that of the anchor,
which was measured in the same run. A number is null where it is infinite or none.
"""

from __future__ import annotations

import json
import math
import statistics
import sys


def report(
    figure: str,
    unit: str,
    values: list[float],
    *,
    against: tuple[str, list[float]] | None = None,
    **varied: object,
) -> None:
    """Write one figure to standard output; `against` is an anchor and its values."""
    line: dict[str, object] = {
        "figure": figure,
        "unit": unit,
        "median": _rounded(statistics.median(values)),
        "min": _rounded(min(values)),
        "max": _rounded(max(values)),
        "n": len(values),
        **varied,
    }
    if against is not None:
        anchor, anchored = against
        line["ratio"] = _rounded(statistics.median(values) / statistics.median(anchored))
        line["anchor"] = anchor
    write_line(line)


def write_line(line: object) -> None:
    """Write one object as a line of JSON."""
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def _rounded(value: float) -> float | None:
    """To three places, or to four digits where it is small."""
    if not math.isfinite(value):
        return None
    return round(value, 3) if abs(value) >= 1 else float(f"{value:.4g}")
