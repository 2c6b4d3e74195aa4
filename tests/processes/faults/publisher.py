"""The publisher role: one rank of a teacher of two, which writes what ``content`` says."""

import torch
from tests.processes.faults import content, stops
from tests.processes.faults.content import TEMPERATURES, TOP_K
from tests.processes.faults.roles import Role, Voice
from tests.processes.faults.student import CALL_SECONDS, ROW_COUNT
from tests.transport_suite.dense_teacher import HEAD_ROWS, MAX_ROW_TOKENS, VOCABULARY_SIZE

import teacher_logits_client as tl
from teacher_logits_client.publishing import uploads

SHARDS = 2
CHUNK_BYTES = 4096
POOL_BYTES = 64 * 1024
"""Room for a few payloads."""


def rows_of_shard(shard: int) -> range:
    """Return the rows of a step that a shard holds."""
    return range(shard * ROW_COUNT, (shard + 1) * ROW_COUNT)


class PublisherRole(Role):
    """One process with at most one client, and one publisher."""

    points = stops.PUBLISHER | stops.SEALED

    def __init__(self, voice: Voice) -> None:
        super().__init__(voice)
        self.client: tl.Client | None = None
        self.publisher: tl.Publisher | None = None
        uploads.CHUNK_BYTES = CHUNK_BYTES  # so that these small payloads take several

    def enter(
        self,
        *,
        address: str,
        teacher: str,
        shard: int,
        transport: str,
        pool_bytes: int = POOL_BYTES,
        timeout: float = CALL_SECONDS,
    ) -> None:
        """Make a client, where there is none, and open a publisher in the place of any before."""
        if self.publisher is not None:
            self.publisher.close()
        if self.client is None:
            self.client = tl.connect(address, timeout=timeout)
        grid = tl.BatchGrid(
            global_batch_size=SHARDS * ROW_COUNT, data_parallel_size=SHARDS, micro_batch_size=1
        )
        profile = tl.TeacherProfile(
            teacher_id=teacher,
            vocabulary_size=VOCABULARY_SIZE,
            head_rows=HEAD_ROWS,
            top_k=TOP_K,
            max_row_tokens=MAX_ROW_TOKENS,
            batch_grid=grid,
            temperatures=TEMPERATURES,
            data_parallel_rank=shard,
        )
        self.publisher = self.client.open_publisher(
            profile,
            transports=(transport,),
            pool_size_bytes=pool_bytes,
            slab_size_bytes=pool_bytes,
            timeout=timeout,
        )
        assert self.publisher.transport.value == transport

    def publish(self, step: int, timeout: float = CALL_SECONDS) -> None:
        """Reserve, write and seal this rank's rows of a step."""
        assert self.publisher is not None
        teacher = self.publisher.profile.teacher_id
        rows = content.rows_of(teacher, step, rows_of_shard(self.publisher.shard))
        with self.publisher.reserve(step, input_ids=rows, timeout=timeout) as draft:
            logits = torch.cat([content.logits_of(row) for row in rows])
            half = len(draft.columns["topk_ids"]) // 2
            draft.columns["topk_ids"][:half] = 7
            self.stops.at("write")
            tl.select_top_k(logits, out=draft)
            draft.seal(timeout=timeout)

    def leave(self) -> None:
        """Close the publisher, and keep the client."""
        assert self.publisher is not None
        self.publisher.close()
        self.publisher = None

    def end(self) -> None:
        """Let everything go."""
        self.publisher = None
        client, self.client = self.client, None
        if client is not None:
            thread = client._returner._thread
            client.close()
            thread.join(CALL_SECONDS)
            assert not thread.is_alive()
