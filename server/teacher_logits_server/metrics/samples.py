"""Samples: what a registry counts, as the contract's views have it, for the inspection.

Whoever inspects sees the same numbers under the same names as Prometheus, and nothing is counted
twice. Left out are the buckets of histograms, whose sum and count are there, and what is of the
process and of Python.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from teacher_logits.views import MetricView

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

OURS = "teacher_logits_"
_LEFT_OUT = ("_bucket", "_created")


def samples_of(registry: CollectorRegistry) -> tuple[MetricView, ...]:
    """Return every number of a registry, as of now."""
    return tuple(
        MetricView(
            name=sample.name, labels=tuple(sorted(sample.labels.items())), value=float(sample.value)
        )
        for family in registry.collect()
        if family.name.startswith(OURS)
        for sample in family.samples
        if not sample.name.endswith(_LEFT_OUT)
    )
