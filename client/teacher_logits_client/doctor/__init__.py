"""The doctor: what stands in the way of sharing memory between teacher and student, and its cure.

Looks at software, kernel, memory and place of this process, and at one server where its
address is given. Changes nothing; opens one session at most, and closes it.
"""

from __future__ import annotations

from teacher_logits_client.doctor.config import read_surroundings
from teacher_logits_client.doctor.connection import Visit, connection_findings
from teacher_logits_client.doctor.findings import Finding, Report, Verdict
from teacher_logits_client.doctor.kernel import kernel_findings
from teacher_logits_client.doctor.memory import memory_findings
from teacher_logits_client.doctor.place import place_findings
from teacher_logits_client.doctor.software import software_findings

__all__ = ["Finding", "Report", "Verdict", "Visit", "examine"]


def examine(*, pool_size_bytes: int, visit: Visit | None = None) -> Report:
    """Look at everything here, and at a server where one is to be visited."""
    findings = [
        *software_findings(),
        *kernel_findings(),
        *memory_findings(pool_size_bytes),
        *place_findings(read_surroundings()),
    ]
    if visit is not None:
        findings += connection_findings(visit)
    return Report(findings=tuple(findings))
