"""Reflection: a server tells its schema to tools such as grpcurl, where it was told to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from teacher_logits.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

    import grpc


def reflect(server: grpc.aio.Server, service_names: Iterable[str]) -> None:
    """Add the reflection service; before the server starts.

    Raises:
        ConfigError: the extra that it takes is not installed.
    """
    try:
        from grpc_reflection.v1alpha import reflection
    except ImportError as error:
        raise ConfigError(
            "--reflection: grpcio-reflection is not installed: pip install "
            "'teacher-logits[reflection]', or leave the flag out",
            facts={"flag": "--reflection"},
        ) from error
    names = [name for name in service_names if name]
    reflection.enable_server_reflection((*names, reflection.SERVICE_NAME), server)
