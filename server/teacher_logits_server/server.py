"""One server: started, ready, drained, stopped, on the event loop that starts it.

    start    sockets claimed and listened on, health NOT_SERVING; teacher loaded and probed
    ready    health SERVING
    drain    health NOT_SERVING, no new work; leases run out
    stop     every call, thread, socket and slab gone

Promises: whatever fails on the way up takes down what was up already; a second server on the same
socket or port is refused before it loads a teacher. (``app`` looks at the settings before that.)
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

from teacher_logits.addresses import Address, read_address
from teacher_logits.clock import MonotonicClock
from teacher_logits.transport import Transport
from teacher_logits_server.access import access_of
from teacher_logits_server.config import default_address
from teacher_logits_server.exporters.ray_link import join_cluster
from teacher_logits_server.listening import claim_broker, log_addresses
from teacher_logits_server.metrics.held import Held
from teacher_logits_server.metrics.instruments import Instruments
from teacher_logits_server.metrics.page import MetricsPage
from teacher_logits_server.readiness import Readiness
from teacher_logits_server.reaper import Reaper
from teacher_logits_server.services.endpoint import Endpoint, endpoint_of
from teacher_logits_server.services.state_log import StateLog, log_loaded
from teacher_logits_server.threads import in_thread
from teacher_logits_server.wiring import Wired, wire

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from teacher_logits.device_memory import DeviceMemory
    from teacher_logits_server.config import ServerConfig
    from teacher_logits_server.core import Core
    from teacher_logits_server.engines.served import ServedTeacher
    from teacher_logits_server.exporters.ray_link import RayLink
    from teacher_logits_server.sockets import SocketClaim

SWEEP_INTERVAL = timedelta(milliseconds=500)
DRAIN_POLL_SECONDS = 0.05
LAST_CALLS_SECONDS = 1.0

_log = logging.getLogger(__name__)


class Server:
    """One server, on the event loop that starts it.

    Args:
        load: loads the teachers, on a thread of its own; none for a server that serves
            published teachers alone.
        device_memory: the driver of the engine's device; see ``core.Core``.
        instruments: what its parts count in.
    """

    def __init__(
        self,
        config: ServerConfig,
        load: Callable[[], Sequence[ServedTeacher]],
        *,
        device_memory: DeviceMemory | None = None,
        instruments: Instruments | None = None,
    ) -> None:
        self._config = config
        self._device_memory = device_memory
        self._load = load
        self._access = access_of(config.token_file)
        self._clock = MonotonicClock()
        self._instruments = instruments or Instruments()
        self._held = Held(
            is_serving=lambda: self._endpoint is not None and self._endpoint.is_serving
        )
        self._instruments.registry.register(self._held)
        self._page: MetricsPage | None = None
        self._endpoint: Endpoint | None = None
        self._broker_claim: SocketClaim | None = None
        self._broker_path = ""
        self._core: Core | None = None
        self._ray: RayLink | None = None
        self._wired: Wired | None = None
        self._reaping: asyncio.Task[None] | None = None
        self._draining = False
        self._states = StateLog(self._clock)

    async def start(self) -> Readiness:
        """Come up; return what a ready server says of itself.

        Raises:
            ConfigError: an address, or what the engine was told, is of no use.
            AlignmentError: the teacher is not causal.
            Exception: whatever loading the teacher raises.
        """
        try:
            return await self._start()
        except BaseException:
            await self.stop(grace_seconds=0)
            raise

    async def drain(self) -> bool:
        """Take no new work and let the old run out; return whether all of it did in time."""
        if self._core is None or self._endpoint is None:
            return True
        self._draining = True
        self._core.ledger.drain()
        if self._wired is not None:
            self._wired.waiting.ring_all()  # who waits for a session or for room is told
        await self._endpoint.set_serving(False)
        grace = self._config.drain_grace.total_seconds()
        leases = self._core.ledger.lease_count()
        _log.info("draining", extra={"facts": {"leases": leases, "grace_seconds": grace}})
        give_up = self._clock.now() + grace
        while not self._core.is_idle:
            if self._clock.now() >= give_up:
                left = self._core.ledger.lease_count()
                _log.warning("drain gave up", extra={"facts": {"leases": left}})
                return False
            await asyncio.sleep(DRAIN_POLL_SECONDS)
        _log.info("drained")
        return True

    async def stop(self, *, grace_seconds: float = LAST_CALLS_SECONDS) -> None:
        """Stop, and give everything back. Doing so twice is fine.

        Calls under way may end within the grace; what waits for the teacher is told at once.
        What the teacher is computing is waited for.
        """
        reaping, self._reaping = self._reaping, None
        if reaping is not None:
            reaping.cancel()
            await asyncio.wait([reaping])
        if self._wired is not None:
            self._wired.scoring.stop()
            self._wired.waiting.stop()
        core, self._core = self._core, None
        if core is not None:
            core.hang_up()
        ray, page, self._ray, self._page = self._ray, self._page, None, None
        for each in (ray, page):
            if each is not None:
                await in_thread(each.stop, name="stop")
        claim, self._broker_claim = self._broker_claim, None
        if claim is not None:
            claim.release()
        endpoint, self._endpoint = self._endpoint, None
        if endpoint is not None:
            await endpoint.stop(grace_seconds=grace_seconds)
        if core is not None:
            await in_thread(core.close, name="stop")

    async def _start(self) -> Readiness:
        config = self._config
        self._endpoint = endpoint = endpoint_of(config, self._access, self._instruments)
        wanted = config.addresses or (read_address(default_address(), what="--listen"),)
        addresses = await endpoint.listen(wanted)
        log_addresses(addresses, config)
        if config.metrics:
            where = read_address(config.metrics, what="--metrics")
            self._page = MetricsPage(self._instruments.registry, where)
        if Transport.SHARED_MEMORY in config.transports and sys.platform == "linux":
            self._broker_claim = claim_broker(config, addresses, endpoint.audience)
            self._broker_path = self._broker_claim.path
        if config.ray_address and Transport.RAY_OBJECT in config.transports:
            self._ray = await in_thread(partial(join_cluster, config), name="join")
        self._core = core = await in_thread(self._build, name="load")
        core.start()
        self._held.watch(core.tables())
        if self._broker_claim is not None:
            self._broker_claim.let_in()
        self._access.ask(core.ledger)
        self._wired = wire(
            core,
            endpoint,
            config=self._config,
            access=self._access,
            clock=self._clock,
            instruments=self._instruments,
        )
        reaper = Reaper(ledger=core.ledger, every=SWEEP_INTERVAL, also=self._look_around)
        self._reaping = asyncio.ensure_future(reaper.run())
        endpoint.open()
        await self._tell_health()
        return self._readiness(core, addresses)

    def _build(self) -> Core:
        """Load the teachers and put the core together, on a thread of its own."""
        # Not before: it brings torch, and a server that is refused need not wait for that.
        from teacher_logits_server.core import Core
        from teacher_logits_server.engines.passes import closed_on_failure

        began = self._clock.now()
        teachers = self._load()
        log_loaded(teachers, self._clock.now() - began)
        with closed_on_failure(*(each.engine for each in teachers)):
            return Core(
                config=self._config,
                teachers=teachers,
                clock=self._clock,
                broker_path=self._broker_path,
                device_memory=self._device_memory,
                ray=self._ray,
                instruments=self._instruments,
            )

    async def _look_around(self) -> None:
        """Do what is due once a pass, beside the sweep."""
        if self._wired is not None:
            self._wired.dismissal.look()
        await self._tell_health()

    async def _tell_health(self) -> None:
        """Say SERVING while it is healthy and no drain was asked for; of each teacher likewise."""
        core, endpoint = self._core, self._endpoint
        if core is None or endpoint is None:
            return
        healthy = core.vitals.is_healthy
        self._states.health(healthy, core.vitals.health)
        self._states.room(core.ledger.is_full, core.ledger.usage)
        await endpoint.set_serving(healthy and not self._draining)
        await endpoint.teachers.tell(core.vitals.able(), draining=self._draining)

    def _readiness(self, core: Core, addresses: Sequence[Address]) -> Readiness:
        teachers = core.profiles
        readiness = Readiness(
            address=str(addresses[0]),
            addresses=tuple(map(str, addresses)),
            broker=self._broker_path,
            teacher_id=teachers[0].teacher_id if teachers else "",
            teacher_ids=tuple(each.teacher_id for each in teachers),
            vocabulary_size=teachers[0].vocabulary_size if teachers else 0,
            pool_bytes=self._config.pool_size_bytes,
            transports=tuple(sorted(transport.value for transport in core.offered)),
            epoch=core.ledger.epoch,
            pid=os.getpid(),
            replicas=len(core.vitals.replicas()),
            metrics=str(self._page.address) if self._page is not None else "",
        )
        _log.info("ready", extra={"facts": asdict(readiness)})
        return readiness
