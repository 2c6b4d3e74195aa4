"""Ids of the client's choice, scored by a server in a process of its own.

The teacher is one whose logits anybody can work out (`tests.transport_suite.dense_teacher`).
"""

from __future__ import annotations

import itertools
import socket
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from tests.client.conftest import Service, a_profile
from tests.client.publishing.a_publisher import a_student, a_teacher
from tests.reports.tunnels import Tunnel
from tests.transport_suite.dense_teacher import HEAD_ROWS, VOCABULARY_SIZE, head_logits

import teacher_logits_client as tl
from teacher_logits.errors import NotAllowedError, PayloadInvalidError, RequestInvalidError
from teacher_logits.selection_rules import MAX_IDS_PER_TOKEN, ClientIds
from teacher_logits_client.calls.scoring import Scoring

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[3]
ENGINE = "tests.transport_suite.dense_teacher:make"
LONG = 30.0
names = (f"request-{number}" for number in itertools.count())
ROWS = [[3, 1, 4, 1, 5], [9], [2, 6, 5]]
POSITIONS = sum(map(len, ROWS))
TEMPERATURES = (2.0, 0.5)
WAYS = [tl.Transport.SHARED_MEMORY, tl.Transport.STREAM]


@pytest.fixture(scope="module")
def server() -> Iterator[tl.testing.ServerProcess]:
    with tl.testing.serve(ENGINE, folder=ROOT, pool_size="64MiB", slab_size="64MiB") as found:
        yield found


@pytest.fixture(scope="module")
def client(server: tl.testing.ServerProcess) -> Iterator[tl.Client]:
    with tl.connect(server.address) as found:
        yield found


@pytest.fixture(scope="module")
def session(client: tl.Client) -> Iterator[tl.Session]:
    with client.open_session(a_profile(temperatures=TEMPERATURES)) as found:
        yield found


def some_ids(count: int = 4, positions: int = POSITIONS) -> torch.Tensor:
    """Distinct ids a position, in no order."""
    generator = torch.Generator().manual_seed(count)
    return torch.rand(positions, VOCABULARY_SIZE, generator=generator).argsort(1)[:, :count]


def logits() -> torch.Tensor:
    return torch.cat([head_logits(row) for row in ROWS])[:, :VOCABULARY_SIZE].double()


class TestWhatComes:
    @pytest.mark.parametrize("way", WAYS, ids=lambda way: way.value)
    def test_is_what_the_dense_teacher_says_of_them(self, client: tl.Client, way: object) -> None:
        ids = some_ids()
        profile = a_profile(transports=(way,), temperatures=TEMPERATURES)
        with client.open_session(profile) as session:
            with session.scored_ids(ROWS, ids=ids).result(LONG) as payload:
                assert payload.transport is way
                assert payload.payload.selection == ClientIds()
                assert torch.equal(payload.columns["scored_ids"].long(), ids)
                exact = logits().log_softmax(1).gather(1, ids)
                close(payload.columns["scored_logprobs"], exact)

    @pytest.mark.parametrize("temperature", [1.0, *TEMPERATURES])
    def test_has_the_mass_outside_exactly_these_at_each_temperature(
        self, session: tl.Session, temperature: float
    ) -> None:
        ids = some_ids()
        with session.scored_ids(ROWS, ids=ids).result(LONG) as payload:
            targets = payload.targets_at(temperature).clone()

        tempered = (logits() / temperature).log_softmax(1)
        close(targets.topk_logprobs, tempered.gather(1, ids))
        close(targets.log_tail, tempered.scatter(1, ids, -torch.inf).logsumexp(1))

    def test_makes_reverse_kl_on_the_students_own_best_ids_exact(self, session: tl.Session) -> None:
        generator = torch.Generator().manual_seed(8)
        student = torch.randn(POSITIONS, VOCABULARY_SIZE, generator=generator) * 3
        own = student.topk(6).indices
        with session.scored_ids(ROWS, ids=own).result(LONG) as payload:
            loss, count = tl.losses.reverse_kl(student, payload.targets)

        q, p = (coarse(each.double().log_softmax(1), own) for each in (student, logits()))
        each = (q.exp() * (q - p)).sum(1)
        counts = torch.ones(POSITIONS, dtype=torch.bool)
        counts[torch.tensor([len(row) for row in ROWS]).cumsum(0) - 1] = False
        assert int(count) == int(counts.sum())
        assert loss.item() == pytest.approx(each[counts].sum().item(), rel=1e-5)

    def test_is_checked_where_the_next_token_is_among_them(self, session: tl.Session) -> None:
        ids = some_ids()
        ids[0, 2] = ROWS[0][1]
        with session.scored_ids(ROWS, ids=ids).result(LONG) as payload:
            lookup = next(check for check in payload.checks if check.name == "lookup_identity")

        assert lookup.verdict is tl.Verdict.PASSED
        assert lookup.detail.endswith("at 1 positions")

    def test_can_be_read_by_another_session(self, client: tl.Client, session: tl.Session) -> None:
        with session.scored_ids(ROWS, ids=some_ids(3)).result(LONG) as payload:
            with client.open_session(a_profile(student_id="other", top_k=9)) as other:
                name = payload.payload.payload_id
                with other.acquire(payload_id=name, input_ids=ROWS) as shared:
                    assert shared.payload.selection == ClientIds()
                    assert torch.equal(
                        shared.columns["scored_logprobs"], payload.columns["scored_logprobs"]
                    )


