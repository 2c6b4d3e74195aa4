"""Packages that a trainer needs, and the extra that brings them."""

from __future__ import annotations

from teacher_logits.errors import ConfigError


def missing(error: ImportError, *, trainer: str, extra: str) -> ConfigError:
    """Return the error for a trainer whose package is not here, or is too old for it."""
    package = error.name or extra
    return ConfigError(
        f"teacher_logits_client.trainers.{trainer} needs {package}, which is not here or is too "
        f"old ({error}): pip install 'teacher-logits[{extra}]'",
        facts={"package": package, "extra": extra},
    )
