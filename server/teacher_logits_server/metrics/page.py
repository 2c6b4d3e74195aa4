"""The page that Prometheus scrapes: ``http://ADDRESS/metrics``, on threads of its own.

Promises: at most ``MOST_SCRAPES`` at a time, the next is turned away; a scraper that is slow to
ask or to read is cut off after ``SCRAPE_SECONDS``, and nothing else of the server hears of it.
There is no other page, and nothing can be changed here.
"""

from __future__ import annotations

import logging
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from time import monotonic
from typing import TYPE_CHECKING

from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from teacher_logits.addresses import Address
from teacher_logits.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client import CollectorRegistry
    from prometheus_client import Metric as Family

PATH = "/metrics"
MOST_SCRAPES = 8
SCRAPE_SECONDS = 10.0
_LOOK_SECONDS = 0.5

_log = logging.getLogger(__name__)


class MetricsPage:
    """Serves what a registry holds, from when it is made until ``stop``.

    Raises:
        ConfigError: the address is in use, or is none of this machine.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        address: Address,
        *,
        most_seconds: float = SCRAPE_SECONDS,
    ) -> None:
        try:
            self._server = _Server(address, _Page(registry), most_seconds)
        except OSError as error:
            raise ConfigError(
                f"--metrics {address}: {error.strerror or error}; give it another address",
                facts={"flag": "--metrics", "value": str(address)},
            ) from error
        self.address = Address(host=address.host, port=self._server.server_port)
        self._thread = threading.Thread(
            target=self._server.serve_forever,
            args=(min(_LOOK_SECONDS, most_seconds / 2),),
            name="teacher-logits-metrics",
            daemon=True,
        )
        self._thread.start()

    def stop(self) -> None:
        """Serve no more; scrapes under way are cut off."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, address: Address, page: Collector, most_seconds: float) -> None:
        self.page = page
        self.most_seconds = most_seconds
        self.address_family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        self._open: dict[socket.socket, float] = {}
        self._lock = threading.Lock()
        super().__init__((address.host, address.port), _Handler)

    def server_bind(self) -> None:
        """Bind, without asking a name server who we are, as the base class would."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_name, self.server_port = self.socket.getsockname()[:2]

    def verify_request(self, request: object, client_address: object) -> bool:
        """Take a connection, or turn it away where too many are open."""
        assert isinstance(request, socket.socket)  # of a server of sockets
        with self._lock:
            if len(self._open) >= MOST_SCRAPES:
                return False
            self._open[request] = monotonic() + self.most_seconds
            return True

    def service_actions(self) -> None:
        """Cut off those who take too long."""
        self._cut_off(until=monotonic())

    def shutdown_request(self, request: object) -> None:
        """End a connection."""
        assert isinstance(request, socket.socket)
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def server_close(self) -> None:
        """End all connections."""
        super().server_close()
        self._cut_off(until=float("inf"))

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing of a scraper that went away; of the rest, where it went wrong."""
        _log.debug("scrape failed", exc_info=True)

    def _cut_off(self, *, until: float) -> None:
        with self._lock:
            for connection, give_up in self._open.items():
                if give_up <= until:
                    _shut(connection)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    server_version = "teacher-logits"
    sys_version = ""

    def setup(self) -> None:
        """Let no read or write take longer than the whole may."""
        self.request.settimeout(self.server.most_seconds)
        super().setup()

    def do_GET(self) -> None:
        """Answer with the metrics, in the format that is asked for."""
        if self.path.partition("?")[0] != PATH:
            self.send_error(404, explain=f"there is {PATH} alone")
            return
        try:
            encode, content_type = choose_encoder(self.headers.get("Accept") or "")
        except (TypeError, ValueError):  # a version that is none
            encode, content_type = choose_encoder("")
        body = encode(self.server.page)
        self.send_response(200)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: a scrape is no change of state."""


class _Page(Collector):
    """A registry without the times at which counters were made, which would double its series."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Family]:
        for each in self._registry.collect():
            each.samples = [s for s in each.samples if not s.name.endswith("_created")]
            yield each


def _shut(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # it is gone already
