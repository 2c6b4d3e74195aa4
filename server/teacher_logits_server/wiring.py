"""Wiring: the services of a server, each with what it takes of the core."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from teacher_logits.transport import Transport
from teacher_logits_server.services.bulk import BulkService
from teacher_logits_server.services.dismissal import Dismissal
from teacher_logits_server.services.objects import ObjectService
from teacher_logits_server.services.operator import OperatorService
from teacher_logits_server.services.registry import RegistryService
from teacher_logits_server.services.student import StudentService
from teacher_logits_server.services.waiting import Waiting

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from teacher_logits.clock import Clock
    from teacher_logits_server.access import Access
    from teacher_logits_server.config import ServerConfig
    from teacher_logits_server.core import Core
    from teacher_logits_server.metrics.instruments import Instruments
    from teacher_logits_server.services.endpoint import Endpoint
    from teacher_logits_server.services.scoring import ScoringService


@dataclass(frozen=True, kw_only=True)
class Wired:
    """What a server has to stop, of its services."""

    waiting: Waiting
    scoring: ScoringService
    dismissal: Dismissal


def wire(
    core: Core,
    endpoint: Endpoint,
    *,
    config: ServerConfig,
    access: Access,
    clock: Clock,
    instruments: Instruments,
) -> Wired:
    """Add all services to an endpoint that listens, and is not open yet. On its event loop."""
    from teacher_logits_server.services.scoring import ScoringService  # brings torch

    ledger, objects, services = core.ledger, core.objects, endpoint.services
    path, wait = "" if core.broker is None else core.broker.path, config.default_wait
    waiting = Waiting(clock=clock, longest_wait=wait, limits=config, instruments=instruments)
    waiting.listen_to(ledger)
    services.add_student(
        StudentService(
            ledger=ledger,
            publishing=core.publishing,
            waiting=waiting,
            broker_path=path,
            objects=objects,
            instruments=instruments,
        )
    )
    services.add_registry(_registry_of(core, waiting, path))
    if objects is not None:
        services.add_objects(ObjectService(exporter=objects, waiting=waiting))
    scoring = ScoringService(scorers=core.scorers, ledger=ledger, clock=clock, longest_wait=wait)
    services.add_scoring(scoring)
    services.add_operator(_operator_of(core, clock, instruments))
    bulk = _bulk_of(core, endpoint, config, instruments)
    if Transport.STREAM in config.transports:
        services.add_generic_rpc_handlers([bulk.handler()])
    end = partial(_end, core, bulk, waiting)
    return Wired(waiting=waiting, scoring=scoring, dismissal=_dismissal_of(core, access, end))


def _dismissal_of(core: Core, access: Access, end: Callable[[Collection[str]], None]) -> Dismissal:
    return Dismissal(access=access, ledger=core.ledger, publishing=core.publishing, end=end)


def _registry_of(core: Core, waiting: Waiting, broker_path: str) -> RegistryService:
    return RegistryService(
        ledger=core.ledger,
        slabs=core.slabs,
        calls=core.publishing,
        waiting=waiting,
        broker_path=broker_path,
    )


def _end(core: Core, bulk: BulkService, waiting: Waiting, session_ids: Collection[str]) -> None:
    """End the lines, waits and streams of sessions that are closed."""
    if core.broker is not None:
        core.desk.end(session_ids)
        core.broker.tell(session_ids)
    bulk.end(session_ids)
    waiting.ring_all()


def _operator_of(core: Core, clock: Clock, instruments: Instruments) -> OperatorService:
    return OperatorService(
        ledger=core.ledger,
        publishing=core.publishing,
        scorers=core.scorers,
        clock=clock,
        objects=core.objects,
        replicas=core.vitals.replicas,
        metrics=instruments.samples,
        node_stores=tuple if core.stores is None else core.stores.view,
        able=core.vitals.able,
    )


def _bulk_of(
    core: Core, endpoint: Endpoint, config: ServerConfig, instruments: Instruments
) -> BulkService:
    return BulkService(
        exporter=core.stream,
        stall=config.default_wait,
        max_session_streams=config.max_session_streams,
        unix_paths=endpoint.unix_paths,
        instruments=instruments,
        bringing=core.bringing,
    )
