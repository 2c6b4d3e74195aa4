"""Codecs of streams, from a server in a process of its own: registered steps and scored rows."""

from __future__ import annotations

import logging
import time
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
import torch
from tests.client.publishing.a_publisher import a_student, a_teacher, flat, some_rows
from tests.encoded import chunk

import teacher_logits_client as tl
from teacher_logits.codec.value_codecs import certify, entry_errors
from teacher_logits.encodings import IdCodec, StreamCodec, ValueCodec
from teacher_logits.errors import ChecksumError, SessionRefusedError, StreamBrokenError
from teacher_logits.layout import ColumnKind
from teacher_logits.terms import SessionTerms
from teacher_logits_client.calls import Calls
from teacher_logits_client.openers.buffers import BufferPool
from teacher_logits_client.openers.codec_terms import check_settled
from teacher_logits_client.openers.stream import StreamOpener, parse_chunk
from teacher_logits_server.admission.stream_codecs import choose_codec

if TYPE_CHECKING:
    from collections.abc import Iterator

    from teacher_logits.error_bounds import ErrorBound
    from teacher_logits.terms import LeaseTerms

PATIENCE = 30.0
IDS, LENGTHS, LOGITS = some_rows(5)
ROWS = [[3, 5, 7, 1, 2, 8, 4], [9], [1, 2, 3] * 40]
LOSSLESS = [
    ("as_written", "planes24"),
    ("as_written", "packed18"),
    ("bfloat16_exact", "int32"),
    ("bfloat16_exact", "packed18"),
]
LOSSY = [("float16", "planes24"), ("bfloat16", "packed18"), ("uint8", "packed18")]


@pytest.fixture(scope="module")
def client() -> Iterator[tl.Client]:
    with tl.testing.serve(pool_size="64MiB") as server, tl.connect(server.address) as client:
        yield client


@contextmanager
def published(
    client: tl.Client, teacher_id: str, logits: torch.Tensor, *, arithmetic: str = "bfloat16"
) -> Iterator[None]:
    """A teacher that has published step 0, in fp32."""
    profile = a_teacher(teacher_id, arithmetic_type=arithmetic)
    with client.open_publisher(profile) as publisher:
        with publisher.reserve(
            step=0, rows=range(len(IDS)), input_ids=IDS, lengths=LENGTHS
        ) as draft:
            tl.select_top_k(flat(logits, LENGTHS), out=draft)
        yield


@contextmanager
def streaming(client: tl.Client, teacher_id: str, **wishes: object) -> Iterator[tl.Session]:
    profile = a_student(teacher_id, **{"transports": ("stream",), **wishes})
    with client.open_session(profile) as session:
        yield session


def columns_of_step(session: tl.Session) -> dict[str, torch.Tensor]:
    """The columns of step 0, which is held against the tokens that were sent."""
    with session.acquire(step=0, input_ids=IDS, lengths=LENGTHS, timeout=PATIENCE) as batch:
        assert {each.verdict.value for each in batch.checks} == {"passed"}
        assert batch.targets.topk_logprobs.dtype is torch.float32
        return {name: column.clone() for name, column in batch.columns.items()}


def assert_same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, column in expected.items():
        assert got[name].dtype == column.dtype, name
        assert torch.equal(got[name], column), name


@pytest.mark.parametrize(("values", "ids"), LOSSLESS)
def test_a_registered_step_comes_bit_for_bit_where_its_codec_loses_nothing(
    client: tl.Client, values: str, ids: str
) -> None:
    teacher = f"exact-{values}-{ids}"
    wishes = {"value_codecs": (values,), "id_codecs": (ids,)}
    with ExitStack() as stack:
        plain = stack.enter_context(streaming(client, teacher_of(stack, client, teacher)))
        small = stack.enter_context(streaming(client, teacher, student_id="small", **wishes))
        assert small.terms.stream.bound.is_exact
        assert (small.terms.stream.codec.values.value, small.terms.stream.codec.ids.value) == (
            values,
            ids,
        )
        counts = [client.statistics().streamed_bytes]
        expected = columns_of_step(plain)
        counts.append(client.statistics().streamed_bytes)
        got = columns_of_step(small)
        counts.append(client.statistics().streamed_bytes)

    assert_same(got, expected)
    assert counts[2] - counts[1] < counts[1] - counts[0]


