"""Samples: of fixed size, of weights that are right on average, the same for the same uniforms."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from teacher_logits.errors import PayloadInvalidError, RequestInvalidError
from teacher_logits.layout import RowStatus
from teacher_logits.selection.sampling import Sample, sample_threshold
from teacher_logits.selection.uniforms import row_counters, uniforms
from teacher_logits.selection_rules import Sampled

sizes = st.sampled_from([1, 2, 7, 16, 50])
fractions = st.floats(0, 1, exclude_max=True)


@st.composite
def rows(draw: st.DrawFn) -> torch.Tensor:
    """Rows from uniform to one id alone, with ties and ids that are ruled out."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    logits = torch.randn(3, draw(st.sampled_from([1, 2, 7, 41, 300])), generator=generator)
    logits = logits * draw(st.sampled_from([0.0, 1.0, 6.0, 40.0]))
    if draw(st.booleans()):
        logits = logits.round()
    if draw(st.booleans()):
        logits[:, torch.rand(logits.shape[1], generator=generator) < 0.6] = -torch.inf
        logits[:, 0] = 1.0
    return logits


def dense(sample: Sample, width: int) -> torch.Tensor:
    ids = sample.ids.long()
    out = torch.zeros(len(ids), width + 1, dtype=torch.float64)
    return out.scatter_add_(1, ids.masked_fill(ids < 0, width), sample.weights)[:, :width]


@given(rows(), sizes, fractions)
def test_a_sample_has_that_many_distinct_ids_of_some_mass_and_weights_of_one(
    logits: torch.Tensor, m: int, u: float
) -> None:
    p = logits.double().softmax(1)

    got = sample_threshold(logits, m=m, uniforms=torch.full((3,), u, dtype=torch.float64))

    for row in range(3):
        ids = got.ids[row][got.ids[row] >= 0]
        assert len(ids) == min(m, int((p[row] > 0).sum())) == len(ids.unique())
        assert (p[row, ids.long()] > 0).all()
    assert (got.weights[got.ids < 0] == 0).all()
    torch.testing.assert_close(got.weights.sum(1), torch.ones(3, dtype=torch.float64))


@given(rows(), sizes, fractions)
def test_no_entry_is_further_from_its_probability_than_the_threshold(
    logits: torch.Tensor, m: int, u: float
) -> None:
    p = logits.double().softmax(1)
    got = sample_threshold(logits, m=m, uniforms=torch.full((3,), u, dtype=torch.float64))

    error = (dense(got, logits.shape[1]) - p).abs()

    assert (error <= got.thresholds.unsqueeze(1) * (1 + 1e-9) + 1e-15).all()


@pytest.mark.parametrize("scale", [0.5, 3.0])
def test_over_all_uniforms_the_mean_is_the_distribution(scale: float) -> None:
    logits = torch.randn(1, 60, generator=torch.Generator().manual_seed(5)) * scale
    steps = 20_000
    grid = (torch.arange(steps, dtype=torch.float64) + 0.5) / steps

    got = sample_threshold(logits.expand(steps, -1), m=8, uniforms=grid)

    # A grid finds each pick's share of the uniforms to within one step.
    mean = dense(got, 60).mean(0)
    bound = float(got.thresholds[0]) * 2 / steps
    assert float((mean - logits[0].double().softmax(0)).abs().max()) <= bound


def test_a_position_is_sampled_alike_whatever_comes_with_it() -> None:
    logits = torch.randn(9, 70_000, generator=torch.Generator().manual_seed(3))
    u = torch.rand(9, generator=torch.Generator().manual_seed(4), dtype=torch.float64)

    together = sample_threshold(logits, m=12, uniforms=u)

    for row in range(9):
        alone = sample_threshold(logits[row : row + 1], m=12, uniforms=u[row : row + 1])
        assert torch.equal(alone.ids[0], together.ids[row])
        assert torch.equal(alone.weights[0], together.weights[row])


