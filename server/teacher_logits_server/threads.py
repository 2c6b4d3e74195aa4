"""Work on a thread of its own, for the event loop to wait for."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


async def in_thread(work: Callable[[], T], *, name: str) -> T:
    """Run ``work`` on a daemon thread and return what it returns.

    Unlike an executor's, the thread keeps no process from ending: a signal that comes while
    a large model loads is obeyed at once.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, failure = None, None
        try:
            result = work()
        except BaseException as error:
            failure = error
        try:
            loop.call_soon_threadsafe(settle, result, failure)
        except RuntimeError:
            pass  # the loop is over, and with it whoever asked

    thread = threading.Thread(target=run, name=f"teacher-logits-{name}", daemon=True)
    thread.start()
    result = await future
    thread.join()
    return result
