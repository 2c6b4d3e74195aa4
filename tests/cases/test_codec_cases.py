"""Fields packed and padded again, against what NeMo RL's codec makes of them.

Every case falls under exactly one of the tests. Where upstream packs a token-aligned field as a
rectangle without a word, or pads what nobody called a sequence, ours is an error on purpose: each
such test says which and why.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.cases.golden import tensors

from teacher_logits.errors import PayloadInvalidError
from teacher_logits_client.data_plane.jagged import pack_jagged
from teacher_logits_client.data_plane.padded import make_dense, pad_jagged

CASES: list[dict[str, Any]] = tensors("codec_cases.pt")["cases"]
if not CASES:
    raise ValueError("codec_cases.pt holds no case")
FIELD = "field"


def is_rectangle_of_tokens(case: dict[str, Any]) -> bool:
    """Whether a field that was declared token-aligned went out with its padding."""
    return bool(case["token_aligned"] and not case["is_jagged"])


def narrows(case: dict[str, Any]) -> bool:
    """Whether rows are to be padded to less than the longest has, which upstream ignores."""
    return bool(0 < case["pad_to_seqlen"] < case["materialized"].shape[1])


def pads_a_rectangle(case: dict[str, Any]) -> bool:
    """Whether axis 1 of a field was padded that nobody declared token-aligned."""
    return bool(not case["token_aligned"] and case["pad_to_seqlen"])


def like_upstream(case: dict[str, Any]) -> bool:
    return not (is_rectangle_of_tokens(case) or narrows(case) or pads_a_rectangle(case))


def each(wanted: Any) -> pytest.MarkDecorator:
    cases = [case for case in CASES if wanted(case)]
    return pytest.mark.parametrize("case", cases, ids=[f"{c['id']}-{c['tag']}" for c in cases])


def aligned(case: dict[str, Any]) -> set[str]:
    return {FIELD} if case["token_aligned"] else set()


def packed(case: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Packed, the width stated: upstream cuts what is wider than the longest row unasked."""
    width = case["value"].shape[1] if case["token_aligned"] else None
    fields = {FIELD: case["value"]}
    return pack_jagged(fields, case["lengths"], token_aligned=aligned(case), padded_to=width)


@each(like_upstream)
def test_a_field_is_packed_and_padded_as_upstream_does_it(case: dict[str, Any]) -> None:
    found: dict[str, Any] = packed(case)

    assert found[FIELD].is_nested == case["is_jagged"]
    if case["is_jagged"]:
        assert torch.equal(found[FIELD].values(), case["jagged_values"])
        assert torch.equal(found[FIELD].offsets(), case["jagged_offsets"])
    padded = pad_jagged(
        make_dense(found),
        lengths=case["lengths"],
        token_aligned=aligned(case),
        pad_values={} if case["pad_value"] is None else {FIELD: case["pad_value"]},
        pad_to_seqlen=case["pad_to_seqlen"],
    )
    assert padded.fields[FIELD].dtype is case["materialized"].dtype
    assert torch.equal(padded.fields[FIELD], case["materialized"])
    assert padded.mask.sum(1).tolist() == case["lengths"].tolist()


@each(lambda case: case["is_jagged"] and case["value"].shape[1] > int(case["lengths"].max()))
def test_what_is_wider_than_the_longest_row_is_cut_only_where_it_is_stated(
    case: dict[str, Any],
) -> None:
    """Upstream cuts it unasked: a length that is one too short would lose a token of every row."""
    width = case["value"].shape[1]

    with pytest.raises(PayloadInvalidError, match=f"say padded_to={width}"):
        pack_jagged({FIELD: case["value"]}, case["lengths"], token_aligned={FIELD})


@each(is_rectangle_of_tokens)
def test_a_field_of_tokens_is_no_rectangle(case: dict[str, Any]) -> None:
    """Upstream falls back to one without a word where there are no rows, or not as many as lengths.

    Ours differs on purpose: its padding would go over the wire and come back as tokens.
    """
    with pytest.raises(PayloadInvalidError, match=r"rows"):
        packed(case)


@each(narrows)
def test_a_width_below_the_longest_row_is_refused(case: dict[str, Any]) -> None:
    """Upstream ignores it, so that this rank runs at another width than its peers."""
    with pytest.raises(PayloadInvalidError, match=r"pad_to_seqlen is 2 and the longest row has 4"):
        pad_jagged(packed(case), token_aligned={FIELD}, pad_to_seqlen=case["pad_to_seqlen"])


@each(pads_a_rectangle)
def test_axis_1_of_a_field_that_is_not_of_tokens_stays_as_it_is(case: dict[str, Any]) -> None:
    """Upstream pads it like a sequence; declared one, its rows would not have their lengths."""
    found, wide = packed(case), case["pad_to_seqlen"]

    kept = pad_jagged(found, lengths=case["lengths"], token_aligned=(), pad_to_seqlen=wide)
    with pytest.raises(PayloadInvalidError, match=r"row 1 of field has 4 tokens, and its length"):
        pad_jagged(found, lengths=case["lengths"], token_aligned={FIELD}, pad_to_seqlen=wide)

    assert torch.equal(kept.fields[FIELD], case["value"])


def test_each_case_is_under_one_of_these() -> None:
    sorts = (like_upstream, is_rectangle_of_tokens, narrows, pads_a_rectangle)

    assert [sum(sort(case) for sort in sorts) for case in CASES] == [1] * len(CASES)
