"""The examples that the README points at run, and teach."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import teacher_logits_client as tl
from teacher_logits_client import testing

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_a_student_learns_from_a_teacher_of_one_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES)
    train = runpy.run_path(str(EXAMPLES / "train.py"))["main"]

    with testing.serve("own_engine:make") as server:
        losses = train(server.address)

    assert losses[-1] < losses[0] / 2


TO_A_SERVER = ("train.py", "rl_batches.py", "hf_trainer.py", "trl_trainer.py", "queue_trainer.py")
WRONG_ARGUMENTS = (
    *((name, ()) for name in TO_A_SERVER),
    *((name, ("unix:/s", "more")) for name in TO_A_SERVER),
    ("publisher.py", ()),
    ("publisher.py", ("unix:/s",)),
    ("publisher.py", ("listen", "unix:/s")),
    ("ray_deferred.py", ("unix:/s",)),
    ("own_engine.py", ()),
)
NEEDS = {"trl_trainer.py": "trl", "queue_trainer.py": "transfer_queue", "ray_deferred.py": "ray"}


def defaults_of(function: object) -> dict[str, object]:
    return dict(getattr(function, "__kwdefaults__", None) or {})


def run(name: str, *arguments: str) -> object:
    """Run an example as a program; return what it ends with."""
    needed = pytest.importorskip(NEEDS.get(name, "torch"))
    with pytest.MonkeyPatch.context() as patch:
        if name == "ray_deferred.py":
            patch.delattr(needed, "init")  # no cluster is started here, whatever becomes of it
        patch.setattr("sys.argv", [name, *arguments])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return ended.value.code


@pytest.mark.parametrize(("name", "arguments"), WRONG_ARGUMENTS)
def test_an_example_says_how_it_is_called(name: str, arguments: tuple[str, ...]) -> None:
    called = "teacher-logits serve" if name == "own_engine.py" else f"python {name}"

    assert str(run(name, *arguments)).startswith(f"usage: {called}")


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("train.py", ()),
        ("rl_batches.py", ()),
        ("publisher.py", ("teach",)),
        ("publisher.py", ("learn",)),
    ],
)
def test_an_example_without_a_server_ends_in_a_sentence(
    name: str, arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tl.connect, "__kwdefaults__", {**defaults_of(tl.connect), "timeout": 0.1})

    said = str(run(name, *arguments, f"unix:{tmp_path}/nobody"))

    assert said.startswith("ServerUnreachableError: nobody answers at unix:")


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", ["hf_trainer.py", "trl_trainer.py"])
def test_a_trainer_s_example_with_a_wrong_address_ends_in_a_sentence(name: str) -> None:
    assert str(run(name, "nowhere")).startswith("ConfigError: address 'nowhere' is no address")


def test_a_student_reads_what_a_teacher_in_a_process_of_its_own_publishes() -> None:
    example = EXAMPLES / "publisher.py"
    learn = runpy.run_path(str(example))["learn"]

    with testing.serve() as server:
        teacher = subprocess.Popen(
            [sys.executable, str(example), "teach", server.address],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            losses = learn(server.address)
            said, _ = teacher.communicate(timeout=30)
        finally:
            teacher.kill()
            teacher.communicate()

    assert teacher.returncode == 0
    assert [line.split(":")[0] for line in said.splitlines()] == ["step 0", "step 1", "step 2"]
    assert all(0 < loss < 20 for loss in losses)
