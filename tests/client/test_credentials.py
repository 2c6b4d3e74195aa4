"""What a client is told of tokens and TLS: what goes together, and what is never shown."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

import pytest
import trustme

import teacher_logits_client as tl
from teacher_logits.errors import ConfigError
from teacher_logits_client.calls.shown import Shown
from teacher_logits_client.config import find_connection
from teacher_logits_client.credentials import Credentials

if TYPE_CHECKING:
    from pathlib import Path

TOKEN = "t0ken-0123456789"
UNIX, HERE, FAR = "unix:/run/t.sock", "127.0.0.1:5555", "teacher.example:5555"


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TOKEN_FILE", "TLS_CA", "TLS_CERT", "TLS_KEY", "TLS_SERVER_NAME"):
        monkeypatch.delenv(f"TEACHER_LOGITS_{name}", raising=False)


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.touch(mode=0o600)
    path.write_text(f"{TOKEN}\n")
    return path


@pytest.mark.parametrize(
    ("address", "given", "rule"),
    [
        (FAR, {}, r"connect with tls=Tls\(ca=...\) \(--tls-ca\), or pass insecure=True"),
        (HERE, {"token": TOKEN}, "would travel to '127.0.0.1:5555' unencrypted"),
        (UNIX, {"tls": tl.Tls()}, "is a Unix socket, which takes no TLS"),
        (FAR, {"tls": tl.Tls(), "insecure": True}, "give one of the two"),
        (f"tls://{FAR}", {"insecure": True}, "give one of the two"),
        (UNIX, {"token": TOKEN, "token_file": "/t"}, "were both given"),
        (UNIX, {"token": "two words"}, "the token is none"),
        (UNIX, {"token": ""}, "the token is none"),
    ],
)
def test_what_does_not_go_together_is_refused_before_anything_is_sent(
    address: str, given: dict[str, Any], rule: str
) -> None:
    with pytest.raises(ConfigError, match=rule) as caught:
        find_connection(address, **given)
    assert TOKEN not in str(caught.value)


@pytest.mark.parametrize(
    ("address", "given"),
    [
        (UNIX, {"token": TOKEN}),
        (f"tls://{FAR}", {"token": TOKEN}),
        (FAR, {"token": TOKEN, "tls": tl.Tls()}),
        (FAR, {"token": TOKEN, "insecure": True}),
    ],
)
def test_a_token_goes_where_nobody_listens_or_where_that_was_said(
    address: str, given: dict[str, Any]
) -> None:
    found = find_connection(address, **given)
    assert found.credentials.token() == TOKEN
    assert TOKEN not in repr(found)


def test_a_scheme_says_tls_with_the_authorities_of_the_machine() -> None:
    found = find_connection(f"tls://{FAR}")
    assert str(found.address) == FAR
    assert found.credentials.tls == tl.Tls()


def test_a_token_of_a_file_is_the_files_of_the_moment_and_each_change_is_said_once(
    token_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="teacher_logits_client")
    token = find_connection(UNIX, token_file=token_file).credentials.token
    assert token() == TOKEN
    token_file.write_text(f"{TOKEN}-anew")
    assert token() == f"{TOKEN}-anew"
    token_file.write_text("two words")
    assert token() == token() == f"{TOKEN}-anew"

    said = [(record.levelno, record.getMessage()) for record in caplog.records]
    assert said[0] == (logging.INFO, f"a new token of {token_file} was taken")
    assert [level for level, _ in said] == [logging.INFO, logging.WARNING]
    assert TOKEN not in caplog.text


def test_a_token_file_that_others_can_read_is_refused(token_file: Path) -> None:
    token_file.chmod(0o644)
    with pytest.raises(ConfigError, match=r"token_file .* is open to other users"):
        find_connection(UNIX, token_file=token_file)


def test_the_environment_says_what_the_caller_does_not(
    monkeypatch: pytest.MonkeyPatch, token_file: Path
) -> None:
    monkeypatch.setenv("TEACHER_LOGITS_TOKEN_FILE", str(token_file))
    monkeypatch.setenv("TEACHER_LOGITS_TLS_CA", "/ca.pem")
    found = find_connection(FAR)
    assert found.credentials.tls == tl.Tls(ca="/ca.pem")
    assert found.credentials.token() == TOKEN
    assert find_connection(UNIX).credentials.tls is None
    assert find_connection(HERE, insecure=True).credentials.tls is None
    assert find_connection(UNIX, token="another").credentials.token() == "another"


@pytest.mark.parametrize(
    ("address", "given", "shown"),
    [
        (UNIX, {}, UNIX),
        (HERE, {}, HERE),
        (HERE, {"tls": tl.Tls(ca="/ca.pem")}, f"tls://{HERE}"),
        (f"tls://{FAR}", {}, f"tls://{FAR}"),
    ],
)
def test_a_connection_is_written_as_it_is_given(
    address: str, given: dict[str, Any], shown: str
) -> None:
    assert str(find_connection(address, **given)) == shown


@pytest.mark.parametrize("address", ["teacher.example", "tls://teacher.example", "tls:/x:1"])
def test_a_wrong_address_is_told_every_form_that_there_is(address: str) -> None:
    with pytest.raises(ConfigError, match=r"host:port, \[v6\]:port or tls://host:port$"):
        find_connection(address)


def test_a_certificate_goes_with_its_key() -> None:
    with pytest.raises(ConfigError, match="go together"):
        tl.Tls(cert="/c.pem")


@pytest.mark.parametrize("which", ["ca", "cert"])
def test_a_file_that_is_no_certificate_is_named(tmp_path: Path, which: str) -> None:
    junk = tmp_path / "junk"
    junk.write_text("hello")
    key = tmp_path / "key"
    key.touch(mode=0o600)
    trustme.CA().issue_cert("a").private_key_pem.write_to_path(str(key))
    tls = tl.Tls(ca=junk) if which == "ca" else tl.Tls(cert=junk, key=key)
    with pytest.raises(ConfigError, match=f"tls: {which} .*junk"):
        tls.contents()


@pytest.mark.parametrize("which", ["ca", "cert", "key"])
def test_no_pipe_is_waited_for(tmp_path: Path, which: str) -> None:
    key, pipe = tmp_path / "key", tmp_path / "pipe"
    key.touch(mode=0o600)
    os.mkfifo(pipe, 0o600)
    tls = tl.Tls(ca=pipe)
    if which != "ca":
        tls = tl.Tls(cert=pipe, key=pipe if which == "key" else key)
    with pytest.raises(ConfigError, match=rf"tls.{{1,2}}{which} .*pipe is no file"):
        tls.contents()


@pytest.mark.parametrize("name", ["a..b", ".a", "a" * 64, "\udcff"])
def test_a_servers_name_is_one_that_a_certificate_can_have(name: str) -> None:
    with pytest.raises(ConfigError, match=r"server_name .* is no host's name"):
        tl.Tls(server_name=name)


def test_a_file_of_what_is_no_token_is_named(token_file: Path) -> None:
    token_file.write_text("tokén-0123456789")
    with pytest.raises(ConfigError, match=r"token_file .*token: the token is none"):
        find_connection(UNIX, token_file=token_file)


def test_a_key_that_other_users_can_read_is_refused(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.touch(mode=0o644)
    with pytest.raises(ConfigError, match=r"tls_key .*key is open to other users \(mode 0644\)"):
        tl.Tls(cert=key, key=key).contents()


def test_a_calls_metadata_has_the_token_and_its_sessions_secret_alone() -> None:
    shown = Shown(Credentials(token=lambda: TOKEN))
    shown.keep("s-1", "secret")
    bearer = ("authorization", f"Bearer {TOKEN}")
    assert shown.metadata("s-1") == (bearer, ("teacher-logits-session", "secret"))
    assert shown.metadata("s-2") == (bearer,)
    assert Shown(Credentials()).metadata("s-1") == ()


@pytest.mark.parametrize("missing", ["ca", "cert", "key"])
def test_a_file_of_tls_that_is_not_there_is_named_and_called_unreadable(
    tmp_path: Path, missing: str
) -> None:
    authority = trustme.CA()
    own = authority.issue_cert("client")
    given = {each: tmp_path / f"{each}.pem" for each in ("ca", "cert", "key")}
    authority.cert_pem.write_to_path(str(given["ca"]))
    own.cert_chain_pems[0].write_to_path(str(given["cert"]))
    given["key"].touch(mode=0o600)
    own.private_key_pem.write_to_path(str(given["key"]))
    given[missing].unlink()

    with pytest.raises(ConfigError, match=f"^tls_{missing} .* cannot be read: No such") as caught:
        tl.Tls(ca=given["ca"], cert=given["cert"], key=given["key"]).contents()
    assert caught.value.facts == {"argument": f"tls_{missing}", "path": str(given[missing])}
