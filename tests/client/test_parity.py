"""Parity: targets held against what somebody else computed, and what explains a difference."""

import math
import zipfile
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

import teacher_logits_client as tl
from teacher_logits.errors import PayloadInvalidError
from teacher_logits_client.parity.lookup import EntryReference
from teacher_logits_client.parity.npz import read_npz

OFFSETS = torch.tensor([0, 9, 10, 24])
POSITIONS, V, K = 24, 40, 5


def logits(seed: int = 3) -> torch.Tensor:
    return torch.randn(POSITIONS, V, generator=torch.Generator().manual_seed(seed)) * 3


def targets(given: torch.Tensor, *, temperature: float = 1.0) -> tl.Targets:
    """What a service hands out that has these logits."""
    logprobs = (given / temperature).log_softmax(1)
    kept = logprobs.topk(K, 1)
    rest = logprobs.exp().scatter(1, kept.indices, 0.0).sum(1).log()
    ends = torch.zeros(POSITIONS, dtype=torch.bool)
    ends[OFFSETS[1:] - 1] = True
    return tl.Targets(
        topk_ids=kept.indices.int(),
        topk_logprobs=kept.values,
        log_tail=rest,
        actual_logprob=given.log_softmax(1)[:, 7],
        valid=~ends,
        temperature=temperature,
        row_offsets=OFFSETS,
    )


def moved(given: torch.Tensor, by: int) -> torch.Tensor:
    """Each position has what was `by` positions on; what has none there stays as it is."""
    places = torch.arange(POSITIONS) + by
    rows = torch.arange(3).repeat_interleave(OFFSETS.diff())
    inside = places.clamp(0, POSITIONS - 1)
    here = (places == inside) & (rows[inside] == rows)
    return torch.where(here.unsqueeze(1), given[inside], given)


class TestTheSameNumbers:
    @pytest.mark.parametrize("temperature", [1.0, 2.5])
    def test_hold_as_logits_and_as_log_probabilities(self, temperature: float) -> None:
        own = targets(logits(), temperature=temperature)
        for reference in (logits(), logits() + 7, logits().log_softmax(1)):
            parity = tl.compare_with_reference(own, reference, tolerance=1e-4)
            assert parity.holds
            assert (parity.positions, parity.entries) == (POSITIONS, POSITIONS * K)
            assert (parity.shared_ids, parity.cause) == (1.0, "")
            assert parity.max_abs_diff < 1e-4

    def test_hold_as_padded_rows(self) -> None:
        padded = torch.full((3, 14, V), torch.nan)
        for row, (start, end) in enumerate(pairwise(OFFSETS.tolist())):
            padded[row, : end - start] = logits()[start:end]
        assert tl.compare_with_reference(targets(logits()), padded, tolerance=1e-4).holds

    def test_hold_without_the_columns_that_pad_a_head(self) -> None:
        head = torch.cat([logits(), torch.full((POSITIONS, 3), 60.0)], 1)
        own = targets(logits())
        assert not tl.compare_with_reference(own, head).holds
        assert tl.compare_with_reference(own, head, vocabulary_size=V, tolerance=1e-4).holds

    def test_hold_for_the_ids_that_a_reference_of_entries_names(self) -> None:
        kept = logits().log_softmax(1).topk(3, 1)
        reference = EntryReference(kept.indices, kept.values)
        parity = tl.compare_with_reference(targets(logits()), reference, tolerance=1e-4)
        assert parity.holds
        assert parity.entries == POSITIONS * 3
        assert parity.shared_ids == pytest.approx(3 / K)
        assert (parity.top_k, parity.reference_ids) == (K, 3)

    def test_have_the_same_loss(self) -> None:
        following = torch.full((POSITIONS,), 7)
        parity = tl.compare_with_reference(targets(logits()), logits(), next_ids=following)
        assert parity.served_loss is not None
        assert parity.served_loss == pytest.approx(parity.reference_loss, abs=1e-5)


