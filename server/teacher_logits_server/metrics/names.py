"""Every metric of a server, defined once: its name, kind, labels, help and buckets.

Names are a promise to dashboards and alerts: one is added, none is renamed or removed within a
major release. ``docs/observability.md`` lists them all, and a test holds the two together.

No label ever has an id, an address or a text of a client's: each of ``LABELS`` has its values from
a closed list of the code, or from the server's own settings.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

LABELS: Mapping[str, str] = {
    "surface": "rpc, broker or line: where it was asked",
    "reason": "the stable name of an error (docs/observability.md, errors.py), or of what the "
    "broker turns connections away for",
    "class": "contract_violation, stale_reference, not_available, transport_failure or internal",
    "rule": "the stable name of a broken rule of a handshake",
}
"""Where the values of each label come from."""


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One metric. ``kind`` is ``counter``, ``gauge`` or ``histogram``; only that has buckets.

    ``name`` is as it stands on the page: a counter ends in ``_total``, and units are in it.
    """

    name: str
    kind: str
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


REFUSALS = Metric(
    name="teacher_logits_refusals_total",
    kind="counter",
    help="Calls and connections that were refused, by where and why.",
    labels=("surface", "reason"),
)
BROKEN_RULES = Metric(
    name="teacher_logits_broken_rules_total",
    kind="counter",
    help="Rules of a handshake that refused callers broke; one refusal may name several.",
    labels=("rule",),
)
ERRORS = Metric(
    name="teacher_logits_errors_total",
    kind="counter",
    help="Calls that ended in an error, by what the caller can do about it.",
    labels=("surface", "class"),
)

METRICS = tuple(each for each in globals().values() if isinstance(each, Metric))
"""All of them, in the order of this file."""
