"""Digests: the same content the same name, whatever it came in; other content another one."""

import hashlib
import struct
from array import array
from collections.abc import Collection

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from teacher_logits.digest import payload_digest, row_digest, tokenizer_fingerprint
from teacher_logits.errors import PayloadInvalidError

int32 = st.integers(-(2**31), 2**31 - 1)
rows = st.lists(int32, max_size=20)


class TestRowDigest:
    @given(rows)
    def test_is_blake2b_of_count_and_ids(self, ids: list[int]) -> None:
        told = struct.pack(f"<I{len(ids)}i", len(ids), *ids)

        expected = hashlib.blake2b(told, digest_size=16, person=b"tls-row-v1").digest()

        assert row_digest(ids) == expected

    @given(rows)
    def test_does_not_depend_on_what_the_ids_lie_in(self, ids: list[int]) -> None:
        narrow, wide = np.array(ids, np.int32), np.array(ids, np.int64)
        forms: list[Collection[int]] = [
            tuple(ids),
            array("i", ids),
            array("q", ids),
            memoryview(array("i", ids)),
            narrow,
            wide,
            np.stack([narrow, narrow + 1], axis=1)[:, 0],  # not in one piece
            torch.tensor(ids, dtype=torch.int32).numpy(),
            torch.tensor(ids, dtype=torch.int64),
        ]

        assert {row_digest(form) for form in forms} == {row_digest(ids)}

    @given(rows, rows)
    def test_differs_where_the_rows_differ(self, ids: list[int], others: list[int]) -> None:
        assert (row_digest(ids) == row_digest(others)) == (ids == others)

    def test_tells_a_shorter_row_from_one_that_is_padded(self) -> None:
        assert row_digest([5, 6]) != row_digest([5, 6, 0])

    @pytest.mark.parametrize("misfit", [2**31, -(2**31) - 1, 1.0, "7", None])
    @pytest.mark.parametrize("place", [0, 2])
    def test_refuses_an_id_that_int32_cannot_hold_and_says_where(
        self, misfit: int, place: int
    ) -> None:
        ids: list[int] = [-1, -2, -3]
        ids[place] = misfit

        with pytest.raises(PayloadInvalidError, match=f"at place {place} is no whole") as refusal:
            row_digest(ids)

        assert refusal.value.facts["place"] == place

    def test_refuses_a_wide_buffer_with_an_id_that_int32_cannot_hold(self) -> None:
        with pytest.raises(PayloadInvalidError, match=f"{2**40} at place 1"):
            row_digest(np.array([1, 2**40]))

    @pytest.mark.parametrize(
        "no_row",
        [
            b"\x01\x00\x00\x00",
            np.zeros((2, 3), np.int32),
            np.zeros(3, np.float32),
            np.zeros(3, np.uint8),
            np.zeros(3, ">i4"),
        ],
        ids=["bytes", "two axes", "floats", "single bytes", "the other byte order"],
    )
    def test_refuses_a_buffer_that_is_not_one_row_of_integers(
        self, no_row: Collection[int]
    ) -> None:
        with pytest.raises(PayloadInvalidError, match="one row at a time"):
            row_digest(no_row)


IDS = ("topk_ids", "int32", (2, 3), bytes(range(24)))
TAIL = ("log_tail", "float32", (2, 1), bytes(8))


