"""The server's certificate: what cannot be one is refused at the start, and not taken later."""

from __future__ import annotations

import logging
import math
import os
import ssl
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING

import grpc
import pytest
import trustme

from teacher_logits.errors import ConfigError
from teacher_logits_server.certificate_dates import end_of
from teacher_logits_server.config import ServerConfig
from teacher_logits_server.metrics import names
from teacher_logits_server.metrics.instruments import Instruments
from teacher_logits_server.services.certificates import server_credentials

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def config(tmp_path: Path, authority: trustme.CA) -> ServerConfig:
    write(tmp_path, authority)
    authority.cert_pem.write_to_path(str(tmp_path / "ca"))
    return ServerConfig(
        listen=("127.0.0.1:0",),
        tls_cert=str(tmp_path / "cert"),
        tls_key=str(tmp_path / "key"),
        tls_client_ca=str(tmp_path / "ca"),
    )


def write(
    folder: Path, authority: trustme.CA, *parts: str, expires_at: datetime | None = None
) -> None:
    """Put a new certificate and its key there, or one of the two."""
    issued = authority.issue_cert("localhost", not_after=expires_at)
    if "key" in (parts or ("key",)):
        (folder / "key").touch(mode=0o600)
        issued.private_key_pem.write_to_path(str(folder / "key"))
    if "cert" in (parts or ("cert",)):
        issued.cert_chain_pems[0].write_to_path(str(folder / "cert"))


def test_without_one_tcp_goes_without_tls() -> None:
    assert server_credentials(ServerConfig()) is None


@pytest.mark.parametrize(
    ("name", "spoil", "match"),
    [
        ("cert", "unlink", "--tls-cert .*cert cannot be read: No such file"),
        ("key", "unlink", "--tls-key .*key cannot be read: No such file"),
        ("ca", "unlink", "--tls-client-ca .*ca cannot be read: No such file"),
        ("cert", "junk", "no certificate and its key in PEM"),
        ("key", "junk", "no certificate and its key in PEM"),
        ("ca", "junk", "no certificates in PEM"),
        ("cert", "pipe", "--tls-cert .*cert is no file"),
        ("key", "pipe", "--tls-key .*key is no file"),
        ("ca", "pipe", "--tls-client-ca .*ca is no file"),
        ("key", "another's", "no certificate and its key in PEM, .*MISMATCH"),
    ],
)
def test_what_can_be_none_is_refused_by_its_flag(
    *,
    tmp_path: Path,
    config: ServerConfig,
    authority: trustme.CA,
    name: str,
    spoil: str,
    match: str,
) -> None:
    if spoil == "another's":
        write(tmp_path, authority, "key")
    elif spoil == "junk":
        (tmp_path / name).write_text("junk")
    else:
        (tmp_path / name).unlink()
        if spoil == "pipe":
            os.mkfifo(tmp_path / name, 0o600)

    with pytest.raises(ConfigError, match=match):
        server_credentials(config)


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o602, 0o660])
def test_a_key_that_others_can_read_or_change_is_refused(
    tmp_path: Path, config: ServerConfig, mode: int
) -> None:
    (tmp_path / "key").chmod(mode)
    match = f"--tls-key .*key is open to other users \\(mode {mode:04o}\\).*chmod 600.*Kubernetes"
    with pytest.raises(ConfigError, match=match) as caught:
        server_credentials(config)
    assert caught.value.facts["flag"] == "--tls-key"
    assert caught.value.facts["mode"] == f"{mode:04o}"


def test_its_group_may_read_a_key(tmp_path: Path, config: ServerConfig) -> None:
    # As a Secret of Kubernetes is mounted, whose group is the pod's fsGroup.
    (tmp_path / "key").chmod(0o440)
    assert server_credentials(config) is not None


def test_a_half_that_does_not_fit_is_told_and_the_old_pair_goes_on(
    tmp_path: Path,
    config: ServerConfig,
    authority: trustme.CA,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    fetch: list[Callable[[], object]] = []

    def made(first: object, later: Callable[[], object], **_: object) -> object:
        fetch[:] = [later]
        return first

    monkeypatch.setattr(grpc, "dynamic_ssl_server_credentials", made)
    old = server_credentials(config)
    write(tmp_path, authority, "key")
    assert fetch[0]() is old
    assert fetch[0]() is old
    write(tmp_path, authority)
    assert fetch[0]() is not old
    assert len([each for each in caplog.records if "not taken" in each.getMessage()]) == 1


def test_a_rotation_says_that_it_worked_and_until_when(
    tmp_path: Path,
    config: ServerConfig,
    authority: trustme.CA,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    instruments = Instruments()
    server_credentials(config, instruments)

    def shown() -> float | None:
        return instruments.registry.get_sample_value(names.CERTIFICATE_ENDS.name)

    assert shown()
    assert caplog.records == []

    (tmp_path / "cert").write_text("junk")
    shown()
    write(tmp_path, authority, expires_at=datetime(2049, 5, 6, 7, 8, 9, tzinfo=timezone.utc))

    assert shown() == datetime(2049, 5, 6, 7, 8, 9, tzinfo=timezone.utc).timestamp()
    assert [(each.levelname, each.getMessage()) for each in caplog.records] == [
        ("ERROR", "new certificates not taken, the old ones go on"),
        ("INFO", "new certificates taken"),
    ]
    assert vars(caplog.records[1])["facts"] == {"ends": "2049-05-06 07:08:09 UTC"}


@pytest.mark.parametrize(
    ("hours", "said"),
    [(-1, ["certificate has ended"]), (23, ["certificate ends within a day"]), (48, [])],
)
def test_one_that_has_ended_or_soon_will_is_warned_of(
    *,
    tmp_path: Path,
    config: ServerConfig,
    authority: trustme.CA,
    caplog: pytest.LogCaptureFixture,
    hours: int,
    said: list[str],
) -> None:
    ends = datetime.now(timezone.utc) + timedelta(hours=hours)
    write(tmp_path, authority, expires_at=ends)

    server_credentials(config)

    assert [each.getMessage() for each in caplog.records] == said


@pytest.mark.parametrize("year", [2049, 2050, 2101])
def test_the_end_is_read_in_both_ways_that_it_may_be_written(
    authority: trustme.CA, year: int
) -> None:
    ends = datetime(year, 1, 2, 3, 4, 5, tzinfo=timezone.utc)
    issued = authority.issue_cert("localhost", not_after=ends)
    assert end_of(b"text before\n" + issued.cert_chain_pems[0].bytes()) == ends.timestamp()


def test_what_cannot_be_read_has_no_end(authority: trustme.CA) -> None:
    pem = authority.issue_cert("localhost").cert_chain_pems[0].bytes()
    der = ssl.PEM_cert_to_DER_cert(pem.decode())
    for cut in range(0, len(der), 7):
        assert math.isnan(end_of(ssl.DER_cert_to_PEM_cert(der[:cut]).encode()))
    assert math.isnan(end_of(b"junk"))
