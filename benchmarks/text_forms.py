"""Forms in which others send ids and log-probabilities: text, and the arrays themselves.

Written as their users write them, there and back: `encode` makes the bytes that travel, `decode`
the arrays that a loss takes.
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from teacher_logits.tensors import to_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    Arrays = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Form:
    """One form: ids int32 [P,K] and log-probabilities fp32 [P,K] to bytes, and back."""

    encode: Callable[[torch.Tensor, torch.Tensor], bytes]
    decode: Callable[[bytes], Arrays]


def _to_arrays(ids: torch.Tensor, logprobs: torch.Tensor) -> bytes:
    return b"".join((len(ids).to_bytes(4, "little"), to_bytes(ids), to_bytes(logprobs)))


def _from_arrays(data: bytes) -> Arrays:
    positions, body = int.from_bytes(data[:4], "little"), bytearray(data[4:])
    both = torch.frombuffer(body, dtype=torch.int32).view(2, positions, -1)
    return both[0], both[1].view(torch.float32)


def _to_base64(ids: torch.Tensor, logprobs: torch.Tensor) -> bytes:
    body = {
        "shape": list(ids.shape),
        "ids": base64.b64encode(to_bytes(ids)).decode("ascii"),
        "logprobs": base64.b64encode(to_bytes(logprobs)).decode("ascii"),
    }
    return json.dumps(body, separators=(",", ":")).encode()


def _from_base64(data: bytes) -> Arrays:
    body = json.loads(data)
    found = [
        torch.frombuffer(bytearray(base64.b64decode(body[name])), dtype=dtype).view(body["shape"])
        for name, dtype in (("ids", torch.int32), ("logprobs", torch.float32))
    ]
    return found[0], found[1]


def _to_lists(ids: torch.Tensor, logprobs: torch.Tensor) -> bytes:
    body = {"ids": ids.tolist(), "logprobs": logprobs.tolist()}
    return json.dumps(body, separators=(",", ":")).encode()


def _from_lists(data: bytes) -> Arrays:
    body = json.loads(data)
    return torch.tensor(body["ids"], dtype=torch.int32), torch.tensor(body["logprobs"])


def _to_triples(ids: torch.Tensor, logprobs: torch.Tensor) -> bytes:
    body = [
        [[value, each, None] for each, value in zip(row, values, strict=True)]
        for row, values in zip(ids.tolist(), logprobs.tolist(), strict=True)
    ]
    return json.dumps(body, separators=(",", ":")).encode()


def _from_triples(data: bytes) -> Arrays:
    body = json.loads(data)
    ids = torch.tensor([[each[1] for each in row] for row in body], dtype=torch.int32)
    return ids, torch.tensor([[each[0] for each in row] for row in body])


def _to_dicts(ids: torch.Tensor, logprobs: torch.Tensor) -> bytes:
    body = [
        {
            str(each): {"logprob": value, "rank": rank, "decoded_token": None}
            for rank, (each, value) in enumerate(zip(row, values, strict=True), 1)
        }
        for row, values in zip(ids.tolist(), logprobs.tolist(), strict=True)
    ]
    return json.dumps(body, separators=(",", ":")).encode()


def _from_dicts(data: bytes) -> Arrays:
    body = json.loads(data)
    ids = torch.tensor([[int(each) for each in row] for row in body], dtype=torch.int32)
    return ids, torch.tensor([[each["logprob"] for each in row.values()] for row in body])


FORMS = {
    "int32+float32": Form(encode=_to_arrays, decode=_from_arrays),
    "base64": Form(encode=_to_base64, decode=_from_base64),
    "lists": Form(encode=_to_lists, decode=_from_lists),
    "triples": Form(encode=_to_triples, decode=_from_triples),
    "dicts": Form(encode=_to_dicts, decode=_from_dicts),
}