def teacher_of(stack: ExitStack, client: tl.Client, teacher_id: str) -> str:
    stack.enter_context(published(client, teacher_id, LOGITS.bfloat16()))
    return teacher_id


@pytest.mark.parametrize(("values", "ids"), LOSSY)
def test_a_registered_step_comes_as_near_as_the_session_says(
    client: tl.Client, values: str, ids: str
) -> None:
    teacher = f"near-{values}"
    wishes = {"value_codecs": (values,), "id_codecs": (ids,)}
    with ExitStack() as stack:
        plain = stack.enter_context(streaming(client, teacher_of(stack, client, teacher)))
        small = stack.enter_context(streaming(client, teacher, student_id="small", **wishes))
        bound = small.terms.stream.bound
        expected, got = columns_of_step(plain), columns_of_step(small)
    name = ColumnKind.TOPK_LOGPROBS.value
    true, near = expected.pop(name), got.pop(name)

    assert_same(got, expected)
    assert near.dtype is true.dtype is torch.float32
    assert not torch.equal(near, true)
    assert ((near.double() - true.double()).abs() <= entry_errors(near, bound)).all()
    kl, gradient = certify(near, bound)
    tail = expected["log_tail"][:, :1].double()
    p, q = (torch.cat([each.double(), tail], 1).log_softmax(1) for each in (true, near))
    assert ((p.exp() * (p - q)).sum(1) <= kl + 1e-12).all()
    assert ((p.exp() - q.exp()).abs().sum(1) <= gradient + 1e-12).all()


def test_logits_that_bf16_cannot_carry_come_as_they_were_written(
    client: tl.Client, caplog: pytest.LogCaptureFixture
) -> None:
    with ExitStack() as stack:
        stack.enter_context(published(client, "unsaid", LOGITS, arithmetic=""))
        plain = stack.enter_context(streaming(client, "unsaid"))
        small = stack.enter_context(
            streaming(client, "unsaid", student_id="s", value_codecs=("bfloat16_exact",))
        )
        assert small.terms.stream.codec.values is tl.ValueCodec.BFLOAT16_EXACT
        expected = columns_of_step(plain)
        with caplog.at_level(logging.WARNING, "teacher_logits_client"):
            got = columns_of_step(small)

    assert_same(got, expected)
    assert any("is not what bf16 logits give" in each for each in caplog.messages)


@pytest.mark.parametrize(
    ("wishes", "settled", "named"),
    [
        ({"value_codecs": ("uint8",)}, ("as_written", "int32"), "value_codecs asks for uint8"),
        ({"id_codecs": ("planes24",)}, ("as_written", "int32"), "id_codecs asks for planes24"),
        ({"value_codecs": ("float16",)}, ("uint8", "int32"), "settled on uint8"),
        ({}, ("bfloat16", "int32"), "value_codecs asks for none"),
        ({}, ("as_written", "packed18"), "id_codecs asks for none"),
    ],
)
def test_a_server_that_settles_on_what_was_not_asked_for_is_told_so_at_once(
    client: tl.Client,
    monkeypatch: pytest.MonkeyPatch,
    wishes: dict[str, object],
    settled: tuple[str, str],
    named: str,
) -> None:
    """As one of a release that knew no codecs does, which passes them over."""
    opening = Calls.open_session

    def deaf(self: Calls, *given: object, **named: object) -> object:
        opened = opening(self, *given, **named)  # type: ignore[arg-type]
        codec = StreamCodec(values=ValueCodec(settled[0]), ids=IdCodec(settled[1]))
        stream = replace(opened.terms.stream, codec=codec)
        return replace(opened, terms=replace(opened.terms, stream=stream))

    profile = a_student("settled", transports=("stream",), **wishes)
    with published(client, "settled", LOGITS.bfloat16()):
        with monkeypatch.context() as patched:
            patched.setattr(Calls, "open_session", deaf)
            with pytest.raises(SessionRefusedError, match=f"codec_unavailable: .*{named}"):
                client.open_session(profile)
        with streaming(client, "settled"):  # the refused session holds no rank
            pass


