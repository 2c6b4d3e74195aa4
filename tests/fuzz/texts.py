"""What people write: files of settings, flags, addresses; and numbers that describe arrays."""

from __future__ import annotations

import contextlib
import functools
import io
import re
import struct
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
import trustme
from tests.fuzz.surface import joined, split

from teacher_logits.addresses import read_address
from teacher_logits.errors import ConfigError, TeacherLogitsError
from teacher_logits.grid import BatchGrid
from teacher_logits.keys import check_epoch, check_name
from teacher_logits.locality import ModelGrid
from teacher_logits.profiles import TeacherProfile
from teacher_logits.shard_parts import ShardedBy, part_of, runs_of_part, shard_of
from teacher_logits.shard_plan import ShardBox, plan_shards
from teacher_logits_client.credentials import token_of_file
from teacher_logits_client.data_plane.jagged import flat_rows, pack_jagged
from teacher_logits_server import cli
from teacher_logits_server.access.tokens import MIN_TOKEN_CHARS, read_tokens
from teacher_logits_server.cli import read_config
from teacher_logits_server.config import ServerConfig
from teacher_logits_server.services.certificates import server_credentials

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_YAML = """\
listen: [unix:/tmp/s, "127.0.0.1:5555"]
model: some/folder
pool-size: 4GiB
session_ttl: 30s
top_k: 64
insecure: true
batch_grid: 64,4,2
teachers:
  small: {model: other/folder, top_k: 8}
  large: &x {engine: "package.module:make"}
"""
_MORE_YAML = ["", "a: *b", "2001-99-99: 1", "? [1]\n: 2", "!!python/object:os.system {}", "[" * 60,
              "a: &a [*a]", "top_k: 1e400", "teachers: [1]", "teachers: {1: {}}", "- 1",
              "pool_size: 0x10", "top_k: .inf", "\ufeffmodel: x", "a: !!binary aGk="]  # fmt: skip


_TOKENS = """\
# roles           token                                          name
student           GkX0cW1yqvVYkS2mR9bD7w                         trainer-a
publisher         sha256:1f0a66b2c9de55d1a1f0a66b2c9de55d1a1f0a66b2c9de55d1a1f0a66b2c9de0  pool
operator,student  4fUq9cHnE0vXl1sQ8yTz3A==
"""
_MORE_TOKENS = ["", "#", "student", "student  trainer-a-of-tomorrow  GkX0cW1yqv+YkS2mR9bD7w==",
                "student sha256:00 a", "student,operator,student GkX0cW1yqvVYkS2mR9bD7w",
                "\ufeffstudent GkX0cW1yqvVYkS2mR9bD7w", "student 4fUq9cHnE0vXl1sQ \0"]  # fmt: skip
_AUTHORITY = trustme.CA()
_CERTIFIED = _AUTHORITY.issue_cert("localhost").private_key_and_cert_chain_pem.bytes().decode()
_WORD = re.compile(rf"\S{{{MIN_TOKEN_CHARS},}}")


class Settings:
    """Files of settings, of tokens, of a certificate and its key; flags and addresses.

    input   WHAT text

    WHAT is `y` for the server's file, `f` for its flags, one a line, `a` for an address, `n` for
    names and ids, `t` for the server's tokens, `s` for a client's, `c` for a certificate, its
    key and the authorities of clients, all in one file (made anew by each run). No message of
    tokens tells one.
    """

    name = "settings"

    def __init__(self) -> None:
        # Made once and not for each input: it keeps nothing of what it reads.
        self._patch = pytest.MonkeyPatch()
        self._patch.setattr(cli, "_parser", functools.cache(cli._parser))
        self._folder = tempfile.TemporaryDirectory(prefix="tl-")
        self._path = Path(self._folder.name) / "c.yaml"
        self._secret = Path(self._folder.name) / "s"
        self._secret.touch(mode=0o600)
        path = str(self._secret)
        self._tls = ServerConfig(
            listen=("127.0.0.1:0",), tls_cert=path, tls_key=path, tls_client_ca=path
        )

    def seeds(self) -> Sequence[bytes]:
        texts = [f"y{each}" for each in (_YAML, *_MORE_YAML)]
        texts += ["f--model=x\n--listen=unix:/tmp/s\n--top-k=8\n--teacher=a=b\n--pool-size=1GiB"]
        texts += ["aunix:/tmp/s", "a127.0.0.1:80", "a[::1]:80", "a/run/x", "nteacher-1", "ns-0-1"]
        texts += [f"t{each}" for each in (_TOKENS, *_MORE_TOKENS)]
        texts += ["sGkX0cW1yqvVYkS2mR9bD7w\n", "stwo words", "s", f"c{_CERTIFIED}"]
        return [each.encode() for each in texts]

    def run(self, data: bytes) -> str:
        what, text = data[:1], data[1:]
        try:
            if what in (b"t", b"s", b"c"):
                self._read_secret(what, text)
            elif what == b"y":
                self._path.write_bytes(text)
                read_config(["--config", str(self._path)])
            elif what == b"f":
                flags = text.decode("utf-8", "replace").split("\n")
                with contextlib.redirect_stderr(io.StringIO()):  # argparse says it there
                    read_config([each for each in flags if each.startswith("--")])
            elif what == b"a":
                read_address(text.decode("utf-8", "surrogateescape"), what="address")
            else:
                name = text.decode("utf-8", "replace")
                check_epoch(name, "0123456789ab", what="session")
                check_name(name, what="name")
        except ConfigError:
            return "CONFIG"
        except TeacherLogitsError as error:
            return error.reason
        except SystemExit:
            return "NO FLAG"  # argparse has said so
        return "OK"

    def _read_secret(self, what: bytes, text: bytes) -> None:
        self._secret.write_bytes(text)
        if what == b"c":
            server_credentials(self._tls)
            return
        try:
            if what == b"t":
                read_tokens(str(self._secret))
            else:
                token_of_file(str(self._secret))
        except ConfigError as error:
            told = f"{error.message} {error.facts}"
            words = _WORD.findall(text.decode("utf-8", "replace"))
            assert not [each for each in words if each in told], "a token was told"
            raise

    def check(self) -> None:
        good = [f"t{_TOKENS}", "sGkX0cW1yqvVYkS2mR9bD7w", f"c{_CERTIFIED}"]
        assert [self.run(each.encode()) for each in good] == ["OK"] * len(good)

    def close(self) -> None:
        self._patch.undo()
        self._folder.cleanup()


