"""Selections beside plain top-k: nuclei and samples, from a server's teacher and from publishers.

The server's teacher is one whose logits anybody can work out.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from tests.client.conftest import a_profile
from tests.client.publishing.a_publisher import (
    VOCABULARY,
    K,
    a_student,
    a_teacher,
    expected,
    some_rows,
)
from tests.transport_suite.dense_teacher import VOCABULARY_SIZE, head_logits

import teacher_logits_client as tl
from teacher_logits.digest import row_digest
from teacher_logits.errors import PayloadInvalidError, RequestInvalidError, SessionRefusedError
from teacher_logits.selection import Selection, select_top_k
from teacher_logits.selection.nucleus import cap_nucleus
from teacher_logits.selection.sampling import sample_threshold
from teacher_logits.selection.uniforms import row_counters, uniforms
from teacher_logits.selection_rules import ClientIds
from teacher_logits_client.losses import Tail

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).parents[3]
LONG = 30.0
ROWS = [[3, 1, 4, 1, 5, 9], [2, 6, 5]]
M = 12
SAMPLED = tl.Sampled(seed=77)
CUT = tl.Nucleus(mass=0.9, least=2)
names = (f"teacher-{number}" for number in itertools.count())


@pytest.fixture(scope="module")
def client() -> Iterator[tl.Client]:
    engine = "tests.transport_suite.dense_teacher:make"
    with (
        tl.testing.serve(engine, folder=ROOT, pool_size="64MiB", slab_size="64MiB") as server,
        tl.connect(server.address) as found,
    ):
        yield found


@pytest.fixture(scope="module")
def sampled(client: tl.Client) -> Iterator[tl.Session]:
    with client.open_session(a_profile(top_k=M, selection=SAMPLED)) as found:
        yield found


def logits_of(row: list[int]) -> torch.Tensor:
    return head_logits(row)[:, :VOCABULARY_SIZE]


def columns_of(
    session: tl.Session, rows: list[list[int]], **given: object
) -> dict[str, torch.Tensor]:
    """Copies of the columns that come for some rows."""
    with session.score(rows, **given).result(LONG) as payload:  # type: ignore[arg-type]
        return {name: tensor.clone() for name, tensor in payload.columns.items()}


class TestSamples:
    def test_are_drawn_by_seed_row_and_position(self, sampled: tl.Session) -> None:
        got = columns_of(sampled, ROWS)

        for row, part in zip(ROWS, (slice(0, 6), slice(6, 9)), strict=True):
            digest = torch.frombuffer(bytearray(row_digest(row)), dtype=torch.uint8).view(1, 16)
            places = torch.arange(len(row))
            drawn = uniforms(SAMPLED.seed, row_counters(digest), places, torch.zeros_like(places))
            right = sample_threshold(logits_of(row), m=M, uniforms=drawn)
            assert torch.equal(got["sampled_ids"][part], right.ids)
            assert torch.equal(got["sampled_weights"][part], right.weights.float())
            assert torch.equal(got["entropy"][part], right.entropy.float())

    def test_are_the_same_in_another_order_in_windows_and_from_another_session(
        self, client: tl.Client, sampled: tl.Session
    ) -> None:
        whole = columns_of(sampled, ROWS)
        turned = columns_of(sampled, ROWS[::-1])
        window = columns_of(sampled, ROWS, windows=[(2, 3), (1, 2)])
        with client.open_session(a_profile(top_k=M, selection=SAMPLED, student_id="b")) as other:
            again = columns_of(other, [ROWS[1]])

        for name in ("sampled_ids", "sampled_weights"):
            first, second = whole[name][:6], whole[name][6:]
            assert torch.equal(turned[name], torch.cat([second, first]))
            assert torch.equal(window[name], torch.cat([first[2:5], second[1:]]))
            assert torch.equal(again[name], second)

    def test_differ_with_the_seed_of_a_request(self, sampled: tl.Session) -> None:
        same = columns_of(sampled, ROWS, seed=SAMPLED.seed)["sampled_ids"]
        other = columns_of(sampled, ROWS, seed=78)["sampled_ids"]

        assert torch.equal(same, columns_of(sampled, ROWS)["sampled_ids"])
        assert not torch.equal(same, other)

    def test_say_what_they_are(self, sampled: tl.Session) -> None:
        with sampled.score(ROWS, seed=5).result(LONG) as payload:
            assert payload.payload.selection == tl.Sampled(seed=5)
            assert payload.payload.top_k == M
            assert payload.targets.sampled
            assert payload.targets.clone().sampled
            assert not payload.targets.valid[5]
            loose = [each.name for each in payload.checks if each.verdict is tl.Verdict.UNCHECKED]
        assert loose == ["lookup_identity"]
        chosen = [check for check in sampled.checks if check.name == "selection"]
        assert [check.verdict for check in chosen] == [tl.Verdict.PASSED]

    def test_take_the_actual_log_probability_along(self, sampled: tl.Session) -> None:
        got = columns_of(sampled, [ROWS[0]])["actual_logprob"]

        following = torch.tensor(ROWS[0][1:]).unsqueeze(1)
        exact = logits_of(ROWS[0]).double().log_softmax(1)[:-1].gather(1, following).squeeze(1)
        torch.testing.assert_close(got[:-1].double(), exact, atol=1e-5, rtol=1e-5)
        assert got[-1] == 0

    def test_teach_what_the_dense_teacher_does_on_average(self, sampled: tl.Session) -> None:
        student = torch.zeros(6, VOCABULARY_SIZE, dtype=torch.float64, requires_grad=True)
        total = torch.zeros_like(student)
        value, seeds = 0.0, 60
        for seed in range(seeds):
            with sampled.score([ROWS[0]], seed=seed).result(LONG) as payload:
                loss, _ = tl.losses.forward_kl(student, payload.targets)
                (slope,) = torch.autograd.grad(loss, student)
            total += slope / seeds
            value += loss.item() / seeds

        p = logits_of(ROWS[0]).double().softmax(1)[:5]
        # Of a student that says nothing the KL has no spread at all: log V less the entropy.
        dense = (p * (p * VOCABULARY_SIZE).log()).sum().item()
        assert value == pytest.approx(dense, rel=1e-5)
        exact = torch.full_like(p, 1 / VOCABULARY_SIZE) - p
        once = (slope[:5] - exact).square().sum()
        assert (total[:5] - exact).square().sum() < once / 10

    @pytest.mark.parametrize(
        ("loss", "name"),
        [
            (tl.losses.reverse_kl, "reverse_kl"),
            (tl.losses.generalised_jsd, "generalised_jsd"),
            (tl.losses.skew_kl, "skew_kl"),
            (tl.losses.skew_reverse_kl, "skew_reverse_kl"),
            (tl.losses.total_variation, "total_variation"),
            (tl.losses.logprob_mse, "logprob_mse"),
        ],
    )
    def test_are_refused_by_a_loss_that_is_not_linear(
        self, sampled: tl.Session, loss: Callable[..., object], name: str
    ) -> None:
        with sampled.score(ROWS).result(LONG) as payload:
            with pytest.raises(
                PayloadInvalidError, match="take forward_kl or soft_cross_entropy"
            ) as caught:
                loss(torch.zeros(9, VOCABULARY_SIZE), payload.targets)

        assert caught.value.facts["loss"] == name
        assert caught.value.facts["losses"] == "forward_kl, soft_cross_entropy"

    @pytest.mark.parametrize("loss", [tl.losses.forward_kl, tl.losses.soft_cross_entropy])
    def test_go_into_the_linear_losses_with_each_tail_that_leaves_the_student_whole(
        self, sampled: tl.Session, loss: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        student = torch.randn(9, VOCABULARY_SIZE, generator=torch.Generator().manual_seed(1))
        with sampled.score(ROWS).result(LONG) as payload:
            found = [
                loss(student, payload.targets, tail=tail)[0].item()
                for tail in (Tail.BUCKET, Tail.TRUNCATED, Tail.TEACHER_RENORMALISED)
            ]
            with pytest.raises(PayloadInvalidError, match="renormalised on the sampled ids"):
                loss(student, payload.targets, tail=Tail.RENORMALISED)

        assert found == pytest.approx([found[0]] * 3, rel=1e-6)

    def test_go_into_losses_from_hidden_states_alike(self, sampled: tl.Session) -> None:
        generator = torch.Generator().manual_seed(2)
        hidden = torch.randn(9, 4, generator=generator, dtype=torch.float64, requires_grad=True)
        weight = torch.randn(VOCABULARY_SIZE, 4, generator=generator, dtype=torch.float64)
        with sampled.score(ROWS).result(LONG) as payload:
            plain, _ = tl.losses.forward_kl(hidden @ weight.T, payload.targets)
            fused, _ = tl.losses.forward_kl(tl.losses.from_hidden(hidden, weight), payload.targets)
            with pytest.raises(PayloadInvalidError, match="forward_kl or soft_cross_entropy"):
                tl.losses.reverse_kl(tl.losses.from_hidden(hidden, weight), payload.targets)

        slopes = [torch.autograd.grad(loss, hidden)[0] for loss in (plain, fused)]
        torch.testing.assert_close(plain.detach(), fused.detach())
        torch.testing.assert_close(*slopes)

    def test_have_no_temperature_but_1(self, sampled: tl.Session) -> None:
        with sampled.score(ROWS).result(LONG) as payload:
            with pytest.raises(PayloadInvalidError, match="no temperature 2"):
                payload.targets_at(2.0)

    def test_have_no_log_probabilities_to_compare(self, sampled: tl.Session) -> None:
        with sampled.score(ROWS).result(LONG) as payload:
            with pytest.raises(PayloadInvalidError, match="no log-probabilities"):
                tl.compare_with_reference(payload.targets, torch.zeros(9, VOCABULARY_SIZE))

    def test_a_session_of_samples_has_ids_scored_too(self, sampled: tl.Session) -> None:
        with sampled.scored_ids([[1, 2]], ids=torch.tensor([[4], [5]])).result(LONG) as payload:
            assert payload.payload.selection == ClientIds()
            assert not payload.targets.sampled

    def test_are_shared_with_a_session_of_samples_and_with_no_other(
        self, client: tl.Client, sampled: tl.Session
    ) -> None:
        asked = a_profile(top_k=M, selection=tl.Sampled(seed=1), student_id="c")
        with (
            sampled.score(ROWS, seed=9).result(LONG) as payload,
            client.open_session(asked) as friend,
            client.open_session(a_profile(top_k=M, student_id="d")) as stranger,
        ):
            name = payload.payload.payload_id
            with friend.acquire(payload_id=name, input_ids=ROWS) as shared:
                assert shared.payload.selection == tl.Sampled(seed=9)
            with pytest.raises(PayloadInvalidError, match=r"its selection is Sampled\(seed=9\)"):
                stranger.acquire(payload_id=name)


class TestNuclei:
    @pytest.mark.parametrize("value_type", [tl.ElementType.FLOAT16, tl.ElementType.FLOAT32])
    def test_are_plain_selections_cut(self, client: tl.Client, value_type: tl.ElementType) -> None:
        cut = tl.Nucleus(mass=0.3)
        asked = a_profile(top_k=40, selection=cut, temperatures=(2.0,), value_type=value_type)
        with client.open_session(asked) as session:
            with session.score(ROWS).result(LONG) as payload:
                got = {name: tensor.clone() for name, tensor in payload.columns.items()}
                targets = payload.targets_at(2.0).clone()
                assert payload.payload.selection == cut

        logits = torch.cat([logits_of(row) for row in ROWS])
        plain = select_top_k(logits, k=40, temperatures=(1.0, 2.0))
        right = cap_nucleus(plain, cut, temperatures=(1.0, 2.0))
        assert torch.equal(got["topk_ids"], right.topk_ids)
        assert bool((right.topk_ids < 0).any())
        torch.testing.assert_close(got["topk_logprobs"], right.topk_logprobs.to(targets_type(got)))
        torch.testing.assert_close(got["log_tail"], right.log_tail)
        total = targets.topk_logprobs.double().exp().sum(1) + targets.log_tail.double().exp()
        torch.testing.assert_close(total, torch.ones_like(total))

    def test_a_publishers_say_so_to_who_takes_what_there_is(self, client: tl.Client) -> None:
        ids, lengths, logits = some_rows(4)
        name = next(names)
        with (
            client.open_publisher(a_teacher(name, selection=CUT)) as publisher,
            client.open_session(a_student(name)) as session,
        ):
            with publisher.reserve(0, input_ids=ids, lengths=lengths) as draft:
                tl.select_top_k(logits * 4, out=draft)
            with session.acquire(step=0, input_ids=ids, lengths=lengths, timeout=LONG) as batch:
                kept = batch.columns["topk_ids"].clone()
                tails = batch.columns["log_tail"].clone()
                assert bool(batch.targets.log_tail.isfinite().all())
            payload = draft.payload
        whole = expected(ids, lengths, logits * 4)
        assert isinstance(whole, Selection)
        right = cap_nucleus(whole, CUT, temperatures=payload.temperatures)
        assert payload.selection == CUT
        assert torch.equal(kept, right.topk_ids)
        assert bool((kept < 0).any())
        torch.testing.assert_close(tails, right.log_tail)


def targets_type(columns: dict[str, torch.Tensor]) -> torch.dtype:
    return columns["topk_logprobs"].dtype


class TestRefused:
    def open(self, client: tl.Client, **given: object) -> None:
        with client.open_session(a_profile(**given)):
            pass

    def test_a_sample_at_other_temperatures(self, client: tl.Client) -> None:
        with pytest.raises(SessionRefusedError, match=r"selection_unavailable.*temperature 2"):
            self.open(client, selection=SAMPLED, temperatures=(2.0,))

    def test_more_entries_at_least_than_at_most(self, client: tl.Client) -> None:
        with pytest.raises(SessionRefusedError, match=r"selection_unavailable.*top_k 8"):
            self.open(client, selection=tl.Nucleus(mass=0.5, least=9))

    def test_columns_that_a_sample_does_not_have(self, client: tl.Client) -> None:
        with pytest.raises(SessionRefusedError, match=r"column_unavailable.*no log_tail"):
            self.open(client, selection=SAMPLED, columns=("log_tail",))
        self.open(client, selection=SAMPLED, columns=("sampled_weights", "entropy"))

    @pytest.mark.parametrize("asked", [SAMPLED, CUT, tl.TopK()])
    def test_another_selection_than_is_published(self, client: tl.Client, asked: object) -> None:
        name = next(names)
        has = tl.TopK() if asked == CUT else CUT
        with client.open_publisher(a_teacher(name, selection=has)):
            with pytest.raises(SessionRefusedError, match="selection_unavailable") as caught:
                client.open_session(a_student(name, selection=asked, temperatures=()))

        assert caught.value.violations[0].facts["teacher_selection"] == has.name

    def test_publishers_that_select_differently(self, client: tl.Client) -> None:
        name = next(names)
        grid = tl.BatchGrid(global_batch_size=4, data_parallel_size=2, micro_batch_size=1)
        with client.open_publisher(a_teacher(name, batch_grid=grid, selection=CUT)):
            with pytest.raises(SessionRefusedError, match="teacher_grid_conflict"):
                client.open_publisher(a_teacher(name, batch_grid=grid, data_parallel_rank=1))

    def test_a_seed_where_nothing_is_sampled(self, client: tl.Client) -> None:
        with client.open_session(a_profile()) as session:
            with pytest.raises(PayloadInvalidError, match="no sample"):
                session.score(ROWS, seed=1)

    def test_a_seed_that_is_none(self, sampled: tl.Session) -> None:
        with pytest.raises(RequestInvalidError, match="seed is -1"):
            sampled.score(ROWS, seed=-1)

    @pytest.mark.parametrize("given", [ClientIds(), "nucleus", 0.9])
    def test_what_no_session_selects_by(self, given: object) -> None:
        with pytest.raises(RequestInvalidError, match="selection of a student"):
            a_profile(selection=given)

    @pytest.mark.parametrize("given", [SAMPLED, ClientIds(), None])
    def test_what_no_publisher_selects_by(self, given: object) -> None:
        with pytest.raises(RequestInvalidError, match="selection of a teacher"):
            a_teacher("t", selection=given)

    def test_a_publisher_of_samples_who_is_told_where_they_come_from(self) -> None:
        with pytest.raises(
            RequestInvalidError, match=r"drawn by a server's engine \(serve --model"
        ):
            a_teacher("t", selection=SAMPLED)


def test_a_sharded_head_is_published_by_one_of_its_ranks(client: tl.Client) -> None:
    """What a tensor-parallel teacher does: each shard selects, one rank writes what they merge."""
    ids, lengths, logits = some_rows(6)
    name = next(names)
    rows = torch.cat([row[:length] for row, length in zip(logits, lengths, strict=True)])
    following = torch.cat(
        [
            torch.cat([row[1:length], torch.tensor([-1])])
            for row, length in zip(ids, lengths, strict=True)
        ]
    )
    with (
        client.open_publisher(a_teacher(name)) as publisher,
        client.open_session(a_student(name)) as session,
    ):
        shards = [
            tl.select_partial(
                rows[:, start:stop],
                k=K,
                first_id=start,
                vocab_size=VOCABULARY,
                temperatures=(1.0, 2.0),
                next_ids=following,
            )
            for start, stop in ((0, 4), (4, 30), (30, 56))
        ]
        with publisher.reserve(0, input_ids=ids, lengths=lengths) as draft:
            draft.write(**tl.merge_partials(shards).finish().columns)
        with session.acquire(step=0, input_ids=ids, lengths=lengths, timeout=LONG) as batch:
            assert torch.equal(batch.columns["topk_ids"], expected_ids(ids, lengths, logits))


def expected_ids(ids: torch.Tensor, lengths: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    found = expected(ids, lengths, logits)
    assert isinstance(found, Selection)
    return found.topk_ids
