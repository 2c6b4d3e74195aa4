"""Instruments: the one registry of a server, and what its parts count in.

A registry of the server's own, so that two servers in one process do not count together. Safe on
any thread.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from teacher_logits_server.metrics.refusals import Refusals


class Instruments:
    """What the parts of one server count in; ``registry`` is what a scrape reads."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.refusals = Refusals(self.registry)
