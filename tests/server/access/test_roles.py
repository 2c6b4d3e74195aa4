"""The table of roles: every RPC there is stands in it, for those whom it is for."""

from __future__ import annotations

import importlib
import pkgutil
from typing import TYPE_CHECKING

import pytest
from grpc_health.v1 import health_pb2

from teacher_logits import v1
from teacher_logits_server.access.roles import (
    EVERY_ROLE,
    NAMES_ITS_OWN_SESSION,
    OPEN_TO_ALL,
    ROLES,
    Role,
    roles_of,
)

if TYPE_CHECKING:
    from google.protobuf.descriptor import FileDescriptor, MethodDescriptor


def methods_in(file: FileDescriptor) -> list[MethodDescriptor]:
    return [each for service in file.services_by_name.values() for each in service.methods]


def path_of(method: MethodDescriptor) -> str:
    return f"/{method.containing_service.full_name}/{method.name}"


SCHEMA = [
    method
    for module in pkgutil.iter_modules(v1.__path__)
    if module.name.endswith("_pb2")
    for method in methods_in(importlib.import_module(f"{v1.__name__}.{module.name}").DESCRIPTOR)
]


HEALTH = [
    method
    for service in health_pb2.DESCRIPTOR.services_by_name.values()
    for method in service.methods
]


def test_the_schema_is_found_whole() -> None:
    assert len(SCHEMA) >= 18


@pytest.mark.parametrize("method", SCHEMA, ids=path_of)
def test_every_rpc_of_the_schema_stands_in_it(method: MethodDescriptor) -> None:
    assert roles_of(path_of(method))


def test_nothing_of_ours_stands_in_it_that_the_schema_has_not() -> None:
    ours = {method for method in ROLES if method.startswith("/teacher_logits.")}
    assert ours == {path_of(method) for method in SCHEMA}


@pytest.mark.parametrize("method", HEALTH, ids=path_of)
def test_health_is_everybodys(method: MethodDescriptor) -> None:
    assert path_of(method) in OPEN_TO_ALL


def test_whatever_is_not_in_it_is_nobodys() -> None:
    assert not roles_of("/teacher_logits.v1.RegistryService/Burn")


@pytest.mark.parametrize("method", SCHEMA, ids=path_of)
def test_registry_calls_are_publishers_alone_and_operators_calls_operators(
    method: MethodDescriptor,
) -> None:
    service = method.containing_service.name
    alone = {"RegistryService": Role.PUBLISHER, "OperatorService": Role.OPERATOR}
    if service in alone:
        assert roles_of(path_of(method)) == {alone[service]}
    else:
        assert Role.OPERATOR not in roles_of(path_of(method)) < EVERY_ROLE


@pytest.mark.parametrize("method", SCHEMA, ids=path_of)
def test_a_call_that_names_a_session_is_its_owners_but_for_an_operators(
    method: MethodDescriptor,
) -> None:
    names_one = "session_id" in method.input_type.fields_by_name
    is_operators = method.containing_service.name == "OperatorService"
    assert not names_one or (path_of(method) in NAMES_ITS_OWN_SESSION) != is_operators
