"""Tokenizers: what a fingerprint is taken of."""

from __future__ import annotations

import pytest

from teacher_logits.errors import RequestInvalidError
from teacher_logits.tokenizer import fingerprint_of, id_count


@pytest.mark.parametrize("take", [fingerprint_of, id_count])
@pytest.mark.parametrize("given", ["gpt2", None, {"a": 0}])
def test_what_is_no_tokenizer_is_refused_with_its_type(take: object, given: object) -> None:
    with pytest.raises(RequestInvalidError, match="where a tokenizer is due") as caught:
        take(given)  # type: ignore[operator]

    assert caught.value.facts["given"] == type(given).__name__
