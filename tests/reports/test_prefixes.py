"""Rows that begin alike, one after the other and together: R12.

The built-in engine keeps nothing from one pass to the next (``use_cache=False``), so a cache can
serve no wrong row; what can still differ is the padding and the company that a row is scored in.
"""

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
import transformers
from tests.transport_suite.writing import a_profile, embedded_server

import teacher_logits_client as tl
from teacher_logits_server.engines.transformers import load_engine

VOCABULARY = 300
PREFIX = [(7 * at + 3) % VOCABULARY for at in range(33)]
ROWS = {"a": [*PREFIX, 5, 4, 3, 2, 1], "b": [*PREFIX, *range(100, 160)], "prefix": PREFIX}


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tl.Session]:
    """A session of a server with the built-in engine and a small model."""
    folder = tmp_path_factory.mktemp("model")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=128,
        )
        model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    engine = load_engine(str(folder), device="cpu")
    everything = a_profile(top_k=VOCABULARY, value_type=tl.ElementType.FLOAT32)
    with (
        embedded_server(
            tmp_path_factory.mktemp("prefixes"), pool_bytes=4 << 20, engine=engine
        ) as server,
        tl.connect(server.address) as client,
        client.open_session(everything) as opened,
    ):
        yield opened


def scores(session: tl.Session, rows: list[list[int]]) -> list[torch.Tensor]:
    """Return the log-probabilities of each row, by id [L,V], with that of the next token last."""
    with session.score(rows).result() as leased:
        columns = leased.columns
        dense = torch.empty(len(columns["topk_ids"]), VOCABULARY)
        dense.scatter_(1, columns["topk_ids"].long(), columns["topk_logprobs"])
        both = torch.cat([dense, columns["actual_logprob"].unsqueeze(1)], 1)
        starts = leased.row_offsets.tolist()
    return [both[first:last].clone() for first, last in pairwise(starts)]


def test_r12_rows_that_share_a_prefix_are_scored_as_each_is_alone(session: tl.Session) -> None:
    cold = {name: scores(session, [row])[0] for name, row in ROWS.items()}
    for _ in range(3):
        for name, row in ROWS.items():
            torch.testing.assert_close(scores(session, [row])[0], cold[name])
        together = scores(session, [*ROWS.values()])
        for name, found in zip(ROWS, together, strict=True):
            assert len(found) == len(ROWS[name])  # not one position is left out
            torch.testing.assert_close(found, cold[name], rtol=1e-4, atol=1e-4)
