"""Settings: read from text, defined once, refused by the name of their flag."""

import dataclasses
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from teacher_logits.errors import ConfigError
from teacher_logits.grid import BatchGrid
from teacher_logits.locality import ModelGrid
from teacher_logits.transport import Transport
from teacher_logits_server import cli, readers
from teacher_logits_server.config import ServerConfig, default_address, flag_of
from teacher_logits_server.engines import check_settings
from teacher_logits_server.flags import settings_of

SETTINGS = {name: setting for name, _, setting in settings_of(ServerConfig)}


def test_a_server_that_is_told_nothing_has_the_defaults_of_its_help() -> None:
    config = ServerConfig()

    assert config.pool_size_bytes == 1024**3
    assert config.session_ttl == timedelta(seconds=30)
    assert config.max_request_tokens == 65536
    assert config.addresses == ()


def test_every_setting_has_a_flag_of_its_own() -> None:
    flags = [setting.flag for setting in SETTINGS.values()]

    assert len(set(flags)) == len(dataclasses.fields(ServerConfig))


def test_help_tells_of_every_flag_with_its_unit_and_default(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.read_config(["--help"])

    said = " ".join(capsys.readouterr().out.split())
    assert stop.value.code == 0
    assert [s.flag for s in SETTINGS.values() if f"{s.flag} " not in said] == []
    assert "most shared memory for payloads, all slabs together (default: 1GiB)" in said
    assert "--session-ttl SPAN a remote session ends when no renewal came" in said
    assert "memory of publishers on, and of this server's own teacher (--device-pool-size" in said
    assert "(default: local,cuda_ipc,shared_memory,ray_object,stream)" in said


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("pool_size_bytes", 0, "at least 4096"),
        ("slab_size_bytes", -1, "at least 4096"),
        ("chunk_bytes", 4 * 1024**2, "cannot read the stream"),
        ("chunk_bytes", 1, "at least 4096"),
        ("max_sessions", 0, "at least 1"),
        ("keep_steps", -1, "at least 0"),
        ("max_quarantine", -0.1, "at least 0"),
        ("max_quarantine", 1.5, "at most 1"),
        ("max_request_tokens", 0, "at least 1"),
        ("max_request_tokens", 2**40, "one gRPC message"),
        ("max_batch_tokens", 0, "at least 1"),
        ("max_waiting_requests", 0, "at least 1"),
        ("top_k", 0, "at least 1"),
        ("threads", 0, "at least 1"),
        ("ready_fd", -1, "at least 0"),
        ("session_ttl", timedelta(0), "longer than nothing"),
        ("default_wait", timedelta(seconds=-1), "longer than nothing"),
        ("opening_ttl", timedelta(days=8), "at most 7 days"),
        ("drain_grace", timedelta(seconds=-1), "longer than nothing"),
        ("keep_deserted", timedelta(seconds=-1), "longer than nothing"),
        ("renew_interval", timedelta(seconds=16), "half of --session-ttl (30s)"),
        ("teacher_id", "two words", "is not a name"),
        ("transports", (), "at least one"),
        ("transports", (Transport.STREAM, Transport.STREAM), "none twice"),
        ("transports", (Transport.CUDA_IPC, Transport.STREAM), "shared_memory beside it"),
        ("transports", (Transport.RAY_OBJECT,), "needs --ray-address"),
        ("ray_budget_bytes", 4096, "no --ray-address names one"),
        ("allow_uids", (-5,), "start at 0"),
        ("broker", "relative/path", "absolute path"),
        (
            "batch_grid",
            BatchGrid(global_batch_size=10, data_parallel_size=3, micro_batch_size=1),
            "10",
        ),
        ("model_grid", ModelGrid(node_count=0, gpus_per_node=8), "node_count is 0"),
        ("dtype", "float8", "choose from auto, float32"),
        # In Python, where no reader of text stands before them.
        ("listen", "unix:/a", "ServerConfig(listen=) takes a tuple of str, not str"),
        ("transports", ("stream",), "ServerConfig(transports=) takes a tuple of Transport"),
        ("allow_uids", 5, "takes a tuple of int, not int"),
        ("pool_size_bytes", "1GiB", "ServerConfig(pool_size_bytes=) takes int, not str"),
        ("session_ttl", 30, "takes timedelta, not int"),
        ("batch_grid", (64, 4, 2), "takes BatchGrid, not tuple"),
        ("model", Path("model"), "takes str, not PosixPath"),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused_by_its_flag(
    field: str, value: object, rule: str
) -> None:
    with pytest.raises(ConfigError) as refusal:
        ServerConfig(**{field: value})  # type: ignore[arg-type]

    assert flag_of(field) in refusal.value.message
    assert rule in refusal.value.message
    assert refusal.value.facts["flag"] == flag_of(field)


class TestARayCluster:
    @pytest.mark.parametrize(
        ("settings", "said"),
        [
            ({"ray_budget_bytes": 5}, "--ray-budget 5: must be 0"),
            ({"ray_namespace": ""}, "--ray-namespace : must be a name"),
            ({"transports": (Transport.STREAM,)}, "--ray-address auto: is joined for ray_object"),
        ],
    )
    def test_is_refused_where_it_would_be_of_no_use(
        self, settings: dict[str, object], said: str
    ) -> None:
        with pytest.raises(ConfigError) as refusal:
            ServerConfig(ray_address="auto", **settings)  # type: ignore[arg-type]
        assert said in refusal.value.message

    def test_is_not_joined_where_it_is_not_named(self) -> None:
        assert ServerConfig().ray_address == ""
        assert Transport.RAY_OBJECT in ServerConfig().transports


class TestTheEngine:
    @pytest.mark.parametrize(
        ("settings", "name"),
        [
            ({}, ""),
            ({"model": "./model"}, "transformers"),
            ({"engine": "mine:make"}, "mine:make"),
            ({"engine": "transformers"}, "transformers"),
        ],
    )
    def test_is_transformers_with_a_model_and_none_without_either(
        self, settings: dict[str, str], name: str
    ) -> None:
        assert ServerConfig(**settings).engine_name == name  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("teacher_id", "mine"),
            ("threads", 2),
            ("top_k", 64),
            (
                "batch_grid",
                BatchGrid(global_batch_size=4, data_parallel_size=2, micro_batch_size=1),
            ),
        ],
    )
    def test_that_is_none_leaves_nothing_to_say_of_a_teacher(
        self, field: str, value: object
    ) -> None:
        config = ServerConfig(**{field: value})  # type: ignore[arg-type]

        with pytest.raises(ConfigError, match="without --model or --engine") as refusal:
            check_settings(config)
        assert refusal.value.facts["flag"] == flag_of(field)

    def test_that_is_none_needs_nothing_installed(self) -> None:
        check_settings(ServerConfig())


