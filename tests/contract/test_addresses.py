"""An address is written and read alike by who listens there and by who connects."""

import os

import pytest

from teacher_logits.addresses import Address, check_path, read_address
from teacher_logits.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("unix:/run/t.sock", Address(path="/run/t.sock")),
        ("127.0.0.1:5555", Address(host="127.0.0.1", port=5555)),
        ("localhost:0", Address(host="localhost", port=0)),
        ("[::1]:80", Address(host="::1", port=80)),
    ],
)
def test_an_address_is_read_and_written_alike(text: str, address: Address) -> None:
    assert read_address(text, what="--listen") == address
    assert str(address) == text


@pytest.mark.parametrize("text", ["/run/t.sock", "unix:/run/t.sock", "unix:///run/t.sock"])
def test_a_path_is_a_unix_socket_alone_and_as_grpc_writes_it(text: str) -> None:
    assert read_address(text, what="address") == Address(path="/run/t.sock")


def test_a_channel_finds_hosts_by_their_names_and_sockets_by_their_paths() -> None:
    assert read_address("node7:80", what="address").target == "dns:///node7:80"
    assert read_address("/run/t.sock", what="address").target == "unix:/run/t.sock"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "here",
        "unix:",
        "unix:relative",
        "unix:/folder/",
        "host:",
        ":80",
        "h:x",
        "::1:80",
        "[h]:80",
        "h:65536",
        "http://h:80",
        "h:" + "9" * 5000,
        "a..b:80",
        ".h:80",
        "h" * 64 + ":80",
        os.fsdecode(b"\xff") + ":80",
        os.fsdecode(b"unix:/\xff"),
    ],
)
def test_what_is_none_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match="--listen"):
        read_address(text, what="--listen")


def test_a_path_may_have_what_the_kernel_takes_and_no_byte_more() -> None:
    longest = "/" + "é" * 53  # 107 bytes, of fewer characters
    assert check_path(longest, what="--broker") == longest
    with pytest.raises(ConfigError, match=r"--broker.* 108 bytes.* 107"):
        check_path(longest + "x", what="--broker")
