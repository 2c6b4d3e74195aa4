"""The teachers that a server runs itself: each with its settings and what computes it.

Refuses, before anything is loaded, what a look tells of all of them; and, where one does not load,
the start as a whole: no teacher that was named is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

from teacher_logits.errors import ConfigError
from teacher_logits_server.engines import check_settings, make_engine
from teacher_logits_server.engines.passes import closed_on_failure
from teacher_logits_server.named_teachers import about, raise_all
from teacher_logits_server.ray_settings import of_no_teacher

if TYPE_CHECKING:
    from teacher_logits_server.config import ServerConfig
    from teacher_logits_server.engines.passes import ServedEngine

Engines: TypeAlias = "ServedEngine | Mapping[str, ServedEngine] | None"


@dataclass(frozen=True, kw_only=True, eq=False)
class ServedTeacher:
    """One of them. ``config`` is the server's, with what is said of this teacher alone."""

    config: ServerConfig
    engine: ServedEngine

    @property
    def teacher_id(self) -> str:
        """Its name."""
        return self.config.teacher_id


def check_teachers(config: ServerConfig) -> None:
    """Refuse what would not load, of every teacher; see ``check_settings``.

    Raises:
        ConfigError: naming the teachers where there are several, and the flag.
    """
    if not config.engine_name:
        check_settings(config)
    wrong = []
    for own in config.of_each_teacher():
        try:
            with about(own.teacher_id, of_several=bool(config.teachers)):
                check_settings(own)
        except ConfigError as error:
            wrong.append(error)
    raise_all(wrong)


def load_teachers(config: ServerConfig) -> tuple[ServedTeacher, ...]:
    """Load all teachers, one after the other.

    Raises:
        ConfigError, EngineError: one does not load; see ``make_engine``.
    """
    loaded: list[ServedTeacher] = []
    for own in config.of_each_teacher():
        with (
            closed_on_failure(*(each.engine for each in loaded)),
            about(own.teacher_id, of_several=bool(config.teachers)),
        ):
            loaded.append(ServedTeacher(config=own, engine=make_engine(own)))
    return tuple(loaded)


def served_by(config: ServerConfig, engines: Engines) -> tuple[ServedTeacher, ...]:
    """Return the teachers of engines that are there already.

    Args:
        engines: one, which is the teacher of the config's ``teacher_id``; or several by the names
            of their teachers, whose settings are those of the config, as far as it names them.
    """
    alone = {"teachers": (), **of_no_teacher(config.engine_name)}
    own = replace(config, **alone)  # type: ignore[arg-type]
    if engines is None:
        return ()
    if not isinstance(engines, Mapping):
        return (ServedTeacher(config=own, engine=engines),)
    named = {each.teacher_id: each for each in config.of_each_teacher()}
    return tuple(
        ServedTeacher(config=named.get(name) or replace(own, teacher_id=name), engine=engine)
        for name, engine in engines.items()
    )
