"""What a server was told: all settings together, checked, and the defaults of the machine.

A config refuses nonsense when it is made, with a ``ConfigError`` that names the flag. The
environment is read here alone, by ``default_address``, ``runtime_folder`` and ``notify_socket``.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, fields, replace
from datetime import timedelta

from teacher_logits.addresses import UNIX, Address, check_path, read_address
from teacher_logits.errors import ConfigError, RequestInvalidError
from teacher_logits.grid import BatchGrid, check_batch_grid, check_sizes
from teacher_logits.keys import check_name
from teacher_logits.locality import ModelGrid, model_sizes
from teacher_logits.socket_path import default_socket_path, socket_folder
from teacher_logits.transport import Transport
from teacher_logits_server.access_settings import AccessSettings
from teacher_logits_server.access_settings import broken_rule as of_access
from teacher_logits_server.flags import Setting, settings_of
from teacher_logits_server.limit_settings import LimitSettings
from teacher_logits_server.limit_settings import broken_rule as of_limits
from teacher_logits_server.named_teachers import about, check_names, configs_of
from teacher_logits_server.own_settings import OF_A_TEACHER
from teacher_logits_server.ray_settings import RaySettings, of_no_teacher
from teacher_logits_server.ray_settings import broken_rule as of_ray
from teacher_logits_server.readers import SIZE, size_setting, span_setting
from teacher_logits_server.replica_settings import ReplicaSettings
from teacher_logits_server.replica_settings import broken_rule as of_replicas
from teacher_logits_server.settings import (
    KIB,
    MIB,
    ListenSettings,
    MemorySettings,
    OutputSettings,
    TeacherSettings,
    TimeSettings,
)
from teacher_logits_server.watch_settings import WatchSettings
from teacher_logits_server.watch_settings import broken_rule as of_watching

DEFAULT_ENGINE = "transformers"
MAX_SPAN = timedelta(days=7)
MAX_REQUEST_TOKENS = 16 * MIB
MIN_POOL_BYTES = 4 * KIB
MIN_CHUNK_BYTES = 4 * KIB
MAX_CHUNK_BYTES = 4 * MIB - KIB
"""A chunk and its header stay below the 4 MiB that a gRPC client takes when told nothing."""


@dataclass(frozen=True, kw_only=True)
class ServerConfig(
    WatchSettings,
    OutputSettings,
    TimeSettings,
    LimitSettings,
    RaySettings,
    MemorySettings,
    ReplicaSettings,
    TeacherSettings,
    AccessSettings,
    ListenSettings,
):
    """Settings of one server. Sizes are bytes, spans ``timedelta``; ``None`` is "not said"."""

    def __post_init__(self) -> None:
        """Refuse what makes no sense.

        Raises:
            ConfigError: naming the flag, its value and the rule.
        """
        _check_types(self)
        _check_listen(self)
        _check_teacher(self)
        for broken_rule in (of_access, of_replicas, of_ray, of_watching, of_limits):
            if (broken := broken_rule(self)) is not None:
                raise _refuse(*broken)
        _check_device_pool(self)
        _check_numbers(self)
        _check_times(self)
        _check_teachers(self)

    @property
    def engine_name(self) -> str:
        """The engine that computes the server's own teacher; empty where it has none."""
        return self.engine or (DEFAULT_ENGINE if self.model else "")

    def of_each_teacher(self) -> tuple[ServerConfig, ...]:
        """Return settings for each teacher of the server's own: what those above say is of it.

        That of ``model`` or ``engine`` comes first, where there is one.
        """
        if not self.teachers:
            return (self,) if self.engine_name else ()
        own = {"teachers": (), **of_no_teacher(self.engine_name)}
        first = (replace(self, **own),) if self.engine_name else ()  # type: ignore[arg-type]
        return (*first, *configs_of(self, self.teachers, OF_A_TEACHER))

    def check_teacher_flags(self) -> None:
        """Refuse what is said of a teacher where there is none of the server's own.

        Raises:
            ConfigError: naming the flag, and the one that gives a teacher.
        """
        rule = (
            "is said of the server's own teacher, and without --model or --engine it has none and "
            "serves what is published; give one, or leave this out"
        )
        said = settings_of(TeacherSettings)
        if self.teachers:  # who have the other settings
            rule = "names the teacher of --model or --engine, and neither is given: give one"
            said = ((n, default, each) for n, default, each in said if n == "teacher_id")
        for name, default, _ in said:
            if (value := getattr(self, name)) != default and not self.engine_name:
                text = _sizes(value) if isinstance(value, BatchGrid | ModelGrid) else value
                raise _refuse(name, text, rule)

    @property
    def addresses(self) -> tuple[Address, ...]:
        """Where it was told to listen; empty where the default address is meant."""
        return tuple(read_address(text, what="--listen") for text in self.listen)


