"""Row digests against the golden ones: group `align/` of losses_golden.npz."""

import numpy as np
import pytest
from tests.cases.golden import arrays

from teacher_logits.digest import row_digest

ALIGN = arrays("losses_golden.npz", "align/")
ROWS = [
    ALIGN["ids"][start:stop]
    for start, stop in zip(ALIGN["cu_seqlens"], ALIGN["cu_seqlens"][1:], strict=False)
]


def test_there_is_a_digest_for_each_packed_row() -> None:
    assert len(ROWS) == len(ALIGN["digests"]) > 0


@pytest.mark.parametrize("row", range(len(ROWS)))
@pytest.mark.parametrize("form", ["list", "int32", "int64"])
def test_a_packed_row_has_its_golden_digest(row: int, form: str) -> None:
    ids = ROWS[row].tolist() if form == "list" else ROWS[row].astype(form)

    assert row_digest(ids) == ALIGN["digests"][row].tobytes()


@pytest.mark.parametrize("ids", [[], np.zeros(0, np.int32)], ids=["list", "int32"])
def test_an_empty_row_has_its_golden_digest(ids: "list[int] | np.ndarray") -> None:
    assert row_digest(ids) == ALIGN["digest_empty"].tobytes()
