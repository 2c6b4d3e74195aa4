"""Engines: what computes a teacher's scores, behind a protocol small enough to write in an hour.

An engine says once what it is (``EngineProfile``) and then turns rows of token ids into logits,
a chunk of positions at a time. It knows nothing of sessions, payloads or slabs: the scorer
calls it on one thread, one pass at a time, and selects from each chunk before it asks for the
next. An engine of your own is a class with ``profile`` and ``logits``, and a function that
makes it from the server's config: ``serve --engine package.module:function``.

Refuses an engine name that leads nowhere (``find_engine``).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias, cast

from teacher_logits.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from teacher_logits_server.config import ServerConfig

BUILT_IN = {"transformers": "teacher_logits_server.engines.transformers:from_config"}


@dataclass(frozen=True, kw_only=True)
class EngineProfile:
    """What an engine says of its teacher.

    ``vocabulary_size`` counts the ids that its tokenizer can produce, ``head_rows`` the columns
    of its logits (columns from ``vocabulary_size`` on are padding), ``max_row_tokens`` the
    tokens of the longest row, ``arithmetic_type`` is for people (``bfloat16``). ``revision``
    changes whenever the weights do; it and ``tokenizer_fingerprint`` are empty where unknown.
    """

    name: str
    vocabulary_size: int
    head_rows: int
    max_row_tokens: int
    arithmetic_type: str
    revision: str = ""
    tokenizer_fingerprint: str = ""


@dataclass(frozen=True, kw_only=True, eq=False)
class Row:
    """One row to score.

    ``token_ids`` is int64 [L] on the CPU, a teacher's prefix included; ``first`` and ``count``
    are the wanted positions, counted from its first token. Tokens behind the last wanted
    position are left out beforehand: a causal teacher cannot see them.
    """

    token_ids: Tensor
    first: int
    count: int


class Engine(Protocol):
    """What computes a teacher's logits."""

    @property
    def profile(self) -> EngineProfile:
        """Return what the engine says of its teacher; the same for as long as it lives."""

    def logits(self, rows: Sequence[Row]) -> Iterator[Tensor]:
        """Yield the logits of the wanted positions, a chunk at a time.

        Each chunk is [c, head_rows], fp32, bf16 or fp16, on any device; together the chunks are
        the wanted positions of ``rows`` in their order. Logits at position s are the
        distribution of token s + 1. The caller owns a chunk, and may write into it, until it
        asks for the next. Whatever is raised fails the requests of these rows and no others.
        """


EngineFactory: TypeAlias = Callable[["ServerConfig"], Engine]


def find_engine(name: str) -> EngineFactory:
    """Return the function that makes an engine: ``transformers``, or ``package.module:function``.

    Raises:
        ConfigError: the module cannot be imported, or has no such function.
    """
    module_name, colon, attribute = BUILT_IN.get(name, name).partition(":")
    if not colon or not module_name or not attribute:
        raise _unknown(name, f"the engines here are {', '.join(BUILT_IN)}")
    try:
        found = getattr(importlib.import_module(module_name), attribute)
    except ImportError as error:
        raise _unknown(name, f"module {module_name} cannot be imported ({error})") from error
    except AttributeError as error:
        raise _unknown(name, f"module {module_name} has no {attribute}") from error
    if not callable(found):
        raise _unknown(name, f"{attribute} cannot be called")
    return cast("EngineFactory", found)


def _unknown(name: str, why: str) -> ConfigError:
    return ConfigError(
        f"--engine {name!r} leads to no engine: {why}; an engine of your own is given as "
        "package.module:function",
        facts={"flag": "--engine", "value": name},
    )