def flag_of(name: str) -> str:
    """Return the flag of a field of ``ServerConfig``, for messages."""
    return _SETTINGS[name].flag


def default_address() -> str:
    """Return the address that a server listens on when told nothing (``socket_path``)."""
    return f"{UNIX}{default_socket_path(os.environ)}"


def runtime_folder() -> str:
    """Return the folder that holds this user's sockets. It need not exist yet."""
    return socket_folder(os.environ)


def notify_socket() -> str:
    """Return where systemd hears that a service is ready; empty where nobody asked."""
    return os.environ.get("NOTIFY_SOCKET", "")


def _refuse(name: str, value: object, rule: str) -> ConfigError:
    flag = flag_of(name)
    fact = value if isinstance(value, int | float | str) else str(value)
    is_size = _SETTINGS[name].reader is SIZE
    shown = size_setting(value) if is_size and isinstance(value, int) else fact
    return ConfigError(f"{flag} {shown}: {rule}", facts={"flag": flag, "value": fact})


def _check_types(config: ServerConfig) -> None:
    for name, default, setting in settings_of(ServerConfig):
        value = getattr(config, name)
        if value != default and not setting.fits(value):
            rule = f"ServerConfig({name}=) takes {setting.type_text}, not {type(value).__name__}"
            raise _refuse(name, str(value), rule)
        if value != default and isinstance(value, str):
            try:
                setting.reader.parse(value)
            except ValueError as error:
                raise _refuse(name, value, str(error)) from None


def _check_listen(config: ServerConfig) -> None:
    seen: set[Address] = set()
    for address in config.addresses:
        if address in seen and (address.is_unix or address.port):
            raise _refuse("listen", str(address), "is given twice")
        seen.add(address)
    if config.broker:
        check_path(config.broker, what=flag_of("broker"))
        if Address(path=config.broker) in seen:
            raise _refuse("broker", config.broker, "is an address of --listen too; choose another")
    _check_transports(config)


def _check_transports(config: ServerConfig) -> None:
    if len(set(config.transports)) != len(config.transports) or not config.transports:
        names = ",".join(transport.value for transport in config.transports)
        raise _refuse("transports", names, "name at least one, and none twice")
    if Transport.CUDA_IPC in config.transports and Transport.SHARED_MEMORY not in config.transports:
        rule = "needs shared_memory beside it, over which the host half of device memory comes"
        raise _refuse("transports", Transport.CUDA_IPC.value, rule)


def _check_teacher(config: ServerConfig) -> None:
    try:
        check_name(config.teacher_id, what="id")
    except RequestInvalidError as error:
        raise _refuse("teacher_id", config.teacher_id, error.message) from None
    if config.batch_grid is not None:
        grid = config.batch_grid
        violations = check_batch_grid(
            global_batch_size=grid.global_batch_size, student=grid, teacher=grid
        )
        if violations:
            raise _refuse("batch_grid", _sizes(grid), violations[0].message)
    if config.model_grid is not None:
        too_small = check_sizes(model_sizes(config.model_grid, side="teacher"))
        if too_small:
            raise _refuse("model_grid", _sizes(config.model_grid), too_small[0].message)


