"""Calls into TransferQueue as they end, without one: deadlines, errors, and what is imported."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from teacher_logits.errors import (
    ConfigError,
    DeadlinePassedError,
    ObjectLostError,
    PayloadConflictError,
    TransportFailure,
)
from teacher_logits_client.data_plane.transfer_queue_calls import Calls

if TYPE_CHECKING:
    from collections.abc import Iterator

LONG = 30.0


class StorageKeyNotFoundError(KeyError):
    """Named as TransferQueue's."""


@pytest.fixture
def calls() -> Iterator[Calls]:
    made = Calls()
    yield made
    made.close()


def test_a_call_that_gives_nothing_in_time_is_cancelled(calls: Calls) -> None:
    cancelled = asyncio.Event()

    async def forever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    with pytest.raises(DeadlinePassedError, match=r"waited 0.001 s for TransferQueue to do it"):
        calls.run(forever(), what="do it", timeout=0.001)

    calls.run(cancelled.wait(), what="see it end", timeout=LONG)


@pytest.mark.parametrize(
    ("raised", "told"),
    [
        (StorageKeyNotFoundError("7"), ObjectLostError),
        (RuntimeError("no unit"), TransportFailure),
        (TimeoutError("no ACK"), TransportFailure),
        (PayloadConflictError("ours"), PayloadConflictError),
    ],
)
def test_what_a_call_raises_is_one_of_our_errors(
    calls: Calls, raised: Exception, told: type[Exception]
) -> None:
    async def fail() -> None:
        raise raised

    with pytest.raises(told) as caught:
        calls.run(fail(), what="do it", timeout=LONG)

    assert caught.type is told
    assert str(raised) in str(caught.value)
    assert caught.value is raised or type(caught.value.__cause__) is type(raised)


def test_after_the_close_nothing_is_called(calls: Calls) -> None:
    calls.close()
    calls.close()

    with pytest.raises(ConfigError, match="closed"):
        calls.run(asyncio.sleep(0), what="do it", timeout=LONG)


ALONE = """
import importlib, pkgutil, sys
for name in ({absent}):
    sys.modules[name] = None
import teacher_logits_client.data_plane as room
for each in pkgutil.iter_modules(room.__path__):
    importlib.import_module(f"{{room.__name__}}.{{each.name}}")
print(sorted({{"grpc", "google", "teacher_logits_server"}} & set(sys.modules)))
try:
    importlib.import_module("teacher_logits_client.data_plane.transfer_queue").attach()
except Exception as error:
    print(f"{{type(error).__name__}}: {{error}}")
"""


def said(absent: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", ALONE.format(absent=absent)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_room_needs_neither_grpc_nor_a_server_nor_the_extra() -> None:
    first, second = said('"ray", "transfer_queue", "tensordict"').splitlines()

    assert first == "[]"
    assert second.startswith("ConfigError: data_plane.transfer_queue needs ray, which is not here")
    assert second.endswith("pip install 'teacher-logits[transfer-queue]'")
