"""The file of tokens: what may stand in it, who may read it, and whose a token is."""

from __future__ import annotations

import hashlib
import logging
from typing import TYPE_CHECKING

import pytest

from teacher_logits.errors import ConfigError, NotAllowedError, UnknownCallerError
from teacher_logits_server.access import Access, access_of
from teacher_logits_server.access.roles import ROLES, Role
from teacher_logits_server.access.tokens import Tokens, read_tokens

if TYPE_CHECKING:
    from pathlib import Path

TOKEN, OTHER = "t0ken-0123456789", "0ther-0123456789"
SCORE = "/teacher_logits.v1.ScoringService/Score"
INSPECT = "/teacher_logits.v1.OperatorService/Inspect"


def written(folder: Path, text: str, mode: int = 0o600) -> Path:
    path = folder / "tokens"
    path.write_text(text, encoding="utf-8")
    path.chmod(mode)
    return path


def read(folder: Path, text: str) -> Tokens:
    return read_tokens(str(written(folder, text)))


def shown(token: str) -> list[tuple[str, str | bytes]]:
    return [("user-agent", "grpc"), ("authorization", f"Bearer {token}")]


def test_a_line_has_roles_a_token_and_a_name_if_any(tmp_path: Path) -> None:
    tokens = read(tmp_path, f"# ours\n\nstudent,publisher {TOKEN} both\n  operator\t{OTHER}\n")
    one, other = tokens.find(TOKEN), tokens.find(OTHER)
    assert one is not None
    assert other is not None
    assert (one.name, one.roles) == ("both", frozenset({Role.STUDENT, Role.PUBLISHER}))
    assert (other.name, other.roles) == ("", frozenset({Role.OPERATOR}))
    assert one.owner != other.owner


def test_a_token_may_stand_there_as_its_digest(tmp_path: Path) -> None:
    digest = hashlib.sha256(TOKEN.encode()).hexdigest()
    tokens = read(tmp_path, f"student sha256:{digest.upper()} a\n")
    assert tokens.find(TOKEN) is not None
    assert tokens.find(digest) is None  # who reads the file has no token by it


def test_two_tokens_of_one_name_are_one_caller(tmp_path: Path) -> None:
    tokens = read(tmp_path, f"student {TOKEN} a\nstudent {OTHER} a\n")
    old, new = tokens.find(TOKEN), tokens.find(OTHER)
    assert old is not None
    assert old == new


@pytest.mark.parametrize("token", ["", TOKEN[:-1], TOKEN + "x", TOKEN.upper(), "é", "\udc80"])
def test_anything_else_is_nobodys(tmp_path: Path, token: str) -> None:
    assert read(tmp_path, f"student {TOKEN}\n").find(token) is None


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("", "holds no token"),
        ("# nobody\n", "holds no token"),
        (f"\nteacher {TOKEN}\n", r"line 2: the roles are student, publisher, operator"),
        (f"student {TOKEN} a b\n", "line 1: give roles, a token"),
        ("student\n", "line 1: give roles, a token"),
        ("student short\n", "at least 16 characters"),
        ("student tokén-0123456789\n", "printable and ASCII"),
        ("student sha256:abc\n", "64 hexadecimal digits"),
        (f"student {TOKEN} ../a\n", "is not a name: use 1 to 128 letters"),
        (f"student trainer-a-of-tomorrow +{TOKEN}\n", "the third word is not a name"),
        (f"student {TOKEN} a\noperator {TOKEN} b\n", "the same token stands on two lines"),
    ],
)
def test_a_line_that_makes_no_sense_is_refused_and_no_token_is_told(
    tmp_path: Path, text: str, rule: str
) -> None:
    with pytest.raises(ConfigError, match=f"--token-file .*{rule}") as caught:
        read(tmp_path, text)
    assert TOKEN not in str(caught.value)


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o660, 0o602])
def test_a_file_that_others_can_read_or_change_is_refused(tmp_path: Path, mode: int) -> None:
    path = written(tmp_path, f"student {TOKEN}\n", mode)
    with pytest.raises(ConfigError, match=f"open to other users \\(mode {mode:04o}\\).*chmod 600"):
        read_tokens(str(path))


