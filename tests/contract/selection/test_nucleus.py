"""Nuclei: enough of the mass is kept, the rest is in the tail, and nothing is lost by packing."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from teacher_logits.errors import PayloadInvalidError, RequestInvalidError
from teacher_logits.selection import Selection, select_top_k
from teacher_logits.selection.nucleus import JaggedEntries, cap_nucleus, pack, unpack
from teacher_logits.selection_rules import Nucleus

TEMPERATURES = (1.0, 2.0)


@st.composite
def selections(draw: st.DrawFn) -> tuple[torch.Tensor, Selection]:
    """Logits from flat to peaked, and what is selected of them."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    logits = torch.randn(4, draw(st.sampled_from([5, 40])), generator=generator)
    logits = logits * draw(st.sampled_from([0.1, 2.0, 8.0]))
    return logits, select_top_k(logits, k=16, temperatures=TEMPERATURES)


masses = st.sampled_from([0.05, 0.5, 0.9, 0.999, 1.0])


@given(selections(), masses, st.integers(1, 20))
def test_an_entry_stays_while_less_than_the_mass_lies_before_it(
    made: tuple[torch.Tensor, Selection], mass: float, least: int
) -> None:
    _, plain = made

    got = cap_nucleus(plain, Nucleus(mass=mass, least=least), temperatures=TEMPERATURES)

    masses_there = plain.topk_logprobs.double().exp()
    before = masses_there.cumsum(1) - masses_there
    stays = ((before < mass) | (torch.arange(16) < least)) & (plain.topk_ids >= 0)
    assert torch.equal(got.topk_ids, torch.where(stays, plain.topk_ids, -1))
    assert torch.equal(got.topk_logprobs[stays], plain.topk_logprobs[stays])
    assert (got.topk_logprobs[~stays] == -torch.inf).all()


@given(selections(), masses)
def test_the_tail_is_the_mass_outside_at_every_temperature(
    made: tuple[torch.Tensor, Selection], mass: float
) -> None:
    logits, plain = made

    got = cap_nucleus(plain, Nucleus(mass=mass), temperatures=TEMPERATURES)

    for column, temperature in enumerate(TEMPERATURES):
        logprobs = (logits.double() / temperature).log_softmax(1)
        kept = torch.zeros_like(logprobs, dtype=torch.bool)
        for row, ids in enumerate(got.topk_ids.long()):
            kept[row, ids[ids >= 0]] = True
        exact = logprobs.masked_fill(kept, -torch.inf).logsumexp(1)
        torch.testing.assert_close(got.log_tail[:, column].double(), exact, atol=1e-5, rtol=1e-5)


@given(selections(), masses)
def test_what_was_packed_is_unpacked(made: tuple[torch.Tensor, Selection], mass: float) -> None:
    cut = cap_nucleus(made[1], Nucleus(mass=mass), temperatures=TEMPERATURES)

    entries = pack(cut.topk_ids, cut.topk_logprobs)
    ids, logprobs = unpack(entries, 16)

    assert torch.equal(ids, cut.topk_ids)
    assert torch.equal(logprobs, cut.topk_logprobs)
    assert len(entries.ids) == int((cut.topk_ids >= 0).sum())


def test_more_entries_than_fit_are_refused() -> None:
    entries = JaggedEntries(
        ids=torch.arange(3), logprobs=torch.zeros(3), offsets=torch.tensor([0, 3])
    )

    with pytest.raises(PayloadInvalidError, match="3 entries, and a rectangle of 2"):
        unpack(entries, 2)


def test_other_temperatures_than_the_selections_are_refused() -> None:
    plain = select_top_k(torch.zeros(1, 4), k=2, temperatures=TEMPERATURES)

    with pytest.raises(PayloadInvalidError, match="1 temperatures are given"):
        cap_nucleus(plain, Nucleus(mass=0.5))


@pytest.mark.parametrize("mass", [0.0, -1.0, 1.5, float("nan"), "most", True])
def test_a_mass_that_is_no_share_is_refused(mass: float) -> None:
    with pytest.raises(RequestInvalidError, match="nucleus of mass"):
        Nucleus(mass=mass)


@pytest.mark.parametrize("least", [0, -3, 1.5])
def test_fewer_than_one_entry_is_refused(least: int) -> None:
    with pytest.raises(RequestInvalidError, match="at least"):
        Nucleus(mass=0.9, least=least)


def test_what_is_cut_keeps_its_mass_however_large_the_logits() -> None:
    cut = cap_nucleus(select_top_k(torch.full((1, 8), 1e30), k=8), Nucleus(mass=0.5))

    kept = int((cut.topk_ids >= 0).sum())
    assert 4 <= kept <= 5
    torch.testing.assert_close(cut.log_tail.exp(), torch.tensor([[1 - kept / 8]]))
