"""Each check of `make deploy-check` finds what is broken in a copy of `deploy/`.

That it finds nothing in what is there is for `make deploy-check` itself to show, in CI too.
"""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest
from deploy.check import CHECKS, FOLDER, main
from deploy.checks import ToolMissingError, find_tool, folder_of, manifests
from deploy.checks.manifests import resource_findings

if TYPE_CHECKING:
    from pathlib import Path

ONE_POD = "kubernetes/one_pod.yaml"
CHART = "helm/teacher-logits"
UNIT = "systemd/teacher-logits.service"

BROKEN = [
    ("dockerfiles", "Dockerfile", ("USER 10001:10001", "USER root"), "DL3002"),
    ("compose", "compose.yaml", ("read_only: true", "read_olny: true"), "'read_olny'"),
    ("compose", "compose.yaml", ("cap_drop: [ALL]", "cap_drop: ALL"), "cap_drop"),
    ("compose", "compose.yaml", ("volumes:\n  #", "name: twice\nvolumes:\n  #"), "keys come twice"),
    (
        "manifests",
        ONE_POD,
        ("shareProcessNamespace", "shareProcessNamespaces"),
        "shareProcessNames",
    ),
    ("manifests", "ray/raycluster.yaml", ("groupName:", "grupName:"), "'grupName'"),
    ("manifests", "ray/raycluster.yaml", ('num-cpus: "0"', "num-cpus: 0"), "not of type 'string'"),
    ("chart", f"{CHART}/templates/teacher.yaml", ("{{- end }}", ""), "expected end"),
    ("chart", f"{CHART}/values.yaml", ("loadSeconds: 900", "loadSeconds: soon"), "loadSeconds"),
    ("chart", f"{CHART}/ci/one-pod-values.yaml", ("student:", "studnet:"), "studnet"),
    ("chart", ONE_POD, ("teacher-model", "another"), "is not what the chart renders"),
    ("clusters", "ray/cluster.yaml", ("max_workers: 2", "max_workers: two"), "max_workers"),
    ("clusters", "ray/cluster.yaml", ("deploy/ray/teacher_pool", "ray/none"), "is not there"),
    ("observability", "prometheus/alerts.yaml", ("teacher_logits_", "student_"), "student_"),
    ("units", UNIT, ("Restart=on-failure", "Restart=sometimes"), "sometimes"),
    ("units", UNIT, ("CapabilityBoundingSet=\n", ""), "exposure"),
    ("units", f"{UNIT}.d/cuda.conf", ("DevicePolicy=", "DevicePolice="), "DevicePolice"),
    ("units", "systemd/teacher-logits.sysusers.conf", ("u teacher", "x teacher"), "sysusers.conf"),
]


@pytest.fixture(autouse=True)
def newest_kubernetes(monkeypatch: pytest.MonkeyPatch) -> None:
    """One version's schemas: each takes a while to read."""
    monkeypatch.setattr(manifests, "VERSIONS", manifests.VERSIONS[-1:])


def found(check: str, folder: Path) -> str:
    """What a check says of a folder, a line each; skips where it cannot be made."""
    try:
        return "\n".join(CHECKS[check](folder))
    except ToolMissingError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(("check", "file", "edit", "said"), BROKEN)