def terms_of(
    wishes: dict[str, object], bound: ErrorBound | None = None
) -> tuple[tl.StudentProfile, SessionTerms]:
    """What is settled for a student of a teacher that writes fp32, with another bound."""
    student, teacher = a_student("t", **wishes), a_teacher("t", arithmetic_type="bfloat16")
    stream = choose_codec(student, teacher, is_published=True)
    if bound is not None:
        stream = replace(stream, bound=bound)
    return student, SessionTerms(
        session_id="s",
        epoch="e",
        ttl=timedelta(seconds=1),
        renew_interval=timedelta(seconds=1),
        default_wait=timedelta(seconds=1),
        teacher=teacher,
        checks=(),
        vocabulary_size=teacher.vocabulary_size,
        max_request_tokens=1,
        settlements=(),
        stream=stream,
    )


@pytest.mark.parametrize("codec", ["float16", "bfloat16", "uint8"])
def test_a_server_that_certifies_less_than_its_codec_can_cost_is_refused(codec: str) -> None:
    wishes: dict[str, object] = {"value_codecs": (codec,)}
    student, right = terms_of(wishes)
    check_settled(student, right)
    bound = right.stream.bound
    check_settled(*terms_of(wishes, replace(bound, relative=bound.relative * 2)))  # no harm

    for name in ("relative", "absolute", "kl", "gradient", "of_range"):
        has = getattr(bound, name)
        if has == 0:
            continue
        less = 1e-3 if has is None else has / 2
        with pytest.raises(SessionRefusedError, match=f"certifies {name} .* by this release") as no:
            check_settled(*terms_of(wishes, replace(bound, **{name: less})))
        (violation,) = no.value.violations
        assert (violation.rule, violation.facts["bound"]) == ("codec_unavailable", name)
        assert violation.facts["certified"] == less


@pytest.mark.parametrize("values", [(), ("float16",), ("bfloat16_exact", "as_written"), ("uint8",)])
@pytest.mark.parametrize("ids", [(), ("packed18",)])
def test_what_our_own_server_certifies_is_taken(
    values: tuple[str, ...], ids: tuple[str, ...]
) -> None:
    check_settled(*terms_of({"value_codecs": values, "id_codecs": ids}))


@pytest.mark.parametrize(
    ("wishes", "kind"),
    [
        ({"value_codecs": ("float32",)}, "as_written"),
        ({"value_codecs": ("uint8", "as_written")}, "uint8"),
    ],
)
def test_what_changes_nothing_may_be_settled_on_by_its_own_name(
    client: tl.Client, wishes: dict[str, object], kind: str
) -> None:
    with ExitStack() as stack:
        name = teacher_of(stack, client, f"named-{kind}")
        session = stack.enter_context(streaming(client, name, **wishes))
        assert session.terms.stream.codec.values.value == kind


def test_other_transports_encode_nothing(client: tl.Client) -> None:
    wishes = {"value_codecs": ("uint8",), "id_codecs": ("packed18",)}
    with ExitStack() as stack:
        teacher = teacher_of(stack, client, "shared")
        plain = stack.enter_context(streaming(client, teacher))
        local = stack.enter_context(
            streaming(client, teacher, transports=("shared_memory",), student_id="local", **wishes)
        )
        assert local.terms.stream.codec.values is tl.ValueCodec.UINT8
        assert_same(columns_of_step(local), columns_of_step(plain))


def test_a_session_that_asks_for_what_cannot_be_had_is_refused(client: tl.Client) -> None:
    with pytest.raises(SessionRefusedError, match="end value_codecs with 'as_written'") as refused:
        with scoring(client, value_codecs=("float32", "bfloat16")):
            pass
    [violation] = refused.value.violations
    assert violation.rule == "codec_unavailable"
    assert violation.facts["value_type"] == "float16"


@contextmanager
def scoring(client: tl.Client, **wishes: object) -> Iterator[tl.Session]:
    grid = tl.BatchGrid(global_batch_size=3, data_parallel_size=1, micro_batch_size=1)
    profile = tl.StudentProfile(
        batch_grid=grid,
        teacher_id="teacher",
        top_k=20,
        transports=("stream",),  # type: ignore[arg-type]
        **wishes,  # type: ignore[arg-type]
    )
    with client.open_session(profile) as session:
        yield session


