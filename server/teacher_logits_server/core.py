"""The core: everything that stands behind the services, made once the teachers are loaded.

Each teacher that the server runs has a scorer of its own, with its own thread and queue, so that
none waits for another. A server without an engine has none; its teachers are those that are
published.

It owns what it makes and gives all of it back in ``hang_up`` and ``close``: threads, sockets,
memory, and the server's entry in the table of this process.
"""

from __future__ import annotations

import logging
import resource
import sys
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from teacher_logits import keys
from teacher_logits.errors import ConfigError
from teacher_logits.transport import Transport
from teacher_logits_server.broker import Broker
from teacher_logits_server.broker.peers import looked_at
from teacher_logits_server.engines.describing import described
from teacher_logits_server.engines.device import engine_device
from teacher_logits_server.engines.passes import PassEngine
from teacher_logits_server.exporters.bringing import Bringing, StoredTickets
from teacher_logits_server.exporters.cuda_ipc import CudaIpcExporter
from teacher_logits_server.exporters.local import LocalExporter
from teacher_logits_server.exporters.ray_link import join_cluster
from teacher_logits_server.exporters.ray_object import RayObjectExporter
from teacher_logits_server.exporters.shared_memory import SharedMemoryExporter
from teacher_logits_server.exporters.stream import StreamExporter
from teacher_logits_server.foreign import ForeignSlabs
from teacher_logits_server.ledger import Ledger
from teacher_logits_server.lending.own_device import OwnDevice
from teacher_logits_server.metrics.held import Tables
from teacher_logits_server.metrics.instruments import Instruments
from teacher_logits_server.readers import size_setting
from teacher_logits_server.scorer import Scorer
from teacher_logits_server.services.line import LineDesk
from teacher_logits_server.services.publishing import PublisherCalls
from teacher_logits_server.slabs import ServerSlabs
from teacher_logits_server.vitals import Vitals

if TYPE_CHECKING:
    from collections.abc import Sequence

    from teacher_logits.clock import Clock
    from teacher_logits.device_memory import DeviceMemory
    from teacher_logits_server.config import ServerConfig
    from teacher_logits_server.engines.device import EngineDevice
    from teacher_logits_server.engines.served import ServedTeacher
    from teacher_logits_server.exporters import Exporter, SlabExporter
    from teacher_logits_server.exporters.ray_link import RayLink
    from teacher_logits_server.replicas.stores import Stores
    from teacher_logits_server.views import LedgerView

_log = logging.getLogger(__name__)

SPARE_LINES = 1024
"""Connections beyond the most sessions, for those that have not said hello yet: as many as four
users' processes may have."""


