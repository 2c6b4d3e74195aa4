"""How the service presents itself: R17, T37, T39, and starts that cannot be."""

import socket
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import grpc
import pytest
from tests.reports.conftest import Tried
from tests.reports.raw import TIMEOUT_SECONDS, refused
from tests.reports.teachers import TriedTeacher
from tests.transport_suite.right import RAGGED
from tests.transport_suite.writing import a_profile, embedded_server

import teacher_logits_client as tl
from teacher_logits.__main__ import main
from teacher_logits.errors import DeadlinePassedError, SessionRefusedError
from teacher_logits.profiles import PROTOCOL_VERSION
from teacher_logits.v1 import profile_pb2, teacher_logits_service_pb2, tensor_pb2
from teacher_logits.wire import student_to_wire

USAGE = 2
TOY = ("--engine", "teacher_logits_client.testing:toy_teacher")
LONGEST_PATH_BYTES = 107
WAIT_SECONDS = 0.3


# R17: what is printed as a deadline is the one that counts


@pytest.fixture(scope="module")
def held_up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tl.Client]:
    """A client of a server whose teacher stands still, and which lets no call wait for long."""
    teacher = TriedTeacher()
    folder = tmp_path_factory.mktemp("held")
    wait = timedelta(seconds=WAIT_SECONDS)
    with (
        embedded_server(folder, pool_bytes=1 << 20, engine=teacher, default_wait=wait) as server,
        tl.connect(server.address) as client,
    ):
        teacher.gate.clear()
        yield client
        teacher.gate.set()


def test_r17_a_wait_that_the_server_cuts_short_names_the_wait_that_counted(
    held_up: tl.Client,
) -> None:
    with held_up.open_session(a_profile(top_k=8)) as session:
        assert session.terms.default_wait.total_seconds() == WAIT_SECONDS
        future = session.score(RAGGED, timeout=TIMEOUT_SECONDS)
        with pytest.raises(DeadlinePassedError, match=r"after 0\.3 s") as caught:
            future.result()
        assert caught.value.facts["longest_wait_seconds"] == WAIT_SECONDS
        assert "--default-wait" in caught.value.message


@pytest.mark.parametrize(("timeout", "counted"), [(0.2, 0.2), (None, WAIT_SECONDS)])
def test_r17_a_wait_that_the_server_leaves_alone_names_the_callers_or_its_default(
    held_up: tl.Client, timeout: float | None, counted: float
) -> None:
    with held_up.open_session(a_profile(top_k=8)) as session:
        future = session.score(RAGGED, timeout=timeout)
        with pytest.raises(DeadlinePassedError) as caught:
            future.result()
    # Whoever is first says it: the client by its own clock, the server by what was left.
    facts = caught.value.facts
    said = facts.get("deadline_seconds", facts.get("waited_seconds"))
    assert isinstance(said, float)
    assert 0 < said <= counted


# T37 and other starts that cannot be: the flag, the numbers, and the exit code of a usage error


def start(*arguments: str) -> int:
    """Run the command line of a server that must not come up; return its exit code."""
    return main(["serve", *arguments])


def a_path(folder: Path, length: int) -> str:
    """Return a path of so many bytes."""
    path = f"{folder}/"
    return path + "x" * (length - len(path))


@pytest.mark.parametrize("length", [LONGEST_PATH_BYTES + 1, 150])
def test_t37_a_socket_path_that_is_too_long_is_refused_with_its_length(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], length: int
) -> None:
    path = a_path(tmp_path, length)
    assert start("--listen", f"unix:{path}") == USAGE
    said = capsys.readouterr().err
    assert "--listen" in said
    assert f"{length} bytes" in said
    assert str(LONGEST_PATH_BYTES) in said
    with pytest.raises(tl.errors.ConfigError, match=f"{length} bytes"):
        tl.connect(f"unix:{path}")
    assert list(tmp_path.iterdir()) == []


