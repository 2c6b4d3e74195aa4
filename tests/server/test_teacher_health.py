"""The health of several teachers: one that dies is alone with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.transport_suite.dense_teacher import DenseTeacher
from tests.transport_suite.writing import a_profile, embedded_server

import teacher_logits_client as tl
from teacher_logits.errors import EngineError
from teacher_logits_client.calls.inspection import inspect_server
from teacher_logits_server.services.teacher_health import health_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    import torch

    from teacher_logits_server.engines import Row

PATIENCE_SECONDS = 30
LAST_WORDS = 1403
"""The token at which a teacher's thread ends."""
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class MortalTeacher(DenseTeacher):
    def logits(self, rows: Sequence[Row]) -> Iterator[torch.Tensor]:
        if any(LAST_WORDS in row.token_ids.tolist() for row in rows):
            raise SystemExit("out of memory, say")
        yield from super().logits(rows)


class Health:
    """Asks a server, by its names."""

    def __init__(self, address: str) -> None:
        self._stub = health_pb2_grpc.HealthStub(grpc.insecure_channel(address))

    def of(self, name: str) -> int:
        request = health_pb2.HealthCheckRequest(service=name)
        return self._stub.Check(request, timeout=PATIENCE_SECONDS).status  # type: ignore[attr-defined,no-any-return]

    def await_end(self, name: str) -> None:
        request = health_pb2.HealthCheckRequest(service=name)
        for each in self._stub.Watch(request, timeout=PATIENCE_SECONDS):  # type: ignore[attr-defined]
            if each.status == NOT_SERVING:
                return


def test_each_teacher_has_a_health_and_the_server_is_well_while_one_of_them_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    teachers = {"math": MortalTeacher(), "code": MortalTeacher()}
    with (
        embedded_server(tmp_path, pool_bytes=1 << 20, engine=teachers) as server,
        tl.connect(server.address) as client,
        tl.TeacherRouter.open(client, a_profile(top_k=8), ["math", "code"]) as router,
    ):
        health = Health(server.address)
        assert {health.of(health_name(each)) for each in teachers} == {SERVING}
        with pytest.raises(grpc.RpcError) as unknown:
            health.of(health_name("art"))
        assert unknown.value.code() is grpc.StatusCode.NOT_FOUND

        with pytest.raises(EngineError):
            router.score([[LAST_WORDS]], tags=["math"]).result()
        health.await_end(health_name("math"))

        assert health.of("") == SERVING
        assert health.of(health_name("code")) == SERVING
        router.score([[1, 2]], tags=["code"]).result().close()
        view = inspect_server(client.address, timeout=PATIENCE_SECONDS)
        assert {each.teacher_id: each.serving for each in view.queues} == {
            "math": False,
            "code": True,
        }
        assert {each.teacher_id: each.scored_tokens for each in view.queues}["code"] == 2
        assert view.queue.scored_tokens == 2
        [logged] = [each for each in caplog.records if each.msg == "a teacher does not serve"]
        assert logged.facts == {"teacher_id": "math"}  # type: ignore[attr-defined]

        with pytest.raises(EngineError):
            router.score([[LAST_WORDS]], tags=["code"]).result()
        health.await_end("")
