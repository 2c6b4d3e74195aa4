"""Dropped: what its owner never closed is named in a ``ResourceWarning`` when it goes."""

from __future__ import annotations

import warnings


def warn_dropped(what: str, source: object, *, ended: str = "closed") -> None:
    """Say that ``what`` went without being ``ended``; for the ``__del__`` of ``source``."""
    warnings.warn(
        f"{what} was dropped without being {ended}: use it in a `with` block",
        ResourceWarning,
        stacklevel=3,
        source=source,
    )
