"""Codecs against the golden answers: group enc/.

Ids exactly; fp32 values at 2e-6 absolute and 1e-5 relative, by the README. `row_lengths` and
`row_offsets` are the layout's own, which every payload has.
"""

import numpy as np
import pytest
import torch
from tests.cases.golden import arrays

from teacher_logits.codec.id_codecs import decode_ids, encode_ids, mark_absent
from teacher_logits.codec.value_codecs import decode_values, encode_values
from teacher_logits.encodings import Plane, packed_bytes

ENC = arrays("losses_golden.npz", "enc/")
IDS = torch.from_numpy(ENC["ids"]).to(torch.int32)
VALUES = torch.from_numpy(ENC["logprob"])
POSITIONS, K = IDS.shape


def encoded(plane: Plane, row_bytes: int) -> torch.Tensor:
    out = torch.empty(POSITIONS, row_bytes, dtype=torch.uint8)
    if plane in (Plane.LOW16, Plane.HIGH8, Plane.PACKED18):
        encode_ids(plane, IDS, out)
    else:
        encode_values(plane, VALUES, out)
    return out


def bits(name: str) -> torch.Tensor:
    """A golden array as the bytes it has in memory, one row a position."""
    return torch.from_numpy(np.ascontiguousarray(ENC[name])).view(torch.uint8).view(POSITIONS, -1)


def assert_close(got: torch.Tensor, expected: np.ndarray) -> None:
    wanted = torch.from_numpy(expected).double()
    assert torch.allclose(got.double(), wanted, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("plane", "name", "row_bytes"),
    [
        (Plane.PACKED18, "ids_packed", packed_bytes(K)),
        (Plane.LOW16, "ids_low16", 2 * K),
        (Plane.HIGH8, "ids_high8", K),
        (Plane.FLOAT16, "f16", 2 * K),
        (Plane.BFLOAT16, "bf16_bits", 2 * K),
        (Plane.CODES, "u8_code", K),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_bits(plane: Plane, name: str, row_bytes: int) -> None:
    assert torch.equal(encoded(plane, row_bytes), bits(name))


def test_u8_hi_and_u8_step() -> None:
    scale = encoded(Plane.SCALE, 8).view(torch.float32)

    assert_close(scale[:, 0], ENC["u8_hi"])
    assert_close(scale[:, 1], ENC["u8_step"])


def test_u8_decoded() -> None:
    decoded = torch.empty(POSITIONS, K)
    decode_values(Plane.CODES, bits("u8_code"), decoded, head=encoded(Plane.SCALE, 8))

    assert_close(decoded, ENC["u8_decoded"])


def test_ids_of_ids_packed() -> None:
    decoded = torch.empty_like(IDS)
    decode_ids(Plane.PACKED18, bits("ids_packed"), decoded)
    mark_absent(decoded)

    assert torch.equal(decoded, IDS)


def test_ids_of_planes() -> None:
    decoded = torch.empty_like(IDS)
    decode_ids(Plane.LOW16, bits("ids_low16"), decoded)
    decode_ids(Plane.HIGH8, bits("ids_high8"), decoded)

    assert torch.equal(decoded, IDS)


@pytest.mark.parametrize(("plane", "name"), [(Plane.FLOAT16, "f16"), (Plane.BFLOAT16, "bf16_bits")])
def test_values_of_halves(plane: Plane, name: str) -> None:
    decoded = torch.empty(POSITIONS, K)
    decode_values(plane, bits(name), decoded)

    step = 2.0**-11 if plane is Plane.FLOAT16 else 2.0**-8
    assert ((decoded - VALUES).abs() <= step * VALUES.abs() + 2.0**-25).all()
