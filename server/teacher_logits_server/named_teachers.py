"""Named teachers: several of the server's own behind its addresses, and what each has for itself.

    --teacher math=./Qwen2.5-Math-7B        or in YAML    teachers:
    --teacher code=package.module:function                  math: ./Qwen2.5-Math-7B
                                                            code:
                                                              engine: package.module:function
                                                              top_k: 256

What is named has the server's own settings but for those that it is given. Nothing that was
named is left out: what it may not be given, cannot be read or makes no sense is refused with its
name, and so is a name that comes twice.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from teacher_logits.errors import ConfigError, TeacherLogitsError
from teacher_logits_server.flags import settings_of
from teacher_logits_server.ray_settings import of_no_teacher
from teacher_logits_server.readers import Reader
from teacher_logits_server.replica_settings import ReplicaSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from teacher_logits_server.flags import Setting

C = TypeVar("C")

FLAG = "--teacher"
KEY = "teachers"
"""Of the mapping in a YAML file."""
NEVER_SHARED: dict[str, object] = {
    "model": "",
    "engine": "",
    "teacher_id": "teacher",
    KEY: (),
    **{name: default for name, default, _ in settings_of(ReplicaSettings)},
}
"""What is said of one teacher is not said of the others: the settings of none."""


@dataclass(frozen=True, kw_only=True)
class NamedTeacher:
    """One of a server's several teachers; ``settings`` by the names of ``ServerConfig``."""

    teacher_id: str
    settings: Mapping[str, object]


def read_named(text: str) -> NamedTeacher:
    """Read ``NAME=MODEL``, or ``NAME=module:function`` of an engine: that has no slash."""
    name, equals, what = (part.strip() for part in text.partition("="))
    if not (name and equals and what):
        raise ValueError("give NAME=MODEL, as in math=./Qwen2.5-Math-7B")
    is_engine = ":" in what and "/" not in what
    return NamedTeacher(teacher_id=name, settings={"engine" if is_engine else "model": what})


NAMED = Reader("NAME=MODEL", read_named, NamedTeacher)


def read_mapping(
    document: object,
    options: Mapping[str, tuple[str, Setting]],
    *,
    where: str,
    read: Callable[..., object],
) -> tuple[NamedTeacher, ...]:
    """Read the mapping of a YAML file: names, each with a model or a mapping of settings.

    Args:
        options: what a teacher may be given: names and settings, by key.
        where: the file and the key, for messages.
        read: reads one setting's value.

    Raises:
        ConfigError: naming the teachers, with all that is wrong.
    """
    if not isinstance(document, dict) or not document:
        raise _refuse(f"{where}: a mapping of names is expected, such as `math: ./Qwen2.5-Math-7B`")
    made, wrong = [], []
    for given, entry in document.items():
        name = str(given)
        try:
            made.append(_read_entry(name, entry, options, where=f"{where}: {name}", read=read))
        except ConfigError as error:
            error.facts["teacher_id"] = name
            wrong.append(error)
    raise_all(wrong)
    return tuple(made)


def _read_entry(
    name: str,
    entry: object,
    options: Mapping[str, tuple[str, Setting]],
    *,
    where: str,
    read: Callable[..., object],
) -> NamedTeacher:
    if isinstance(entry, str):
        try:
            return read_named(f"{name}={entry}")
        except ValueError as error:
            raise _refuse(f"{where}: {error}") from None
    if not isinstance(entry, dict):
        raise _refuse(
            f"{where}: a model or a mapping of settings is expected, such as `model: ./Qwen3-8B`"
        )
    given = [(str(key).replace("-", "_"), value) for key, value in entry.items()]
    keys = [key for key, _ in given]
    twice = sorted({key for key in keys if keys.count(key) > 1})
    if twice:
        raise _refuse(f"{where}: {', '.join(twice)} is given twice")
    _check_known(keys, options, where=where)
    settings = {}
    for key, value in given:
        field, setting = options[key]
        settings[field] = read(setting, value, where=f"{where}: {key}")
    return NamedTeacher(teacher_id=name, settings=settings)


def _check_known(keys: Iterable[str], options: Collection[str], *, where: str) -> None:
    unknown = [key for key in keys if key not in options]
    if unknown:
        raise _refuse(
            f"{where}: {', '.join(unknown)} is nothing that a teacher may have of its own; it may "
            f"have {', '.join(options)}",
            unknown=", ".join(unknown),
        )


def configs_of(config: C, named: Sequence[NamedTeacher], options: Collection[str]) -> tuple[C, ...]:
    """Return the settings of each named teacher: the config's, and over them its own.

    Args:
        options: fields of the config that a teacher may have of its own.

    Raises:
        ConfigError: naming the teachers that cannot be had so.
    """
    made, wrong = [], []
    for each in named:
        not_told = of_no_teacher(str(each.settings.get("engine", "")))
        own = {**NEVER_SHARED, **not_told, **each.settings, "teacher_id": each.teacher_id}
        try:
            with about(each.teacher_id):
                _check_known(each.settings, options, where="NamedTeacher(settings=)")
                made.append(replace(config, **own))  # type: ignore[type-var]
        except ConfigError as error:
            wrong.append(error)
    raise_all(wrong)
    return tuple(made)


def check_names(names: Sequence[str]) -> None:
    """Refuse a name that comes twice.

    Raises:
        ConfigError: with all that do.
    """
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise _refuse(
            f"{FLAG}: {', '.join(map(repr, twice))} is the name of two teachers: students ask for "
            "one by its name; give each its own (that of --model or --engine is --teacher-id)",
            teacher_id=", ".join(twice),
        )


@contextmanager
def about(teacher_id: str, *, of_several: bool = True) -> Iterator[None]:
    """Have an error say which teacher it is about, where there are several."""
    try:
        yield
    except TeacherLogitsError as error:
        if of_several:
            error.message = f"teacher {teacher_id!r}: {error.message}"
            error.args = (error.message,)
            error.facts["teacher_id"] = teacher_id
        raise


def raise_all(errors: Sequence[ConfigError]) -> None:
    """Raise what was found, as one error; nothing where that is nothing."""
    if len(errors) == 1:
        raise errors[0]
    if errors:
        names = ", ".join(str(error.facts.get("teacher_id", "")) for error in errors)
        raise _refuse("; ".join(error.message for error in errors), teacher_id=names)


def _refuse(message: str, **facts: str) -> ConfigError:
    return ConfigError(message, facts={"flag": FLAG, **facts})
