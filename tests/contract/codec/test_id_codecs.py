"""Id codecs: every id comes back, whatever K is and however many are absent."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from teacher_logits.codec.id_codecs import decode_ids, encode_ids, mark_absent, restore_absent
from teacher_logits.encodings import CodecError, Plane, packed_bytes


@st.composite
def ids_below(draw: st.DrawFn, most: int) -> torch.Tensor:
    """Ids [R,K] of which the last may be absent, the largest among them."""
    k = draw(st.integers(1, 13))
    row = st.lists(st.integers(0, most - 1), min_size=k, max_size=k)
    ids = torch.tensor(draw(st.lists(row, min_size=1, max_size=5)), dtype=torch.int32)
    ids[0, 0] = most - 1
    ids[-1, draw(st.integers(1, k)) :] = -1
    return ids


def packed(ids: torch.Tensor) -> torch.Tensor:
    out = torch.empty(len(ids), packed_bytes(ids.shape[1]), dtype=torch.uint8)
    encode_ids(Plane.PACKED18, ids, out)
    return out


@given(ids_below((1 << 24) - 1))
def test_three_byte_planes_bring_every_id_back(ids: torch.Tensor) -> None:
    back = torch.full_like(ids, 77)
    for plane, each in ((Plane.LOW16, 2), (Plane.HIGH8, 1)):
        out = torch.empty(len(ids), each * ids.shape[1], dtype=torch.uint8)
        encode_ids(plane, ids, out)
        decode_ids(plane, out, back)

    assert torch.equal(back, ids)


@given(ids_below((1 << 18) - 1))
def test_eighteen_bits_bring_every_id_back(ids: torch.Tensor) -> None:
    back = torch.full_like(ids, 77)
    decode_ids(Plane.PACKED18, packed(ids), back)
    mark_absent(back)

    assert torch.equal(back, ids)


@given(ids_below(1 << 18))
def test_a_vocabulary_of_all_eighteen_bits_tells_absent_ids_by_their_log_probabilities(
    ids: torch.Tensor,
) -> None:
    logprobs = torch.where(ids < 0, -torch.inf, -1.0)
    back = torch.full_like(ids, 77)
    decode_ids(Plane.PACKED18, packed(ids), back)
    restore_absent(back, logprobs, torch.ones(len(ids), dtype=torch.bool))

    assert torch.equal(back, ids)


@pytest.mark.parametrize(
    ("plane", "wrong"),
    [(Plane.LOW16, (1 << 24) - 1), (Plane.LOW16, -2), (Plane.PACKED18, 1 << 18)],
)
def test_an_id_that_would_be_cut_to_another_is_refused(plane: Plane, wrong: int) -> None:
    ids = torch.tensor([[5, -1], [wrong, 7]], dtype=torch.int32)
    out = torch.empty(2, 5, dtype=torch.uint8)

    with pytest.raises(CodecError, match=f"an id of {wrong} is none") as refused:
        encode_ids(plane, ids, out)
    assert refused.value.facts["token_id"] == wrong


@pytest.mark.parametrize("k", [1, 2, 3, 4, 64])
def test_a_position_is_whole_bytes_and_two_and_a_quarter_bytes_an_id(k: int) -> None:
    assert packed(torch.zeros(3, k, dtype=torch.int32)).shape == (3, -(-9 * k // 4))
