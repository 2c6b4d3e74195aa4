"""An engine of one's own, in thirty lines, found by its name and served like the built-in one."""

from __future__ import annotations

import math
import sys
from array import array
from types import ModuleType
from typing import TYPE_CHECKING

import pytest
import torch

from teacher_logits.clock import MonotonicClock
from teacher_logits.errors import ConfigError
from teacher_logits.grid import BatchGrid
from teacher_logits.layout import ColumnKind, ElementType
from teacher_logits.profiles import PROTOCOL_VERSION, StudentProfile
from teacher_logits.tensors import column_tensors
from teacher_logits_server.config import ServerConfig
from teacher_logits_server.core import Core
from teacher_logits_server.engines import EngineProfile, Row, find_engine
from teacher_logits_server.engines import transformers as built_in
from teacher_logits_server.scorer import ScoreJob

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

PATIENCE = 30.0


# --- the thirty lines ---------------------------------------------------------------------


class CountingTeacher:
    """Believes that the token that was there most often comes next."""

    profile = EngineProfile(
        name="counting",
        vocabulary_size=256,
        head_rows=256,
        max_row_tokens=1024,
        arithmetic_type="float32",
    )

    def __init__(self, sharpness: float) -> None:
        self.sharpness = sharpness

    def logits(self, rows: Sequence[Row]) -> Iterator[torch.Tensor]:
        for row in rows:
            seen = torch.nn.functional.one_hot(row.token_ids, 256).cumsum(0).float()
            yield self.sharpness * seen[row.first : row.first + row.count]


def make_teacher(config: ServerConfig) -> CountingTeacher:
    return CountingTeacher(sharpness=2.0 if config.dtype == "auto" else 1.0)


# ------------------------------------------------------------------------------------------


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a package that has the engine, as a user's would."""
    module = ModuleType("their_engines")
    module.make_teacher = make_teacher  # type: ignore[attr-defined]
    module.not_a_function = 3  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "their_engines", module)
    return "their_engines"


def test_an_engine_of_ones_own_is_found_probed_and_served(package: str) -> None:
    config = ServerConfig(pool_size_bytes=1 << 20, slab_size_bytes=1 << 20)
    engine = find_engine(f"{package}:make_teacher")(config)
    core = Core(config=config, engine=engine, clock=MonotonicClock(), broker_path="")
    core.start()
    try:
        opened = core.ledger.open_session(
            request_id="open",
            protocol_version=PROTOCOL_VERSION,
            profile=StudentProfile(
                batch_grid=BatchGrid(global_batch_size=1, data_parallel_size=1, micro_batch_size=1),
                top_k=2,
                value_type=ElementType.FLOAT32,
            ),
        )
        session = opened.terms.session_id
        core.ledger.prove_locality(session, proofs={}, failures=[])
        checks = {check.name: check.verdict.value for check in opened.terms.checks}
        assert checks["causality"] == "passed"
        assert opened.terms.teacher.engine == "counting"
        columns = score(core, session, [5, 5, 9])
    finally:
        core.stop()
    assert columns[ColumnKind.TOPK_IDS].tolist() == [[5, 0], [5, 0], [5, 9]]
    expected = [
        2.0 - math.log(math.exp(2.0) + 255),
        4.0 - math.log(math.exp(4.0) + 255),
        4.0 - math.log(math.exp(4.0) + math.exp(2.0) + 254),
    ]
    best = columns[ColumnKind.TOPK_LOGPROBS][:, 0].tolist()
    assert best == pytest.approx(expected, abs=1e-5)


def score(core: Core, session: str, row: Sequence[int]) -> dict[ColumnKind, torch.Tensor]:
    job = ScoreJob(
        session_id=session,
        request_id="score",
        input_ids=array("i", row).tobytes(),
        row_lengths=(len(row),),
        deadline=MonotonicClock().now() + PATIENCE,
    )
    lease = core.scorer.submit(job).result(PATIENCE)
    with core.ledger.pin(session, lease.lease_id) as (payload, extent):
        room = bytearray(core.slabs.room(extent))
    return column_tensors(room, payload.columns)


def test_the_built_in_engine_has_a_name() -> None:
    assert find_engine("transformers") is built_in.from_config


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("vllm", "the engines here are transformers"),
        ("", "the engines here are transformers"),
        (":make_teacher", "the engines here are transformers"),
        ("their_engines:", "the engines here are transformers"),
        ("no_such_package.engines:make", "no_such_package.engines cannot be imported"),
        ("their_engines:missing", "their_engines has no missing"),
        ("their_engines:not_a_function", "not_a_function cannot be called"),
    ],
)
def test_a_name_that_leads_nowhere_is_refused_with_the_reason(
    package: str, name: str, why: str
) -> None:
    assert package == "their_engines"
    with pytest.raises(ConfigError, match=why) as told:
        find_engine(name)
    assert told.value.facts == {"flag": "--engine", "value": name}
    assert "package.module:function" in told.value.message
