"""`inspect --parity`: a teacher that agrees with itself, held against a second opinion (R28)."""

import json
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file
from tests import forked
from tests.client.publishing.a_publisher import a_student, a_teacher, some_rows
from tests.transport_suite.dense_teacher import VOCABULARY_SIZE, DenseTeacher, head_logits
from tests.transport_suite.writing import Embedded, a_profile, embedded_server
from tokenizers import Tokenizer, models

import teacher_logits_client as tl
from teacher_logits.errors import ConfigError
from teacher_logits_client import cli
from teacher_logits_server.engines import Row
from teacher_logits_server.engines.transformers import load_engine

MIB = 1 << 20
ROWS = ([3, 1, 4, 1, 5, 9, 2, 6, 5, 3], [14, 7, 1498, 77], [8, 2, 8, 1, 8, 2, 8])
WIDTH = max(map(len, ROWS))
LEFT = np.array([[column >= WIDTH - len(row) for column in range(WIDTH)] for row in ROWS])
PROBABILITIES = np.ones((len(ROWS), WIDTH, VOCABULARY_SIZE), dtype=np.float32)
PROBABILITIES[..., 1:] = 0

Ran = tuple[int, str]
Run = Callable[..., Ran]
Complain = Callable[..., str]


class DoubtfulTeacher(DenseTeacher):
    """The dense teacher, whose logits can be late, or divided by a temperature."""

    is_late = False
    temperature = 1.0

    def logits(self, rows: Sequence[Row]) -> Iterator[torch.Tensor]:
        """Yield a row at a time."""
        for row in rows:
            logits = head_logits(row.token_ids.tolist()) / self.temperature
            if self.is_late:
                logits = torch.cat([logits[:1], logits[:-1]])
            yield logits[row.first : row.first + row.count]


@pytest.fixture(scope="module")
def doubtful() -> DoubtfulTeacher:
    return DoubtfulTeacher()


@pytest.fixture(scope="module")
def server(
    doubtful: DoubtfulTeacher, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Embedded]:
    folder = tmp_path_factory.mktemp("parity")
    with embedded_server(folder, pool_bytes=8 * MIB, engine=doubtful) as running:
        yield running


@pytest.fixture
def teacher(doubtful: DoubtfulTeacher) -> Iterator[DoubtfulTeacher]:
    yield doubtful
    doubtful.is_late, doubtful.temperature = False, 1.0


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command; its exit code, and what it wrote."""

    def inspect(*argv: str) -> Ran:
        capsys.readouterr()
        code = cli.inspect(argv)
        return code, capsys.readouterr().out

    return inspect


@pytest.fixture
def complain(capsys: pytest.CaptureFixture[str]) -> Complain:
    """Run the command, which cannot compare: what it says of that, and nothing else."""

    def inspect(*argv: str) -> str:
        capsys.readouterr()
        code = cli.inspect(argv)
        out, said = capsys.readouterr()
        assert (code, out) == (2, "")
        return said

    return inspect


def save(path: Path, arrays: Mapping[str, object]) -> None:
    """Write a .npz."""
    np.savez(path, **arrays)  # type: ignore[arg-type]


def of_rows(dense: Callable[[Sequence[int]], torch.Tensor]) -> dict[str, torch.Tensor]:
    """What a file has to say of `ROWS`, padded with numbers that nobody may read."""
    ids = torch.zeros(len(ROWS), WIDTH, dtype=torch.int64)
    said = []
    for number, row in enumerate(ROWS):
        ids[number, : len(row)] = torch.tensor(row)
        values = dense(row)
        said.append(torch.cat([values, torch.full((WIDTH - len(row), values.shape[1]), torch.nan)]))
    lengths = torch.tensor([len(row) for row in ROWS])
    return {"input_ids": ids, "lengths": lengths, "logits": torch.stack(said)}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the teacher should say, as logits of its whole head, in a .npz."""
    path = tmp_path_factory.mktemp("reference") / "mine.npz"
    save(path, of_rows(head_logits))
    return str(path)


