"""Engines: what computes a teacher's scores, behind a protocol small enough to write in an hour.

An engine says once what it is (``EngineProfile``) and then turns rows of token ids into logits,
a chunk of positions at a time. It knows nothing of sessions, payloads or slabs: the scorer
calls it on one thread, one pass at a time, and selects from each chunk before it asks for the
next. An engine of your own is a class with ``profile`` and ``logits``, and a function that
makes it from the server's config: ``serve --engine package.module:function``.

Refuses an engine name that leads nowhere (``find_engine``) and a function that makes no engine
(``make_engine``); ``check_settings`` sees what can be seen before anything is loaded.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Protocol, TypeAlias, cast

from teacher_logits.errors import ConfigError, EngineError, TeacherLogitsError
from teacher_logits_server.engines.model_files import find_model, find_tokenizer
from teacher_logits_server.ray_settings import RAY

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from teacher_logits_server.config import ServerConfig
    from teacher_logits_server.engines.passes import ServedEngine

BUILT_IN = {
    "transformers": "teacher_logits_server.engines.transformers:from_config",
    RAY: "teacher_logits_server.replicas.engine:from_config",
}
_NEEDS = {"transformers": ("torch", "transformers"), RAY: ("ray",)}
MAX_WORDS = 300
"""Most characters of somebody else's error that a message of ours repeats."""


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


# By its fields and not its class: an engine need not import anything of the server.
_PROFILE = [(each.name, int if each.type == "int" else str) for each in fields(EngineProfile)]


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


EngineFactory: TypeAlias = Callable[["ServerConfig"], "ServedEngine"]


def find_engine(name: str) -> EngineFactory:
    """Return the function that makes an engine: ``transformers``, or ``package.module:function``.

    Raises:
        ConfigError: the module is not found, fails while it is imported, or has no such function.
    """
    module_name, colon, attribute = BUILT_IN.get(name, name).partition(":")
    if not colon or not module_name or not attribute:
        raise _unknown(name, f"the engines here are {', '.join(BUILT_IN)}")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        why = f"module {module_name} cannot be imported ({words_of(error)})"
        if _is_not_found(error, module_name):
            why += f"; looked {_where_modules_are()}"
        raise _unknown(name, why) from error
    found = getattr(module, attribute, None)
    if found is None:
        raise _unknown(name, f"module {module_name} has no {attribute}")
    if not callable(found):
        raise _unknown(name, f"{attribute} cannot be called")
    return cast("EngineFactory", found)


def check_settings(config: ServerConfig) -> None:
    """Refuse what would not load, as far as a look tells; an own engine's module is imported.

    Raises:
        ConfigError: naming the flag: of the engine, or of the model or tokenizer it is to load;
            or one that speaks of a teacher where there is none.
    """
    name = config.engine_name
    if not name:
        config.check_teacher_flags()
        return
    if name not in BUILT_IN:
        _check_takes_config(name, find_engine(name))
        return
    missing = [each for each in _NEEDS[name] if importlib.util.find_spec(each) is None]
    if missing:
        raise ConfigError(
            f"--engine {name} needs {' and '.join(missing)}, not installed here: install "
            f"teacher-logits[{name}]",
            facts={"flag": "--engine", "value": name, "missing": ", ".join(missing)},
        )
    if name == RAY:
        return  # what its replicas are to load is looked at where they run
    find_model(config.model)
    if config.tokenizer:
        find_tokenizer(config.tokenizer)


def make_engine(config: ServerConfig) -> ServedEngine:
    """Make the engine that a server was told to serve.

    Raises:
        ConfigError: the name leads nowhere, or to a function that takes other arguments or
            returns no engine.
        EngineError: the function failed, with its error's type and words.
    """
    name = config.engine_name
    factory = find_engine(name)
    _check_takes_config(name, factory)
    try:
        engine = factory(config)
        profile = getattr(engine, "profile", None)
    except TeacherLogitsError:
        raise
    except Exception as error:
        raise EngineError(
            f"--engine {name!r} failed while it made its engine: {words_of(error)}; mend it, or "
            "serve with --log-level debug to see where",
            facts={"flag": "--engine", "value": name, "error": type(error).__name__},
        ) from error
    _check_is_engine(name, engine, profile)
    return engine


def words_of(error: Exception) -> str:
    """Return an error's type and text as one line."""
    said = " ".join(str(error).split())[:MAX_WORDS]
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def _check_takes_config(name: str, factory: EngineFactory) -> None:
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):
        return  # written in C: calling it will tell
    try:
        signature.bind(object())
    except TypeError as error:
        raise ConfigError(
            f"--engine {name!r} cannot make an engine: it takes {signature} and is called with "
            f"one argument, the server's config ({error}); give a function that takes the config",
            facts={"flag": "--engine", "value": name},
        ) from None


def _check_is_engine(name: str, engine: object, profile: object) -> None:
    made = "None" if engine is None else f"an object of type {type(engine).__name__}"
    why = ""
    if engine is None:
        why = "is no engine (does it lack its `return`?)"
    elif profile is None:
        why = "has no `profile`"
    elif lacking := [name for name, kind in _PROFILE if not _has(profile, name, kind)]:
        why = f"has a `profile` of type {type(profile).__name__} without {', '.join(lacking)}"
    elif not any(callable(getattr(engine, way, None)) for way in ("logits", "start")):
        why = "has no method `logits`"
    else:
        why = _why_sizes(cast("EngineProfile", profile))
    if why:
        raise ConfigError(
            f"--engine {name!r} returned {made}, which {why}; an engine has `profile`, an "
            "EngineProfile, and `logits(rows)`, which yields tensors [positions, head_rows]",
            facts={"flag": "--engine", "value": name, "returned": type(engine).__name__},
        )


def _has(profile: object, name: str, kind: type) -> bool:
    value = getattr(profile, name, None)
    return isinstance(value, kind) and not isinstance(value, bool)


def _why_sizes(profile: EngineProfile) -> str:
    ids, rows, tokens = profile.vocabulary_size, profile.head_rows, profile.max_row_tokens
    if 1 <= ids <= rows and tokens >= 1:
        return ""
    return (
        f"has a `profile` of {ids} ids, {rows} head rows and {tokens} tokens a row: at least 1 "
        "each, and no more ids than rows"
    )


def _is_not_found(error: Exception, module_name: str) -> bool:
    """Whether it is the module itself, or a package around it, that is nowhere."""
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return False
    return f"{module_name}.".startswith(f"{error.name}.")


def _where_modules_are() -> str:
    here = os.getcwd()
    in_folder = f" and in the current folder {here}" if {here, ""} & set(sys.path) else ""
    return f"in PYTHONPATH, among the packages of {sys.executable}{in_folder}"


def _unknown(name: str, why: str) -> ConfigError:
    return ConfigError(
        f"--engine {name!r} leads to no engine: {why}; an engine of your own is given as "
        "package.module:function",
        facts={"flag": "--engine", "value": name},
    )