def _check_teachers(config: ServerConfig) -> None:
    """Refuse named teachers that the server cannot have together."""
    if not config.teachers:
        return
    each = config.of_each_teacher()
    check_names([own.teacher_id for own in each])
    for own in each:
        with about(own.teacher_id):
            if not own.engine_name:
                raise _refuse("teachers", own.teacher_id, "a model or an engine is missing")
            if own.pool_size_bytes > config.pool_size_bytes:
                rule = f"is a share of the server's {size_setting(config.pool_size_bytes)}, no more"
                raise _refuse("pool_size_bytes", own.pool_size_bytes, rule)
    devices = sorted({own.device for own in each})
    if config.device_pool_size_bytes and len(devices) > 1:
        rule = f"is memory of one device, and teachers are on {', '.join(devices)}: leave it out"
        raise _refuse("device_pool_size_bytes", config.device_pool_size_bytes, rule)


def _check_device_pool(config: ServerConfig) -> None:
    if not (size := config.device_pool_size_bytes):
        return
    if size < MIN_POOL_BYTES:
        rule = f"must be 0, for none, or at least {MIN_POOL_BYTES}"
        raise _refuse("device_pool_size_bytes", size, rule)
    if config.device == "cpu":
        rule = f"is memory of a GPU, and {flag_of('device')} is cpu: name a GPU there"
        raise _refuse("device_pool_size_bytes", size, rule)
    if Transport.CUDA_IPC not in config.transports:
        rule = f"is read over cuda_ipc alone: have it among {flag_of('transports')}"
        raise _refuse("device_pool_size_bytes", size, rule)


def _check_numbers(config: ServerConfig) -> None:
    least = {
        "top_k": 1,
        "pool_size_bytes": MIN_POOL_BYTES,
        "slab_size_bytes": MIN_POOL_BYTES,
        "chunk_bytes": MIN_CHUNK_BYTES,
        "max_quarantine": 0,
        "threads": 1,
        "ready_fd": 0,
    }
    for name, floor in least.items():
        value = getattr(config, name)
        if value is not None and value < floor:
            raise _refuse(name, value, f"must be at least {floor}")
    if config.max_request_tokens > MAX_REQUEST_TOKENS:
        rule = f"must be at most {MAX_REQUEST_TOKENS}, since one request is one gRPC message"
        raise _refuse("max_request_tokens", config.max_request_tokens, rule)
    if config.max_quarantine > 1:
        raise _refuse("max_quarantine", config.max_quarantine, "must be at most 1, all of the pool")
    if config.chunk_bytes > MAX_CHUNK_BYTES:
        rule = (
            f"must be at most {MAX_CHUNK_BYTES}, or a gRPC client that raises no limit cannot "
            "read the stream"
        )
        raise _refuse("chunk_bytes", config.chunk_bytes, rule)


def _check_times(config: ServerConfig) -> None:
    for name, _, _ in settings_of(TimeSettings):
        value: timedelta = getattr(config, name)
        may_be_none = name in ("drain_grace", "keep_deserted")
        if value < timedelta(0) or (not value and not may_be_none):
            raise _refuse(name, span_setting(value), "must be longer than nothing")
        if value > MAX_SPAN:
            rule = f"must be at most {MAX_SPAN.days} days"
            raise _refuse(name, span_setting(value), rule)
    if config.renew_interval * 2 > config.session_ttl:
        ttl = span_setting(config.session_ttl)
        rule = (
            f"must be at most half of {flag_of('session_ttl')} ({ttl}), so that one lost "
            "renewal ends no session"
        )
        raise _refuse("renew_interval", span_setting(config.renew_interval), rule)


def _sizes(grid: BatchGrid | ModelGrid) -> str:
    """The sizes of a grid as its flag takes them."""
    return ",".join(str(getattr(grid, each.name)) for each in fields(grid)[:4])


_SETTINGS: dict[str, Setting] = {name: each for name, _, each in settings_of(ServerConfig)}