class TestAddresses:
    @pytest.mark.parametrize(
        "text",
        [
            "",
            "here",
            "unix:",
            "unix:relative",
            "unix:/folder/",
            "host:",
            "h:x",
            "::1:80",
            "h:65536",
        ],
    )
    def test_what_is_no_address_is_refused_by_name(self, text: str) -> None:
        with pytest.raises(ConfigError, match="--listen"):
            ServerConfig(listen=(text,))

    @pytest.mark.parametrize("flag", ["listen", "broker"])
    def test_a_socket_path_over_107_bytes_is_refused_with_its_length(self, flag: str) -> None:
        path = "/" + "é" * 53 + "x"  # 108 bytes, of fewer characters

        value: object = (f"unix:{path}",) if flag == "listen" else path
        with pytest.raises(ConfigError, match=f"--{flag}.* 108 bytes.* 107") as refusal:
            ServerConfig(**{flag: value})  # type: ignore[arg-type]

        assert refusal.value.facts["length_bytes"] == 108
        ServerConfig(listen=(f"unix:{path[:-1]}",))

    @pytest.mark.parametrize("text", ["0.0.0.0:1", "[::]:1", "10.0.0.7:1", "node7:1"])
    def test_other_hosts_reach_a_server_only_where_that_was_asked_for(self, text: str) -> None:
        with pytest.raises(ConfigError, match="--insecure"):
            ServerConfig(listen=(text,))

        ServerConfig(listen=(text,), insecure=True)

    @pytest.mark.parametrize("text", ["127.0.0.1:1", "127.8.8.8:1", "[::1]:1", "localhost:1"])
    def test_so_do_the_other_users_of_this_machine(self, text: str) -> None:
        with pytest.raises(ConfigError, match=r"every user of this machine.*--insecure"):
            ServerConfig(listen=(text,))

        assert ServerConfig(listen=(text,), insecure=True).addresses[0].is_loopback

    def test_tls_is_leave_too(self) -> None:
        config = ServerConfig(listen=("node7:1",), tls_cert="/c.pem", tls_key="/k.pem")

        assert not config.addresses[0].is_loopback

    @pytest.mark.parametrize(
        ("settings", "match"),
        [
            ({"tls_cert": "/c.pem"}, "--tls-cert /c.pem: goes with --tls-key"),
            ({"tls_key": "/k.pem"}, "--tls-key /k.pem: goes with --tls-cert"),
            ({"tls_client_ca": "/a.pem"}, "--tls-client-ca /a.pem: is for TLS"),
            ({"tls_cert": "/c", "tls_key": "/k"}, "--tls-cert /c: is for addresses host:port"),
            ({"metrics": "9090"}, "--metrics '9090' is no address: give host:port or"),
        ],
    )
    def test_tls_is_said_whole(self, settings: dict[str, str], match: str) -> None:
        with pytest.raises(ConfigError, match=match):
            ServerConfig(**settings)  # type: ignore[arg-type]

    def test_one_address_given_twice_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="twice"):
            ServerConfig(listen=("127.0.0.1:7", "127.0.0.1:7"), insecure=True)

    def test_the_broker_takes_no_address_of_the_server(self) -> None:
        with pytest.raises(ConfigError, match="--broker"):
            ServerConfig(listen=("unix:/run/t.sock",), broker="/run/t.sock")

    def test_the_default_is_a_socket_in_the_users_runtime_folder(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))

        assert default_address() == f"unix:{tmp_path}/teacher-logits/teacher.sock"

    def test_a_runtime_folder_that_is_not_there_is_not_the_default(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "gone"))

        assert "gone" not in default_address()