class TestForms:
    def test_a_rectangle_is_read_at_each_rows_own_positions(self, session: tl.Session) -> None:
        rectangle = torch.full((3, 7, 4), -7)
        flat, start = some_ids(), 0
        for row, tokens in enumerate(ROWS):
            rectangle[row, : len(tokens)] = flat[start : start + len(tokens)]
            start += len(tokens)

        assert torch.equal(asked(session, rectangle), flat)

    def test_a_list_of_rows_is_joined(self, session: tl.Session) -> None:
        flat = some_ids()
        rows = list(flat.split([len(row) for row in ROWS]))

        assert torch.equal(asked(session, rows), flat)
        assert torch.equal(asked(session, [row.tolist() for row in rows]), flat)
        assert torch.equal(asked(session, flat.numpy()), flat)

    @pytest.mark.parametrize("of_all", [False, True], ids=["wanted", "all"])
    def test_windows_take_the_ids_of_wanted_positions(
        self, session: tl.Session, of_all: bool
    ) -> None:
        windows = [(1, 2), (0, 0), (2, 1)]
        rows = list(some_ids().split([len(row) for row in ROWS]))
        wanted = [row[at : at + n] for row, (at, n) in zip(rows, windows, strict=True)]

        got = asked(session, rows if of_all else wanted, windows=windows)

        assert torch.equal(got, torch.cat(wanted))

    def test_fewer_ids_of_a_position_are_filled_up(self, session: tl.Session) -> None:
        ids = some_ids()
        ids[2, 1:] = -1
        ids[4] = -1
        with session.scored_ids(ROWS, ids=ids).result(LONG) as payload:
            tails = payload.columns["log_tail"][:, 0].clone()
            values = payload.columns["scored_logprobs"].clone()
            present = payload.targets.present.sum(1).tolist()

        assert present == [4, 4, 1, 4, 0, 4, 4, 4, 4]
        assert (values[ids < 0] == -torch.inf).all()
        assert tails[4].item() == 0.0