class Core:
    """Slabs, ledger, scorers, exporters and broker of one server.

    Args:
        teachers: those that the server runs itself.
        broker_path: where the broker is to listen, claimed already; empty for no broker.
        device_memory: the driver of the engines' device, where they are to write there; the
            machine's own where None.
        ray: the Ray cluster that was joined, if one was.
        instruments: what its parts count in.
    """

    def __init__(
        self,
        *,
        config: ServerConfig,
        teachers: Sequence[ServedTeacher],
        clock: Clock,
        broker_path: str,
        device_memory: DeviceMemory | None = None,
        ray: RayLink | None = None,
        instruments: Instruments | None = None,
    ) -> None:
        """Put the parts together and probe each teacher: as long as that takes.

        Raises:
            AlignmentError: the teacher's answer for a position depends on later tokens.
            EngineError: it failed on the probe's rows.
            ConfigError: the engine's device has no room for ``--device-pool-size``.
        """
        self._instruments = instruments or Instruments()
        epoch = keys.new_epoch() if ray is None else ray.joined.epoch
        self.offered = on_offer(config, has_broker=bool(broker_path), has_ray=ray is not None)
        self.passes = {
            each.teacher_id: each.engine for each in teachers if isinstance(each.engine, PassEngine)
        }
        engines = [described(each, of_several=len(teachers) > 1) for each in teachers]
        self.profiles = tuple(each.profile for each in engines)
        # Behind the probes, which had the teachers take what they work with; all on one device.
        self.device = self._find_device(teachers[0].config, device_memory) if teachers else None
        self.slabs = ServerSlabs(epoch=epoch, device=self.device)
        local = LocalExporter(epoch=epoch, slabs=self.slabs)
        self.ledger = Ledger(
            epoch=epoch,
            limits=config,
            engines=engines,
            clock=clock,
            slots=self.slabs,
            offered=self.offered,
            local_secret=local.secret,
        )
        if self.device is not None:
            self.ledger.add_device(own_device(config, self.device))
            self.device.on_freed(self.ledger.memory_freed)
        self.stores = None if ray is None else self._make_stores(config)
        self.scorers = {each.teacher_id: self._make_scorer(each, clock) for each in teachers}
        self._make_exporters(config, local, ray)
        self.broker = self._make_broker(config, broker_path, clock) if broker_path else None
        self.vitals = Vitals(scorers=self.scorers, passes=self.passes, broker=self.broker)

    def _make_stores(self, config: ServerConfig) -> Stores | None:
        """Have what replicas compute stay on their nodes, for sessions that read objects."""
        if not self.passes:
            return None
        from teacher_logits_server.replicas.stores import make_stores  # brings Ray

        stores = make_stores(config, epoch=self.ledger.epoch, engines=self.passes.values())
        self.ledger.on_stored_freed(stores.drop)
        return stores

    def _make_scorer(self, teacher: ServedTeacher, clock: Clock) -> Scorer:
        return Scorer(
            engine=teacher.engine,
            ledger=self.ledger,
            slabs=self.slabs,
            config=teacher.config,
            clock=clock,
            times=self._instruments.passes_of(teacher.teacher_id),
            stores=self.stores,
        )

    def _find_device(
        self, config: ServerConfig, memory: DeviceMemory | None
    ) -> EngineDevice | None:
        if config.device_pool_size_bytes and Transport.CUDA_IPC not in self.offered:
            raise ConfigError(
                f"--device-pool-size {size_setting(config.device_pool_size_bytes)}: device memory "
                "is passed on over the broker, which runs on Linux alone: leave it out",
                facts={"flag": "--device-pool-size", "value": config.device_pool_size_bytes},
            )
        return engine_device(config, memory)

    def _make_exporters(
        self, config: ServerConfig, local: LocalExporter, ray: RayLink | None
    ) -> None:
        self.foreign = ForeignSlabs(descriptor_limit() // 2)
        self.ledger.on_slabs_dropped(self.foreign.drop)
        self.publishing = PublisherCalls(ledger=self.ledger, slabs=self.slabs, foreign=self.foreign)
        both = (self.slabs, self.foreign)
        self.stream = StreamExporter(ledger=self.ledger, slabs=both, chunk_bytes=config.chunk_bytes)
        shared = SharedMemoryExporter(ledger=self.ledger, slabs=both)
        by_handle = CudaIpcExporter(ledger=self.ledger, shared=shared, own=self.slabs)
        self.objects: RayObjectExporter | None = None
        self.bringing: Bringing | None = None
        stored: StoredTickets | None = None
        if self.stores is not None:
            self.bringing = Bringing(ledger=self.ledger, slabs=self.slabs, stores=self.stores)
            stored = StoredTickets(stores=self.stores, bringing=self.bringing)
        if ray is not None:
            self.objects = RayObjectExporter(
                ledger=self.ledger,
                slabs=both,
                link=ray,
                join=partial(join_cluster, config),
                stored=stored,
            )
        known: list[Exporter] = [local, by_handle, shared, self.stream]
        known += [self.objects] if self.objects is not None else []
        self.exporters = [each for each in known if each.transport in self.offered]
        self._passes: SlabExporter = by_handle if by_handle in self.exporters else shared

    def _make_broker(self, config: ServerConfig, path: str, clock: Clock) -> Broker:
        self.desk = desk = LineDesk(
            ledger=self.ledger,
            exporter=self._passes,
            publishing=self.publishing,
            allowed_uids=config.allow_uids,
            refusals=self._instruments.refusals,
            max_user_lines=config.max_user_lines,
        )
        broker = Broker(
            path=path,
            desk=desk,
            clock=clock,
            hello_within=config.opening_ttl,
            max_lines=config.max_sessions + config.max_publishers + SPARE_LINES,
            refusals=self._instruments.refusals,
        )
        self.ledger.on_mail(broker.tell)
        return broker

    def start(self) -> None:
        """Start the threads and take readers.

        Raises:
            OSError: the broker's socket cannot be made; nothing runs then.
        """
        if self.broker is not None:
            self.broker.start()
        for scorer in self.scorers.values():
            scorer.start()
        for exporter in self.exporters:
            exporter.start()

    def hang_up(self) -> None:
        """Take no more readers, and end the lines of those there are."""
        for exporter in self.exporters:
            exporter.stop()
        if self.broker is not None:
            self.broker.stop()

    def close(self) -> None:
        """End the scorers and give the memory back, once all calls have ended.

        What the teachers are computing is waited for.
        """
        if self.objects is not None:
            self.objects.close()
        for scorer in self.scorers.values():
            scorer.stop()
        if self.stores is not None and self.bringing is not None:
            self.bringing.close()
            self.stores.close()
        for passes in self.passes.values():
            passes.close()
        self.slabs.close()
        self.foreign.close()

    def tables(self) -> Tables:
        """Return what a scrape reads."""
        broker, objects = self.broker, self.objects
        return Tables(
            epoch=self.ledger.epoch,
            view=self._view,
            queues=lambda: {name: each.queue() for name, each in self.scorers.items()},
            replicas=self.vitals.replicas,
            objects=lambda: None if objects is None else objects.view(),
            line_calls=lambda: {} if broker is None else dict(self.desk.calls),
            line_count=lambda: 0 if broker is None else broker.line_count,
        )

    def _view(self) -> LedgerView:
        held = self.ledger.view()
        return replace(held, sessions=looked_at(held.sessions, self.ledger.processes()))

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits, nothing runs, and no lease is out.

        Registered payloads that nobody has leased do not count.
        """
        for scorer in self.scorers.values():
            queue = scorer.queue()
            if queue.waiting_requests or queue.running_requests:
                return False
        return not self.ledger.lease_count()


def descriptor_limit() -> int:
    """Return how many descriptors this process may have; as many as can be where nothing says."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def on_offer(config: ServerConfig, *, has_broker: bool, has_ray: bool) -> frozenset[Transport]:
    """Return the transports of ``--transports`` for which there is what they take."""
    offered = frozenset(config.transports)
    if not has_broker:
        offered -= {Transport.SHARED_MEMORY, Transport.CUDA_IPC}
    return offered if has_ray else offered - {Transport.RAY_OBJECT}


def own_device(config: ServerConfig, device: EngineDevice) -> OwnDevice:
    """Return the pool of the engine's device, and say that there is one."""
    size_bytes = config.device_pool_size_bytes
    facts = {"device_uuid": device.device.uuid, "device_pool_bytes": size_bytes}
    _log.info("the engine writes to its device", extra={"facts": facts})
    return OwnDevice(
        offer=device.offer, budget_bytes=size_bytes, slab_size_bytes=config.slab_size_bytes
    )
