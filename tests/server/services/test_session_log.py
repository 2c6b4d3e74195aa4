"""The log of a session that has settled: names of facts are few, whatever writers there are."""

import logging
from datetime import timedelta

import pytest

from teacher_logits.profiles import TeacherProfile
from teacher_logits.terms import SERVER_WRITER, SessionTerms
from teacher_logits.transport import Refusal, RefusalReason, Settlement, Transport
from teacher_logits_server.services.session_log import log_settled

SECOND = timedelta(seconds=1)


def settled(writer_id: str, transport: Transport) -> Settlement:
    refusal = Refusal(
        transport=Transport.CUDA_IPC,
        reason=RefusalReason.NOT_OFFERED,
        message=f"not by {writer_id}",
    )
    return Settlement(writer_id=writer_id, transport=transport, refusals=(refusal,))


def facts_of(caplog: pytest.LogCaptureFixture, *settlements: Settlement) -> dict[str, object]:
    terms = SessionTerms(
        session_id="s-1",
        epoch="e",
        ttl=SECOND,
        renew_interval=SECOND,
        default_wait=SECOND,
        teacher=TeacherProfile(
            teacher_id="t", vocabulary_size=8, head_rows=8, top_k=2, max_row_tokens=4
        ),
        checks=(),
        vocabulary_size=8,
        max_request_tokens=64,
        settlements=settlements,
    )
    with caplog.at_level(logging.INFO, logger="teacher_logits_server"):
        log_settled({"student_id": "ada"}, terms)
    (record,) = caplog.records
    facts: dict[str, object] = vars(record)["facts"]
    return facts


def test_of_the_server_alone_it_names_no_writer(caplog: pytest.LogCaptureFixture) -> None:
    facts = facts_of(caplog, settled(SERVER_WRITER, Transport.STREAM))

    assert facts == {
        "session_id": "s-1",
        "student_id": "ada",
        "transport": "stream",
        "no_cuda_ipc": f"NOT_OFFERED: not by {SERVER_WRITER}",
    }


def test_writers_stand_in_a_fact_and_in_no_name_of_one(caplog: pytest.LogCaptureFixture) -> None:
    facts = facts_of(
        caplog,
        settled("publisher-0-ab", Transport.SHARED_MEMORY),
        settled("publisher-1-cd", Transport.STREAM),
        settled("publisher-2-ef", Transport.STREAM),
    )

    assert facts == {
        "session_id": "s-1",
        "student_id": "ada",
        "transport": "shared_memory; stream",
        "writers": "publisher-0-ab: shared_memory; publisher-1-cd: stream; publisher-2-ef: stream",
        "no_cuda_ipc": "NOT_OFFERED: not by publisher-0-ab; NOT_OFFERED: not by publisher-1-cd; "
        "NOT_OFFERED: not by publisher-2-ef",
    }