class TestRefusedBeforeAnythingIsSent:
    @pytest.mark.parametrize("bad", [-2, VOCABULARY_SIZE])
    def test_an_id_outside_the_vocabulary(self, session: tl.Session, bad: int) -> None:
        ids = some_ids()
        ids[6, 3] = bad

        with pytest.raises(PayloadInvalidError, match=f"row 2, position 0: id {bad} is outside"):
            session.scored_ids(ROWS, ids=ids)

    def test_an_id_twice(self, session: tl.Session) -> None:
        ids = some_ids()
        ids[1, 3] = ids[1, 0]

        with pytest.raises(PayloadInvalidError, match=r"row 0, position 1: .* is given twice"):
            session.scored_ids(ROWS, ids=ids)

    @pytest.mark.parametrize(
        ("ids", "words"),
        [
            (torch.zeros(POSITIONS), "float32"),
            (torch.zeros(POSITIONS - 1, 2, dtype=torch.long), "9 positions are wanted"),
            (torch.zeros(POSITIONS, dtype=torch.long), "9 positions are wanted"),
            (torch.zeros(POSITIONS, 0, dtype=torch.long), "0 ids a position"),
            (torch.zeros(2, 5, 2, dtype=torch.long), "2 rows and input_ids of 3"),
            (torch.zeros(3, 4, 2, dtype=torch.long), "room for 4"),
            ([[[1], [2]]], "1 rows and input_ids of 3"),
            ([[[1]] * 5, [[1, 2]], [[1]] * 3], "one M for all rows"),
            ([[[1]] * 4, [[1]], [[1]] * 3], "5 of its 5 positions"),
            ("ids", "cannot be read"),
        ],
    )
    def test_ids_of_no_such_shape(self, session: tl.Session, ids: object, words: str) -> None:
        with pytest.raises(PayloadInvalidError, match=words):
            session.scored_ids(ROWS, ids=ids)  # type: ignore[arg-type]

    def test_no_ids_at_all(self, session: tl.Session) -> None:
        with pytest.raises(PayloadInvalidError, match="ids is None: give the ids to score"):
            session.scored_ids(ROWS, ids=None)  # type: ignore[arg-type]

    @pytest.mark.parametrize("given", [5, 1.5])
    def test_what_lists_no_ids(self, session: tl.Session, given: object) -> None:
        with pytest.raises(PayloadInvalidError, match=r"ids are .*give a tensor of integers"):
            session.scored_ids(ROWS, ids=given)  # type: ignore[arg-type]

    def test_more_a_position_than_the_teacher_gives(self, session: tl.Session) -> None:
        most = session.teacher.top_k
        ids = torch.arange(most + 1).expand(POSITIONS, -1)

        with pytest.raises(PayloadInvalidError, match=f"the teacher gives 1 to {most}") as caught:
            session.scored_ids(ROWS, ids=ids)

        assert caught.value.facts["limit"] == most

    def test_more_than_one_request_may_hold(self, session: tl.Session) -> None:
        limit = session.terms.max_request_tokens * MAX_IDS_PER_TOKEN
        rows = [[1] * 4000] * 2
        each = limit // 8000 + 1
        ids = torch.arange(each, dtype=torch.int32).expand(8000, -1)

        with pytest.raises(PayloadInvalidError, match=f"the server takes {limit} at a time"):
            session.scored_ids(rows, ids=ids)


class TestRefusedByTheServer:
    """What a client of another make may send."""

    def send(self, session: tl.Session, ids: torch.Tensor, *, each: int, request: str) -> object:
        """Send ids as they are, which this client would refuse."""
        scoring = Scoring(
            session_id=session.terms.session_id,
            request_id=request,
            input_ids=torch.tensor([7, 8], dtype=torch.int32).numpy().tobytes(),
            row_lengths=[2],
            prefix_ids=b"",
            prefix_lengths=(),
            row_windows=(),
            mask_bad_rows=False,
            ids=ids.to(torch.int32).numpy().tobytes(),
            ids_per_position=each,
        )
        lease = session._calls.score(scoring, what="ids", timeout=LONG).result(LONG)
        session._calls.release(session.terms.session_id, lease.lease_id, timeout=LONG)
        return lease.lease_id

    @pytest.mark.parametrize(
        ("ids", "each", "words"),
        [
            ([[1, 2], [3, VOCABULARY_SIZE]], 2, "row 0, position 1: id 1500 is outside"),
            ([[1, 2], [3, -2]], 2, "row 0, position 1: id -2 is outside"),
            ([[1, 1], [3, 4]], 2, "row 0, position 0: id 1 is given twice"),
            ([[1, 2]], 2, "take 16 bytes, and 8 came"),
            ([[1, 2], [3, 4]], 1, "take 8 bytes, and 16 came"),
            ([[1, 2], [3, 4]], -3, "-3 ids a position"),
            ([list(range(1025))] * 2, 1025, "1025 ids a position"),
        ],
    )
    def test_ids_that_cannot_be_scored(
        self, session: tl.Session, ids: list[list[int]], each: int, words: str
    ) -> None:
        with pytest.raises(PayloadInvalidError, match=words):
            self.send(session, torch.tensor(ids), each=each, request=next(names))

    def test_a_retry_brings_the_same_lease_and_other_ids_under_its_name_are_refused(
        self, session: tl.Session
    ) -> None:
        ids = torch.tensor([[1, 2], [3, 4]])
        self.send(session, ids, each=2, request="again")

        with pytest.raises(RequestInvalidError, match="again"):
            self.send(session, ids + 1, each=2, request="again")

    def test_a_teacher_that_publishes(self, client: tl.Client) -> None:
        with (
            client.open_publisher(a_teacher("publishes"), pool_size_bytes=1 << 18),
            client.open_session(a_student("publishes")) as session,
        ):
            future = session.scored_ids([[1, 2]], ids=torch.tensor([[1], [2]]))
            with pytest.raises(NotAllowedError, match="acquire its steps"):
                future.result(LONG)


