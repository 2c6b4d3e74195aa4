"""Rates: how fast a server's counts go, from several looks at it.

The server's own uptime is the clock, since it was taken with the counts. Another epoch is another
server, whose counts begin anew: what was seen before it is forgotten.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from teacher_logits.views import ServerView

_PREFIX = "teacher_logits_"
GRANTED_BYTES = f"{_PREFIX}granted_bytes_total"
GRANTED_LEASES = f"{_PREFIX}leases_granted_total"
STREAMED_BYTES = f"{_PREFIX}streamed_bytes_total"
SCORED_TOKENS = f"{_PREFIX}scored_tokens_total"
SCORED_REQUESTS = f"{_PREFIX}scored_requests_total"
WAITING_TOKENS = f"{_PREFIX}queue_tokens"
QUEUE_REQUESTS = f"{_PREFIX}queue_requests"
PASSES = f"{_PREFIX}batch_fill_ratio_count"
PASS_FILLS = f"{_PREFIX}batch_fill_ratio_sum"
PASS_SECONDS = f"{_PREFIX}pass_seconds_sum"
REFUSALS = f"{_PREFIX}refusals_total"

WINDOW_SECONDS = 5.0
"""What a rate is averaged over, at most; a single interval where that is longer."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Counts a second between two looks, ``seconds`` apart, by metric and the value of a label.

    Of a look that is alone nothing is known, and nothing of a server that tells no metrics:
    ``seconds`` is 0, and every rate None.
    """

    seconds: float = 0.0
    changes: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def rate(self, metric: str, label: str = "") -> float | None:
        """Return how many a second; None where nothing is known yet."""
        if self.seconds <= 0:
            return None
        return self.changes.get(metric, {}).get(label, 0.0) / self.seconds

    def share(self, part: str, whole: str, label: str) -> float | None:
        """Return the change of one metric as a part of another's; None where that has none."""
        parts, wholes = self.changes.get(part, {}), self.changes.get(whole, {})
        total = wholes.get(label, 0.0)
        return parts.get(label, 0.0) / total if total > 0 else None


NOTHING_YET = Rates()

LABELS = {
    GRANTED_BYTES: "transport",
    GRANTED_LEASES: "transport",
    STREAMED_BYTES: "",
    SCORED_TOKENS: "teacher",
    SCORED_REQUESTS: "teacher",
    WAITING_TOKENS: "teacher",
    PASSES: "teacher",
    PASS_FILLS: "teacher",
    PASS_SECONDS: "teacher",
    REFUSALS: "reason",
}
"""By which label each metric is told apart; what differs in others is summed."""


def counts(view: ServerView, metric: str) -> dict[str, float]:
    """Return what a view counts of a metric, by the value of its label."""
    return _all_counts(view).get(metric, {})


def _all_counts(view: ServerView) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for each in view.metrics:
        if each.name in LABELS:
            by_label = found.setdefault(each.name, {})
            value = each.label(LABELS[each.name])
            by_label[value] = by_label.get(value, 0.0) + each.value
    return found


class Looks:
    """The last looks at one server, as many as a window of rates needs."""

    def __init__(self, *, window_seconds: float = WINDOW_SECONDS) -> None:
        self._window = window_seconds
        self._looks: deque[ServerView] = deque()

    def add(self, view: ServerView) -> bool:
        """Take a look; returns whether it was at another server than the last one."""
        before = self._looks[-1] if self._looks else None
        is_other = before is not None and before.epoch != view.epoch
        if is_other:
            self._looks.clear()
        self._looks.append(view)
        while len(self._looks) > 2 and self._seconds_since(self._looks[1]) >= self._window:
            self._looks.popleft()
        return is_other

    def rates(self) -> Rates:
        """Return the rates from the first look of the window to the last."""
        if len(self._looks) < 2 or not self._looks[-1].metrics:
            return NOTHING_YET
        first, last = _all_counts(self._looks[0]), _all_counts(self._looks[-1])
        changes = {
            metric: {
                label: max(0.0, value - first.get(metric, {}).get(label, 0.0))
                for label, value in by_label.items()
            }
            for metric, by_label in last.items()
        }
        return Rates(seconds=self._seconds_since(self._looks[0]), changes=changes)

    def _seconds_since(self, view: ServerView) -> float:
        return (self._looks[-1].uptime - view.uptime).total_seconds()
