"""A server in a process of its own, obeying signals, or in a thread of yours.

first SIGTERM or SIGINT     drain: no new work, leases run out within --drain-grace; stop
a second one                stop at once
a teacher that hangs        is not waited for much beyond that grace
one while the teacher loads stop at once
a task that is not cancelled is left behind
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
import time
from concurrent.futures import Future
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, TypeVar

from teacher_logits.errors import TeacherLogitsError
from teacher_logits_server import logs
from teacher_logits_server.engines.served import check_teachers, load_teachers, served_by
from teacher_logits_server.handshakes import watch_handshakes
from teacher_logits_server.metrics.instruments import Instruments
from teacher_logits_server.readiness import STOPPING, Readiness, announce, retract, tell_systemd
from teacher_logits_server.server import Server
from teacher_logits_server.threads import in_thread
from teacher_logits_server.traces import exported

if TYPE_CHECKING:
    from collections.abc import Iterator

    from teacher_logits.device_memory import DeviceMemory
    from teacher_logits_server.config import ServerConfig
    from teacher_logits_server.engines.served import Engines, ServedTeacher

T = TypeVar("T")

EXIT_DRAINED = 0
EXIT_NOT_DONE = 3
EXIT_BY_SIGNAL = 128
"""Plus the signal's number: 130 for SIGINT, 143 for SIGTERM."""
STOP_SECONDS = 10.0
"""How long a stop may take at least, where the drain has left it less: memory is given back."""
LAST_WORK_SECONDS = 1.0
"""How long a forced stop waits for what the teacher is computing."""
HUNG_SECONDS = 5.0
"""How long what is left on the event loop may take to be cancelled."""

_log = logging.getLogger(__name__)


def serve(config: ServerConfig, *, device_memory: DeviceMemory | None = None) -> int:
    """Serve until a signal comes, and return the process's exit code.

    0: all leases came back; 3: the drain ran out of time with leases still out, or its teacher
    still at work; 128 and the signal's number: stopped at once. Configures the log; call it from
    the main thread. ``device_memory`` as for ``core.Core``.

    Raises:
        TeacherLogitsError: it did not come up.
    """
    instruments = Instruments()
    with watch_handshakes(instruments.refusals, has_tls=bool(config.tls_cert)) as stream:
        handler = logs.configure(format=config.log_format, level=config.log_level, stream=stream)
        try:
            with exported(config.otlp_endpoint):
                with closing(_End()) as end:
                    return asyncio.run(_serve(config, device_memory, instruments, end))
        except TeacherLogitsError:
            # Whoever called writes the message; where it came from is for those who look closer.
            _log.debug("did not come up", exc_info=True)
            raise
        finally:
            logs.unconfigure(handler)


async def _serve(
    config: ServerConfig, device_memory: DeviceMemory | None, instruments: Instruments, end: _End
) -> int:
    code = await _live(config, device_memory, instruments)
    end.is_due(code)
    return code


async def _live(
    config: ServerConfig, device_memory: DeviceMemory | None, instruments: Instruments
) -> int:
    signals = _Signals()
    server = Server(
        config, lambda: _load(config), device_memory=device_memory, instruments=instruments
    )
    starting = asyncio.create_task(_start(server, config))
    if not await signals.spare(starting):
        starting.cancel()
        await asyncio.wait([starting])
        return EXIT_BY_SIGNAL + signals.last
    readiness = starting.result()
    signals.listen()  # Ray's handler, which an engine may have brought, prints a stack
    try:
        announce(readiness, config)
        await signals.wait()
        tell_systemd(STOPPING)
        give_up = time.monotonic() + config.drain_grace.total_seconds()
        draining = asyncio.create_task(server.drain())
        if not await signals.spare(draining):
            draining.cancel()
            return EXIT_BY_SIGNAL + signals.last
        return await _stop(server, signals, give_up) if draining.result() else EXIT_NOT_DONE
    finally:
        await _stop_at_once(server)
        retract(config)


async def _start(server: Server, config: ServerConfig) -> Readiness:
    """Come up. Settings that cannot be served with are refused before anybody hears of it."""
    await in_thread(lambda: check_teachers(config), name="check")
    return await server.start()


def _load(config: ServerConfig) -> tuple[ServedTeacher, ...]:
    """Load the teachers, if there are to be some. The sockets are ours by now, and so is a ready
    file that lies there."""
    retract(config)
    return load_teachers(config)