class TestReaders:
    @pytest.mark.parametrize(
        ("text", "size"),
        [("4096", 4096), ("1KiB", 1024), ("256MiB", 2**28), ("1.5GiB", 3 * 2**29), ("2 gb", 2e9)],
    )
    def test_sizes(self, text: str, size: int) -> None:
        assert readers.size(text) == size

    @given(st.integers(min_value=0, max_value=2**50))
    def test_a_size_reads_as_it_was_written(self, size: int) -> None:
        assert readers.size(readers.size_setting(size)) == size

    @pytest.mark.parametrize(
        ("text", "seconds"), [("30", 30), ("30s", 30), ("500ms", 0.5), ("2min", 120), ("1h", 3600)]
    )
    def test_spans(self, text: str, seconds: float) -> None:
        assert readers.span(text) == timedelta(seconds=seconds)

    @given(st.integers(min_value=0, max_value=10**9))
    def test_a_span_reads_as_it_was_written(self, milliseconds: int) -> None:
        span = timedelta(milliseconds=milliseconds)

        assert readers.span(readers.span_setting(span)) == span

    @pytest.mark.parametrize(("text", "share"), [("0.25", 0.25), ("25%", 0.25), ("0", 0), ("1", 1)])
    def test_a_share_is_a_number_or_a_percentage(self, text: str, share: float) -> None:
        assert readers.share(text) == share

    @pytest.mark.parametrize(
        ("reader", "text"),
        [
            (readers.size, "big"),
            (readers.size, "-1"),
            (readers.span, "soon"),
            (readers.span, "9" * 400),
            (readers.whole, "1.5"),
            (readers.switch, "perhaps"),
            (readers.share, "1.5"),
            (readers.share, "half"),
            (readers.share, "nan"),
            (readers.share, "5%0"),
            (readers.transports, "stream,pigeon"),
            (readers.batch_grid, "64,4"),
            (readers.model_grid, "2,8,4,-1"),
        ],
    )
    def test_text_that_means_nothing_is_refused_with_what_would(
        self, reader: Callable[[str], object], text: str
    ) -> None:
        with pytest.raises(ValueError, match=r"^give "):
            reader(text)


