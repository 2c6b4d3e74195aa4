"""Settings of replicas: what makes no sense is refused before a cluster is asked."""

from __future__ import annotations

import importlib.util
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
from tests.server.replicas.teacher import Teacher

from teacher_logits.errors import ConfigError
from teacher_logits.transport import Transport
from teacher_logits_server.cli import read_config
from teacher_logits_server.config import ServerConfig
from teacher_logits_server.engines import check_settings
from teacher_logits_server.engines.served import served_by
from teacher_logits_server.named_teachers import NamedTeacher
from teacher_logits_server.replicas.actor import of_a_replica

if TYPE_CHECKING:
    from pathlib import Path


def test_they_are_read_from_flags_and_mean_one_replica_on_a_cpu_where_left_out() -> None:
    read = read_config(["--engine", "ray", "--model", "m"])
    assert (read.replicas, read.replica_engine, read.replica_gpus, read.replica_cpus) == (
        1,
        "transformers",
        0.0,
        1.0,
    )
    flags = ["--replicas", "8", "--replica-gpus", "0.5", "--placement", "pack"]
    read = read_config(["--engine", "ray", *flags, "--replica-start", "15min"])
    assert (read.replicas, read.replica_gpus, read.placement) == (8, 0.5, "pack")
    assert read.replica_start == timedelta(minutes=15)


@pytest.mark.parametrize(
    ("flag", "settings"),
    [
        ("--replicas", {"engine": "ray", "replicas": 0}),
        ("--replicas", {"model": "m", "replicas": 2}),
        ("--replica-engine", {"engine": "a:b", "replica_engine": "c:d"}),
        ("--replica-engine", {"engine": "ray", "replica_engine": "ray"}),
        ("--replica-cpus", {"engine": "ray", "replica_cpus": 0.0}),
        ("--replica-gpus", {"engine": "ray", "device": "cuda"}),
        ("--replica-start", {"engine": "ray", "replica_start": timedelta(0)}),
        ("--replica-patience", {"engine": "ray", "replica_patience": timedelta(0)}),
        ("--placement", {"engine": "ray", "placement": "anywhere"}),
        (
            "--device-pool-size",
            {
                "engine": "ray",
                "replica_gpus": 1.0,
                "device": "cuda",
                "device_pool_size_bytes": 8192,
            },
        ),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused_by_its_flag(flag: str, settings: dict[str, object]) -> None:
    with pytest.raises(ConfigError) as raised:
        ServerConfig(**settings)  # type: ignore[arg-type]
    assert raised.value.facts["flag"] == flag


@pytest.mark.parametrize("text", ["-1", "nan", "inf", "many"])
def test_an_amount_is_a_number_that_is_not_negative(text: str) -> None:
    with pytest.raises(ConfigError, match="not negative"):
        read_config(["--engine", "ray", "--replica-gpus", text])


def test_ray_that_is_not_installed_is_refused_with_the_extra_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "ray" else found(name)
    )
    with pytest.raises(ConfigError, match=r"install teacher-logits\[ray\]"):
        check_settings(ServerConfig(engine="ray"))


IN_REPLICAS = NamedTeacher(teacher_id="a", settings={"engine": "ray", "model": "m", "replicas": 2})
BESIDE = NamedTeacher(teacher_id="b", settings={"model": "n"})
OBJECTS = (Transport.RAY_OBJECT, Transport.STREAM)
NO_OBJECTS = (Transport.SHARED_MEMORY, Transport.STREAM)


@pytest.mark.parametrize("transports", [OBJECTS, NO_OBJECTS, tuple(Transport)], ids=str)
@pytest.mark.parametrize(
    "teachers", [{"engine": "ray"}, {"engine": "ray", "teachers": (BESIDE,)}], ids=str
)
def test_what_a_server_says_of_its_cluster_is_refused_by_none_of_its_teachers(
    transports: tuple[Transport, ...], teachers: dict[str, object]
) -> None:
    told = {"ray_address": "auto", "ray_namespace": "own", "transports": transports, **teachers}
    budget = 8192 if Transport.RAY_OBJECT in transports else 0
    config = ServerConfig(model="m", ray_budget_bytes=budget, **told)  # type: ignore[arg-type]
    first, *others = config.of_each_teacher()
    assert (first.ray_address, first.ray_namespace) == ("auto", "own")
    assert of_a_replica(first).engine == "transformers"
    assert all(not each.ray_address for each in others)


def test_a_cluster_may_be_joined_for_the_replicas_of_one_of_several_teachers_alone(
    tmp_path: Path,
) -> None:
    config = ServerConfig(ray_address="auto", transports=NO_OBJECTS, teachers=(BESIDE, IN_REPLICAS))
    beside, in_replicas = config.of_each_teacher()
    assert (beside.ray_address, in_replicas.ray_address) == ("", "auto")
    assert of_a_replica(in_replicas).model == "m"
    [made] = served_by(config, {"another": Teacher(tmp_path)})
    assert made.teacher_id == "another"
    with pytest.raises(ConfigError, match="joined for ray_object and --engine ray alone"):
        ServerConfig(ray_address="auto", transports=NO_OBJECTS, teachers=(BESIDE,))


@pytest.mark.parametrize(
    ("flag", "settings"),
    [
        (
            "--ray-budget",
            {"engine": "ray", "ray_address": "auto", "transports": NO_OBJECTS}
            | {"ray_budget_bytes": 8192},
        ),
        ("--ray-namespace", {"ray_namespace": "own"}),
        ("--ray-namespace", {"ray_namespace": "own", "teachers": (BESIDE,)}),
        ("--ray-namespace", {"engine": "ray", "ray_namespace": ""}),
    ],
    ids=str,
)
def test_what_is_said_of_a_cluster_and_used_by_nothing_is_refused(
    flag: str, settings: dict[str, object]
) -> None:
    with pytest.raises(ConfigError) as raised:
        ServerConfig(**settings)  # type: ignore[arg-type]
    assert raised.value.facts["flag"] == flag


def test_a_span_is_shown_as_its_flag_takes_it() -> None:
    with pytest.raises(ConfigError, match="--replica-start 20s: is said of replicas"):
        read_config(["--model", "m", "--replica-start", "20s"])
