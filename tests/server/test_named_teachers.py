"""Several teachers of one server: read, named, and all of them there or a start that is refused."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from teacher_logits.errors import ConfigError
from teacher_logits_server import cli
from teacher_logits_server.config import ServerConfig
from teacher_logits_server.engines.served import check_teachers, load_teachers, served_by
from teacher_logits_server.named_teachers import NamedTeacher

TOY = "teacher_logits_client.testing:toy_teacher"
KIB = 1024


def from_file(folder: Path, text: str, *flags: str) -> ServerConfig:
    """What a server is told by a file, and flags beside it."""
    (folder / "server.yaml").write_text(text, encoding="utf-8")
    return cli.read_config(["--config", str(folder / "server.yaml"), *flags])


def named(**teachers: Mapping[str, object]) -> tuple[NamedTeacher, ...]:
    return tuple(NamedTeacher(teacher_id=name, settings=own) for name, own in teachers.items())


def names(config: ServerConfig) -> list[str]:
    return [each.teacher_id for each in config.of_each_teacher()]


class TestOfFlags:
    def test_each_is_a_model_or_an_engine_under_its_name(self) -> None:
        config = cli.read_config(["--teacher", "math=./a=b", "--teacher", "code=own:make"])

        math, code = config.of_each_teacher()
        assert (math.teacher_id, math.model, math.engine_name) == ("math", "./a=b", "transformers")
        assert (code.teacher_id, code.model, code.engine_name) == ("code", "", "own:make")

    def test_the_other_settings_are_everybodys(self) -> None:
        flags = ["--teacher", "math=./a", "--teacher", "code=./b", "--top-k", "8"]

        assert [own.top_k for own in cli.read_config(flags).of_each_teacher()] == [8, 8]

    def test_a_path_with_a_colon_is_no_engine(self) -> None:
        (own,) = cli.read_config(["--teacher", "math=./a:b"]).of_each_teacher()

        assert own.model == "./a:b"

    @pytest.mark.parametrize("text", ["", "./model", "math=", "=./model"])
    def test_what_lacks_name_or_model_is_refused(self, text: str) -> None:
        with pytest.raises(ConfigError, match=r"--teacher.*give NAME=MODEL"):
            cli.read_config(["--teacher", text])


class TestTheOldForm:
    def test_is_one_teacher(self) -> None:
        (own,) = ServerConfig(model="./m", teacher_id="big", top_k=7).of_each_teacher()

        assert (own.teacher_id, own.model, own.top_k) == ("big", "./m", 7)

    def test_and_named_ones_are_there_together(self) -> None:
        flags = ["--model", "./m", "--teacher", "math=./a", "--dtype", "float16"]
        first, math = cli.read_config(flags).of_each_teacher()

        assert (first.teacher_id, first.model) == ("teacher", "./m")
        assert (math.teacher_id, math.model, math.dtype) == ("math", "./a", "float16")

    def test_whose_engine_is_not_that_of_the_named(self) -> None:
        first, math = cli.read_config(["--engine", TOY, "--teacher", "math=./a"]).of_each_teacher()

        assert (first.engine_name, math.engine_name) == (TOY, "transformers")

    def test_with_a_name_that_is_given_twice_is_refused(self) -> None:
        with pytest.raises(ConfigError, match=r"'math' is the name of two teachers"):
            cli.read_config(["--model", "./m", "--teacher-id", "math", "--teacher", "math=./a"])

    def test_named_and_without_a_model_is_refused_and_not_left_out(self) -> None:
        config = ServerConfig(teacher_id="big", teachers=named(math={"engine": TOY}))

        with pytest.raises(ConfigError, match=r"--teacher-id big: .* neither is given"):
            check_teachers(config)


class TestOfAFile:
    def test_have_settings_of_their_own(self, tmp_path: Path) -> None:
        config = from_file(
            tmp_path,
            """
            top-k: 64
            teachers:
              math: ./a
              code:
                model: ./b
                device: cuda:1
                top-k: 256
                pool_size: 64KiB
                max_batch_tokens: 512
              7: {engine: "own:make"}
            """,
        )

        math, code, seven = config.of_each_teacher()
        assert (math.model, math.device, math.top_k) == ("./a", "auto", 64)
        assert (code.model, code.device, code.top_k) == ("./b", "cuda:1", 256)
        assert (code.pool_size_bytes, code.max_batch_tokens) == (64 * KIB, 512)
        assert (seven.teacher_id, seven.engine, seven.model) == ("7", "own:make", "")

    def test_and_those_of_flags_are_there_together(self, tmp_path: Path) -> None:
        text = "model: ./m\nteacher: [one=./1]\nteachers: {two: ./2}\n"

        config = from_file(tmp_path, text, "--teacher", "three=./3")

        assert names(config) == ["teacher", "one", "two", "three"]

    def test_that_flags_name_again_are_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"'math' is the name of two teachers") as refusal:
            from_file(tmp_path, "teachers: {math: ./a, code: ./b}", "--teacher", "math=./c")

        assert refusal.value.facts["teacher_id"] == "math"

    @pytest.mark.parametrize(
        ("entry", "said"),
        [
            ("{model: ./a, temperature: 2}", r"teachers: math: temperature is nothing that"),
            ("{model: ./a, listen: x}", r"teachers: math: listen is nothing .* may have model"),
            ("{model: ./a, top_k: 1, top-k: 2}", r"teachers: math: top_k is given twice"),
            ("{model: ./a, top_k: many}", r"teachers: math: top_k many: give a whole number"),
            ("{model: ./a, top_k: 0}", r"teacher 'math': --top-k 0: must be at least 1"),
            ("{top_k: 5}", r"teacher 'math': --teacher math: a model or an engine is missing"),
            ("{model: ./a, pool_size: 2GiB}", r"teacher 'math': --pool-size 2GiB: is a share of"),
            ("[./a]", r"teachers: math: a model or a mapping of settings is expected"),
            ("", r"teachers: math: a model or a mapping of settings is expected"),
        ],
    )
    def test_one_that_cannot_be_is_refused_by_its_name(
        self, tmp_path: Path, entry: str, said: str
    ) -> None:
        with pytest.raises(ConfigError, match=said) as refusal:
            from_file(tmp_path, f"teachers:\n  code: ./b\n  math: {entry}")

        assert refusal.value.facts["teacher_id"] == "math"

    def test_all_that_cannot_be_are_told_at_once(self, tmp_path: Path) -> None:
        text = "teachers: {a: {top_k: 0, model: ./a}, b: ./b, c: {model: ./c, top_k: -1}}"

        with pytest.raises(ConfigError, match=r"'a': --top-k 0.*'c': --top-k -1") as refusal:
            from_file(tmp_path, text)

        assert refusal.value.facts["teacher_id"] == "a, c"

    @pytest.mark.parametrize("text", ["{math: ./a, math: ./b}", "{7: ./a, '7': ./b}"])
    def test_a_name_that_stands_there_twice_is_refused(self, tmp_path: Path, text: str) -> None:
        with pytest.raises(ConfigError, match=r"is given twice"):
            from_file(tmp_path, f"teachers: {text}")

    @pytest.mark.parametrize("text", ["", "[math]", "./a", "{}"])
    def test_that_are_no_mapping_are_refused(self, tmp_path: Path, text: str) -> None:
        with pytest.raises(ConfigError, match=r"teachers: a mapping of names is expected"):
            from_file(tmp_path, f"teachers: {text}")

    def test_a_name_that_is_none_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"teacher 'a b': --teacher-id a b"):
            from_file(tmp_path, "teachers: {a b: ./a}")


class TestInPython:
    def test_a_setting_that_no_teacher_has_of_its_own_is_refused(self) -> None:
        with pytest.raises(ConfigError, match=r"teacher 'math': .*chunk_bytes is nothing that"):
            ServerConfig(teachers=named(math={"engine": TOY, "chunk_bytes": 8192}))

    def test_one_device_pool_is_of_one_device(self) -> None:
        both = named(a={"engine": TOY, "device": "cuda:0"}, b={"engine": TOY, "device": "cuda:1"})

        with pytest.raises(ConfigError, match=r"--device-pool-size 1MiB.* cuda:0, cuda:1"):
            ServerConfig(device_pool_size_bytes=1 << 20, teachers=both)


class TestStarting:
    def test_all_models_that_are_not_there_are_told_at_once(self, tmp_path: Path) -> None:
        missing = str(tmp_path / "missing")
        config = ServerConfig(
            teachers=named(a={"model": missing}, b={"engine": TOY}, c={"model": missing})
        )

        with pytest.raises(ConfigError, match=r"teacher 'a': --model.*; teacher 'c': --model"):
            check_teachers(config)

    def test_one_that_does_not_load_is_named_and_nothing_is_served(self) -> None:
        config = ServerConfig(teachers=named(a={"engine": TOY}, b={"engine": "json:loads"}))

        with pytest.raises(Exception, match=r"teacher 'b': --engine 'json:loads'") as refusal:
            load_teachers(config)

        assert refusal.value.facts["teacher_id"] == "b"  # type: ignore[attr-defined]

    def test_the_names_of_one_alone_need_no_mention(self) -> None:
        with pytest.raises(ConfigError, match=r"^--engine 'nothing.here:make'"):
            check_teachers(ServerConfig(engine="nothing.here:make"))

    def test_each_engine_is_made_by_its_own_settings(self) -> None:
        config = ServerConfig(engine=TOY, teachers=named(math={"engine": TOY, "top_k": 3}))

        loaded = load_teachers(config)

        assert [(each.teacher_id, each.config.top_k) for each in loaded] == [
            ("teacher", 1024),
            ("math", 3),
        ]
        assert loaded[0].engine is not loaded[1].engine

    def test_engines_that_are_there_already_have_the_settings_of_their_names(self) -> None:
        config = ServerConfig(top_k=5, teachers=named(math={"engine": TOY, "top_k": 3}))
        (one,) = load_teachers(ServerConfig(engine=TOY))

        served = served_by(config, {"math": one.engine, "code": one.engine})

        assert [(each.teacher_id, each.config.top_k) for each in served] == [
            ("math", 3),
            ("code", 5),
        ]


class TestOfReplicas:
    def test_one_may_run_in_replicas_and_another_not(self, tmp_path: Path) -> None:
        config = from_file(
            tmp_path, "teachers: {math: {engine: ray, model: ./a, replicas: 3}, code: ./b}"
        )

        math, code = config.of_each_teacher()
        assert (math.engine_name, math.replicas) == ("ray", 3)
        assert (code.engine_name, code.replicas) == ("transformers", 1)

    def test_what_is_said_of_the_replicas_of_one_is_said_of_no_other(self) -> None:
        flags = ["--engine", "ray", "--model", "./m", "--replicas", "3", "--teacher", "math=./a"]
        first, math = cli.read_config(flags).of_each_teacher()

        assert (first.replicas, math.replicas) == (3, 1)
