"""NeMo RL's three functions under their own names: what they promise beyond upstream's."""

import inspect
import os
import re
import subprocess
import sys
from collections import UserDict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.cases.golden import FOLDER

from teacher_logits.errors import (
    ContractViolation,
    GridMismatchError,
    NotNodeLocalError,
    PayloadInvalidError,
)
from teacher_logits.grid import BatchGrid
from teacher_logits.x_token import (
    PaddingTargetError,
    assert_teacher_student_batch_grid,
    assert_xtoken_ipc_node_local,
    pad_distillation_val_batch,
    padding_target,
)

ROOT = Path(__file__).parents[2]

GRID = "global_batch_size student_gbs teacher_gbs student_dp teacher_dp student_mbs teacher_mbs"
NODES = "num_nodes gpus_per_node student_tp student_cp teacher_tp teacher_cp student_dp teacher_dp"


class TestTheRules:
    @pytest.mark.parametrize(
        ("rule", "names"),
        [
            (assert_teacher_student_batch_grid, GRID),
            (assert_xtoken_ipc_node_local, NODES),
        ],
    )
    def test_take_upstreams_keywords_and_nothing_by_place(
        self, rule: Callable[..., None], names: str
    ) -> None:
        parameters = inspect.signature(rule).parameters.values()

        assert {parameter.name for parameter in parameters} == set(names.split())
        assert {parameter.kind for parameter in parameters} == {inspect.Parameter.KEYWORD_ONLY}

    def test_a_grid_that_does_not_fit_is_one_error_with_every_rule(self) -> None:
        with pytest.raises(GridMismatchError) as refusal:
            assert_teacher_student_batch_grid(
                global_batch_size=48,
                student_gbs=64,
                teacher_gbs=48,
                student_dp=5,
                teacher_dp=4,
                student_mbs=1,
                teacher_mbs=5,
            )

        assert [violation.rule for violation in refusal.value.violations] == [
            "gbs_mismatch",
            "student_dp_indivisible",
            "teacher_mbs_indivisible",
        ]
        assert all(v.message in str(refusal.value) for v in refusal.value.violations)

    def test_grids_that_may_cross_nodes_are_one_error_with_every_rule(self) -> None:
        with pytest.raises(NotNodeLocalError) as refusal:
            assert_xtoken_ipc_node_local(
                num_nodes=2,
                gpus_per_node=8,
                student_tp=3,
                student_cp=1,
                teacher_tp=1,
                teacher_cp=3,
                student_dp=4,
                teacher_dp=2,
            )

        assert [violation.rule for violation in refusal.value.violations] == [
            "dp_mismatch",
            "group_not_node_aligned",
        ]

    @pytest.mark.parametrize("error", [GridMismatchError, NotNodeLocalError, PaddingTargetError])
    def test_a_loop_that_catches_upstreams_assertions_catches_ours(
        self, error: type[Exception]
    ) -> None:
        assert issubclass(error, AssertionError)
        assert issubclass(error, ContractViolation)


@pytest.mark.slow
def test_every_case_passes_under_optimisation_too(tmp_path: Path) -> None:
    """`python -O` takes asserts out of the product (upstream's checks are asserts), not out of
    tests; a test that must fail shows that this run has both."""
    failing = tmp_path / "test_fails.py"
    failing.write_text("def test_fails() -> None:\n    assert __debug__\n")
    cases = [f"tests/cases/test_{name}_cases.py" for name in ("grid", "locality", "pad")]
    options = ["-p", "no:cacheprovider", "-c", "pyproject.toml", "--rootdir", "."]

    done = subprocess.run(
        [sys.executable, "-O", "-m", "pytest", "-q", *options, *cases, str(failing)],
        cwd=ROOT,
        env=os.environ | {"TEACHER_LOGITS_CASES": str(FOLDER.absolute())},
        capture_output=True,
        text=True,
        check=False,
    )

    failed = re.findall(r"^FAILED .*::(\w+)", done.stdout, re.MULTILINE)
    passed = re.findall(r"(\d+) passed", done.stdout)
    assert failed == ["test_fails"], done.stdout + done.stderr
    assert int(passed[0]) > 0