class TestCommandLine:
    def test_flags_become_settings(self) -> None:
        config = cli.read_config(
            [
                *("--listen", "unix:/run/a.sock", "--listen", "127.0.0.1:0"),
                *("--pool-size", "2GiB", "--session-ttl", "1min", "--top-k", "64"),
                *("--transports", "stream", "--batch-grid", "64,4,2", "--insecure"),
            ]
        )

        assert config == ServerConfig(
            listen=("unix:/run/a.sock", "127.0.0.1:0"),
            pool_size_bytes=2 * 1024**3,
            session_ttl=timedelta(minutes=1),
            top_k=64,
            transports=(Transport.STREAM,),
            batch_grid=BatchGrid(global_batch_size=64, data_parallel_size=4, micro_batch_size=2),
            insecure=True,
        )

    @pytest.mark.parametrize(
        ("arguments", "flag"),
        [
            (["--pool-size", "large"], "--pool-size"),
            (["--session-ttl", "later"], "--session-ttl"),
            (["--log-format", "xml"], "--log-format"),
            (["--max-sessions", "0"], "--max-sessions"),
        ],
    )
    def test_a_value_that_cannot_be_read_is_refused_by_its_flag(
        self, arguments: list[str], flag: str
    ) -> None:
        with pytest.raises(ConfigError, match=flag):
            cli.read_config(arguments)

    def test_an_unknown_flag_is_refused_by_name(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as stop:
            cli.read_config(["--pool", "1GiB"])  # not even as the beginning of one

        assert stop.value.code == 2
        assert "--pool" in capsys.readouterr().err


class TestFile:
    def _read(self, folder: Path, text: str, *flags: str) -> ServerConfig:
        path = folder / "server.yaml"
        path.write_text(text, encoding="utf-8")
        return cli.read_config(["--config", str(path), *flags])

    def test_a_file_holds_the_same_settings(self, tmp_path: Path) -> None:
        config = self._read(
            tmp_path,
            "listen: [unix:/run/a.sock, 127.0.0.1:0]\npool_size: 2GiB\nmax_sessions: 8\n"
            "insecure: true\ntransports: local,stream\ndefault_wait: 5s\n",
        )

        assert config == ServerConfig(
            listen=("unix:/run/a.sock", "127.0.0.1:0"),
            pool_size_bytes=2 * 1024**3,
            max_sessions=8,
            insecure=True,
            transports=(Transport.LOCAL, Transport.STREAM),
            default_wait=timedelta(seconds=5),
        )

    def test_one_value_will_do_for_a_list(self, tmp_path: Path) -> None:
        text = "listen: 127.0.0.1:0\ninsecure: yes"
        assert self._read(tmp_path, text).listen == ("127.0.0.1:0",)

    def test_flags_win_over_the_file(self, tmp_path: Path) -> None:
        config = self._read(tmp_path, "top_k: 8\nmax_sessions: 8", "--top-k", "9")

        assert (config.top_k, config.max_sessions) == (9, 8)

    def test_an_empty_file_says_nothing(self, tmp_path: Path) -> None:
        assert self._read(tmp_path, "# nothing\n") == ServerConfig()

    def test_a_key_may_be_written_as_its_flag_is(self, tmp_path: Path) -> None:
        assert self._read(tmp_path, "pool-size: 2MiB\ntop-k: 8\n").top_k == 8
        with pytest.raises(ConfigError, match="top_k is given twice"):
            self._read(tmp_path, "top-k: 8\ntop_k: 9\n")

    def test_unknown_keys_are_refused_by_name(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="pool_sise, 7 is no setting"):
            self._read(tmp_path, "pool_sise: 1GiB\n7: 8\ntop_k: 8\n")

    def test_a_bad_value_is_refused_by_file_and_key(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"server\.yaml: pool_size large: give bytes"):
            self._read(tmp_path, "pool_size: large")

    @pytest.mark.parametrize("text", ["pool_size: {a: 1}", "pool_size:", "top_k: [1, 2]"])
    def test_a_value_of_another_shape_is_refused(self, tmp_path: Path, text: str) -> None:
        with pytest.raises(ConfigError, match="is no value for"):
            self._read(tmp_path, text)

    @pytest.mark.parametrize("text", ["just words", "- a\n- b", "a: [", "!!python/object:os.x {}"])
    def test_what_is_no_mapping_is_refused(self, tmp_path: Path, text: str) -> None:
        with pytest.raises(ConfigError, match="--config"):
            self._read(tmp_path, text)

    @pytest.mark.parametrize(
        "text", ["top_k: 2001-99-99", "top_k: 0b", "? {a: 1}\n: 2", "a: " + "[" * 2000]
    )
    def test_what_yaml_cannot_make_a_value_of_is_refused(self, tmp_path: Path, text: str) -> None:
        with pytest.raises(ConfigError, match="--config"):
            self._read(tmp_path, text)

    def test_a_file_that_is_not_there_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="No such file"):
            cli.read_config(["--config", str(tmp_path / "none.yaml")])
