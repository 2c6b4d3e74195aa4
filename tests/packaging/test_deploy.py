"""The image and the compose file fit each other, and the server that they start.

That the image's steps work, and the services with it, is `make image-check`'s to show.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import grpc
import pytest
import trustme
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import HealthServicer

from teacher_logits_client import testing
from teacher_logits_server.cli import read_config

if TYPE_CHECKING:
    from teacher_logits_server.config import ServerConfig

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text("utf-8")
SOCKETS = "/run/teacher-logits"
ADDRESS = f"unix:{SOCKETS}/teacher.sock"

Service: TypeAlias = dict[str, object]


def services() -> dict[str, Service]:
    document = yaml.safe_load((DEPLOY / "compose.yaml").read_text("utf-8"))
    found: dict[str, Service] = document["services"]
    return found


def words(service: Service, key: str) -> list[str]:
    """A list of the compose file."""
    found = service.get(key, [])
    assert isinstance(found, list)
    return [str(each) for each in found]


def volumes(service: Service) -> dict[str, str]:
    """Where a service has what: {"sockets": "/run/..."}."""
    pairs = (text.split(":")[:2] for text in words(service, "volumes"))
    return {source: target for source, target in pairs}


def exec_form(instruction: str) -> list[str]:
    """The words of the Dockerfile's one instruction of that name, which are a JSON list."""
    lines = DOCKERFILE.replace("\\\n", " ").splitlines()
    (line,) = (line for line in lines if line.startswith(f"{instruction} "))
    found: list[str] = json.loads(line[line.index("[") :])
    return found


def settings(command: list[str]) -> ServerConfig:
    """What `teacher-logits serve` makes of a container's command."""
    assert command[0] == "serve"
    return read_config(command[1:])


@pytest.mark.parametrize("name", services())
def test_a_service_has_no_right_that_it_does_not_need(name: str) -> None:
    service = services()[name]

    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert not {"privileged", "cap_add", "ipc", "pid", "user"} & set(service)


@pytest.mark.parametrize("name", services())
def test_a_service_has_the_sockets_where_the_image_has_them(name: str) -> None:
    assert volumes(services()[name])["sockets"] == SOCKETS
    assert f"-o 10001 -g 10001 -m 0700 {SOCKETS}" in DOCKERFILE


@pytest.mark.parametrize("name", services())
def test_what_a_service_mounts_is_in_the_repository(name: str) -> None:
    folders = [each for each in volumes(services()[name]) if "/" in each]

    assert [each for each in folders if not (DEPLOY / each).is_dir()] == []


def test_the_teacher_is_told_settings_that_it_knows_and_listens_where_students_look() -> None:
    config = settings(words(services()["teacher"], "command"))

    assert config.listen == (ADDRESS,)
    assert words(services()["student"], "command") == [ADDRESS]


def test_the_settings_of_a_pool_of_teachers_are_ones_that_the_server_knows() -> None:
    read = read_config(["--config", str(DEPLOY / "ray" / "teacher_pool.yaml")])
    assert (read.engine, read.replicas, read.replica_gpus) == ("ray", 8, 1.0)


def test_the_teacher_may_drain_for_as_long_as_it_was_told() -> None:
    teacher = services()["teacher"]
    grace_seconds = int(str(teacher["stop_grace_period"]).removesuffix("s"))

    assert grace_seconds > settings(words(teacher, "command")).drain_grace.total_seconds()


def test_the_students_run_the_example_once_the_teacher_serves() -> None:
    student = services()["student"]
    program, script = words(student, "entrypoint")

    assert program == "python"
    assert volumes(student)["../examples"] == str(Path(script).parent)
    assert (ROOT / "examples" / Path(script).name).is_file()
    assert student["depends_on"] == {"teacher": {"condition": "service_healthy"}}


def test_the_image_s_own_command_is_one_that_the_server_reads() -> None:
    config = settings(exec_form("CMD"))

    assert exec_form("ENTRYPOINT") == ["teacher-logits"]
    assert (config.model, config.listen) == ("/model", (ADDRESS,))


def test_the_image_asks_the_address_that_it_listens_at_for_its_health() -> None:
    program, script, address = exec_form("HEALTHCHECK")

    assert (program, address) == ("python", ADDRESS)
    assert f"COPY deploy/health.py {script}\n" in DOCKERFILE


def test_the_image_runs_as_a_user_by_number_who_is_not_root() -> None:
    assert re.findall(r"^USER (\S+)$", DOCKERFILE, re.MULTILINE) == ["10001:10001"]


