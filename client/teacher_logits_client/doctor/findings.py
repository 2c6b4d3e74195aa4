"""Findings: what the doctor saw, how bad it is, and what mends it.

``ok`` stands in nobody's way, ``warn`` costs something (bytes are streamed that could be
shared, a check does not happen), ``fail`` stops the work. Names are stable: scripts read them.
"""

from __future__ import annotations

import enum
import json
import textwrap
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from teacher_logits_client.terminal_text import harmless

if TYPE_CHECKING:
    from collections.abc import Mapping

    from teacher_logits.errors import Fact

_WIDTH = 100


class Verdict(enum.Enum):
    """How bad a finding is, the best first."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was looked at: a sentence, its numbers, and the cure where one is due."""

    name: str
    verdict: Verdict
    message: str
    cure: str = ""
    facts: Mapping[str, Fact] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Report:
    """All findings, in the order in which they were looked at."""

    findings: tuple[Finding, ...]

    @property
    def verdict(self) -> Verdict:
        """The worst there is."""
        order = list(Verdict)
        return max((each.verdict for each in self.findings), key=order.index, default=Verdict.OK)

    def to_text(self) -> str:
        """Return the report for people: a line or a few a finding, and a last line that sums up."""
        width = max((len(each.name) for each in self.findings), default=0)
        lines = [harmless(line) for each in self.findings for line in _lines(each, width)]
        counts = {v: sum(each.verdict is v for each in self.findings) for v in Verdict}
        summary = ", ".join(f"{count} {verdict.value}" for verdict, count in counts.items())
        return "\n".join([*lines, "", f"{self.verdict.value}: {summary}"])

    def to_json(self) -> str:
        """Return the report for programs: ``verdict`` and ``findings``, one object."""
        findings = [
            {
                "name": each.name,
                "verdict": each.verdict.value,
                "message": each.message,
                "cure": each.cure,
                "facts": dict(each.facts),
            }
            for each in self.findings
        ]
        return json.dumps({"verdict": self.verdict.value, "findings": findings}, indent=2)


def _lines(finding: Finding, width: int) -> list[str]:
    """Return a finding's lines, its cure below it."""
    margin = " " * (width + 8)
    head = f"{finding.verdict.value:<4}  {finding.name:<{width}}  "
    text = [head + finding.message, *([f"{margin}cure: {finding.cure}"] if finding.cure else [])]
    return [
        line
        for part in text
        for line in textwrap.wrap(
            part, _WIDTH, subsequent_indent=margin, break_long_words=False, break_on_hyphens=False
        )
    ]
