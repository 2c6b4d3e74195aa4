"""What runs in a replica, called as Ray calls it: what it loads, refuses and returns."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from teacher_logits.errors import AlignmentError, ConfigError, EngineError
from teacher_logits_server.config import ServerConfig
from teacher_logits_server.engines import EngineProfile
from teacher_logits_server.replicas.actor import Refused, ReplicaActor, of_a_replica
from teacher_logits_server.replicas.endings import difference, refusal_of, words_of_end

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

    from teacher_logits.errors import TeacherLogitsError

TEACHER = "tests.server.replicas.teacher"


def config(folder: Path, replica_engine: str) -> ServerConfig:
    return ServerConfig(
        engine="ray",
        replicas=3,
        replica_engine=replica_engine,
        model=str(folder),
        top_k=7,
        ray_address="auto",
        replica_patience=timedelta(seconds=5),
    )


def refused(folder: Path, replica_engine: str) -> TeacherLogitsError:
    told = ReplicaActor().load(config(folder, replica_engine))
    assert isinstance(told, Refused)
    return refusal_of(told, 2)


def test_a_replica_loads_by_the_server_s_settings_as_a_server_of_its_own_would(
    tmp_path: Path,
) -> None:
    own = of_a_replica(config(tmp_path, f"{TEACHER}:make"))
    assert own == ServerConfig(engine=f"{TEACHER}:make", model=str(tmp_path), top_k=7)


def test_what_does_not_load_is_told_with_its_words_and_the_replica(tmp_path: Path) -> None:
    error = refused(tmp_path, f"{TEACHER}:fail")
    assert isinstance(error, EngineError)
    assert error.message.startswith("replica 2 on ")
    assert f"no weights in {tmp_path}" in error.message
    assert error.facts["replica"] == 2


def test_an_engine_that_is_not_there_is_refused_by_the_flag_that_named_it(tmp_path: Path) -> None:
    error = refused(tmp_path, "nowhere.at_all:make")
    assert isinstance(error, ConfigError)
    assert error.facts["flag"] == "--replica-engine"
    assert "--replica-engine 'nowhere.at_all:make' leads to no engine" in error.message


def test_a_model_that_is_not_there_is_refused_by_its_flag(tmp_path: Path) -> None:
    error = refused(tmp_path / "missing", "transformers")
    assert isinstance(error, ConfigError)
    assert error.facts["flag"] == "--model"


def test_a_teacher_that_fails_its_probe_is_refused_as_any_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.server.replicas import teacher

    for name, token in (("DIE", -1), ("RAISE", -1), ("HOLD", -1), ("SHORT", 64)):
        monkeypatch.setattr(teacher, name, token)
    assert isinstance(refused(tmp_path, f"{TEACHER}:make"), AlignmentError)


def test_rows_asked_of_a_replica_that_loaded_nothing_are_told_so() -> None:
    assert ReplicaActor().score([]) == "the replica has loaded no teacher"


def test_teachers_are_compared_in_all_that_students_are_told_of_them() -> None:
    one = EngineProfile(
        name="e", vocabulary_size=5, head_rows=8, max_row_tokens=9, arithmetic_type="float32"
    )
    other = EngineProfile(
        name="e",
        vocabulary_size=5,
        head_rows=8,
        max_row_tokens=9,
        arithmetic_type="bfloat16",
        revision="r2",
    )
    assert difference(one, one) == ""
    assert (
        difference(one, other) == "arithmetic_type 'float32' and 'bfloat16', revision '' and 'r2'"
    )


def test_why_an_actor_ended_is_one_line() -> None:
    dead = "The actor is dead because it was killed by `ray.kill`."
    said = f"The actor died unexpectedly before this task.\n\tclass_name: A\n{dead}"
    assert words_of_end(RuntimeError(said)) == dead
    assert words_of_end(RuntimeError()) == "RuntimeError"