def test_r28_the_same_numbers_are_called_so(server: Embedded, run: Run, reference: str) -> None:
    code, text = run(server.address, "--parity", reference)
    assert code == 0
    assert "max abs diff" in text
    assert "verdict      the same numbers" in text
    assert all(line[12] == " " and line[13] != " " for line in text.splitlines())
    code, text = run(server.address, "--parity", reference, "--json")
    said = json.loads(text)
    assert (code, said["holds"], said["cause"], said["notes"]) == (0, True, "", [])
    assert said["rows"] == len(ROWS)
    assert said["positions"] == sum(map(len, ROWS))
    assert said["max_abs_diff"] < 0.01  # what fp16 rounds
    assert said["served_loss"] == pytest.approx(said["reference_loss"], abs=1e-3)


def test_r28_a_teacher_that_is_one_token_late_is_found_which_no_guard_of_a_payload_can(
    server: Embedded, run: Run, reference: str, teacher: DoubtfulTeacher
) -> None:
    teacher.is_late = True
    with tl.connect(server.address) as client, client.open_session(a_profile()) as session:
        session.score(ROWS).result().close()  # digests and lookups agree: it agrees with itself
    code, text = run(server.address, "--parity", reference, "--json")
    said = json.loads(text)
    assert (code, said["holds"], said["shift"]) == (1, False, -1)
    assert "1 token late" in said["cause"]
    assert said["served_loss"] != pytest.approx(said["reference_loss"], abs=0.1)
    assert said["worst"]["row"] in range(len(ROWS))
    _, text = run(server.address, "--parity", reference)
    assert "DIFFERENT" in text
    assert "1 token late" in text


def test_r28_a_server_that_is_not_there_is_no_other_numbers(
    complain: Complain, reference: str, tmp_path: Path
) -> None:
    """A script must not take `could not compare` for a teacher that is wrong."""
    complain("127.0.0.1:9", "--parity", reference, "--timeout", "5")


def test_a_teacher_of_a_batch_grid_is_compared_too(
    doubtful: DoubtfulTeacher, run: Run, reference: str, tmp_path: Path
) -> None:
    grid = tl.BatchGrid(global_batch_size=6, data_parallel_size=1, micro_batch_size=2)
    with embedded_server(tmp_path, pool_bytes=8 * MIB, engine=doubtful, batch_grid=grid) as gridded:
        assert run(gridded.address, "--parity", reference)[0] == 0


def test_r28_a_script_learns_it_from_the_exit_code(
    server: Embedded, reference: str, teacher: DoubtfulTeacher
) -> None:
    """In a process of its own, to which memory is shared."""
    teacher.is_late = True
    asked = (server.address, "--parity", reference, "--json")
    done = forked.run([sys.executable, "-m", "teacher_logits", "inspect", *asked], timeout=60)
    assert done.returncode == 1, done.stderr
    said = json.loads(done.stdout)
    assert (said["transport"], said["shift"]) == ("shared_memory", -1)


def test_r28_a_temperature_that_was_applied_already_is_found(
    server: Embedded, run: Run, reference: str, teacher: DoubtfulTeacher
) -> None:
    teacher.temperature = 2.0
    code, text = run(server.address, "--parity", reference, "--json")
    said = json.loads(text)
    assert (code, said["shift"]) == (1, None)
    assert said["temperature"] == pytest.approx(2.0, rel=0.01)


