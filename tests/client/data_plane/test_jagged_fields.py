"""Fields of rows without their padding and back: properties, and every refusal."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from teacher_logits.errors import PayloadInvalidError
from teacher_logits_client.data_plane.fields import ABSENT_ID, PAD_VALUES
from teacher_logits_client.data_plane.jagged import nest, pack_jagged, row_lengths
from teacher_logits_client.data_plane.padded import make_dense, pad_jagged
from teacher_logits_client.targets import ABSENT_LOGPROB
from teacher_logits_client.trainers.nemo_rl import INDICES, LOGITS, TAIL

TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool)
ALIGNED = {"f"}

rows_of_lengths = st.lists(st.integers(0, 6), min_size=1, max_size=5)


def made(lengths: list[int], *, k: int, extra: int, dtype: torch.dtype) -> torch.Tensor:
    shape = (len(lengths), max(lengths) + extra) + ((k,) if k else ())
    chance = torch.Generator().manual_seed(len(lengths))
    return torch.randint(0, 100, shape, generator=chance).to(dtype)


@given(
    lengths=rows_of_lengths,
    k=st.integers(0, 3),
    padding=st.integers(0, 4),
    more=st.integers(0, 4),
    dtype=st.sampled_from(TYPES),
)
def test_what_was_packed_comes_back_with_its_own_padding(
    lengths: list[int], k: int, padding: int, more: int, dtype: torch.dtype
) -> None:
    field = made(lengths, k=k, extra=padding, dtype=dtype)
    longest = max(lengths)

    packed = pack_jagged({"f": field}, lengths, token_aligned=ALIGNED, padded_to=longest + padding)
    back = pad_jagged(
        packed, token_aligned=ALIGNED, pad_values={"f": 1}, pad_to_seqlen=longest + more
    )

    found = back.fields["f"]
    assert [len(row) for row in packed["f"].unbind()] == lengths
    assert back.lengths.tolist() == back.mask.sum(1).tolist() == lengths
    assert found.dtype is dtype
    assert found.shape[:2] == back.mask.shape == (len(lengths), longest + more)
    for row, length in enumerate(lengths):
        assert torch.equal(found[row, :length], field[row, :length])
        assert (found[row, length:] == 1).all()
    again = pack_jagged({"f": found}, lengths, token_aligned=ALIGNED, padded_to=longest + more)
    assert torch.equal(again["f"].values(), packed["f"].values())


@given(lengths=rows_of_lengths)
def test_fields_made_dense_are_padded_as_those_that_stayed_nested(lengths: list[int]) -> None:
    packed = pack_jagged(
        {"f": made(lengths, k=2, extra=0, dtype=torch.float32)}, lengths, token_aligned=ALIGNED
    )

    dense = make_dense(packed)

    assert dense["f"].is_nested == (len(set(lengths)) > 1)
    same = [pad_jagged(each, token_aligned=ALIGNED).fields["f"] for each in (packed, dense)]
    assert torch.equal(*same)


def test_fields_are_made_dense_without_a_copy() -> None:
    packed = pack_jagged({"f": torch.zeros(2, 3, 2)}, [3, 3], token_aligned=ALIGNED)

    dense = make_dense(packed)["f"]
    padded = pad_jagged({"f": dense}, token_aligned=ALIGNED).fields["f"]

    start = packed["f"].values().data_ptr()
    assert dense.data_ptr() == padded.data_ptr() == start


def test_nested_rows_with_gaps_between_them_are_read_as_they_are() -> None:
    whole = torch.arange(12.0).reshape(2, 6)
    gaps = torch.nested.narrow(
        whole, 1, torch.tensor([0, 1]), torch.tensor([2, 3]), layout=torch.jagged
    )

    padded = pad_jagged({"f": gaps}, token_aligned=ALIGNED).fields["f"]

    assert padded.tolist() == [[0, 1, 0], [7, 8, 9]]


def test_padding_of_the_teachers_fields_is_no_distribution() -> None:
    """Zeros would be K equal entries of token 0, which a loss without the mask would learn."""
    fields = {
        LOGITS: torch.zeros(2, 3, 2),
        INDICES: torch.ones(2, 3, 2, dtype=torch.int64),
        TAIL: torch.full((2, 3), -1.0),
        "input_ids": torch.ones(2, 3, dtype=torch.int64),
    }

    back = pad_jagged(pack_jagged(fields, [3, 1]))

    gone = ~back.mask
    assert gone.sum() == 2
    assert (back.fields[INDICES][gone] == ABSENT_ID).all()
    assert (back.fields[LOGITS][gone] == ABSENT_LOGPROB).all()
    assert (back.fields[TAIL][gone] == 0).all()
    assert (back.fields["input_ids"][gone] == 0).all()
    with pytest.raises(RuntimeError, match=r"out of bounds"):
        torch.zeros(2, 3, 8).gather(2, back.fields[INDICES])


def test_a_loss_that_gathers_before_it_masks_may_have_an_id_to_gather() -> None:
    fields = {INDICES: torch.ones(2, 3, 2, dtype=torch.int64)}

    back = pad_jagged(pack_jagged(fields, [3, 1]), pad_values={**PAD_VALUES, INDICES: 0})

    assert (back.fields[INDICES][~back.mask] == 0).all()


def test_fields_that_are_not_of_tokens_pass_unchanged() -> None:
    fields = {"input_lengths": torch.tensor([3, 1]), "f": torch.zeros(2, 3)}

    packed = pack_jagged(fields, [3, 1], token_aligned=ALIGNED)
    back = pad_jagged(packed, token_aligned=ALIGNED)

    assert torch.equal(back.fields["input_lengths"], fields["input_lengths"])


def test_what_is_nested_already_passes_where_its_rows_have_their_lengths() -> None:
    nested = nest(torch.arange(4.0), torch.tensor([3, 1]))

    packed = pack_jagged({"f": nested}, [3, 1], token_aligned=ALIGNED)

    assert torch.equal(packed["f"].values(), nested.values())
    with pytest.raises(PayloadInvalidError, match=r"row 0 of f has 3 tokens, and its length is 2"):
        pack_jagged({"f": nested}, [2, 2], token_aligned=ALIGNED)


def test_what_was_packed_shares_no_memory_and_no_graph() -> None:
    field = torch.zeros(2, 3, requires_grad=True)

    packed = pack_jagged({"f": field}, [3, 3], token_aligned=ALIGNED)["f"]
    packed.values().add_(1)

    assert not packed.requires_grad
    assert (field == 0).all()


@pytest.mark.parametrize(
    ("field", "lengths", "padded_to", "told"),
    [
        (torch.zeros(3, 4), [4, 2], None, "f has 3 rows and there are 2 lengths"),
        (torch.zeros(2), [1, 1], None, r"shape \(2,\) and is declared token-aligned"),
        (torch.zeros(()), [1], None, "f has 0 rows and there are 1 lengths"),
        (torch.zeros(2, 3), [4, 2], None, "3 tokens wide and the longest row has 4"),
        (torch.zeros(2, 6), [4, 2], None, "6 tokens wide and the longest row has 4: where"),
        (torch.zeros(2, 6), [4, 2], 8, "longest row has 4, and padded_to says 8"),
        (torch.zeros(2, 6), [4, 2], 3, "padded_to is 3 and the longest row has 4"),
        (torch.zeros(2, 4).to_sparse(), [4, 2], None, "is declared token-aligned"),
        ([[1.0]], [1], None, "f is a list: only tensors"),
    ],
)
def test_what_upstream_would_send_as_a_rectangle_or_cut_is_refused(
    field: torch.Tensor, lengths: list[int], padded_to: int | None, told: str
) -> None:
    with pytest.raises(PayloadInvalidError, match=told) as caught:
        pack_jagged({"f": field}, lengths, token_aligned=ALIGNED, padded_to=padded_to)

    assert caught.value.facts


@pytest.mark.parametrize(
    "lengths",
    [[], torch.zeros(0), [1.5], [True], [-1, 2], torch.tensor([[1]]), torch.tensor([True])],
)
def test_lengths_are_whole_numbers_from_0_on_of_at_least_one_row(
    lengths: list[int] | torch.Tensor,
) -> None:
    with pytest.raises(PayloadInvalidError, match="length"):
        row_lengths(lengths)


def nested(*lengths: int) -> torch.Tensor:
    return nest(torch.zeros(sum(lengths), 2), torch.tensor(lengths))


@pytest.mark.parametrize(
    ("fields", "options", "told"),
    [
        ({"f": nested(3, 1), "g": nested(2, 1)}, {}, "row 0 of g has 2 tokens, and its length"),
        ({"f": nested(3, 1), "g": nested(3)}, {}, "g has 1 rows and there are 2"),
        ({"f": nested(3, 1)}, {"lengths": [3, 2]}, "row 1 of f has 1 tokens, and its length is 2"),
        ({"f": torch.zeros(2, 3)}, {"lengths": [3, 1]}, "row 1 of f has 3 tokens"),
        ({"f": torch.zeros(2)}, {}, "is declared token-aligned"),
        ({"other": nested(3, 1), "f": nested(3, 1)}, {}, "other has rows of 1 to 3 entries"),
        ({"other": torch.zeros(2)}, {}, "nothing says where the tokens are"),
        ({"f": nested(3, 1)}, {"pad_to_seqlen": 2}, "pad_to_seqlen is 2 and the longest row"),
        ({"f": nested(3, 1)}, {"pad_to_seqlen": 4.0}, "pad_to_seqlen is 4.0"),
        ({"f": nested(3, 1).long()}, {"pad_values": {"f": 0.5}}, "give a whole number"),
    ],
)
def test_fields_that_do_not_belong_together_are_refused(
    fields: dict[str, torch.Tensor], options: dict[str, object], told: str
) -> None:
    with pytest.raises(PayloadInvalidError, match=told):
        pad_jagged(fields, token_aligned={"f", "g"}, **options)  # type: ignore[arg-type]
