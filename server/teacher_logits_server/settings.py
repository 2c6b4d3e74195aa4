"""Every setting of a server, defined once: its field, flag, YAML key, unit and help.

The classes here are the groups of ``--help``, in its order, and ``config.ServerConfig`` is
their sum. Nothing is checked here but types; the rules stand in ``config``.
"""

# ruff: noqa: RUF009 - `_set` makes a dataclass field, which is no shared default

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from teacher_logits.transport import Transport
from teacher_logits_server import readers
from teacher_logits_server.access_settings import AccessSettings
from teacher_logits_server.flags import setting as _set
from teacher_logits_server.limit_settings import LimitSettings
from teacher_logits_server.named_teachers import NAMED
from teacher_logits_server.ray_settings import RaySettings
from teacher_logits_server.replica_settings import ReplicaSettings
from teacher_logits_server.watch_settings import WatchSettings

if TYPE_CHECKING:
    from teacher_logits.grid import BatchGrid
    from teacher_logits.locality import ModelGrid
    from teacher_logits_server.named_teachers import NamedTeacher

KIB, MIB, GIB = 1024, 1024**2, 1024**3

SERVABLE = (
    Transport.LOCAL,
    Transport.CUDA_IPC,
    Transport.SHARED_MEMORY,
    Transport.RAY_OBJECT,
    Transport.STREAM,
)
"""Transports that this release has exporters for."""


@dataclass(frozen=True, kw_only=True)
class ListenSettings:
    """where it listens"""

    listen: tuple[str, ...] = _set(
        (),
        "--listen",
        readers.ADDRESS,
        "unix:/path or host:port, several times if wanted; port 0 lets the system choose "
        "(default: a socket in the runtime folder)",
        repeated=True,
    )
    broker: str = _set(
        "",
        "--broker",
        readers.PATH,
        "socket over which students of this node get their shared memory (default: beside the "
        "first Unix socket, or in the runtime folder)",
    )
    transports: tuple[Transport, ...] = _set(
        SERVABLE,
        "--transports",
        readers.TRANSPORTS,
        "ways on offer to hand payloads over, with commas between; cuda_ipc passes the device "
        "memory of publishers on, and of this server's own teacher (--device-pool-size): it takes "
        "shared_memory beside it; publishers' needs no GPU here; ray_object needs --ray-address",
    )


@dataclass(frozen=True, kw_only=True)
class TeacherSettings:
    """the teacher"""

    model: str = _set(
        "",
        "--model",
        readers.PATH,
        "folder (safetensors) or GGUF file of a causal language model; without it and --engine "
        "the server has no teacher of its own and serves those that publishers bring",
    )
    engine: str = _set(
        "",
        "--engine",
        readers.NAME,
        "what computes the scores: transformers (meant where --model is given), ray, which is "
        "several of another one (--replicas), or your own as module:function, looked for in the "
        "current folder too, which is called with the config and returns an engine",
    )
    teacher_id: str = _set("teacher", "--teacher-id", readers.NAME, "name that students ask for")
    teachers: tuple[NamedTeacher, ...] = _set(
        (),
        "--teacher",
        NAMED,
        "one more teacher and its name, several times if wanted: a model, or an engine as "
        "module:function; it has the settings below, but for what a file says of it (teachers:)",
        repeated=True,
    )
    dtype: str = _set(
        "auto",
        "--dtype",
        readers.choice("auto", "float32", "bfloat16", "float16"),
        "arithmetic of the teacher",
    )
    device: str = _set("auto", "--device", readers.NAME, "auto, cpu, cuda or cuda:N")
    device_pool_size_bytes: int = _set(
        0,
        "--device-pool-size",
        readers.SIZE,
        "most memory of --device for payloads of students that read it there (cuda_ipc), beside "
        "what the teacher takes; 0 is none: then all payloads lie in shared memory",
    )
    threads: int | None = _set(
        None,
        "--threads",
        readers.COUNT,
        "CPU threads of the teacher's arithmetic (default: torch's choice)",
    )
    tokenizer: str = _set(
        "",
        "--tokenizer",
        readers.PATH,
        "folder or file of the tokenizer (default: the model's own)",
    )
    top_k: int = _set(
        1024, "--top-k", readers.COUNT, "most entries a position that a student may ask for"
    )
    batch_grid: BatchGrid | None = _set(
        None, "--batch-grid", readers.BATCH_GRID, "grid that students must fit (default: any)"
    )
    model_grid: ModelGrid | None = _set(
        None,
        "--model-grid",
        readers.MODEL_GRID,
        "what the arithmetic node-locality rule compares (default: that rule stays unchecked)",
    )


