"""Round after round of what users do, after which all is as it was: R29, T01, T06."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.reports.memory import forget_peak, peak_bytes
from tests.transport_suite.contents import every_kind
from tests.transport_suite.writing import Embedded, a_profile, embedded_server

import teacher_logits_client as tl
from teacher_logits.layout import ElementType
from teacher_logits_client import testing
from teacher_logits_client.line import Line, PassedSlab

MIB = 1 << 20
POOL_BYTES, SLAB_BYTES = MIB, MIB // 4
ROUNDS = 500
SIZES = (1, 9, 64)
WAYS = (tl.Transport.LOCAL, tl.Transport.SHARED_MEMORY, tl.Transport.STREAM)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Embedded]:
    with embedded_server(tmp_path, pool_bytes=POOL_BYTES, slab_size_bytes=SLAB_BYTES) as running:
        yield running


def test_t01_what_three_clients_read_in_changing_shapes_leaves_no_room_taken(
    server: Embedded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And each slab is handed to each reader once, however much comes in it: T06."""
    asked: list[str] = []
    honest = Line.get_slab

    def get_slab(line: Line, slab_id: str, timeout: float) -> PassedSlab:
        asked.append(slab_id)
        return honest(line, slab_id, timeout)

    monkeypatch.setattr(Line, "get_slab", get_slab)
    with ExitStack() as stack:
        clients = [stack.enter_context(tl.connect(server.address)) for _ in WAYS]
        sessions = {
            k: [
                stack.enter_context(
                    client.open_session(a_profile(top_k=k, temperatures=(2.0,), transports=(way,)))
                )
                for client, way in zip(clients, WAYS, strict=True)
            ]
            for k in SIZES
        }
        before = server.usage
        for turn in range(ROUNDS):
            content = every_kind(
                top_k=SIZES[turn % len(SIZES)],
                windows=((0, 1 + turn * 11 % 40), (3, turn % 5)),
                element_type=ElementType.FLOAT32,
                seed=turn,
            )
            with server.sealed(content) as held:
                for session in sessions[content.top_k]:
                    with session.acquire(payload_id=held.payload.payload_id) as leased:
                        assert leased.columns["topk_ids"].shape == (
                            held.payload.position_count,
                            content.top_k,
                        )
        server.wait_until(lambda: server.usage.used_bytes == before.used_bytes)
        assert server.usage.quarantined_bytes == 0
    assert max(Counter(asked).values()) <= len(SIZES)  # once by each session that maps
    assert 1 <= len(set(asked)) <= POOL_BYTES // SLAB_BYTES


@pytest.mark.parametrize(
    ("rows", "pool_bytes"),
    [
        pytest.param(1, MIB, id="128 KiB each through 1 MiB"),
        pytest.param(64, 64 * MIB, marks=pytest.mark.slow, id="8 MiB each through 64 MiB"),
    ],
)
def test_r29_many_requests_at_once_are_all_answered_within_the_pool(
    rows: int, pool_bytes: int
) -> None:
    """256 requests take no more memory than 32 of them."""
    engine = "tests.transport_suite.dense_teacher:make"
    root = Path(__file__).parents[2]
    flags = {
        "pool_size": pool_bytes,
        "slab_size": pool_bytes,
        "max_waiting_requests": 256,
        "default_wait": 240,
    }
    with (
        testing.serve(engine, folder=root, **flags) as server,
        tl.connect(server.address) as client,
        client.open_session(a_profile(top_k=1024)) as session,
    ):

        async def take(future: tl.ScoreFuture) -> int:
            with await future as leased:
                return leased.payload.size_bytes

        async def answered(count: int) -> int:
            """Ask for so many at once, and take each as it comes; return their bytes."""
            futures = [session.score([[3] * 21] * rows, timeout=240) for _ in range(count)]
            return sum(await asyncio.gather(*map(take, futures)))

        asyncio.run(answered(32))
        before = forget_peak(server.pid)
        assert asyncio.run(answered(256)) > 30 * pool_bytes
        # What a batch is computed in goes up and down again; thirty pools were asked for.
        assert peak_bytes(server.pid) - before < 16 * MIB + 2 * pool_bytes
