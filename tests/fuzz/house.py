"""The server that is fuzzed, in this process, with a student and a publisher that belong there.

Ids of the running server stand in seeds as placeholders of the same length, so that a corpus
outlives the server that it was made with.
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack, suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
from google.rpc import code_pb2, status_pb2
from tests.fuzz.surface import PATIENCE_SECONDS
from tests.server.services import registry_rig as rig
from tests.transport_suite.dense_teacher import DenseTeacher
from tests.transport_suite.right import RAGGED, assert_right
from tests.transport_suite.writing import a_profile, embedded_server

import teacher_logits_client as tl
from teacher_logits import keys
from teacher_logits.clock import MonotonicClock
from teacher_logits.errors import DeadlinePassedError, TeacherLogitsError
from teacher_logits.v1 import (
    operator_service_pb2,
    scoring_service_pb2,
    scoring_service_pb2_grpc,
    teacher_logits_service_pb2,
)
from teacher_logits.wire.errors import from_status
from teacher_logits.wire.payloads import lease_from_wire

if TYPE_CHECKING:
    from collections.abc import Callable

    from teacher_logits.payload import Payload
    from teacher_logits.profiles import TeacherProfile
    from teacher_logits.terms import LeaseTerms

T = TypeVar("T")
SESSION, PUBLISHER = "s-" + "0" * 35, "s-" + "1" * 35
LEASE, PAYLOAD, RESERVED = "l-" + "0" * 35, "p-" + "0" * 35, "p-" + "1" * 35
"""Placeholders of ids, as long as those of a server."""

SETTINGS = {
    "default_wait": timedelta(milliseconds=30),
    "keep_deserted": timedelta(0),
    "session_ttl": timedelta(minutes=2),
    "max_sessions": 200,
}
POOL_BYTES = 8 << 20
_FORBIDDEN = frozenset({code_pb2.INTERNAL, code_pb2.UNKNOWN})


class House:
    """A server, a plain channel to it, and the ids that are good there now."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._stack = ExitStack()
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="tl-")))
        self.server = self._stack.enter_context(
            embedded_server(folder, pool_bytes=POOL_BYTES, engine=DenseTeacher(), **SETTINGS)
        )
        self.wire = self._stack.enter_context(rig.Wire(self.server.address))
        self._client = self._stack.enter_context(tl.connect(self.server.address))
        self._ids: dict[bytes, bytes] = {}
        self._next_step = 0

    @property
    def ids(self) -> dict[bytes, bytes]:
        """What stands for each placeholder; opened anew where an input has ended it."""
        if not self._ids:
            student = self.wire.student(self.student_profile(), streams=True)
            publisher = self.wire.publisher(self.teacher_profile("rpc"), streams=True)
            lease = self.score(student.session_id)
            reserved = publisher.reserve(self.payload("rpc")).payload_id
            found = {
                SESSION: student.session_id,
                PUBLISHER: publisher.session_id,
                LEASE: lease.lease_id,
                PAYLOAD: lease.payload.payload_id,
                RESERVED: reserved,
            }
            self._ids = {name.encode(): each.encode() for name, each in found.items()}
        return self._ids

    def forget(self) -> None:
        """Have ids made anew: somebody ended what they name."""
        for name in (SESSION, PUBLISHER):
            if self._ids:
                self.close_session(self._ids[name.encode()].decode())
        self._ids = {}

    def with_ids(self, data: bytes) -> bytes:
        """Put this server's ids in the place of placeholders."""
        for name, each in self.ids.items():
            data = data.replace(name, each)
        return data

    @staticmethod
    def student_profile() -> tl.StudentProfile:
        return a_profile(teacher_id="teacher", top_k=8, student_id="fuzz")

    @staticmethod
    def teacher_profile(name: str) -> TeacherProfile:
        return rig.a_teacher(teacher_id=f"fuzz-{name}")

    def payload(self, name: str, step: int = 0) -> Payload:
        described = rig.a_payload(step)
        assert described.key is not None
        teacher = f"fuzz-{name}"
        key = replace(described.key, teacher_id=teacher)
        return replace(described, teacher_id=teacher, key=key)

    def score(self, session_id: str) -> LeaseTerms:
        """Have one row scored."""
        stub = scoring_service_pb2_grpc.ScoringServiceStub(self.wire.channel)
        request = scoring_service_pb2.ScoreRequest(
            session_id=session_id,
            request_id=keys.new_id("r", "fuzz"),
            input_ids=b"\1\0\0\0",
            row_lengths=[1],
            bad_rows=scoring_service_pb2.BAD_ROW_POLICY_REJECT,
        )
        call = partial(stub.Score, request, timeout=PATIENCE_SECONDS)
        return lease_from_wire(patiently(lambda: rig.refused(call)).lease)

    def close_session(self, session_id: str) -> None:
        request = teacher_logits_service_pb2.CloseSessionRequest(session_id=session_id)
        try:
            rig.refused(lambda: self.wire.students.CloseSession(request, timeout=PATIENCE_SECONDS))
        except TeacherLogitsError:
            pass  # an input has closed it

    def reclaim(self, name: str) -> None:
        """Take back what a teacher of ours has left that everybody has left."""
        request = operator_service_pb2.ReclaimRequest(teacher_id=f"fuzz-{name}")
        with suppress(TeacherLogitsError):  # nothing is left of it
            rig.refused(lambda: self.wire.operator.Reclaim(request, timeout=PATIENCE_SECONDS))

    def assert_serves(self) -> None:
        """A good request is answered rightly."""
        with self._client.open_session(self.student_profile()) as session:
            with patiently(lambda: session.score(RAGGED).result(PATIENCE_SECONDS)) as leased:
                assert_right(leased, RAGGED)

    def close(self) -> None:
        self.forget()
        self._stack.close()


def patiently(call: Callable[[], T]) -> T:
    """Make a call again while the server, which lets nobody wait for long, was not done with it."""
    until = MonotonicClock().now() + PATIENCE_SECONDS
    while True:
        try:
            return call()
        except DeadlinePassedError:
            if MonotonicClock().now() > until:
                raise


def word_of_status(data: bytes) -> str:
    """The reason of a failure, which must be one of the tree's and no failure of the server."""
    status = status_pb2.Status.FromString(data)
    assert status.code not in _FORBIDDEN, status
    error = from_status(status)
    assert error is not None, status
    return error.reason