class TestPayloadDigest:
    def test_does_not_depend_on_what_the_bytes_lie_in(self) -> None:
        ids = np.arange(6, dtype=np.int32).reshape(2, 3)
        forms: list[bytes | bytearray | memoryview] = [
            ids.tobytes(),
            bytearray(ids.tobytes()),
            memoryview(ids.tobytes()),
            memoryview(ids),  # type: ignore[arg-type]  # a buffer to mypy from 3.12 on
            memoryview(torch.from_numpy(ids).clone().numpy()),  # type: ignore[arg-type]
        ]

        assert len({payload_digest([("topk_ids", "int32", (2, 3), form)]) for form in forms}) == 1

    def test_looks_at_one_column_after_the_other(self) -> None:
        assert payload_digest(column for column in [IDS, TAIL]) == payload_digest([IDS, TAIL])

    @pytest.mark.parametrize(
        "columns",
        [
            [],
            [IDS],
            [TAIL, IDS],
            [IDS, TAIL, TAIL],
            [("scored_ids", *IDS[1:]), TAIL],
            [("topk_ids", "float32", *IDS[2:]), TAIL],
            [("topk_ids", "int32", (3, 2), IDS[3]), TAIL],
            [("topk_ids", "int32", (6,), IDS[3]), TAIL],
            [(*IDS[:3], bytes(24)), TAIL],
        ],
        ids=["none", "fewer", "order", "more", "kind", "type", "shape", "axes", "bytes"],
    )
    def test_differs_where_anything_of_the_payload_differs(
        self, columns: list[tuple[str, str, tuple[int, ...], bytes]]
    ) -> None:
        assert payload_digest(columns) != payload_digest([IDS, TAIL])

    def test_takes_columns_without_a_single_element(self) -> None:
        empty = np.zeros((0, 3), np.int32)

        found = payload_digest([("topk_ids", "int32", (0, 3), memoryview(empty))])  # type: ignore[arg-type]

        assert found == payload_digest([("topk_ids", "int32", (0, 3), b"")])

    @pytest.mark.parametrize(
        ("column", "message"),
        [
            (
                ("topk_ids", "int32", (2, 3), bytes(23)),
                r"has 23 bytes; its shape \(2, 3\)",
            ),
            (("topk_ids", "int32", (-2, -3), bytes(24)), r"its shape \(-2, -3\)"),
            (("topk_ids", "int3", (2, 3), bytes(24)), r"elements of type 'int3'"),
            (("topk_ids", "uint8", (2,), memoryview(bytes(4))[::2]), r"2 bytes, not in one piece"),
        ],
    )
    def test_refuses_bytes_that_do_not_fill_their_shape(
        self, column: tuple[str, str, tuple[int, ...], bytes], message: str
    ) -> None:
        with pytest.raises(PayloadInvalidError, match=message):
            payload_digest([column])

    def test_stays_what_it_is_from_release_to_release(self) -> None:
        assert payload_digest([IDS, TAIL]) == "a783c0eab9fa9e8c2d678e7e340e7abf"


WORDS = {"a": 0, "b": 1, "é": 2}
ADDED = {"<eos>": 3}


class TestTokenizerFingerprint:
    @given(st.permutations(sorted(WORDS)), st.booleans())
    def test_does_not_depend_on_order_or_on_where_added_tokens_are_listed(
        self, order: list[str], listed_twice: bool
    ) -> None:
        vocabulary = {word: WORDS[word] for word in order} | (ADDED if listed_twice else {})

        found = tokenizer_fingerprint(vocabulary=vocabulary, added_tokens=ADDED)

        assert found == tokenizer_fingerprint(vocabulary=WORDS, added_tokens=ADDED)

    def test_counts_text_as_its_utf8_bytes(self) -> None:
        as_bytes = {word.encode(): token_id for word, token_id in WORDS.items()}

        found = tokenizer_fingerprint(vocabulary=as_bytes, added_tokens=ADDED)

        assert found == tokenizer_fingerprint(vocabulary=WORDS, added_tokens=ADDED)

    @pytest.mark.parametrize(
        ("vocabulary", "added", "normalizer"),
        [
            ({"a": 1, "b": 0, "é": 2}, ADDED, ""),
            ({"a": 0, "b": 1, "e": 2}, ADDED, ""),
            ({"a": 0, "b": 1}, ADDED, ""),
            (WORDS | ADDED, {}, ""),
            (WORDS, {"<eos>": 4}, ""),
            (WORDS, ADDED, "NFC"),
        ],
        ids=["ids permuted", "other word", "fewer words", "none added", "added elsewhere", "norm"],
    )
    def test_differs_where_a_text_could_get_other_ids(
        self, vocabulary: dict[str, int], added: dict[str, int], normalizer: str
    ) -> None:
        found = tokenizer_fingerprint(
            vocabulary=vocabulary, added_tokens=added, normalizer=normalizer
        )

        assert found != tokenizer_fingerprint(vocabulary=WORDS, added_tokens=ADDED)

    def test_takes_a_token_that_is_no_utf8(self) -> None:
        lone = {"\ud800": 0}

        assert len(tokenizer_fingerprint(vocabulary=lone, added_tokens={})) == 32

    @pytest.mark.parametrize("no_id", [-1, 2**31, True, 1.0])
    def test_refuses_what_is_no_token_id(self, no_id: int) -> None:
        with pytest.raises(PayloadInvalidError, match="token 'a' has the id"):
            tokenizer_fingerprint(vocabulary={"a": no_id}, added_tokens={})

    def test_stays_what_it_is_from_release_to_release(self) -> None:
        found = tokenizer_fingerprint(vocabulary=WORDS, added_tokens=ADDED)

        assert found == "641bbffd500be747c2fe04e167ff6e97"


def test_digests_of_nothing_differ_by_what_they_are_of() -> None:
    empty = tokenizer_fingerprint(vocabulary={}, added_tokens={})

    assert len({row_digest([]).hex(), payload_digest([]), empty}) == 3