class Arrays:
    """Numbers that describe arrays: parts of shards, and their plan.

    input   int16 numbers, each list behind its length
    """

    name = "arrays"

    def seeds(self) -> Sequence[bytes]:
        lists = [
            [[0, 4, 0, 8, 0, 16], [0, 4, 0, 8, 0, 8], [0, 4, 0, 8, 8, 16]],
            [[0, 2, 0, 4, 0, 4], [0, 2, 0, 2, 0, 4], [0, 2, 2, 4, 0, 4]],
            [[1, 2, 4, 2, 1, 0, 8, 100, 104]],
        ]
        return [
            bytes([kind]) + joined([struct.pack(f"<{len(each)}h", *each) for each in numbers])
            for kind, numbers in enumerate([lists[0], lists[1], *lists[2:]])
        ]

    def run(self, data: bytes) -> str:
        is_part = bool(data) and data[0] % 3 == 2
        lists = [list(_numbers(each)) for each in split(data[1:])]
        try:
            return self._part(lists) if is_part else self._plan(lists)
        except TeacherLogitsError as error:
            return error.reason

    def check(self) -> None:
        assert [self.run(each) for each in self.seeds()] == ["OK"] * len(self.seeds())

    def close(self) -> None:
        pass

    def _plan(self, lists: list[list[int]]) -> str:
        """A plan tiles what is wanted exactly once."""
        boxes = [_box(each) for each in lists if len(each) >= 6][:8]
        if not boxes:
            return "NOTHING"
        wanted, *shards = boxes
        cells = len(wanted.rows) * sum(map(len, wanted.positions)) * len(wanted.ids)
        plan = plan_shards(shards, wanted)
        covered = sum(len(p.rows) * len(p.positions) * len(p.ids) for p in plan.pieces)
        assert covered == cells
        return "OK"

    def _part(self, lists: list[list[int]]) -> str:
        numbers = [*(lists[0] if lists else []), *[0] * 9][:9]
        nodes, gpus, tensor, context, tensor_rank, context_rank, ids, rows, length = numbers
        ways = [way for way in ShardedBy if ids >> len(way.value) % 3 & 1]
        profile = TeacherProfile(
            teacher_id="t",
            vocabulary_size=max(1, ids),
            head_rows=max(1, ids, rows),
            top_k=1,
            max_row_tokens=8,
            batch_grid=BatchGrid(global_batch_size=4, data_parallel_size=1, micro_batch_size=1),
            sharded_by=tuple(ways),
            model_grid=ModelGrid(
                node_count=nodes,
                gpus_per_node=gpus,
                tensor_parallel_size=tensor,
                context_parallel_size=context,
                tensor_parallel_rank=tensor_rank,
                context_parallel_rank=context_rank,
            ),
        )
        shard_of(profile)
        part = part_of(profile)
        if part is not None and part.sequence_parts > 0:
            runs_of_part(
                abs(length),
                part=part.sequence_part,
                parts=part.sequence_parts,
                sharded_by=tuple(ways),
            )
        return "OK"


class Jagged:
    """Rows without padding.

    input   int16 lengths
    """

    name = "jagged"

    def seeds(self) -> Sequence[bytes]:
        return [struct.pack("<4h", 3, 1, 0, 5), struct.pack("<h", 1), b""]

    def run(self, data: bytes) -> str:
        """Rows come back as they were."""
        lengths = [each % 64 if each >= 0 else each for each in _numbers(data)][:32]
        width = max(0, *lengths, 0)
        ids = torch.arange(len(lengths) * width).view(len(lengths), width)
        try:
            packed = pack_jagged({"input_ids": ids}, lengths, token_aligned={"input_ids"})
        except TeacherLogitsError as error:
            return error.reason
        rows = [row[:length] for row, length in zip(ids, lengths, strict=True)]
        assert torch.equal(flat_rows(packed["input_ids"]), torch.cat(rows))
        return "OK"

    def check(self) -> None:
        pass

    def close(self) -> None:
        pass


def _numbers(data: bytes) -> Iterator[int]:
    for (number,) in struct.iter_unpack("<h", data[: len(data) // 2 * 2]):
        yield number


def _box(numbers: list[int]) -> ShardBox:
    rows, first, ids, *more = (
        range(start, stop) for start, stop in zip(numbers[::2], numbers[1::2], strict=False)
    )
    return ShardBox(rows=rows, positions=(first, *more[:3]), ids=ids)