class TestScored:
    def test_rows_come_in_halves_by_default_and_bit_for_bit(self, client: tl.Client) -> None:
        with scoring(client) as session, session.score(ROWS).result(PATIENCE) as leased:
            assert session.terms.stream.codec == StreamCodec()
            assert leased.columns["topk_logprobs"].dtype is torch.float16

    def test_rows_are_held_against_what_was_sent_by_what_their_codec_allows(
        self, client: tl.Client
    ) -> None:
        with (
            scoring(client, value_type="float32", value_codecs=("uint8",)) as session,
            session.score(ROWS).result(PATIENCE) as leased,
        ):
            assert [each.verdict.value for each in leased.checks] == ["passed"] * 3
            assert leased.columns["topk_logprobs"].dtype is torch.float32


@pytest.fixture(scope="module")
def lease(client: tl.Client) -> Iterator[tuple[Calls, str, LeaseTerms]]:
    """A lease on scored rows in uint8 and 18 bits, over connections of its own."""
    wishes = {"value_codecs": ("uint8",), "id_codecs": ("packed18",)}
    with scoring(client, **wishes) as session, session.score(ROWS).result(PATIENCE) as leased:
        calls = Calls(client.address)
        found = calls.acquire(
            session.terms.session_id,
            request_id="again",
            payload_id=leased.payload.payload_id,
            timeout=PATIENCE,
        )
        assert found.encoding is not None
        yield calls, session.terms.session_id, found
        calls.close()


class Wire:
    """What lies between a real server and a reader."""

    def __init__(self, calls: Calls, session_id: str) -> None:
        self._calls = calls
        self._session_id = session_id
        self.break_at: int | None = None
        self.flip = False
        self.offsets: list[int] = []

    def read(self, lease_id: str, offset: int, timeout: float) -> Iterator[bytes]:
        self.offsets.append(offset)
        for message in self._calls.read_payload(
            self._session_id, lease_id, offset, timeout=PATIENCE
        ):
            if self.break_at is not None:
                yield first_part(message, self.break_at)
                self.break_at = None
                raise StreamBrokenError("the cable was pulled")
            yield message[:-1] + bytes([message[-1] ^ 1]) if self.flip else message

    def columns(self, lease: LeaseTerms) -> dict[str, bytes]:
        opener = StreamOpener(
            self.read, pool=BufferPool(), count=lambda size: None, pause=lambda seconds: None
        )
        opened = opener.open(lease, until=time.monotonic() + PATIENCE)
        return {each.kind.value: bytes(opened.bytes_of(each)) for each in lease.payload.columns}


def first_part(message: bytes, size: int) -> bytes:
    """The first bytes of a chunk, as a chunk that is whole."""
    found = parse_chunk(message)
    return chunk(bytes(found.data[:size]), found.offset_bytes)


class TestBytesOnTheWay:
    @pytest.mark.parametrize("broken", [1, 333, 1000, 5001])
    def test_a_stream_is_taken_up_at_the_byte_that_it_broke_at(
        self, lease: tuple[Calls, str, LeaseTerms], broken: int
    ) -> None:
        calls, session_id, terms = lease
        whole, wire = Wire(calls, session_id), Wire(calls, session_id)
        wire.break_at = broken

        assert wire.columns(terms) == whole.columns(terms)
        assert wire.offsets == [0, broken]

    def test_bytes_that_change_on_the_way_are_refused(
        self, lease: tuple[Calls, str, LeaseTerms]
    ) -> None:
        calls, session_id, terms = lease
        wire = Wire(calls, session_id)
        wire.flip = True

        with pytest.raises(ChecksumError):
            wire.columns(terms)

    def test_the_server_cuts_the_same_bytes_from_wherever_it_is_asked(
        self, lease: tuple[Calls, str, LeaseTerms]
    ) -> None:
        calls, session_id, terms = lease
        assert terms.encoding is not None

        def read(offset: int) -> bytes:
            stream = calls.read_payload(session_id, terms.lease_id, offset, timeout=PATIENCE)
            return b"".join(bytes(parse_chunk(each).data) for each in stream)

        whole = read(0)
        assert len(whole) == terms.encoding.size_bytes
        assert all(read(at) == whole[at:] for at in (1, 77, 1000, len(whole) - 1, len(whole)))
