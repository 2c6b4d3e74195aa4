"""Students of other nodes come in with what the manifests give them: by TLS, with a token."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import trustme
import yaml
from deploy.check import FOLDER
from deploy.checks import ToolMissingError
from deploy.checks.chart import RELEASE
from deploy.checks.helm import ask_helm
from deploy.checks.pods import pod_specs

import teacher_logits_client as tl
from teacher_logits_client import testing
from teacher_logits_server.cli import read_config

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

TEACHER = f"{RELEASE}-teacher"
TOKEN = "a-token-of-a-student"
PROFILE = tl.StudentProfile(
    batch_grid=tl.BatchGrid(global_batch_size=1, data_parallel_size=1, micro_batch_size=1), top_k=2
)
MUTUAL = {
    "sharing": "network",
    "network": {
        "tls": {"secret": "teacher-tls", "clientCa": True},
        "student": {"caSecret": "teacher-tls", "certSecret": "student-tls"},
    },
}


def shipped() -> str:
    return (FOLDER / "kubernetes" / "other_nodes.yaml").read_text("utf-8")


def with_certificates_of_students() -> str:
    try:
        (rendered,) = ask_helm(FOLDER / "helm" / RELEASE, [MUTUAL]).rendered
    except ToolMissingError as error:
        pytest.skip(str(error))
    return rendered.text


def secrets() -> dict[str, dict[str, bytes]]:
    """The Secrets of docs/deploying.md."""
    authority = trustme.CA()
    ca = authority.cert_pem.bytes()

    def papers(name: str) -> dict[str, bytes]:
        issued = authority.issue_cert(name)
        key, (cert, *_) = issued.private_key_pem.bytes(), issued.cert_chain_pems
        return {"ca.crt": ca, "tls.crt": cert.bytes(), "tls.key": key}

    return {
        "teacher-tls": papers(TEACHER),
        "student-tls": papers("student.example"),
        "teacher-ca": {"ca.crt": ca},
        "teacher-tokens": {"tokens": f"student {TOKEN}\n".encode()},
        "student-token": {"token": f"{TOKEN}\n".encode()},
    }


def lay_out(spec: dict[str, Any], root: Path, held: Mapping[str, dict[str, bytes]]) -> None:
    """Write the files of a pod's Secrets below ``root``, as it mounts them."""
    places = {
        m["name"]: m["mountPath"] for each in spec["containers"] for m in each["volumeMounts"]
    }
    for volume in spec["volumes"]:
        given = volume.get("projected") or volume.get("secret")
        if given is None:
            continue
        files: dict[str, bytes] = {}
        for source in given.get("sources", [{"secret": given}]):
            one = source["secret"]
            held_there = held[one.get("name") or one["secretName"]]
            names = [each["key"] for each in one.get("items", [])] or list(held_there)
            files |= {name: held_there[name] for name in names}
        folder = root / places[volume["name"]].lstrip("/")
        folder.mkdir(parents=True)
        for name, content in files.items():
            (folder / name).write_bytes(content)
            (folder / name).chmod(given["defaultMode"])


@pytest.mark.parametrize("text", [shipped, with_certificates_of_students])
def test_a_student_comes_in_with_what_its_pod_has(
    text: Callable[[], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = secrets()
    specs = {
        document["kind"]: spec
        for document in yaml.safe_load_all(text())
        for _, spec in pod_specs(document or {})
    }
    for kind, spec in specs.items():
        lay_out(spec, tmp_path / kind, held)
    config = read_config(specs["Deployment"]["containers"][0]["args"][1:])
    told: dict[str, Any] = {
        name: f"{tmp_path}/Deployment{getattr(config, name)}"
        for name in ("tls_cert", "tls_key", "tls_client_ca", "token_file")
        if getattr(config, name)
    }
    (student,), (wait,) = specs["Job"]["containers"], specs["Job"]["initContainers"]
    for each in student["env"]:
        monkeypatch.setenv(each["name"], f"{tmp_path}/Job{each['value']}")
    monkeypatch.setenv("TEACHER_LOGITS_TLS_SERVER_NAME", TEACHER)

    with testing.serve(listen=["127.0.0.1:0"], **told) as server:
        address = student["args"][-1].replace(f"{TEACHER}:5555", server.address)
        asked = [sys.executable, str(FOLDER / "health.py"), *wait["command"][2:-1], address]
        assert subprocess.run(asked, capture_output=True, text=True).stdout == "SERVING\n"
        with tl.connect(address) as client, client.open_session(PROFILE) as session:
            assert session.terms.vocabulary_size > 0
