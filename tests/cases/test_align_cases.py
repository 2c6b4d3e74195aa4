"""Labels, masks and the causality probe against the golden answers: group align/."""

import pytest
import torch
from tests.cases.golden import arrays

from teacher_logits.selection.causality import CausalityProbe, Verdict, causality_verdict
from teacher_logits_client.rows.labels import next_token_labels, position_mask

ALIGN = {key: torch.from_numpy(v) for key, v in arrays("losses_golden.npz", "align/").items()}
IGNORED = -100
PROBES = sorted(
    key.removeprefix("probe_").removesuffix("_first_change")
    for key in ALIGN
    if key.endswith("_first_change")
)


def test_label() -> None:
    got = next_token_labels(
        ALIGN["ids"], ALIGN["cu_seqlens"], token_mask=ALIGN["token_mask"], ignore_index=IGNORED
    )

    assert torch.equal(got, ALIGN["label"])


def test_label_without_a_token_mask_is_the_same_where_it_counts() -> None:
    counts = ALIGN["position_mask"] != 0

    got = next_token_labels(ALIGN["ids"], ALIGN["cu_seqlens"])

    assert torch.equal(got[counts], ALIGN["label"][counts])


def test_position_mask() -> None:
    got = position_mask(ALIGN["token_mask"], ALIGN["cu_seqlens"])

    assert torch.equal(got, ALIGN["position_mask"])


def test_wrong_roll_mask_is_not_reproduced() -> None:
    got = position_mask(ALIGN["token_mask"], ALIGN["cu_seqlens"])

    assert not torch.equal(got, ALIGN["wrong_roll_mask"])


def probe(name: str) -> CausalityProbe:
    base, changed = ALIGN[f"probe_{name}_a"], ALIGN[f"probe_{name}_b"]
    return causality_verdict(base, base.clone(), changed, position=int(ALIGN["probe_position"]))


def test_the_probe_changed_the_token_at_its_position() -> None:
    changed = (ALIGN["probe_ids"] != ALIGN["probe_ids_changed"]).nonzero().flatten()

    assert changed.tolist() == [int(ALIGN["probe_position"])]


@pytest.mark.parametrize("name", PROBES)
def test_probe_first_change(name: str) -> None:
    assert probe(name).first_changed == int(ALIGN[f"probe_{name}_first_change"])


@pytest.mark.parametrize("name", PROBES)
def test_probe_verdict(name: str) -> None:
    assert probe(name).verdict is Verdict(name)