def test_t37_a_path_too_long_for_the_broker_beside_it_names_the_brokers_flag(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = a_path(tmp_path, LONGEST_PATH_BYTES)
    assert start("--listen", f"unix:{path}", *TOY) == USAGE
    said = capsys.readouterr().err
    assert "--broker" in said
    assert f"{LONGEST_PATH_BYTES + len('.broker')} bytes" in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--engine", "transformers"), "--model is missing"),
        (("--model", "{folder}/nothing"), "there is no such folder or file"),
        (("--model", "{folder}/empty"), "no weights"),
        (("--model", "{folder}/pickled"), "pickled weights"),
        (("--model", "{folder}/text"), "no GGUF file"),
        (("--engine", "nowhere:engine"), "cannot be imported"),
        (("--engine", "vllm"), "leads to no engine"),
        (("--top-k", "0"), "--top-k 0: must be at least 1"),
        (("--chunk-size", "4MiB"), "cannot read the stream"),
        (("--listen", "0.0.0.0:0"), "--insecure"),
        (("--listen", "127.0.0.1:0"), "--tls-cert"),
        (("--listen", "127.0.0.1:{port}", "--insecure", *TOY), "Address already in use"),
        (("--config", "{folder}/nothing"), "cannot be read"),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, tuple) else "",
)
def test_a_start_that_cannot_be_says_why_and_leaves_nothing(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    says: str,
) -> None:
    models, sockets = tmp_path / "models", tmp_path / "sockets"
    for name in ("empty", "pickled"):
        (models / name).mkdir(parents=True)
    (models / "pickled" / "pytorch_model.bin").write_bytes(b"\x80\x04K\x01.")
    (models / "text").write_text("hello")
    sockets.mkdir()
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        given = [each.format(folder=models, port=port) for each in arguments]
        code = start("--listen", f"unix:{sockets / 's'}", *given)
    assert code == USAGE
    said = capsys.readouterr().err
    assert says in said
    assert "Traceback" not in said
    assert list(sockets.iterdir()) == []


# T39: a refusal larger than what gRPC carries


BROKEN_AT_LENGTH = [
    *("not_positive", "tokenizer_mismatch", "vocab_mismatch", "top_k_too_large"),
    *("temperature_unavailable", "column_unavailable"),
    *("engine_mismatch", "arithmetic_type_mismatch"),
]


def test_t39_a_profile_that_breaks_everything_at_length_keeps_code_and_first_rules(
    tried: Tried,
) -> None:
    long = "ü" * 1_000
    profile: profile_pb2.StudentProfile = student_to_wire(a_profile())
    profile.batch_grid.CopyFrom(type(profile.batch_grid)())  # all zeros
    profile.model_grid.node_count = -(2**31)
    profile.data_parallel_rank = -1
    profile.readers_per_rank = 0
    profile.tokenizer_fingerprint = long
    profile.vocabulary_size = 2**31 - 1
    profile.top_k = 2**31 - 1
    profile.temperatures.extend([-1.5] * 16)
    profile.columns.extend([tensor_pb2.COLUMN_KIND_LOGITS] * 64)
    profile.engine = long
    profile.arithmetic_type = long
    profile.hints.host_name = long
    request = teacher_logits_service_pb2.OpenSessionRequest(
        request_id="t39", protocol_version=PROTOCOL_VERSION, profile=profile
    )
    answer = refused(lambda: tried.raw.student.OpenSession(request, timeout=TIMEOUT_SECONDS))
    assert answer.code is grpc.StatusCode.INVALID_ARGUMENT
    assert isinstance(answer.error, SessionRefusedError)
    rules = [violation.rule for violation in answer.error.violations]
    left_out = int(answer.error.facts.get("violations_left_out", 0))
    assert rules == BROKEN_AT_LENGTH[: len(BROKEN_AT_LENGTH) - left_out]
    assert len(rules) >= 3
    assert answer.error.facts["student_global_batch_size"] == 0
    assert "more" in answer.error.message


@pytest.mark.parametrize("size", [10_000, 60_000])
def test_t39_an_error_that_quotes_its_caller_is_cut_and_still_arrives(
    tried: Tried, size: int
) -> None:
    request = teacher_logits_service_pb2.RenewSessionRequest(session_id="s-old-" + "x" * size)
    answer = refused(lambda: tried.raw.student.RenewSession(request, timeout=TIMEOUT_SECONDS))
    assert answer.error.reason == "EPOCH_CHANGED"
    assert len(answer.error.message) < 1000
