"""Scores that are awaited: an event loop goes on while the teacher computes."""

import asyncio

import pytest
import torch
from tests.client.conftest import Service

from teacher_logits.errors import DeadlinePassedError

IDS = torch.arange(40).view(4, 10)


def test_a_loop_goes_on_until_the_scores_are_there(service: Service) -> None:
    async def story() -> list[str]:
        seen: list[str] = []

        async def meanwhile() -> None:
            seen.append("meanwhile")
            service.teacher.gate.set()

        with service.session() as (_, session):
            service.teacher.gate.clear()
            other = asyncio.create_task(meanwhile())
            futures = [session.score(IDS), session.score(IDS)]
            for future in futures:
                with await future as payload:
                    seen.append(str(tuple(payload.targets.topk_ids.shape)))
                    assert await future is payload
            await other
        return seen

    assert asyncio.run(story()) == ["meanwhile", "(40, 8)", "(40, 8)"]


def test_a_wait_that_is_cancelled_leaves_the_request_as_it_was(service: Service) -> None:
    async def story() -> None:
        with service.session() as (_, session):
            service.teacher.gate.clear()
            future = session.score(IDS)
            waiting = asyncio.ensure_future(future)
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            service.teacher.gate.set()
            with await future as payload:
                assert payload.row_offsets.tolist() == [0, 10, 20, 30, 40]

    asyncio.run(story())


def test_what_fails_is_raised_where_it_is_awaited(service: Service) -> None:
    async def story() -> None:
        with service.session() as (_, session):
            service.teacher.gate.clear()
            with pytest.raises(DeadlinePassedError):
                await session.score(IDS, timeout=0.05)

    asyncio.run(story())
