"""The benchmark of codecs runs, and what it measures is inside what is certified."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from benchmarks import codecs
from benchmarks.text_forms import FORMS
from tests.bench.test_scoring_bench import figures

if TYPE_CHECKING:
    import pytest


def test_every_codec_is_measured_beside_what_others_send(
    capfd: pytest.CaptureFixture[str],
) -> None:
    few = ("--teacher", "toy", "--rows", "2", "--tokens", "16", "--rounds", "1")
    assert codecs.main(list(few)) == 0

    lines = figures(capfd.readouterr().out)
    sizes = {str(line["codec"]): line["median"] for line in lines if line["figure"] == "bytes"}
    assert sizes["float16+int32"] == 384
    assert sizes["float16+planes24"] == 320
    assert sizes["float16+packed18"] == 272
    assert sizes["uint8+packed18"] == 216
    assert set(FORMS) < sizes.keys()
    assert sizes["int32+float32"] == 512.125
    # The toy teacher computes in fp32, of which bf16 logits are no way.
    refused = [str(line["codec"]) for line in lines if line["figure"] == "refused"]
    assert refused
    assert all(codec.startswith("bfloat16_exact+") for codec in refused)
    for figure in ("encode", "decode"):
        ours = [line for line in lines if line["figure"] == figure and "ratio" in line]
        assert {line["anchor"] for line in ours} == {"base64"}
    truths = [line for line in lines if line["figure"] in ("kl", "gradient")]
    assert len(truths) == 2 * 4
    assert all(line["inside"] for line in truths)


def test_each_form_says_the_same() -> None:
    ids = torch.arange(12, dtype=torch.int32).view(4, 3)
    logprobs = torch.linspace(-4, 0, 12).view(4, 3)
    for name, form in FORMS.items():
        found = form.decode(form.encode(ids, logprobs))
        assert torch.equal(found[0], ids), name
        assert torch.equal(found[1], logprobs), name