def test_its_group_may_read_it(tmp_path: Path) -> None:
    assert len(read_tokens(str(written(tmp_path, f"student {TOKEN}\n", 0o640)))) == 1


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--token-file .*nowhere cannot be read: No such file"):
        read_tokens(str(tmp_path / "nowhere"))


def test_no_token_is_in_any_repr(tmp_path: Path) -> None:
    tokens = read(tmp_path, f"student {TOKEN}\n")
    seen = f"{tokens!r} {tokens.find(TOKEN)!r} {access_of(str(tmp_path / 'tokens'))!r}"
    assert TOKEN not in seen
    assert hashlib.sha256(TOKEN.encode()).hexdigest() not in seen


def test_without_a_file_whoever_connects_may_call_everything() -> None:
    access = Access()
    for method in (*ROLES, "/somebody.Elses/Method"):
        access.enter(method, ())


def test_with_one_a_token_is_for_its_roles_calls_alone(tmp_path: Path) -> None:
    access = access_of(str(written(tmp_path, f"student {TOKEN} a\n")))
    assert access.enter(SCORE, shown(TOKEN)).caller.name == "a"
    with pytest.raises(
        NotAllowedError, match="for the role operator, and the token shown has student:"
    ):
        access.enter(INSPECT, shown(TOKEN))
    with pytest.raises(NotAllowedError, match="for the role nobody"):
        access.enter("/somebody.Elses/Method", shown(TOKEN))


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        ([], "TOKEN_MISSING"),
        ([("authorization", f"Basic {TOKEN}")], "TOKEN_MISSING"),
        ([("authorization", TOKEN)], "TOKEN_MISSING"),
        ([("authorization-bin", TOKEN.encode())], "TOKEN_MISSING"),
        ([("authorization", "Bearer ")], "TOKEN_UNKNOWN"),
        ([("authorization", f"Bearer {OTHER}")], "TOKEN_UNKNOWN"),
    ],
)
def test_whoever_shows_none_of_them_is_unknown(
    tmp_path: Path, metadata: list[tuple[str, str | bytes]], reason: str
) -> None:
    access = access_of(str(written(tmp_path, f"student {TOKEN}\n")))
    with pytest.raises(UnknownCallerError) as caught:
        access.enter(SCORE, metadata)
    assert caught.value.facts == {"reason": reason}


def test_a_change_counts_from_the_next_call_and_a_bad_one_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = written(tmp_path, f"student {TOKEN}\n")
    access = access_of(str(path))
    path.write_text(f"student {OTHER} another\n")
    access.enter(SCORE, shown(OTHER))
    with pytest.raises(UnknownCallerError):
        access.enter(SCORE, shown(TOKEN))
    path.write_text("nonsense\n")
    for _ in range(3):
        access.enter(SCORE, shown(OTHER))
    path.unlink()
    for _ in range(3):
        access.enter(SCORE, shown(OTHER))
    said = [each.__dict__["facts"]["error"] for each in caplog.records]
    assert ["line 1" in said[0], "No such file" in said[1], len(said)] == [True, True, 2]


def test_a_file_taken_anew_is_told_by_its_number_of_tokens(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    path = written(tmp_path, f"student {TOKEN} a\n")
    access = access_of(str(path))
    access.kinds()
    assert caplog.records == []
    path.write_text("nonsense\n")
    access.kinds()
    path.write_text(f"# two\nstudent {TOKEN} a\noperator {TOKEN}-b b\n")
    access.kinds()
    access.kinds()
    assert [each.getMessage() for each in caplog.records] == [
        "new tokens not taken, the old ones go on",
        "new tokens taken",
    ]
    assert vars(caplog.records[1])["facts"] == {"tokens": 2}
    assert TOKEN not in str([vars(each) for each in caplog.records])