def test_the_image_s_torch_is_the_one_that_constraints_pin() -> None:
    (torch,) = re.findall(r"^torch==\S+$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)

    assert "+" not in torch  # the build is appended by the Dockerfile
    assert '"s/^torch==.*/&${TORCH_BUILD}/" constraints.txt' in DOCKERFILE


def test_an_image_is_built_from_what_is_named_and_nothing_else() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    named = [rule.removeprefix("!") for rule in rules if rule.startswith("!")]

    assert rules[0] == "*"
    assert [name for name in named if not (ROOT / name).exists()] == []
    pyproject = (ROOT / "pyproject.toml").read_text("utf-8")
    (packages,) = re.findall(r"^packages = \[(.+?)\]", pyproject, re.MULTILINE | re.DOTALL)
    assert set(re.findall(r'"(.+?)"', packages)) <= set(named)


def ask_health(*arguments: str) -> tuple[int, str]:
    """The exit code of the image's health check, and what it says."""
    done = run_health(*arguments)
    return done.returncode, done.stdout.strip()


def run_health(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(DEPLOY / "health.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def test_a_server_that_serves_is_healthy() -> None:
    with testing.serve() as server:
        assert ask_health(server.address) == (0, "SERVING")


def test_a_server_that_loads_or_drains_is_alive_and_not_healthy(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/s"
    health = HealthServicer()
    health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    server = grpc.server(ThreadPoolExecutor(1))
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    server.add_insecure_port(address)
    server.start()
    try:
        assert ask_health(address) == (1, "NOT_SERVING")
        assert ask_health("--alive", address) == (0, "NOT_SERVING")
    finally:
        server.stop(0).wait()


def test_nobody_is_not_healthy(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/nobody"

    assert ask_health(address) == (1, f"no answer from {address}: UNAVAILABLE")
    assert ask_health("--alive", address) == (1, f"no answer from {address}: UNAVAILABLE")


def test_who_waits_is_told_once_the_server_serves(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/s"
    command = [sys.executable, str(DEPLOY / "health.py"), "--wait", "600", address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as waiting:
        assert waiting.stdout is not None
        assert waiting.stdout.readline() == f"no answer from {address}: UNAVAILABLE\n"
        with testing.serve(listen=[address]):
            said, _ = waiting.communicate()

    assert (waiting.returncode, said.splitlines()[-1]) == (0, "SERVING")


class Papers:
    """A server's certificate and what else TLS takes, as files."""

    def __init__(self, folder: Path) -> None:
        authority = trustme.CA()
        issued = authority.issue_cert("teacher.example")
        self.ca, self.cert, self.key = (str(folder / name) for name in ("ca", "cert", "key"))
        authority.cert_pem.write_to_path(self.ca)
        issued.cert_chain_pems[0].write_to_path(self.cert)
        (folder / "key").touch(mode=0o600)
        issued.private_key_pem.write_to_path(self.key)


NAMED = ("--tls-server-name", "teacher.example")


@pytest.fixture(scope="module")
def papers(tmp_path_factory: pytest.TempPathFactory) -> Papers:
    return Papers(tmp_path_factory.mktemp("papers"))


def test_a_server_with_tls_is_asked_by_its_authority_or_its_own_certificate(
    papers: Papers,
) -> None:
    listen = ["127.0.0.1:0"]
    with testing.serve(listen=listen, tls_cert=papers.cert, tls_key=papers.key) as server:
        by_tls = f"tls://{server.address}"
        assert ask_health("--tls-ca", papers.ca, *NAMED, by_tls) == (0, "SERVING")
        assert ask_health("--tls-ca", papers.cert, *NAMED, server.address) == (0, "SERVING")

        for wrong in ([server.address], [by_tls], ["--tls-ca", papers.ca, by_tls]):
            code, said = ask_health("--alive", *wrong)
            assert (code, said.startswith(f"no answer from {server.address}: ")) == (1, True)


def test_a_server_that_asks_for_a_certificate_is_shown_one_and_the_environment_says_which(
    papers: Papers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEACHER_LOGITS_TLS_CA", papers.ca)
    monkeypatch.setenv("TEACHER_LOGITS_TLS_SERVER_NAME", "teacher.example")
    with testing.serve(
        listen=["127.0.0.1:0"], tls_cert=papers.cert, tls_key=papers.key, tls_client_ca=papers.ca
    ) as server:
        code, said = ask_health(server.address)
        assert (code, "UNAVAILABLE" in said) == (1, True)
        shown = ("--tls-cert", papers.cert, "--tls-key", papers.key)
        assert ask_health(*shown, server.address) == (0, "SERVING")


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--alive",),
        ("a:1", "b:2"),
        ("--tls-cert", "c", "a:1"),
        ("--tls-ca", "/nowhere", "a:1"),
        ("--tls", "a:1"),
        ("--wait", "soon", "a:1"),
        ("",),
        ("tls://",),
        ("tls://unix:/run/s",),
    ],
)
def test_a_health_check_that_is_called_wrongly_says_so(arguments: tuple[str, ...]) -> None:
    assert ask_health(*arguments)[0] == 2


def test_a_health_check_does_not_ask_with_files_that_cannot_do(
    papers: Papers, tmp_path: Path
) -> None:
    empty, key, other = (tmp_path / name for name in ("empty", "key", "other"))
    for file in (empty, key, other):
        file.touch(mode=0o600)
    trustme.CA().issue_cert("teacher.example").private_key_pem.write_to_path(str(other))
    key.write_bytes(Path(papers.key).read_bytes())
    key.chmod(0o644)
    for given, said in (
        (("--tls-ca", str(empty)), "no certificate"),
        (("--tls-ca", papers.ca, "--tls-cert", papers.cert, "--tls-key", str(other)), "MISMATCH"),
        (("--tls-ca", papers.ca, "--tls-cert", papers.cert, "--tls-key", str(key)), "mode 0644"),
    ):
        asked = run_health(*given, "127.0.0.1:1")
        assert (asked.returncode, said in asked.stderr) == (2, True), asked.stderr
