"""Failed TLS handshakes are counted by what gRPC writes; all else goes where it went."""

from __future__ import annotations

import os
import threading

import pytest
from prometheus_client import CollectorRegistry

from teacher_logits_server.handshakes import STDERR, watch_handshakes
from teacher_logits_server.metrics.refusals import Refusals

FAILED = b"I1130 14:53:09 1544 ssl_transport_security.cc:2563] Handshake failed with error "


def counted(registry: CollectorRegistry, reason: str) -> int:
    labels = {"surface": "tls", "reason": reason}
    return int(registry.get_sample_value("teacher_logits_refusals_total", labels) or 0)


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (b"SSL_ERROR_SSL: error:100000f7:SSL routines::WRONG_VERSION_NUMBER", "NOT_TLS"),
        (b"SSL_ERROR_SSL: error:1000009c:SSL routines::HTTP_REQUEST", "NOT_TLS"),
        (b"SSL: ::PEER_DID_NOT_RETURN_A_CERTIFICATE: no", "CLIENT_CERTIFICATE_MISSING"),
        (b"SSL: ::CERTIFICATE_VERIFY_FAILED: self signed", "CLIENT_CERTIFICATE_REFUSED"),
        (b"SSL: ::BAD_PACKET_LENGTH", "BROKEN_OFF"),
    ],
)
def test_a_line_of_one_is_counted_by_its_reason_and_goes_no_further(
    capfd: pytest.CaptureFixture[str], said: bytes, reason: str
) -> None:
    registry = CollectorRegistry()
    with watch_handshakes(Refusals(registry), has_tls=True):
        os.write(STDERR, FAILED[:40])  # what is written in two pieces is one line
        os.write(STDERR, FAILED[40:] + said + b"\n" + FAILED + said + b"\n")
    assert counted(registry, reason) == 2
    assert "Handshake" not in capfd.readouterr().err


def test_other_lines_and_the_log_come_through(capfd: pytest.CaptureFixture[str]) -> None:
    with watch_handshakes(Refusals(), has_tls=True) as log:
        os.write(STDERR, b"E1130 x.cc:1] something else\n")
        os.write(STDERR, b"E1130 x.cc:1] No match found for server name: other\n")
        log.write("a line of the log\n")
        os.write(STDERR, b"without an end")
    os.write(STDERR, b", and behind it\n")
    err = capfd.readouterr().err
    assert "E1130 x.cc:1] something else\n" in err
    assert "a line of the log\n" in err
    assert "server name" not in err  # which a client chooses
    assert "without an end, and behind it\n" in err


def test_a_child_that_holds_the_other_end_keeps_nobody_waiting(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with watch_handshakes(Refusals(), has_tls=True):
        inherited = os.dup(STDERR)
    os.close(inherited)
    assert not [each for each in threading.enumerate() if each.name == "teacher-logits-tls"]


def test_without_tls_nothing_is_touched() -> None:
    before = os.fstat(STDERR)
    with watch_handshakes(Refusals(), has_tls=False):
        assert os.path.samestat(os.fstat(STDERR), before)
