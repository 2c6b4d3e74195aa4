"""The services: one for each kind of caller, thin between messages and the ledger.

``Services`` holds their handlers. It stands in the server from its first moment, so that
health is answered while the teacher loads, and takes the others once there is a ledger.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import grpc

from teacher_logits.v1 import (
    object_service_pb2_grpc,
    operator_service_pb2_grpc,
    registry_service_pb2_grpc,
    scoring_service_pb2_grpc,
    teacher_logits_service_pb2_grpc,
)

if TYPE_CHECKING:
    from collections.abc import Sequence


class Services(grpc.GenericRpcHandler):
    """Finds the handler of an RPC among the services added so far.

    It takes the two calls by which generated code adds a servicer to a server.
    """

    def __init__(self) -> None:
        self._handlers: list[grpc.GenericRpcHandler] = []

    def add_student(
        self, servicer: teacher_logits_service_pb2_grpc.TeacherLogitsServiceServicer
    ) -> None:
        """Take the service of student ranks."""
        add = teacher_logits_service_pb2_grpc.add_TeacherLogitsServiceServicer_to_server
        add(servicer, self._as_server)

    def add_registry(self, servicer: registry_service_pb2_grpc.RegistryServiceServicer) -> None:
        """Take the service of publishers."""
        registry_service_pb2_grpc.add_RegistryServiceServicer_to_server(servicer, self._as_server)

    def add_scoring(self, servicer: scoring_service_pb2_grpc.ScoringServiceServicer) -> None:
        """Take the scoring service."""
        scoring_service_pb2_grpc.add_ScoringServiceServicer_to_server(servicer, self._as_server)

    def add_operator(self, servicer: operator_service_pb2_grpc.OperatorServiceServicer) -> None:
        """Take the operator's service."""
        operator_service_pb2_grpc.add_OperatorServiceServicer_to_server(servicer, self._as_server)

    def add_objects(self, servicer: object_service_pb2_grpc.ObjectServiceServicer) -> None:
        """Take the service of an object store."""
        object_service_pb2_grpc.add_ObjectServiceServicer_to_server(servicer, self._as_server)

    @property
    def _as_server(self) -> grpc.aio.Server:
        """This object as what generated code takes; it calls the next two methods alone."""
        return cast("grpc.aio.Server", self)

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        """Take handlers."""
        self._handlers.extend(handlers)

    def add_registered_method_handlers(self, service_name: str, method_handlers: object) -> None:
        """Do nothing: the same handlers come the other way too."""

    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler[object, object] | None:
        """Return the handler of an RPC, or None."""
        for each in self._handlers:
            found = each.service(handler_call_details)
            if found is not None:
                return found
        return None