def test_entries_alone_are_compared_where_both_name_them(
    server: Embedded, run: Run, tmp_path: Path
) -> None:
    tensors = of_rows(lambda row: head_logits(row)[:, :VOCABULARY_SIZE].log_softmax(1))
    kept = tensors.pop("logits").topk(20, 2)
    path = tmp_path / "mine.safetensors"
    save_file({**tensors, "topk_ids": kept.indices, "topk_logprobs": kept.values}, path)
    code, text = run(server.address, "--parity", str(path), "--json")
    assert code == 0
    assert json.loads(text)["entries"] == 20 * sum(map(len, ROWS))
    code, text = run(server.address, "--parity", str(path), "--json", "--rows", "2")
    assert json.loads(text)["positions"] == len(ROWS[0]) + len(ROWS[1])
    _, text = run(server.address, "--parity", str(path))
    assert re.search(r"of the \d+ ids of a position are among the reference's own first 20\n", text)


def test_rows_are_cut_by_the_mask_in_their_file(server: Embedded, run: Run, tmp_path: Path) -> None:
    given = of_rows(head_logits)
    lengths = given.pop("lengths")
    for kind in (torch.bool, torch.int64):
        mask = (torch.arange(WIDTH) < lengths.unsqueeze(1)).to(kind)
        save(tmp_path / "masked.npz", {**given, "attention_mask": mask})
        code, text = run(server.address, "--parity", str(tmp_path / "masked.npz"), "--json")
        assert (code, json.loads(text)["positions"]) == (0, sum(map(len, ROWS)))