def test_the_entropy_and_the_normaliser_are_those_of_the_whole_distribution() -> None:
    logits = torch.randn(4, 500, generator=torch.Generator().manual_seed(6)) * 4
    logits[:, 100:300] = -torch.inf

    got = sample_threshold(logits, m=3, uniforms=torch.zeros(4, dtype=torch.float64))

    logprobs = logits.double().log_softmax(1)
    exact = -(logprobs.exp() * logprobs).nan_to_num(nan=0.0).sum(1)
    torch.testing.assert_close(got.entropy, exact, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(got.logsumexp, logits.double().logsumexp(1))


@pytest.mark.parametrize(
    ("value", "status"),
    [(torch.nan, RowStatus.NAN), (torch.inf, RowStatus.POSITIVE_INFINITY)],
)
def test_a_bad_position_has_no_entries(value: float, status: RowStatus) -> None:
    logits = torch.zeros(2, 6)
    logits[0, 3] = value

    got = sample_threshold(logits, m=4, uniforms=torch.zeros(2, dtype=torch.float64))

    assert got.status.tolist() == [status, RowStatus.OK]
    assert got.ids[0].tolist() == [-1] * 4
    assert got.weights[0].tolist() == [0.0] * 4
    assert (float(got.entropy[0]), float(got.logsumexp[0])) == (0.0, 0.0)


def test_no_positions_are_sampled_as_well() -> None:
    got = sample_threshold(torch.zeros(0, 6), m=4, uniforms=torch.zeros(0, dtype=torch.float64))

    assert got.ids.shape == (0, 4)


def test_a_sample_of_nothing_is_refused() -> None:
    with pytest.raises(PayloadInvalidError, match="sample of 0 entries"):
        sample_threshold(torch.zeros(1, 6), m=0, uniforms=torch.zeros(1))


class TestUniforms:
    def of(self, seed: int, row: int, position: int, draw: int) -> float:
        counters = (torch.tensor([each]) for each in (row, position, draw))
        return uniforms(seed, *counters).item()

    @given(*[st.integers(0, 2**63 - 1)] * 4)
    def test_they_are_splitmix_folded_over_what_they_are_drawn_for(
        self, seed: int, row: int, position: int, draw: int
    ) -> None:
        mask, state = (1 << 64) - 1, seed
        for counter in (row, position, draw):
            state = (state + 0x9E3779B97F4A7C15 + counter) & mask
            state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
            state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
            state ^= state >> 31

        assert self.of(seed, row, position, draw) == (state >> 11) * 2.0**-53

    def test_each_of_the_four_matters(self) -> None:
        found = {self.of(*at) for at in ((1, 1, 1, 1), (9, 1, 1, 1), (1, 2, 1, 1), (1, 1, 2, 1))}

        assert len(found | {self.of(1, 1, 1, 2)}) == 5

    def test_a_seed_of_64_bits_is_taken(self) -> None:
        assert 0 <= self.of(2**64 - 1, 1, 1, 1) < 1

    def test_a_row_counts_by_the_first_bits_of_its_digest(self) -> None:
        digests = torch.arange(32, dtype=torch.uint8).view(2, 16)

        expected = [int.from_bytes(bytes(each[:8].tolist()), "little") for each in digests]
        assert row_counters(digests).tolist() == expected


@pytest.mark.parametrize("seed", [-1, 2**64, 0.5, True, "7"])
def test_a_seed_that_is_none_is_refused(seed: int) -> None:
    with pytest.raises(RequestInvalidError, match="seed"):
        Sampled(seed=seed)


@pytest.mark.parametrize("u", [0.0, 1e-17, 0.5, 1 - 2**-53])
def test_entries_as_large_as_the_threshold_are_picked_once_each_whatever_is_rounded(
    u: float,
) -> None:
    for count in (3, 7, 49, 90, 187):
        drawn = torch.tensor([u], dtype=torch.float64)

        got = sample_threshold(torch.zeros(1, count), m=count, uniforms=drawn)

        assert got.ids[0].sort().values.tolist() == list(range(count))