small = st.integers(1, 6)
grids = st.builds(
    lambda dp, mbs, count: BatchGrid(
        global_batch_size=dp * mbs * count, data_parallel_size=dp, micro_batch_size=mbs
    ),
    small,
    small,
    small,
)


class TestPaddingTarget:
    @given(st.integers(1, 500), grids, st.lists(grids, max_size=2))
    def test_is_what_every_side_can_shard(
        self, rows: int, student: BatchGrid, teachers: list[BatchGrid]
    ) -> None:
        target = padding_target(rows, student=student, teachers=teachers)

        assert target >= rows
        for side in (student, *teachers):
            whole_steps, left = divmod(target, side.global_batch_size)
            assert (whole_steps > 0, left) == (True, 0)
            assert target % (side.data_parallel_size * side.micro_batch_size) == 0

    @given(st.integers(1, 300), grids, grids)
    def test_is_the_fewest_rows_that_do(
        self, rows: int, student: BatchGrid, teacher: BatchGrid
    ) -> None:
        def can_shard(total: int) -> bool:
            return not any(total % side.global_batch_size for side in (student, teacher))

        target = padding_target(rows, student=student, teachers=[teacher])

        assert target == next(total for total in range(rows, target + 1) if can_shard(total))

    def test_is_not_the_target_that_upstreams_own_sharding_rejects(self) -> None:
        student = BatchGrid(global_batch_size=64, data_parallel_size=8, micro_batch_size=2)

        assert padding_target(13, student=student, teachers=[student]) == 64

    def test_refuses_a_grid_that_nothing_can_shard(self) -> None:
        student = BatchGrid(global_batch_size=64, data_parallel_size=5, micro_batch_size=2)
        teacher = BatchGrid(global_batch_size=64, data_parallel_size=0, micro_batch_size=2)

        with pytest.raises(GridMismatchError) as refusal:
            padding_target(0, student=student, teachers=[teacher])

        assert [violation.rule for violation in refusal.value.violations] == [
            "not_positive",
            "student_dp_indivisible",
            "not_positive",
        ]


def a_batch(rows: int) -> dict[str, object]:
    """Row r holds r everywhere, and every row counts."""
    return {
        "input_ids": torch.arange(rows).repeat_interleave(3).reshape(rows, 3),
        "sample_mask": torch.ones(rows),
        "texts": [f"row {row}" for row in range(rows)],
    }


class TestPadding:
    @given(st.integers(1, 8), st.integers(0, 8))
    def test_keeps_the_rows_and_adds_rows_that_do_not_count(self, rows: int, extra: int) -> None:
        padded = pad_distillation_val_batch(a_batch(rows), rows + extra)

        last = rows - 1
        row_of = [*range(rows), *[last] * extra]
        ids, mask = padded["input_ids"], padded["sample_mask"]
        assert isinstance(ids, torch.Tensor)
        assert isinstance(mask, torch.Tensor)
        assert ids.tolist() == [[row] * 3 for row in row_of]
        assert padded["texts"] == [f"row {row}" for row in row_of]
        assert mask.tolist() == [1.0] * rows + [0.0] * extra

    @given(st.integers(1, 8), st.integers(1, 8))
    def test_leaves_its_input_alone(self, rows: int, extra: int) -> None:
        batch = a_batch(rows)

        padded = pad_distillation_val_batch(batch, rows + extra)
        for value in padded.values():
            if isinstance(value, torch.Tensor):
                value.fill_(99)

        assert repr(batch) == repr(a_batch(rows))

    def test_gives_back_the_same_object_where_nothing_is_missing(self) -> None:
        batch = {"input_ids": torch.zeros(2, 3)}  # not even a mask is needed

        assert pad_distillation_val_batch(batch, 2) is batch

    def test_gives_back_the_mapping_type_it_was_given(self) -> None:
        padded = pad_distillation_val_batch(UserDict(a_batch(2)), 4)

        assert type(padded) is UserDict
        assert set(padded) == {"input_ids", "sample_mask", "texts"}

    def test_gives_back_a_list_of_whatever_holds_items(self) -> None:
        padded = pad_distillation_val_batch(a_batch(2) | {"texts": ("a", "b")}, 3)

        assert padded["texts"] == ["a", "b", "b"]

    @pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.bfloat16])
    @pytest.mark.parametrize("shape", [(2,), (2, 1)])
    def test_keeps_the_type_and_shape_of_the_mask(
        self, dtype: torch.dtype, shape: tuple[int, ...]
    ) -> None:
        mask = torch.ones(shape, dtype=dtype)

        padded = pad_distillation_val_batch({"sample_mask": mask}, 3)["sample_mask"]

        assert (padded.dtype, padded.shape) == (dtype, (3, *shape[1:]))
        assert padded.flatten().tolist() == [1, 1, 0]

    def test_keeps_bits_that_are_no_numbers(self) -> None:
        batch = a_batch(1) | {"scores": torch.tensor([float("nan")])}

        padded = pad_distillation_val_batch(batch, 2)["scores"]

        assert isinstance(padded, torch.Tensor)
        assert padded.isnan().tolist() == [True, True]


