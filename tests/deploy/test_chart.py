"""The chart, with other values than those whose manifests are written down."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import yaml
from deploy.check import FOLDER
from deploy.checks import ToolMissingError, manifests
from deploy.checks.chart import RELEASE
from deploy.checks.helm import Rendered, ask_helm
from deploy.checks.pods import pod_specs

if TYPE_CHECKING:
    from collections.abc import Mapping

CHART = FOLDER / "helm" / RELEASE
TLS = {"tls": {"secret": "a-certificate"}, "student": {"caSecret": "a-certificate"}}
MUTUAL = {
    "tls": {"secret": "a-certificate", "clientCa": True},
    "student": {"caSecret": "an-authority", "certSecret": "another"},
}

TAKEN: dict[str, dict[str, Any]] = {
    "an engine of one's own": {"teacher": {"model": {"claim": ""}, "args": ["--engine=mine:make"]}},
    "a model in a folder of the claim": {"teacher": {"model": {"subPath": "qwen"}}},
    "a GPU": {"teacher": {"resources": {"limits": {"memory": "8Gi", "nvidia.com/gpu": 1}}}},
    "a teacher with a runtime, an environment and volumes": {
        "runtimeClassName": "nvidia",
        "teacher": {
            "args": ["--device=cuda"],
            "env": [{"name": "A", "value": "b"}],
            "volumes": [{"name": "more", "emptyDir": {}}],
            "volumeMounts": [{"name": "more", "mountPath": "/more"}],
        },
    },
    "a claim of a device that both containers have": {
        "resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "one-gpu"}],
        "teacher": {"resources": {"limits": {"memory": "8Gi"}, "claims": [{"name": "gpu"}]}},
        "student": {"resources": {"limits": {"memory": "8Gi"}, "claims": [{"name": "gpu"}]}},
    },
    "an older kernel": {"sharing": "node", "node": {"hostPid": True, "seLinuxLevel": "s0:c1,c2"}},
    "a teacher alone": {"sharing": "node", "student": {"enabled": False}},
    "TLS": {"sharing": "network", "network": TLS},
    "mutual TLS": {"sharing": "network", "network": MUTUAL},
    "no encryption": {"sharing": "network", "network": {"insecure": True}},
    "nothing that watches or guards it": {
        "metrics": {"enabled": False},
        "networkPolicy": {"enabled": False},
        "podDisruptionBudget": {"enabled": False},
    },
    "ranks that speak to one another": {"sharing": "node", "student": {"replicas": 2}},
    "ranks that need more": {
        "networkPolicy": {"egress": [{"ports": [{"port": 29500}]}]},
        "metrics": {"enabled": False},
    },
    "a place": {
        "nodeSelector": {"gpu": "yes"},
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "imagePullSecrets": [{"name": "registry"}],
        "student": {"image": "trainer:3", "env": [{"name": "A", "value": "b"}]},
    },
}

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a port without TLS": ({"sharing": "network"}, "network.tls.secret"),
    "one pod without a student": ({"student": {"enabled": False}}, "student.enabled: true"),
    "a monitor of no page": (
        {"serviceMonitor": {"enabled": True}, "metrics": {"enabled": False}},
        "metrics.enabled",
    ),
    "a way of sharing that is none": ({"sharing": "memory"}, "sharing"),
    "a key that it does not know": ({"teacher": {"pool": "1GiB"}}, "pool"),
    "tokens of a folder": (
        {"sharing": "node", "network": {"tokensSecret": "t"}},
        "network.tokensSecret takes sharing: network",
    ),
    "TLS of one pod": (
        {"network": {"tls": {"secret": "a-certificate"}}},
        "network.tls.secret takes sharing: network",
    ),
    "no encryption of one pod": (
        {"network": {"insecure": True}},
        "network.insecure takes sharing: network",
    ),
    "TLS and none": (
        {"sharing": "network", "network": {**TLS, "insecure": True}},
        "give one of the two",
    ),
    "certificates of students without TLS": (
        {"sharing": "network", "network": {"insecure": True, "tls": {"clientCa": True}}},
        "network.tls.clientCa takes network.tls.secret",
    ),
    "students that cannot know the teacher": (
        {"sharing": "network", "network": {"tls": {"secret": "a-certificate"}}},
        "takes network.student.caSecret",
    ),
    "students without a token": (
        {"sharing": "network", "network": {**TLS, "tokensSecret": "t"}},
        "network.student.tokenSecret go together",
    ),
    "students without a certificate": (
        {"sharing": "network", "network": {**MUTUAL, "student": {"caSecret": "a"}}},
        "network.student.certSecret go together",
    ),
    "two students of one pod": ({"student": {"replicas": 2}}, "one pod has one student"),
    "root": ({"user": {"uid": 0, "gid": 0}}, "uid"),
    "no limit of memory": ({"teacher": {"resources": {"limits": {"memory": None}}}}, "memory"),
}


@pytest.fixture(scope="module")
def renderings() -> dict[str, Rendered]:
    """What the chart makes of each set of values; skips where Helm is not here."""
    sets = TAKEN | {name: values for name, (values, _) in REFUSED.items()}
    try:
        told = ask_helm(CHART, list(sets.values()))
    except ToolMissingError as error:
        pytest.skip(str(error))
    assert told.lint == ()
    return dict(zip(sets, told.rendered, strict=True))


@pytest.mark.parametrize("name", TAKEN)
def test_what_it_renders_is_right(
    name: str, renderings: Mapping[str, Rendered], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifests, "VERSIONS", manifests.VERSIONS[-1:])

    assert renderings[name].refusal == ""
    assert list(manifests.resource_findings(renderings[name].text, where="chart")) == []


@pytest.mark.parametrize("name", REFUSED)
def test_values_that_make_no_sense_are_refused_with_the_reason(
    name: str, renderings: Mapping[str, Rendered]
) -> None:
    _, said = REFUSED[name]

    assert said in renderings[name].refusal


def test_on_an_older_kernel_the_teacher_alone_sees_the_node_s_processes(
    renderings: Mapping[str, Rendered],
) -> None:
    documents = list(yaml.safe_load_all(renderings["an older kernel"].text))
    specs = {each["kind"]: spec for each in documents for _, spec in pod_specs(each)}

    assert specs["Deployment"]["hostPID"] is True
    assert "hostPID" not in specs["Job"]


def of_kind(rendered: Rendered, kind: str) -> dict[str, dict[str, Any]]:
    """The resources of a kind, by name."""
    documents = [each for each in yaml.safe_load_all(rendered.text) if each]
    return {each["metadata"]["name"]: each for each in documents if each["kind"] == kind}


def test_ranks_find_and_reach_one_another(renderings: Mapping[str, Rendered]) -> None:
    rendered, name = renderings["ranks that speak to one another"], f"{RELEASE}-student"
    template = of_kind(rendered, "Job")[name]["spec"]["template"]
    service = of_kind(rendered, "Service")[name]["spec"]
    policy = of_kind(rendered, "NetworkPolicy")[name]["spec"]

    assert template["spec"]["subdomain"] == name
    assert (service["clusterIP"], service["publishNotReadyAddresses"]) == ("None", True)
    assert service["selector"] == template["metadata"]["labels"]
    ranks = {"podSelector": {"matchLabels": template["metadata"]["labels"]}}
    assert policy["podSelector"] == ranks["podSelector"]
    assert policy["ingress"] == [{"from": [ranks]}]
    assert policy["egress"][0] == {"to": [ranks]}
    assert [each["port"] for each in policy["egress"][1]["ports"]] == [53, 53]


def test_one_student_speaks_to_nobody(renderings: Mapping[str, Rendered]) -> None:
    rendered = renderings["an older kernel"]

    assert f"{RELEASE}-student" not in of_kind(rendered, "Service")
    assert f"{RELEASE}-student" not in of_kind(rendered, "NetworkPolicy")


def test_a_teacher_gets_its_runtime_environment_and_volumes(
    renderings: Mapping[str, Rendered],
) -> None:
    rendered = renderings["a teacher with a runtime, an environment and volumes"]
    teacher = teacher_of(rendered)
    pod = of_kind(rendered, "Job")[RELEASE]["spec"]["template"]["spec"]

    assert pod["runtimeClassName"] == "nvidia"
    assert teacher["env"] == [{"name": "A", "value": "b"}]
    assert {"name": "more", "mountPath": "/more"} in teacher["volumeMounts"]
    assert {"name": "more", "emptyDir": {}} in pod["volumes"]


def teacher_of(rendered: Rendered) -> dict[str, Any]:
    """The container of the teacher."""
    return next(
        container
        for each in yaml.safe_load_all(rendered.text)
        for _, spec in pod_specs(each)
        for container in (*spec.get("initContainers", ()), *spec["containers"])
        if container["name"] == "teacher"
    )


@pytest.mark.parametrize("name", ["an engine of one's own", "mutual TLS", "no encryption"])
def test_a_page_of_metrics_leaves_calls_as_they_are(
    name: str, renderings: Mapping[str, Rendered]
) -> None:
    args = teacher_of(renderings[name])["args"]

    assert "--insecure-metrics" in args
    assert ("--insecure" in args) == (name == "no encryption")


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("TLS", "tls://127.0.0.1:5555"),
        ("mutual TLS", "unix:/run/teacher-logits/teacher.sock"),
        ("no encryption", "unix:/run/teacher-logits/teacher.sock"),
    ],
)
def test_a_teacher_is_ready_where_its_students_come_and_alive_at_its_socket(
    name: str, asked: str, renderings: Mapping[str, Rendered]
) -> None:
    teacher = teacher_of(renderings[name])
    ready, alive = (
        teacher[f"{each}Probe"]["exec"]["command"] for each in ("readiness", "liveness")
    )

    assert ready[-1] == asked
    assert alive[-1] == "unix:/run/teacher-logits/teacher.sock"
    assert (f"--tls-server-name={RELEASE}-teacher" in ready) == (name == "TLS")