def test_rows_that_look_padded_and_have_no_lengths_are_named_beside_a_difference(
    server: Embedded, run: Run, tmp_path: Path
) -> None:
    given = of_rows(head_logits)
    del given["lengths"]
    save(tmp_path / "padded.npz", {**given, "logits": given["logits"].nan_to_num(0.0)})
    code, text = run(server.address, "--parity", str(tmp_path / "padded.npz"))
    assert code == 1
    assert "2 of 3 rows end in id 0 repeated" in text
    assert "lengths" in text


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of its own: what nobody but the command has read stays there."""
    with embedded_server(tmp_path_factory.mktemp("steps"), pool_bytes=MIB) as server:
        yield server.address


class TestAStep:
    """Of a teacher that registers what it says."""

    def test_is_held_against_its_own_rows(self, registry: str, run: Run, tmp_path: Path) -> None:
        ids, lengths, logits = some_rows(1)
        path = tmp_path / "step.npz"
        save(path, {"input_ids": ids, "lengths": lengths, "logits": logits})
        with (
            tl.connect(registry) as client,
            client.open_publisher(a_teacher("registers")) as publisher,
        ):
            asked = (registry, "--teacher-id", "registers", "--parity", str(path), "--step")
            for step, wrong in enumerate((0.0, 1.0)):
                with publisher.reserve(step, input_ids=ids, lengths=lengths) as draft:
                    tl.select_top_k(logits + wrong * logits.roll(1, 2), out=draft)
                code, text = run(*asked, str(step), "--json")
                assert (code, json.loads(text)["holds"]) == (int(wrong), not wrong)

    def test_that_no_student_has_come_for_goes_with_the_command_which_says_so_first(
        self, registry: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        ids, lengths, logits = some_rows(3)
        path = tmp_path / "step.npz"
        save(path, {"input_ids": ids, "lengths": lengths, "logits": logits})
        asked = (registry, "--teacher-id", "lonely", "--parity", str(path), "--step")
        with (
            tl.connect(registry) as client,
            client.open_publisher(a_teacher("lonely")) as publisher,
        ):
            for step, has_student in enumerate((False, True)):
                with publisher.reserve(step, input_ids=ids, lengths=lengths) as draft:
                    tl.select_top_k(logits, out=draft)
                with ExitStack() as stack:
                    if has_student:
                        stack.enter_context(client.open_session(a_student("lonely"), prefetch=0))
                    assert cli.inspect((*asked, str(step))) == 0
                told = capsys.readouterr().err
                assert ("step 0 goes with it" in told) == (not has_student)

    def test_of_a_teacher_that_registers_none_is_not_said_to_go(
        self, server: Embedded, complain: Complain, reference: str
    ) -> None:
        said = complain(server.address, "--parity", reference, "--step", "3")
        assert "goes with it" not in said

    def test_of_a_teacher_that_is_not_there_is_refused_with_those_that_are(
        self, server: Embedded, complain: Complain, reference: str
    ) -> None:
        said = complain(server.address, "--teacher-id", "other", "--parity", reference)
        assert "no one teacher 'other' is there, at" in said
        assert "name one of teacher with --teacher-id" in said

    def test_is_asked_for_where_the_teacher_is_published(
        self, registry: str, complain: Complain, tmp_path: Path
    ) -> None:
        ids, lengths, logits = some_rows(1)
        path = tmp_path / "step.npz"
        save(path, {"input_ids": ids, "lengths": lengths, "logits": logits})
        with tl.connect(registry) as client, client.open_publisher(a_teacher("asks")):
            with pytest.raises(ConfigError, match=r"is published.* give --step"):
                cli.inspect((registry, "--teacher-id", "asks", "--parity", str(path)))

    def test_whose_file_forgot_its_lengths_is_told_so(
        self, registry: str, complain: Complain, tmp_path: Path
    ) -> None:
        ids, lengths, logits = some_rows(4)
        ids[torch.arange(ids.shape[1]) >= lengths.unsqueeze(1)] = 0
        path = tmp_path / "step.npz"
        save(path, {"input_ids": ids, "logits": logits})
        asked = (registry, "--teacher-id", "forgets", "--parity", str(path), "--step", "0")
        with (
            tl.connect(registry) as client,
            client.open_publisher(a_teacher("forgets")) as publisher,
        ):
            with publisher.reserve(0, input_ids=ids, lengths=lengths) as draft:
                tl.select_top_k(logits, out=draft)
            said = complain(*asked)
        assert "end in id 0 repeated, and the file has no lengths" in said

    def test_without_its_last_token_is_refused_before_anything_is_compared(
        self, registry: str, complain: Complain, tmp_path: Path
    ) -> None:
        ids, lengths, logits = some_rows(2)
        path = tmp_path / "step.npz"
        save(path, {"input_ids": ids, "lengths": lengths, "logits": logits})
        with (
            tl.connect(registry) as client,
            client.open_publisher(a_teacher("drops")) as publisher,
        ):
            with publisher.reserve(0, input_ids=ids, lengths=lengths - 1) as draft:
                tl.select_top_k(logits, out=draft)
            asked = ("--parity", str(path), "--step", "0", "--teacher-id", "drops")
            assert "without its last token" in complain(registry, *asked)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model as a user has it, with its tokenizer."""
    place = tmp_path_factory.mktemp("model")
    config = transformers.LlamaConfig(
        vocab_size=120,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        initializer_range=0.3,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        transformers.LlamaForCausalLM(config).save_pretrained(place)
    bare = Tokenizer(models.WordLevel({f"w{i}": i for i in range(100)}, unk_token="w0"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=bare).save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def address(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server that serves the folder."""
    engine = load_engine(str(folder), device="cpu", dtype="float32")
    place = tmp_path_factory.mktemp("served")
    with embedded_server(place, pool_bytes=MIB, engine=engine) as server:
        yield server.address


class TestALocalModel:
    """The folder that somebody else has, loaded and run by the command."""

    def test_says_the_same(self, address: str, run: Run, folder: Path) -> None:
        code, text = run(address, "--parity", str(folder), "--rows", "2", "--json")
        said = json.loads(text)
        assert (code, said["rows"], said["positions"]) == (0, 2, 128)
        assert said["max_abs_diff"] < 0.01
        assert said["reference"].endswith("in float32")

    def test_of_other_weights_says_otherwise(
        self, address: str, run: Run, folder: Path, tmp_path: Path
    ) -> None:
        other = shutil.copytree(folder, tmp_path / "other")
        model = transformers.AutoModelForCausalLM.from_pretrained(other)
        with torch.no_grad():
            model.model.layers[0].mlp.up_proj.weight.neg_()
        model.save_pretrained(other)
        code, text = run(address, "--parity", str(other))
        assert code == 1
        assert "weights" in text

    def test_of_another_tokenizer_is_refused(
        self, address: str, complain: Complain, folder: Path, tmp_path: Path
    ) -> None:
        other = shutil.copytree(folder, tmp_path / "other")
        bare = Tokenizer(models.WordLevel({f"w{99 - i}": i for i in range(100)}, unk_token="w0"))
        transformers.PreTrainedTokenizerFast(tokenizer_object=bare).save_pretrained(other)
        assert "tokenizer" in complain(address, "--parity", str(other))

    def test_that_knows_fewer_ids_is_refused(
        self, server: Embedded, run: Run, folder: Path
    ) -> None:
        with pytest.raises(ConfigError, match="knows 120 ids, and the teacher 1,500"):
            run(server.address, "--parity", str(folder))


class TestWhatCannotBeAsked:
    @pytest.mark.parametrize(
        ("wrong", "said"),
        [
            ({"input_ids": None}, "has no input_ids"),
            ({"logits": None}, "has neither logprobs nor logits"),
            ({"logits": np.zeros((3, 4, 9))}, r"has logits float64 \[3, 4, 9\] beside input_ids"),
            ({"lengths": np.array([0, 1, 2])}, "has lengths that are not"),
            ({"logits": np.array([{}], dtype=object)}, "cannot be read"),
            ({"length": np.array([10, 4, 7])}, "has length, which is not read here"),
            ({"attention_mask": LEFT}, "has lengths and attention_mask: give one"),
            ({"attention_mask": LEFT, "lengths": None}, "row 1 of attention_mask .*first token"),
            ({"attention_mask": LEFT[:2], "lengths": None}, r"attention_mask has shape \(2, 10\)"),
            ({"logits": None, "logprobs": PROBABILITIES}, "has probabilities .*logarithm"),
            ({"logits": None, "logprobs": 40 * (PROBABILITIES - 0.5)}, "up to 20: .*as logits"),
            ({"logits": np.zeros((3, 10, 9))}, "has 9 columns, and the teacher 1,500 ids"),
        ],
    )
    def test_a_file_that_says_something_else_is_refused_by_its_flag(
        self, server: Embedded, run: Run, tmp_path: Path, wrong: dict[str, object], said: str
    ) -> None:
        given = {**of_rows(head_logits), **wrong}
        save(tmp_path / "bad.npz", {name: a for name, a in given.items() if a is not None})
        with pytest.raises(ConfigError, match=f"--parity .*{said}"):
            run(server.address, "--parity", str(tmp_path / "bad.npz"))

    @pytest.mark.parametrize(
        ("name", "said"),
        [("nowhere", ".* a .gguf"), ("nowhere.npz", ""), ("nowhere.safetensors", "")],
    )
    def test_nothing_there_is_said(self, server: Embedded, run: Run, name: str, said: str) -> None:
        with pytest.raises(ConfigError, match=f"--parity '{name}'{said}"):
            run(server.address, "--parity", name)

    @pytest.mark.parametrize(
        "flags",
        [
            ("--rows", "2"),
            ("--step", "1"),
            ("--teacher-id", "a"),
            ("--tolerance", "1"),
            ("--parity", "a.npz", "--reclaim", "quarantined"),
            ("--parity", "a.npz", "--rows", "2", "--step", "1"),
            ("--parity", "a.npz", "--rows", "0"),
            ("--parity", "a.npz", "--tolerance", "nan"),
        ],
    )
    def test_flags_that_do_not_belong_together_end_with_two(
        self, flags: tuple[str, ...], run: Run
    ) -> None:
        with pytest.raises(SystemExit) as caught:
            run("unix:/nowhere", *flags)
        assert caught.value.code == 2