def test_a_broken_file_is_found(
    check: str, file: str, edit: tuple[str, str], said: str, tmp_path: Path
) -> None:
    old, new = edit
    folder = tmp_path / "deploy"
    shutil.copytree(FOLDER, folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    path = folder / file
    text = path.read_text("utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), "utf-8")

    assert said in found(check, folder)


POD = """\
apiVersion: v1
kind: Pod
metadata: {name: teacher}
spec:
  automountServiceAccountToken: false
  terminationGracePeriodSeconds: 45
  securityContext:
    runAsNonRoot: true
    runAsUser: 10001
    seccompProfile: {type: RuntimeDefault}
  containers:
    - name: teacher
      image: registry.example/teacher-logits:0.1.0
      args: [serve, --drain-grace=30s]
      resources: {limits: {memory: 1Gi}}
      startupProbe: &probe {exec: {command: ["true"]}}
      readinessProbe: *probe
      livenessProbe: *probe
      securityContext:
        allowPrivilegeEscalation: false
        readOnlyRootFilesystem: true
        capabilities: {drop: [ALL]}
"""

LOOSE = [
    ("automountServiceAccountToken: false", "", "automountServiceAccountToken"),
    ("runAsUser: 10001", "runAsUser: 0", "runAsUser"),
    ("type: RuntimeDefault", "type: Unconfined", "seccompProfile"),
    ("terminationGracePeriodSeconds: 45", "hostNetwork: true", "hostNetwork"),
    ("terminationGracePeriodSeconds: 45", "hostPID: true", "hostPID"),
    ("terminationGracePeriodSeconds: 45", "", "30 is no more than --drain-grace=30s"),
    (", --drain-grace=30s", "", "--drain-grace=Ns is not said"),
    ("readinessProbe: *probe", "", "readinessProbe missing"),
    ("limits: {memory: 1Gi}", "limits: {cpu: 1}", "resources.limits.memory"),
    (":0.1.0", "", "give it a tag"),
    (":0.1.0", ":latest", "give it a tag"),
    ("allowPrivilegeEscalation: false", "", "allowPrivilegeEscalation"),
    ("readOnlyRootFilesystem: true", "", "readOnlyRootFilesystem"),
    ("drop: [ALL]", "drop: [NET_RAW]", "capabilities.drop"),
    ("drop: [ALL]", "drop: [ALL], add: [SYS_PTRACE]", "capabilities.add"),
    ("kind: Pod", "kind: Pot", "no such kind"),
]


def test_a_pod_that_keeps_to_the_rules_passes() -> None:
    assert list(resource_findings(POD, where="pod")) == []


@pytest.mark.parametrize(("old", "new", "said"), LOOSE)
def test_a_pod_that_breaks_a_rule_is_found(old: str, new: str, said: str) -> None:
    assert old in POD
    findings = list(resource_findings(POD.replace(old, new, 1), where="pod"))

    assert said in "\n".join(findings)


def test_a_manifest_without_a_resource_is_found() -> None:
    assert list(resource_findings("# nothing\n", where="pod")) == ["pod: no resource"]


def test_a_missing_tool_is_skipped_in_sight_and_fails_where_all_are_required(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(folder: Path) -> list[str]:
        find_tool("no-such-linter", comes_from="nowhere")
        return []

    monkeypatch.setattr("deploy.check.CHECKS", {"units": missing})

    assert main([]) == 0
    said = "no-such-linter is not installed; it comes with nowhere\n"
    assert capsys.readouterr().out == f"{'units':<14} SKIPPED: {said}"
    assert main(["--require-all"]) == 1
    assert capsys.readouterr().out == f"{'units':<14} FAILED: {said}"


def test_manifests_are_written_from_the_chart_and_not_from_one_that_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "deploy"
    shutil.copytree(FOLDER / "helm", folder / "helm")
    (folder / "kubernetes").mkdir()
    code = main(["--write"], folder=folder)
    said = capsys.readouterr().out
    if "is not installed" in said:
        pytest.skip(said)
    assert code == 0, said
    assert (folder / ONE_POD).read_text("utf-8") == (FOLDER / ONE_POD).read_text("utf-8")

    (folder / f"{CHART}/ci/one-pod-values.yaml").write_text("sharing: memory\n", "utf-8")
    assert main(["--write"], folder=folder) == 1
    assert "FAILED: " in capsys.readouterr().out


def test_a_missing_package_is_a_missing_tool() -> None:
    with pytest.raises(ToolMissingError, match="comes with some-package"):
        folder_of("no_such_package", comes_from="some-package")


def test_a_finding_fails_and_an_unknown_check_is_called_wrongly(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("deploy.check.CHECKS", {"units": lambda folder: ["line 3: no"]})

    assert main(["units"]) == 1
    assert capsys.readouterr().out == f"{'units':<14} line 3: no\n"
    with pytest.raises(SystemExit, match="2"):
        main(["unit"])
