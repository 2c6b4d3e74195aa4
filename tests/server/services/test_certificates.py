"""The server's certificate: what cannot be one is refused at the start, and not taken later."""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc
import pytest
import trustme

from teacher_logits.errors import ConfigError
from teacher_logits_server.config import ServerConfig
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
        tls_cert=str(tmp_path / "cert"),
        tls_key=str(tmp_path / "key"),
        tls_client_ca=str(tmp_path / "ca"),
    )


def write(folder: Path, authority: trustme.CA, *parts: str) -> None:
    """Put a new certificate and its key there, or one of the two."""
    issued = authority.issue_cert("localhost")
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
