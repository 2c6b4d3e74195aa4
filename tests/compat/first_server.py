"""A server of the first release's schema: the newest one, behind what hides all that came later.

Every message passes through the first release's descriptors, both ways, over gRPC and over broker
lines: a field that it did not know is dropped, an RPC that it had not is unimplemented. What the
newest client sees is what a server of that release could have said.
"""

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2
from tests.compat.schemas import FIRST

TIMEOUT_SECONDS = 20
_PACKET_BYTES, _DESCRIPTORS = 1 << 16, 4
_CALLERS = 8
HEALTH_PACKAGE = health_pb2.DESCRIPTOR.package
HEALTH = {
    f"/{HEALTH_PACKAGE}.Health/{each.name}": each
    for each in health_pb2.DESCRIPTOR.services_by_name["Health"].methods
}
"""The health protocol is gRPC's own, and passes as it is."""


class FirstServer(grpc.GenericRpcHandler):
    """Hands calls on to the newest server, as far as the first release knew them.

    `dropped` counts the bytes of messages that the first release did not know.
    """

    def __init__(self, upstream: grpc.Channel, folder: Path) -> None:
        self.dropped = 0
        self._upstream = upstream
        self._folder = folder
        self._brokers: dict[str, Broker] = {}

    def service(self, handler_call_details: Any) -> Any:
        """Return the handler of a call; None where the first release had no such RPC."""
        path: str = handler_call_details.method
        method = FIRST.methods.get(path) or HEALTH.get(path)
        if method is None:
            return None
        if method.client_streaming:
            return grpc.stream_unary_rpc_method_handler(self._upload(path, method))
        if method.server_streaming:
            return grpc.unary_stream_rpc_method_handler(self._stream(path, method))
        return grpc.unary_unary_rpc_method_handler(self._plain(path, method))

    def close(self) -> None:
        for each in self._brokers.values():
            each.close()

    def known(self, descriptor: Any, data: bytes) -> bytes:
        """What the first release understands of a message."""
        if descriptor.file.package == HEALTH_PACKAGE:
            return data
        known = FIRST.known_of(descriptor, data)
        self.dropped += len(data) - len(known)
        return known

    def _plain(self, path: str, method: Any) -> Any:
        takes, gives = method.input_type, method.output_type
        call = self._upstream.unary_unary(path, bytes, bytes)

        def handle(request: bytes, context: Any) -> bytes:
            asked = call.future(self.known(takes, request), timeout=context.time_remaining())
            context.add_callback(asked.cancel)  # who gives up here gives up there
            try:
                reply = asked.result()
            except grpc.RpcError as error:
                _abort(context, error)
            return self._with_own_broker(gives, self.known(gives, reply))

        return handle

    def _stream(self, path: str, method: Any) -> Any:
        call = self._upstream.unary_stream(path, bytes, bytes)

        def handle(request: bytes, context: Any) -> Iterator[bytes]:
            replies = call(self.known(method.input_type, request), timeout=context.time_remaining())
            context.add_callback(replies.cancel)
            try:
                for reply in replies:
                    yield self.known(method.output_type, reply)
            except grpc.RpcError as error:
                _abort(context, error)

        return handle

    def _upload(self, path: str, method: Any) -> Any:
        call = self._upstream.stream_unary(path, bytes, bytes)

        def handle(requests: Iterator[bytes], context: Any) -> bytes:
            known = (self.known(method.input_type, each) for each in requests)
            try:
                return self.known(method.output_type, call(known, timeout=context.time_remaining()))
            except grpc.RpcError as error:
                _abort(context, error)
            raise AssertionError("never reached: aborting raises")

        return handle

    def _with_own_broker(self, descriptor: Any, reply: bytes) -> bytes:
        """Name a broker of our own in the place of the newest server's."""
        if "broker_path" not in descriptor.fields_by_name:
            return reply
        message = FIRST.message(descriptor.name).FromString(reply)
        if not message.broker_path:
            return reply
        if message.broker_path not in self._brokers:
            path = self._folder / f"b{len(self._brokers)}"
            self._brokers[message.broker_path] = Broker(self, str(path), message.broker_path)
        message.broker_path = self._brokers[message.broker_path].path
        data: bytes = message.SerializeToString()
        return data


class Broker:
    """Hands packets on between lines and the newest server's broker, with their descriptors.

    It lives in the client's process, so that the kernel says the same of both.
    """

    def __init__(self, server: FirstServer, path: str, upstream: str) -> None:
        self.path = path
        self._server = server
        self._upstream = upstream
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(path)
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                client, _ = self._listener.accept()
                server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                server.connect(self._upstream)
                for ends in ((client, server, "LineRequest"), (server, client, "LineReply")):
                    threading.Thread(target=self._pump, args=ends, daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, message: str) -> None:
        descriptor = FIRST.message(message).DESCRIPTOR
        with suppress(OSError):
            while True:
                packet, descriptors, _, _ = socket.recv_fds(source, _PACKET_BYTES, _DESCRIPTORS)
                if not packet:
                    break
                known = self._server.known(descriptor, packet)
                socket.send_fds(sink, [known], descriptors)
                for each in descriptors:
                    socket.close(each)
        with suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)
        source.close()


def _abort(context: Any, error: Any) -> None:
    context.set_trailing_metadata(error.trailing_metadata() or ())
    context.abort(error.code(), error.details() or "")


@contextmanager
def first_server(address: str, folder: Path) -> Iterator[tuple[FirstServer, str]]:
    """Run one in front of the newest server at an address; yield it with its own address."""
    with grpc.insecure_channel(address) as channel, ThreadPoolExecutor(_CALLERS) as threads:
        handler = FirstServer(channel, folder)
        server = grpc.server(threads, handlers=[handler])
        own = f"unix:{folder / 'first'}"
        server.add_insecure_port(own)
        server.start()
        try:
            yield handler, own
        finally:
            server.stop(None).wait()
            handler.close()
