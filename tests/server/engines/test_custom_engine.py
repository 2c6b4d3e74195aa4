"""An engine of one's own, in thirty lines, found by its name and served like the built-in one."""

from __future__ import annotations

import math
import sys
from array import array
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch

from teacher_logits import keys
from teacher_logits.clock import MonotonicClock
from teacher_logits.errors import ConfigError, EngineError
from teacher_logits.grid import BatchGrid
from teacher_logits.layout import ColumnKind, ElementType
from teacher_logits.profiles import PROTOCOL_VERSION, StudentProfile, TeacherProfile
from teacher_logits.tensors import column_tensors
from teacher_logits.transport import Transport
from teacher_logits_server.config import ServerConfig
from teacher_logits_server.engines import EngineProfile, Row, find_engine, make_engine
from teacher_logits_server.engines import transformers as built_in
from teacher_logits_server.engines.probe import probe_engine
from teacher_logits_server.ledger import Ledger
from teacher_logits_server.publishers.engines import EngineTeacher
from teacher_logits_server.scorer import ScoreJob, Scorer
from teacher_logits_server.slabs import ServerSlabs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from teacher_logits.terms import SessionTerms
    from teacher_logits_server.engines.passes import ServedEngine

CLOCK = MonotonicClock()
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


class Served:
    """What stands between the rim of a server and its engine."""

    def __init__(self, engine: ServedEngine, config: ServerConfig) -> None:
        profile = engine.profile
        self.slabs = ServerSlabs(epoch=keys.new_epoch())
        self.ledger = Ledger(
            epoch=keys.new_epoch(),
            limits=config,
            engines=(
                EngineTeacher(
                    profile=TeacherProfile(
                        teacher_id=config.teacher_id,
                        vocabulary_size=profile.vocabulary_size,
                        head_rows=profile.head_rows,
                        top_k=config.top_k,
                        max_row_tokens=profile.max_row_tokens,
                        engine=profile.name,
                    ),
                    checks=(probe_engine(engine),),
                ),
            ),
            clock=CLOCK,
            slots=self.slabs,
            offered=frozenset({Transport.STREAM}),
        )
        self.scorer = Scorer(
            engine=engine, ledger=self.ledger, slabs=self.slabs, config=config, clock=CLOCK
        )

    def open(self, profile: StudentProfile) -> SessionTerms:
        opened = self.ledger.open_session(
            request_id="open", protocol_version=PROTOCOL_VERSION, profile=profile
        )
        return self.ledger.prove_locality(opened.terms.session_id, proofs={}, failures=[])

    def score(self, session_id: str, row: Sequence[int]) -> dict[ColumnKind, torch.Tensor]:
        job = ScoreJob(
            session_id=session_id,
            request_id="score",
            input_ids=array("i", row).tobytes(),
            row_lengths=(len(row),),
            deadline=CLOCK.now() + PATIENCE,
        )
        lease = self.scorer.submit(job).result(PATIENCE)
        with self.ledger.pin(session_id, lease.lease_id) as pinned:
            room = bytearray(self.slabs.room(pinned.room))
        return column_tensors(room, pinned.payload.columns)


def test_an_engine_of_ones_own_is_found_probed_and_served(package: str) -> None:
    config = ServerConfig(pool_size_bytes=1 << 20, slab_size_bytes=1 << 20)
    served = Served(find_engine(f"{package}:make_teacher")(config), config)
    terms = served.open(
        StudentProfile(
            batch_grid=BatchGrid(global_batch_size=1, data_parallel_size=1, micro_batch_size=1),
            top_k=2,
            value_type=ElementType.FLOAT32,
        )
    )
    assert {check.name: check.verdict.value for check in terms.checks}["causality"] == "passed"
    assert terms.teacher.engine == "counting"
    served.scorer.start()
    try:
        columns = served.score(terms.session_id, [5, 5, 9])
    finally:
        served.scorer.stop()
        served.slabs.close()
    assert columns[ColumnKind.TOPK_IDS].tolist() == [[5, 0], [5, 0], [5, 9]]
    expected = [
        2.0 - math.log(math.exp(2.0) + 255),
        4.0 - math.log(math.exp(4.0) + 255),
        4.0 - math.log(math.exp(4.0) + math.exp(2.0) + 254),
    ]
    best = columns[ColumnKind.TOPK_LOGPROBS][:, 0].tolist()
    assert best == pytest.approx(expected, abs=1e-5)


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


def _of(**changed: object) -> EngineProfile:
    return replace(CountingTeacher.profile, **changed)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (None, "returned None, which is no engine (does it lack its `return`?)"),
        (SimpleNamespace(logits=print), "has no `profile`"),
        (
            SimpleNamespace(profile={}, logits=print),
            "`profile` of type dict without name, vocabulary_size",
        ),
        (SimpleNamespace(profile=_of()), "has no method `logits`"),
        (SimpleNamespace(profile=_of(head_rows=9), logits=print), "of 256 ids, 9 head rows"),
        (SimpleNamespace(profile=_of(max_row_tokens=0), logits=print), "0 tokens a row"),
    ],
)
def test_a_function_that_returns_no_engine_is_refused_with_what_is_amiss(
    package: str, monkeypatch: pytest.MonkeyPatch, made: object, why: str
) -> None:
    monkeypatch.setattr(sys.modules[package], "make_teacher", lambda config: made)
    with pytest.raises(ConfigError) as told:
        make_engine(ServerConfig(engine=f"{package}:make_teacher"))
    assert why in told.value.message
    assert told.value.message.startswith("--engine 'their_engines:make_teacher' returned")


@pytest.mark.parametrize("factory", [lambda: None, lambda config, path: None, lambda *, config: 0])
def test_a_function_that_takes_other_arguments_is_refused_before_it_is_called(
    package: str, monkeypatch: pytest.MonkeyPatch, factory: Callable[..., None]
) -> None:
    monkeypatch.setattr(sys.modules[package], "make_teacher", factory)
    with pytest.raises(ConfigError, match="is called with one argument, the server's config"):
        make_engine(ServerConfig(engine=f"{package}:make_teacher"))


def test_a_function_that_fails_is_named_with_the_type_and_words_of_its_error_in_one_line(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(config: ServerConfig) -> None:
        raise LookupError("no weights\nfor this card")

    monkeypatch.setattr(sys.modules[package], "make_teacher", fails)
    with pytest.raises(EngineError, match="LookupError: no weights for this card"):
        make_engine(ServerConfig(engine=f"{package}:make_teacher"))


def test_a_module_that_fails_while_it_is_imported_is_refused_with_its_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "half_an_engine.py").write_text("1 / 0\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="ZeroDivisionError: division by zero") as told:
        find_engine("half_an_engine:make")
    assert "looked" not in told.value.message