async def _stop(server: Server, signals: _Signals, give_up: float) -> int:
    """Stop what has drained, and return the exit code.

    The teacher may be at something that nobody waits for any more, or its device hang.
    """
    stopping = asyncio.create_task(server.stop())
    seconds = max(STOP_SECONDS, give_up - time.monotonic())
    if await signals.spare(stopping, seconds=seconds):
        stopping.result()
        return EXIT_DRAINED
    if signals.has_urged:
        return EXIT_BY_SIGNAL + signals.last
    _log.warning("stopped with the teacher or its device still at work")
    return EXIT_NOT_DONE


async def _stop_at_once(server: Server) -> None:
    """Stop without waiting for calls, nor long for the teacher. Nothing, once it has stopped."""
    await asyncio.wait(
        [asyncio.create_task(server.stop(grace_seconds=0))], timeout=LAST_WORK_SECONDS
    )


class _End:
    """The process's end, once all that others see was given back.

    What is left then are tasks of the event loop, which are cancelled and waited for without an
    end; those of gRPC's are not ours.
    """

    def __init__(self) -> None:
        self._last: threading.Timer | None = None

    def is_due(self, code: int) -> None:
        """Have the process end with a code soon, whatever is left."""
        self._last = threading.Timer(HUNG_SECONDS, self._come, [code])
        self._last.daemon = True
        self._last.start()

    def close(self) -> None:
        """Leave it to whoever called: nothing was left."""
        if self._last is not None:
            self._last.cancel()

    def _come(self, code: int) -> None:
        _log.warning("stopped with a task that did not end")
        logging.shutdown()
        os._exit(code)


class _Signals:
    """SIGTERM and SIGINT, as something to wait for. Each is heard once, however close they come."""

    def __init__(self) -> None:
        self.last = 0
        #: Whether one came while something was spared.
        self.has_urged = False
        self._unheard = 0
        self._came = asyncio.Event()
        self.listen()

    def listen(self) -> None:
        """Have signals told here; again, where a library has put a handler of its own before."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)

    async def wait(self) -> None:
        """Wait for the next one."""
        await self._came.wait()
        self._hear()

    async def spare(self, work: asyncio.Task[T], *, seconds: float | None = None) -> bool:
        """Wait for ``work`` to be done; return False where a signal came before, or too late."""
        came = asyncio.create_task(self._came.wait())
        either: list[asyncio.Task[T] | asyncio.Task[bool]] = [work, came]
        await asyncio.wait(either, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if came.done() and not work.done():
            self.has_urged = True
            self._hear()
        came.cancel()
        return work.done()

    def _on_signal(self, number: int) -> None:
        self.last = number
        self._unheard += 1
        self._came.set()
        _log.info("signal", extra={"facts": {"signal": signal.Signals(number).name}})

    def _hear(self) -> None:
        self._unheard -= 1
        if not self._unheard:
            self._came.clear()


class EmbeddedServer:
    """A server in a thread of this process, as ``serve_in_thread`` hands it out."""

    def __init__(self, readiness: Readiness) -> None:
        self.readiness = readiness

    @property
    def address(self) -> str:
        """Where it listens."""
        return self.readiness.address


@contextmanager
def serve_in_thread(config: ServerConfig, engine: Engines) -> Iterator[EmbeddedServer]:
    """Run a server in a thread of this process, whose clients may then read ``local``.

    Without an engine it serves published teachers alone; several are given by the names of their
    teachers (``engines.served.served_by``). Yields once it is ready. Leaving stops
    it without draining, and returns when its threads, sockets and memory are given back. The log
    is left as it is.

    Raises:
        TeacherLogitsError: it did not come up.
    """
    ready: Future[Readiness] = Future()
    loop_of: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    async def run() -> None:
        enough = asyncio.Event()
        loop_of.append((asyncio.get_running_loop(), enough))
        server = Server(config, lambda: served_by(config, engine))
        ready.set_result(await server.start())
        await enough.wait()
        await server.stop()

    def live() -> None:
        try:
            asyncio.run(run())
        except BaseException as error:
            if ready.done():
                raise
            ready.set_exception(error)

    thread = threading.Thread(target=live, name="teacher-logits-server")
    thread.start()
    try:
        yield EmbeddedServer(ready.result())
    finally:
        if loop_of and not ready.exception():
            loop, enough = loop_of[0]
            loop.call_soon_threadsafe(enough.set)
        thread.join()