@dataclass(frozen=True, kw_only=True)
class MemorySettings:
    """memory (bytes, or with KiB, MiB, GiB)"""

    pool_size_bytes: int = _set(
        GIB, "--pool-size", readers.SIZE, "most shared memory for payloads, all slabs together"
    )
    slab_size_bytes: int = _set(
        256 * MIB,
        "--slab-size",
        readers.SIZE,
        "size of one slab; a larger payload gets a slab of its own",
    )
    max_quarantine: float = _set(
        0.5,
        "--max-quarantine",
        readers.SHARE,
        "share of the pool in quarantine above which new payloads are refused: room whose reader "
        "is gone but not proven gone",
    )
    chunk_bytes: int = _set(
        MIB,
        "--chunk-size",
        readers.SIZE,
        "bytes a message of a streamed payload; below 4MiB, so that any gRPC client reads it",
    )


@dataclass(frozen=True, kw_only=True)
class TimeSettings:
    """times (seconds, or with ms, s, min, h)"""

    session_ttl: timedelta = _set(
        timedelta(seconds=30),
        "--session-ttl",
        readers.SPAN,
        "a remote session ends when no renewal came for this long",
    )
    renew_interval: timedelta = _set(
        timedelta(seconds=10),
        "--renew-interval",
        readers.SPAN,
        "how often remote students are told to renew; at most half of --session-ttl",
    )
    opening_ttl: timedelta = _set(
        timedelta(seconds=10),
        "--opening-ttl",
        readers.SPAN,
        "a session that was opened and never settled ends after this long",
    )
    default_wait: timedelta = _set(
        timedelta(seconds=30),
        "--default-wait",
        readers.SPAN,
        "longest that a call waits in the server, whatever its own deadline, and that a stream "
        "waits for its reader",
    )
    keep_deserted: timedelta = _set(
        timedelta(minutes=10),
        "--keep-deserted",
        readers.SPAN,
        "how long the steps of a published teacher are kept for another student once the last of "
        "its publishers and students has left",
    )
    drain_grace: timedelta = _set(
        timedelta(seconds=30),
        "--drain-grace",
        readers.SPAN,
        "after SIGTERM, how long leases may run out before the server stops",
    )


@dataclass(frozen=True, kw_only=True)
class OutputSettings:
    """what it says"""

    log_format: str = _set(
        "text",
        "--log-format",
        readers.choice("text", "json"),
        "form of the log: one line an event, on standard error",
    )
    log_level: str = _set(
        "info",
        "--log-level",
        readers.choice("debug", "info", "warning", "error"),
        "the least that is logged",
    )
    ready_fd: int | None = _set(
        None,
        "--ready-fd",
        readers.Reader("FD", readers.whole, int),
        "once ready, write one line of JSON with the addresses to this descriptor and close it",
    )
    ready_file: str = _set(
        "",
        "--ready-file",
        readers.PATH,
        "once ready, write the same line into this file, whole or not at all",
    )


GROUPS = (
    ListenSettings,
    AccessSettings,
    TeacherSettings,
    ReplicaSettings,
    MemorySettings,
    RaySettings,
    LimitSettings,
    TimeSettings,
    OutputSettings,
    WatchSettings,
)
