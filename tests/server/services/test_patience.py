"""How long a handler waits for its caller; time passes when a test says so."""

from __future__ import annotations

import asyncio
from contextlib import closing
from typing import TYPE_CHECKING

from tests.server.services.test_bulk import SlowLoop, pass_time

from teacher_logits_server.services.patience import Patience

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


class Handler:
    """Waits for its caller, works, and waits for its caller again."""

    def __init__(self) -> None:
        self.has_come, self.is_worked, self.has_gone = (asyncio.Event() for _ in range(3))
        self.patience: Patience | None = None

    async def serve(self) -> None:
        self.patience = Patience(30)
        try:
            with self.patience:
                await self.has_come.wait()
            await self.is_worked.wait()
            with self.patience:
                await self.has_gone.wait()
        finally:
            self.patience.end()


def play(scenario: Callable[[Handler, asyncio.Future[None]], Awaitable[None]]) -> None:
    async def played() -> None:
        handler = Handler()
        serving = asyncio.ensure_future(handler.serve())
        await pass_time(0)
        await scenario(handler, serving)

    with closing(SlowLoop()) as loop:
        loop.run_until_complete(played())


def is_over(handler: Handler) -> bool:
    return handler.patience is not None and handler.patience.is_over


def test_each_wait_has_all_of_it() -> None:
    async def scenario(handler: Handler, serving: asyncio.Future[None]) -> None:
        await pass_time(29)
        handler.has_come.set()
        handler.is_worked.set()
        await pass_time(0)
        await pass_time(29)
        assert not serving.done()
        handler.has_gone.set()
        await serving

    play(scenario)


def test_work_between_two_waits_does_not_count() -> None:
    async def scenario(handler: Handler, serving: asyncio.Future[None]) -> None:
        handler.has_come.set()
        await pass_time(0)
        await pass_time(100)
        handler.is_worked.set()
        await pass_time(0)
        await pass_time(29)
        assert not serving.done()
        await pass_time(2)
        assert serving.cancelled()
        assert is_over(handler)

    play(scenario)


def test_another_that_cancels_the_handler_is_not_taken_for_it() -> None:
    async def scenario(handler: Handler, serving: asyncio.Future[None]) -> None:
        serving.cancel()
        await pass_time(0)
        assert serving.cancelled()
        assert not is_over(handler)

    play(scenario)