def test_bad_rows_are_masked_with_ids_of_minus_one(service: Service) -> None:
    def spoil(chunk: torch.Tensor) -> torch.Tensor:
        chunk[0, 0] = torch.nan
        return chunk

    service.teacher.spoil = spoil
    ids = torch.tensor([[1, 2]] * 3)
    with service.session() as (_, session):
        with pytest.raises(PayloadInvalidError, match="row 0 hold a NaN"):
            session.scored_ids([[5, 6, 7]], ids=ids).result(LONG)
        future = session.scored_ids([[5, 6, 7]], ids=ids, bad_rows="mask")
        with future.result(LONG) as payload:
            assert payload.columns["scored_ids"].unique().tolist() == [-1]
            assert payload.columns["row_status"].tolist() == [tl.RowStatus.NAN]
            assert not payload.targets.valid.any()


class TestBytesOfTheReply:
    """Over a stream, counted where they pass."""

    @pytest.fixture
    def counted(
        self, server: tl.testing.ServerProcess, tmp_path_factory: pytest.TempPathFactory
    ) -> Iterator[tuple[tl.Session, CountingTunnel, tl.Client]]:
        near = tmp_path_factory.mktemp("tunnel") / "s"
        with counting(near, Path(server.address.removeprefix("unix:"))) as tunnel:
            with tl.connect(f"unix:{near}") as client:
                profile = a_profile(transports=("stream",), student_id="counted")
                with client.open_session(profile) as session:
                    yield session, tunnel, client

    def bytes_of(
        self,
        counted: tuple[tl.Session, CountingTunnel, tl.Client],
        positions: int,
        entries: int,
    ) -> int:
        session, tunnel, client = counted
        row = torch.arange(positions) % VOCABULARY_SIZE
        ids = torch.arange(entries).expand(positions, -1)
        before = tunnel.from_server
        with session.scored_ids(row.unsqueeze(0), ids=ids).result(LONG) as payload:
            assert payload.columns["scored_logprobs"].shape == (positions, entries)
        assert client._returner.wait(LONG)
        return tunnel.from_server - before

    def test_grow_with_positions_times_ids_and_with_nothing_else(
        self, counted: tuple[tl.Session, CountingTunnel, tl.Client]
    ) -> None:
        self.bytes_of(counted, 8, 2)  # what a connection says once

        small = self.bytes_of(counted, 400, 32)
        long, wide = self.bytes_of(counted, 800, 32), self.bytes_of(counted, 400, 64)
        both = self.bytes_of(counted, 800, 64)

        # An id and its log-probability, and beside them 12 bytes a position.
        entry, beside, slack = 8, 12, 4096
        assert abs(small - (400 * 32 * entry + 400 * beside)) < slack
        assert abs((wide - small) - 400 * 32 * entry) < slack
        assert abs((long - small) - 400 * (32 * entry + beside)) < slack
        assert abs((both - long - wide + small) - 400 * 32 * entry) < 2 * slack
        assert both < 800 * HEAD_ROWS * 2 / 4  # the logits in two bytes each


class CountingTunnel(Tunnel):
    """A tunnel that counts what comes from the server."""

    from_server = 0

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        """See ``Tunnel``; an end of an odd number is the server's."""
        of_server = self._ends.index(source) % 2 == 1
        with suppress(OSError):
            while piece := source.recv(1 << 17):
                if of_server:
                    self.from_server += len(piece)
                target.sendall(piece)
        self._end(target)


@contextmanager
def counting(near: Path, far: Path) -> Iterator[CountingTunnel]:
    made = CountingTunnel(near, far, socket.SOCK_STREAM)
    try:
        yield made
    finally:
        made.cut()


def asked(session: tl.Session, ids: object, **given: object) -> torch.Tensor:
    """The ids of the payload that comes for some form of them."""
    future = session.scored_ids(ROWS, ids=ids, **given)  # type: ignore[arg-type]
    with future.result(LONG) as payload:
        return payload.columns["scored_ids"].long()


def coarse(logprobs: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of some ids and of everything else together."""
    rest = logprobs.scatter(1, ids, -torch.inf).logsumexp(1, keepdim=True)
    return torch.cat([logprobs.gather(1, ids), rest], 1)


def close(got: torch.Tensor, exact: torch.Tensor) -> None:
    torch.testing.assert_close(got.double(), exact, atol=2e-5, rtol=1e-5)