class TestOtherNumbers:
    def test_are_named_with_the_entry_that_is_furthest_off(self) -> None:
        served = targets(logits())
        off = served.topk_logprobs.clone()
        off[12, 2] -= 1.5
        off[11, 0] -= 0.5
        wrong = tl.Targets(**{**vars(served), "topk_logprobs": off})
        parity = tl.compare_with_reference(wrong, logits())
        assert (parity.worst.row, parity.worst.position) == (2, 2)
        assert parity.worst.token_id == int(served.topk_ids[12, 2])
        assert parity.worst.reference - parity.worst.served == pytest.approx(1.5, abs=1e-4)
        assert parity.max_abs_diff == pytest.approx(1.5, abs=1e-4)
        assert parity.differing_positions == 2
        assert parity.first_difference is not None
        assert (parity.first_difference.row, parity.first_difference.position) == (2, 1)

    @pytest.mark.parametrize("by", [-2, -1, 1, 2])
    def test_that_are_shifted_within_their_rows_are_called_so(self, by: int) -> None:
        parity = tl.compare_with_reference(targets(moved(logits(), by)), logits())
        assert (parity.holds, parity.shift, parity.temperature) == (False, by, None)
        assert ("late" if by < 0 else "early") in parity.cause

    @pytest.mark.parametrize("applied", [0.7, 2.0])
    def test_to_which_a_temperature_was_applied_are_called_so(self, applied: float) -> None:
        parity = tl.compare_with_reference(targets(logits() / applied), logits())
        assert (parity.holds, parity.shift) == (False, None)
        assert parity.temperature == pytest.approx(applied, rel=1e-3)
        assert f"{applied:.3g}" in parity.cause

    def test_of_another_model_have_no_cause_that_is_made_up(self) -> None:
        parity = tl.compare_with_reference(targets(logits()), logits(seed=4))
        assert (parity.holds, parity.shift, parity.temperature) == (False, None, None)
        assert "weights" in parity.cause
        assert parity.shared_ids < 0.5


class TestWhatCannotBeCompared:
    @pytest.mark.parametrize(
        ("reference", "said"),
        [
            (torch.zeros(POSITIONS - 1, V), f"{POSITIONS - 1} positions"),
            (torch.zeros(2, 14, V), r"shape \(2, 14, 40\)"),
            (torch.zeros(POSITIONS, 6), "6 columns"),
            (torch.full((POSITIONS, V), math.nan), "NaN"),
        ],
    )
    def test_is_refused_with_its_numbers(self, reference: torch.Tensor, said: str) -> None:
        with pytest.raises(PayloadInvalidError, match=said):
            tl.compare_with_reference(targets(logits()), reference)

    def test_is_a_reference_of_fewer_ids_than_the_vocabulary_has(self) -> None:
        for narrow in (logits()[:, :30], logits()[:, :30].view(1, POSITIONS, 30)):
            with pytest.raises(PayloadInvalidError, match="30 columns, and the teacher 40 ids"):
                tl.compare_with_reference(targets(narrow), narrow, vocabulary_size=V)

    def test_is_what_has_no_id_in_common(self) -> None:
        ids = torch.full((POSITIONS, 2), V + 1)
        with pytest.raises(PayloadInvalidError, match="none of the"):
            tl.compare_with_reference(targets(logits()), EntryReference(ids, ids.float()))

    def test_is_a_reference_of_no_entries(self) -> None:
        ids = torch.zeros((POSITIONS, 0), dtype=torch.int64)
        with pytest.raises(PayloadInvalidError, match="K at least 1"):
            EntryReference(ids, ids.float())

    def test_is_a_reference_of_entries_at_another_temperature(self) -> None:
        own = targets(logits(), temperature=2.0)
        reference = EntryReference(own.topk_ids.long(), own.topk_logprobs)
        with pytest.raises(PayloadInvalidError, match="temperature 1"):
            tl.compare_with_reference(own, reference)


class TestANpz:
    @pytest.mark.parametrize("kind", ["f2", "f4", "f8", "i2", "i4", "i8", "i1", "u1", "?"])
    def test_is_read_as_numpy_reads_it(self, kind: str, tmp_path: Path) -> None:
        rows = (np.arange(24).reshape(2, 3, 4) % 5).astype(kind)
        given = {
            "rows": rows,
            "turned": np.asfortranarray(rows),
            "none": rows[:0],
            "one": rows[1, 1, 1],
        }
        for save in (np.savez, np.savez_compressed):
            save(tmp_path / "a.npz", **given)
            read = read_npz(tmp_path / "a.npz")
            assert read.keys() == given.keys()
            for name, array in given.items():
                assert np.array_equal(read[name].numpy(), array)
                assert read[name].shape == array.shape

    def test_of_objects_is_refused(self, tmp_path: Path) -> None:
        np.savez(tmp_path / "a.npz", bad=np.array([{}], dtype=object))
        with pytest.raises(ValueError, match=r"bad.npy is of type '\|O'"):
            read_npz(tmp_path / "a.npz")

    def test_that_is_cut_short_is_refused(self, tmp_path: Path) -> None:
        np.save(tmp_path / "a.npy", np.arange(5))
        whole = (tmp_path / "a.npy").read_bytes()
        for size in (0, 7, len(whole) - 1):
            with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
                archive.writestr("a.npy", whole[:size])
            with pytest.raises(ValueError, match=r"a\.npy"):
                read_npz(tmp_path / "a.npz")
