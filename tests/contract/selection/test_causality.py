"""The causality probe: what moves first when a token is changed."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from teacher_logits.errors import PayloadInvalidError
from teacher_logits.selection import select_top_k
from teacher_logits.selection.causality import (
    CausalityProbe,
    Verdict,
    causality_verdict,
    signature,
    worst,
)

LENGTH = 16


def scores(*, moved_from: int | None, moved_to: int = LENGTH, by: float = 0.5) -> torch.Tensor:
    """Signatures [16,3]: some of their numbers off by ``by`` at some positions."""
    base = torch.arange(LENGTH * 3.0).view(LENGTH, 3)
    if moved_from is not None:
        base[moved_from:moved_to, 1] += by
    return base


def probe(position: int, changed: torch.Tensor, **settings: int) -> CausalityProbe:
    base = scores(moved_from=None)
    return causality_verdict(base, base.clone(), changed, position=position, **settings)


class TestVerdict:
    @given(st.integers(0, LENGTH - 1), st.none() | st.integers(0, LENGTH - 1))
    def test_says_what_moved_first_against_what_was_changed(
        self, position: int, first: int | None
    ) -> None:
        got = probe(position, scores(moved_from=first))

        assert got.first_changed == first
        assert got.position == position
        if first is None:
            assert got.verdict is Verdict.UNMOVED
        elif first == position:
            assert got.verdict is Verdict.OK
        else:
            assert got.verdict is (Verdict.LATE if first > position else Verdict.EARLY)

    def test_names_a_change_that_reaches_the_next_document(self) -> None:
        leaking = scores(moved_from=4)

        assert probe(4, leaking).verdict is Verdict.OK
        assert probe(4, leaking, document_end=9).verdict is Verdict.LEAKS
        assert probe(4, scores(moved_from=4, moved_to=9), document_end=9).verdict is Verdict.OK

    @pytest.mark.parametrize(("by", "first"), [(9e-4, None), (2e-3, 4)])
    def test_takes_less_than_a_thousandth_for_rounding(self, by: float, first: int | None) -> None:
        base = torch.zeros(8, 2)
        changed = base.clone()
        changed[4:, 1] = by

        assert causality_verdict(base, base, changed, position=4).first_changed == first

    @pytest.mark.parametrize(("by", "verdict"), [(0.9, Verdict.UNMOVED), (1.1, Verdict.OK)])
    def test_a_change_must_exceed_ten_times_the_noise(self, by: float, verdict: Verdict) -> None:
        base = torch.zeros(8, 2)
        repeat, changed = base.clone(), base.clone()
        repeat[7, 0] = 0.1
        changed[4:, 1] = by

        got = causality_verdict(base, repeat, changed, position=4)

        assert got.verdict is verdict
        assert got.noise == pytest.approx(0.1)
        assert got.threshold == pytest.approx(1.0)

    def test_equal_infinities_have_not_moved_and_others_have(self) -> None:
        base = torch.full((8, 2), -math.inf)
        changed = base.clone()
        changed[5, 1] = 1.0

        assert causality_verdict(base, base.clone(), changed, position=5).verdict is Verdict.OK

    def test_a_nan_has_moved(self) -> None:
        base = torch.zeros(8)
        changed = base.clone()
        changed[3] = math.nan

        assert causality_verdict(base, base.clone(), changed, position=5).first_changed == 3

    def test_reads_as_a_sentence_with_its_numbers(self) -> None:
        assert "late: token 4 was changed and the first to move is position 5" in str(
            probe(4, scores(moved_from=5))
        )
        assert "1 token(s) late" in str(probe(4, scores(moved_from=5)))
        assert "first to move is none" in str(probe(4, scores(moved_from=None)))

    @pytest.mark.parametrize("position", [-1, LENGTH])
    def test_of_a_token_that_is_not_there_is_refused(self, position: int) -> None:
        with pytest.raises(PayloadInvalidError, match=f"token {position} was changed"):
            probe(position, scores(moved_from=None))

    def test_of_signatures_of_different_shapes_is_refused(self) -> None:
        with pytest.raises(PayloadInvalidError, match="have one shape"):
            probe(4, torch.zeros(LENGTH, 2))


def test_the_worst_of_several_probes_speaks_for_them() -> None:
    good, late, early = (probe(4, scores(moved_from=first)) for first in (4, 5, 3))

    assert worst([good, early, late]) is early
    assert worst([good, good, late]) is late
    assert worst([good]) is good


def test_the_signature_of_a_selection_is_its_numbers() -> None:
    rows = torch.randn(5, 40, generator=torch.Generator().manual_seed(0))
    selection = select_top_k(rows, k=3)

    got = signature(selection)

    assert got.shape == (5, 4)
    assert torch.equal(got[:, :3], selection.topk_logprobs)
    assert torch.equal(got[:, 3], selection.logsumexp[:, 0])


@given(st.integers(0, 11))
def test_a_causal_model_passes_at_every_token(position: int) -> None:
    table = torch.randn(20, 40, generator=torch.Generator().manual_seed(1))
    ids = torch.arange(12)
    changed = ids.clone()
    changed[position] = 19

    def run(tokens: torch.Tensor) -> torch.Tensor:
        return signature(select_top_k(table[tokens].cumsum(0), k=4))

    got = causality_verdict(run(ids), run(ids), run(changed), position=position)

    assert got.verdict is Verdict.OK