class TestPaddingRefuses:
    """Each with the key, the rows and the way out; silently wrong or a bare crash upstream."""

    @pytest.mark.parametrize(
        ("change", "target", "message"),
        [
            ({"y": torch.zeros(3, 1)}, 4, r"'y' has 3 rows where 'input_ids' has 2; give every"),
            ({"y": torch.zeros(3, 1)}, 2, r"'y' has 3 rows where 'input_ids' has 2; give every"),
            ({"y": ["a"]}, 4, r"'y' has 1 rows where 'input_ids' has 2; give every key"),
            ({"y": torch.tensor(1.0)}, 4, r"'y' is a tensor of shape \(\), which has no rows"),
            ({"y": 3}, 4, r"'y' is a int, which has no rows; give a tensor, or a list"),
            ({"y": "ab"}, 4, r"'y' is a str, which has no rows"),
            ({"y": {"a": 1, "b": 2}}, 4, r"'y' is a dict, which has no rows"),
            ({"sample_mask": [1, 1]}, 4, r"'sample_mask' is a list, so 2 padded rows would count"),
            ({}, 4.0, r"the target is 4\.0; use a whole number"),
            ({}, True, r"the target is True; use a whole number"),
        ],
    )
    def test_what_cannot_be_padded_rightly(
        self, change: dict[str, object], target: int, message: str
    ) -> None:
        with pytest.raises(PayloadInvalidError, match=message):
            pad_distillation_val_batch(a_batch(2) | change, target)

    def test_a_batch_without_a_mask(self) -> None:
        with pytest.raises(PayloadInvalidError, match="'sample_mask' is missing") as refusal:
            pad_distillation_val_batch({"input_ids": torch.zeros(2, 3)}, 4)

        assert refusal.value.facts == {"key": "sample_mask", "rows": 2, "extra_rows": 2}

    @pytest.mark.parametrize("batch", [{}, a_batch(0)], ids=["no keys", "no rows"])
    def test_a_batch_without_a_row_to_repeat(self, batch: dict[str, object]) -> None:
        with pytest.raises(PayloadInvalidError, match="0 rows, so there is none to repeat up to 4"):
            pad_distillation_val_batch(batch, 4)

    def test_more_rows_than_the_target(self) -> None:
        with pytest.raises(PaddingTargetError, match="has 3 rows, more than the target") as refusal:
            pad_distillation_val_batch(a_batch(3), 2)

        assert refusal.value.facts == {"rows": 3, "target_size": 2}

    def test_rows_that_cannot_be_taken_one_by_one(self) -> None:
        class Sized:
            def __len__(self) -> int:
                return 2

        with pytest.raises(PayloadInvalidError, match="'y' is a Sized, whose rows cannot be"):
            pad_distillation_val_batch(a_batch(2) | {"y": Sized()}, 4)
