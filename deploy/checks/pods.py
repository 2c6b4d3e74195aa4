"""What every pod of ours keeps to, beside the schema: Kubernetes' *restricted* rules and our own.

Beyond them one pod may see its node's processes or mount a folder of it: a teacher that shares
memory with other pods. Ours are: no token of the API server, a read-only root, a limit of memory
(the pool counts as it), probes of the teacher, and more time to stop than its drain takes.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from deploy.checks.documents import Document

_DRAIN = re.compile(r"--drain-grace=(\d+)s")
_DEFAULT_GRACE_SECONDS = 30
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")


def pod_specs(document: Document) -> Iterator[tuple[str, Document]]:
    """Yield every pod's spec in a resource, and where it stands."""
    spec = document.get("spec", {})
    if document.get("kind") == "Pod":
        yield "spec", spec
    if "template" in spec:
        yield "spec.template.spec", spec["template"]["spec"]
    for template in ray_templates(document):
        yield "a template's spec", template["spec"]


def ray_templates(document: Document) -> list[Document]:
    """Return the pod templates of a RayCluster; none of anything else."""
    if document.get("kind") != "RayCluster":
        return []
    spec = document["spec"]
    return [each["template"] for each in (spec["headGroupSpec"], *spec["workerGroupSpecs"])]


def pod_findings(spec: Document) -> Iterator[str]:
    """Say what a pod of ours must not be."""
    security = spec.get("securityContext", {})
    if spec.get("automountServiceAccountToken") is not False:
        yield "automountServiceAccountToken is not false"
    if security.get("runAsNonRoot") is not True or not security.get("runAsUser"):
        yield "securityContext: runAsNonRoot, and a runAsUser that is not 0"
    if security.get("seccompProfile", {}).get("type") != "RuntimeDefault":
        yield "securityContext.seccompProfile.type is not RuntimeDefault"
    hosts = any("hostPath" in each for each in spec.get("volumes", []))
    if spec.get("hostNetwork") or spec.get("hostIPC"):
        yield "hostNetwork and hostIPC: no transport needs them"
    if spec.get("hostPID") and not hosts:
        yield "hostPID without a folder of the node: nobody outside the pod reaches its sockets"
    for container in (*spec.get("initContainers", []), *spec["containers"]):
        for finding in _container_findings(container):
            yield f"container {container['name']}: {finding}"
        yield from _drain_findings(container, spec)


def _container_findings(container: Document) -> Iterator[str]:
    security = container.get("securityContext", {})
    if security.get("allowPrivilegeEscalation") is not False:
        yield "allowPrivilegeEscalation is not false"
    if security.get("readOnlyRootFilesystem") is not True:
        yield "readOnlyRootFilesystem is not true"
    if security.get("capabilities", {}).get("drop") != ["ALL"]:
        yield "capabilities.drop is not [ALL]"
    if "add" in security.get("capabilities", {}) or security.get("privileged"):
        yield "capabilities.add, privileged: nothing of ours needs them"
    if "memory" not in container.get("resources", {}).get("limits", {}):
        yield "resources.limits.memory is not given"
    tag = container["image"].rpartition(":")[2]
    if tag in (container["image"], "latest") or "/" in tag:
        yield f"image {container['image']}: give it a tag, and not latest"


def _drain_findings(container: Document, spec: Document) -> Iterator[str]:
    """A teacher is probed, and has the time to drain."""
    words = [*container.get("command", []), *container.get("args", [])]
    if "serve" not in words:
        return
    missing = [probe for probe in PROBES if probe not in container]
    if missing:
        yield f"container {container['name']}: {', '.join(missing)} missing"
    drain = next((int(found[1]) for word in words if (found := _DRAIN.fullmatch(word))), None)
    grace = spec.get("terminationGracePeriodSeconds", _DEFAULT_GRACE_SECONDS)
    if drain is None:
        yield f"container {container['name']}: --drain-grace=Ns is not said"
    elif grace <= drain:
        yield f"terminationGracePeriodSeconds {grace} is no more than --drain-grace={drain}s"
