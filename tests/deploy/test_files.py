"""What the files of `deploy/` start is a server that we know, and they give it what it needs."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from deploy.check import FOLDER
from deploy.checks.pods import pod_specs

from teacher_logits import __version__
from teacher_logits_server.cli import read_config

if TYPE_CHECKING:
    from collections.abc import Iterator

FILES = ("kubernetes/one_pod.yaml", "kubernetes/separate_pods.yaml", "kubernetes/other_nodes.yaml")
ON_A_NODE = FILES[:2]
UNIT = (FOLDER / "systemd" / "teacher-logits.service").read_text("utf-8")


def containers(file: str) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Every container of a file, and its pod's spec."""
    for document in yaml.safe_load_all((FOLDER / file).read_text("utf-8")):
        for _, spec in pod_specs(document or {}):
            for each in (*spec.get("initContainers", []), *spec["containers"]):
                yield each, spec


def named(file: str, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    (one,) = [(each, spec) for each, spec in containers(file) if each["name"] == name]
    return one


def mounts(container: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {each["mountPath"]: each for each in container["volumeMounts"]}


@pytest.mark.parametrize("file", [*FILES, "ray/raycluster.yaml"])
def test_a_teacher_is_told_settings_that_the_server_knows_and_is_probed_where_it_listens(
    file: str,
) -> None:
    teacher, _ = named(file, "teacher")
    config = read_config(teacher["args"][1:])

    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        program, script, *_, address = teacher[probe]["exec"]["command"]
        assert (program, script) == ("python", "/opt/teacher-logits/health.py")
        if address.startswith("tls://"):
            port = address.rpartition(":")[2]
            assert f"0.0.0.0:{port}" in config.listen
            assert f"--tls-ca={config.tls_cert}" in teacher[probe]["exec"]["command"]
        else:
            assert address in config.listen
    assert "--alive" in teacher["livenessProbe"]["exec"]["command"]


@pytest.mark.parametrize("file", FILES)
def test_a_teacher_has_the_memory_that_it_lends(file: str) -> None:
    teacher, _ = named(file, "teacher")
    pool = read_config(teacher["args"][1:]).pool_size_bytes
    limit = teacher["resources"]["limits"]["memory"]

    assert limit.endswith("Gi")
    assert int(limit.removesuffix("Gi")) << 30 > 2 * pool


@pytest.mark.parametrize("file", ON_A_NODE)
def test_students_of_a_node_have_the_teacher_s_folder_and_user_and_cannot_write_there(
    file: str,
) -> None:
    (teacher, its_pod), (student, pod) = named(file, "teacher"), named(file, "student")
    folder = "/run/teacher-logits"
    sockets = {each["name"]: each for each in pod["volumes"]}["sockets"]

    assert student["args"] == [read_config(teacher["args"][1:]).listen[0]]
    assert mounts(teacher)[folder]["name"] == mounts(student)[folder]["name"] == "sockets"
    assert mounts(student)[folder]["readOnly"] is True
    assert sockets in its_pod["volumes"]
    assert pod["securityContext"] == its_pod["securityContext"]


def test_one_pod_is_one_pid_namespace_and_the_student_starts_once_the_teacher_serves() -> None:
    teacher, pod = named(FILES[0], "teacher")

    assert pod["shareProcessNamespace"] is True
    assert teacher in pod["initContainers"]
    assert teacher["restartPolicy"] == "Always"


@pytest.mark.parametrize("file", FILES[1:])
def test_a_student_in_a_pod_of_its_own_waits_for_the_teacher_as_long_as_that_may_load(
    file: str,
) -> None:
    (wait, pod), (student, _) = named(file, "teacher-serves"), named(file, "student")
    probe = named(file, "teacher")[0]["startupProbe"]
    seconds = probe["failureThreshold"] * probe["periodSeconds"]

    assert wait in pod["initContainers"]
    assert wait["command"][:2] == ["python", "/opt/teacher-logits/health.py"]
    assert wait["command"][2:] == [f"--wait={seconds}", student["args"][-1]]
    assert wait.get("env") == student.get("env")
    assert mounts(wait).items() <= mounts(student).items()


def test_students_of_other_nodes_find_the_service_and_may_reach_it_alone() -> None:
    documents = list(yaml.safe_load_all((FOLDER / FILES[2]).read_text("utf-8")))
    kinds = {
        each["kind"]: each
        for each in documents
        if each and each["metadata"]["name"] == "teacher-logits-teacher"
    }
    student, _ = named(FILES[2], "student")
    service, policy = kinds["Service"], kinds["NetworkPolicy"]["spec"]
    name, port = student["args"][-1].removeprefix("tls://").split(":")

    assert (service["metadata"]["name"], str(service["spec"]["ports"][0]["port"])) == (name, port)
    ways_in = {each["ports"][0]["port"]: each["from"][0] for each in policy["ingress"]}
    assert set(ways_in) == {"grpc", "metrics"}
    students = ways_in["grpc"]["podSelector"]["matchLabels"]
    assert students["app.kubernetes.io/component"] == "student"
    assert "/run/teacher-logits" not in mounts(student)


@pytest.mark.parametrize("file", FILES[1:])
def test_prometheus_is_led_to_a_port_of_the_teacher(file: str) -> None:
    documents = [each for each in yaml.safe_load_all((FOLDER / file).read_text("utf-8")) if each]
    (monitor,) = [each for each in documents if each["kind"] == "ServiceMonitor"]
    wanted = monitor["spec"]["selector"]["matchLabels"].items()
    (service,) = [
        each
        for each in documents
        if each["kind"] == "Service" and wanted <= each["metadata"]["labels"].items()
    ]
    teacher, _ = named(file, "teacher")
    (port,) = [each for each in teacher["ports"] if each["name"] == "metrics"]

    assert monitor["spec"]["endpoints"][0]["port"] == service["spec"]["ports"][0]["name"]
    assert service["spec"]["ports"][0]["targetPort"] == port["name"]
    assert read_config(teacher["args"][1:]).metrics == f"0.0.0.0:{port['containerPort']}"


IMAGE = re.compile(r"(?:-t |image: (?:&image )?)(teacher-logits\S*)")


@pytest.mark.parametrize(
    "file",
    ["../README.md", "../docs/deploying.md", "Dockerfile", "compose.yaml", *FILES,
     "ray/raycluster.yaml"],
)  # fmt: skip
def test_an_image_is_built_by_the_name_that_is_run(file: str) -> None:
    built = IMAGE.findall((FOLDER / file).read_text("utf-8"))
    name = f"teacher-logits:{__version__}"

    assert built
    assert set(built) <= {name, f"{name}-cuda", f"{name}-ray"}


def test_the_secrets_of_the_manifest_are_made_in_the_docs() -> None:
    text = (FOLDER / FILES[2]).read_text("utf-8")
    used = set(re.findall(r"secretName: (\S+)|secret:\n\s+name: (\S+)", text))
    page = (FOLDER / "../docs/deploying.md").read_text("utf-8")
    made = re.findall(r"^kubectl create secret \w+ (\S+)", page, re.MULTILINE)

    assert {first or second for first, second in used} == set(made)


def test_kuberay_adds_no_probes_of_its_own_which_take_what_the_image_has_not() -> None:
    unprobed = [
        each["name"]
        for each, _ in containers("ray/raycluster.yaml")
        if not {"readinessProbe", "livenessProbe"} <= set(each)
    ]
    assert unprobed == []


def commands(text: str) -> list[list[str]]:
    """The programs of a unit that it starts."""
    lines = re.findall(r"^ExecStart=(.+)$", text.replace("\\\n", " "), re.MULTILINE)
    return [shlex.split(line) for line in lines]


def setting(name: str) -> str:
    (value,) = re.findall(rf"^{name}=(.*)$", UNIT, re.MULTILINE)
    return str(value)


def test_the_service_starts_a_server_that_has_the_time_to_drain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ((program, serve, *flags),) = commands(UNIT)
    place = flags.index("--config")
    config = read_config([*flags[:place], *flags[place + 2 :]])

    assert (program, serve) == ("/opt/teacher-logits/bin/teacher-logits", "serve")
    assert flags[place + 1] == "/etc/teacher-logits/server.yaml"
    assert config.listen == (f"unix:/run/{setting('RuntimeDirectory')}/teacher.sock",)
    assert float(setting("TimeoutStopSec").rstrip("s")) > config.drain_grace.total_seconds()
    assert (config.socket_group, setting("RuntimeDirectoryMode")) == (setting("Group"), "0750")
    assert setting("Type") == "notify"


def allowed_calls() -> set[str]:
    """The system calls that the service may make."""
    allowed: set[str] = set()
    for line in re.findall(r"^SystemCallFilter=(\S+)$", UNIT, re.MULTILINE):
        if line.startswith("~"):
            allowed -= members(line[1:])
        else:
            allowed |= members(line)
    return allowed


def members(group: str) -> set[str]:
    """The system calls of a group, by systemd's own word."""
    command = ["systemd-analyze", "syscall-filter", group]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    calls: set[str] = set()
    for word in (line.strip() for line in said.splitlines()[1:]):
        if word.startswith("@"):
            calls |= members(word)
        elif word and not word.startswith("#"):
            calls.add(word)
    return calls


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_the_service_s_hardening_leaves_it_what_handing_memory_over_takes() -> None:
    takes = "memfd_create fcntl mmap madvise sendmsg recvmsg getsockopt pidfd_open epoll_pwait"
    assert set(takes.split()) <= allowed_calls()
    assert not {"mount", "ptrace", "setuid", "bpf"} & allowed_calls()
