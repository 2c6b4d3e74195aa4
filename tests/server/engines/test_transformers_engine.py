"""The built-in engine says what the model says, in chunks, and refuses by name what it cannot."""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, normalizers

from teacher_logits.digest import tokenizer_fingerprint
from teacher_logits.errors import ConfigError
from teacher_logits.tokenizer import fingerprint_of
from teacher_logits_server.config import ServerConfig
from teacher_logits_server.engines import EngineProfile, Row
from teacher_logits_server.engines import transformers as built_in
from teacher_logits_server.engines.head import MIN_CHUNK_POSITIONS, chunk_positions
from teacher_logits_server.engines.probe import probe_causality
from teacher_logits_server.engines.transformers import (
    TransformersEngine,
    from_config,
    load_engine,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PretrainedConfig, PreTrainedModel

V = 300
SMALL: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
LLAMA = transformers.LlamaConfig(**SMALL)
CONFIGS: list[PretrainedConfig] = [
    LLAMA,
    transformers.LlamaConfig(**SMALL, tie_word_embeddings=True),
    transformers.LlamaConfig(  # rows of more than 32 tokens turn by other angles
        **SMALL,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "short_factor": [1.0] * 4,
            "long_factor": [3.0] * 4,
        },
    ),
    transformers.Gemma2Config(**SMALL, head_dim=8, final_logit_softcapping=0.5),
    transformers.CohereConfig(**SMALL, logit_scale=0.0625),
    transformers.GraniteConfig(**SMALL, logits_scaling=7.0),
    transformers.PhiConfig(**SMALL),
    transformers.GPT2Config(vocab_size=V, n_embd=32, n_layer=2, n_head=4, n_positions=128),
    transformers.MambaConfig(vocab_size=V, hidden_size=32, num_hidden_layers=2, state_size=4),
]
ROWS = [list(range(100)), [5, 4, 3, 2, 1, 0, 7], list(range(50, 90))]


def make_model(config: PretrainedConfig) -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for weights in model.parameters():
                weights.mul_(2.0)  # as they are born their logits are all but zero
    return model.eval()  # type: ignore[no-any-return]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model as a user has it: weights, config, tokenizer; the head is padded by 20 rows."""
    place = tmp_path_factory.mktemp("model")
    make_model(LLAMA).save_pretrained(place)
    bare = Tokenizer(models.WordLevel({f"w{i}": i for i in range(V - 20)}, unk_token="w0"))
    bare.normalizer = normalizers.Lowercase()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=bare)
    tokenizer.save_pretrained(place)
    return place


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    """The model again, to be spoilt."""
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def row(token_ids: Sequence[int], first: int = 0, count: int | None = None) -> Row:
    count = len(token_ids) - first if count is None else count
    return Row(token_ids=torch.tensor(token_ids), first=first, count=count)


def said_by(engine: TransformersEngine, rows: Sequence[Row]) -> torch.Tensor:
    return torch.cat([chunk.clone() for chunk in engine.logits(rows)])


def own_words(model: PreTrainedModel, token_ids: Sequence[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([token_ids]), use_cache=False).logits[0].float()  # type: ignore[no-any-return]


class TestLogits:
    @pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.model_type)
    def test_padded_rows_in_chunks_are_what_the_model_says_of_each_row_alone(
        self, config: PretrainedConfig
    ) -> None:
        model = make_model(config)
        profile = EngineProfile(
            name="t", vocabulary_size=0, head_rows=0, max_row_tokens=128, arithmetic_type="float32"
        )
        engine = TransformersEngine(model, profile=profile, chunk_bytes=1)
        expected = torch.cat([own_words(model, token_ids) for token_ids in ROWS])
        given = said_by(engine, [row(token_ids) for token_ids in ROWS])
        assert float((given - expected).abs().max()) < 1e-5 * float(expected.abs().max())
        assert probe_causality(engine).verdict.value == "passed"

    def test_only_wanted_positions_come(self, folder: Path) -> None:
        engine = load_engine(str(folder), device="cpu")
        whole = said_by(engine, [row(ROWS[0])])
        given = said_by(engine, [row(ROWS[0], 10, 3), row(ROWS[0], 99, 1)])
        assert torch.allclose(given, whole[[10, 11, 12, 99]], atol=2e-5)

    def test_chunks_are_small_fp32_and_the_callers_to_write_into(self, folder: Path) -> None:
        engine = load_engine(str(folder), device="cpu", chunk_bytes=1)
        expected = said_by(engine, [row(ROWS[0])])
        sizes = []
        at = 0
        for chunk in engine.logits([row(ROWS[0])]):
            assert chunk.dtype == torch.float32
            assert torch.allclose(chunk, expected[at : at + len(chunk)], atol=2e-5)
            chunk.fill_(torch.nan)
            sizes.append(len(chunk))
            at += len(chunk)
        assert sizes == [MIN_CHUNK_POSITIONS, 100 - MIN_CHUNK_POSITIONS]

    def test_a_chunk_keeps_to_its_budget_with_its_16_bit_product_counted(self) -> None:
        assert chunk_positions(128 << 20, width=151_936, weight_bytes=4) == 220
        assert chunk_positions(128 << 20, width=151_936, weight_bytes=2) == 147
        assert chunk_positions(1 << 20, width=151_936, weight_bytes=4) == MIN_CHUNK_POSITIONS

    def test_16_bit_weights_answer_in_fp32_what_the_model_answers(self, folder: Path) -> None:
        engine = load_engine(str(folder), device="cpu", dtype="bfloat16")
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        [chunk] = engine.logits([row(ROWS[1])])
        assert chunk.dtype == torch.float32
        assert torch.allclose(chunk, own_words(model, ROWS[1]), atol=0.05)
        assert engine.profile.arithmetic_type == "bfloat16"

    def test_a_head_with_a_bias_adds_it(self) -> None:
        model = make_model(transformers.PhiConfig(**SMALL))
        with torch.no_grad():
            model.get_output_embeddings().bias.copy_(torch.arange(float(V)))
        profile = EngineProfile(
            name="t", vocabulary_size=0, head_rows=0, max_row_tokens=128, arithmetic_type=""
        )
        engine = TransformersEngine(model, profile=profile)
        expected = own_words(model, ROWS[1])
        assert torch.allclose(said_by(engine, [row(ROWS[1])]), expected, rtol=1e-5)
        assert int(expected[0].argmax()) == V - 1

    def test_a_number_that_some_models_divide_by_and_others_multiply_with_is_tried_both_ways(
        self,
    ) -> None:
        class Multiplying(transformers.LlamaForCausalLM):
            def forward(self, *args: object, **more: object) -> object:
                output = super().forward(*args, **more)
                output.logits = output.logits * self.config.logits_scaling
                return output

        scaled: dict[str, Any] = {**SMALL, "logits_scaling": 3.0}
        model = Multiplying(transformers.LlamaConfig(**scaled))
        profile = EngineProfile(
            name="t", vocabulary_size=0, head_rows=0, max_row_tokens=128, arithmetic_type=""
        )
        engine = TransformersEngine(model, profile=profile)
        expected = own_words(model, ROWS[1])
        assert torch.allclose(said_by(engine, [row(ROWS[1])]), expected, rtol=1e-5, atol=1e-6)

    def test_a_model_that_does_something_else_to_its_logits_is_refused(self) -> None:
        class Odd(transformers.LlamaForCausalLM):
            def forward(self, *args: object, **more: object) -> object:
                output = super().forward(*args, **more)
                output.logits = output.logits.abs()
                return output

        profile = EngineProfile(
            name="t", vocabulary_size=0, head_rows=0, max_row_tokens=128, arithmetic_type=""
        )
        with pytest.raises(ConfigError, match="logits of a Odd are not those of its body and head"):
            TransformersEngine(Odd(LLAMA), profile=profile)


def write_gguf(path: Path, *, vocabulary: Sequence[str]) -> None:
    """Write a llama of one layer with random weights, and a byte-level tokenizer inside."""
    chance = torch.Generator().manual_seed(0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(8)
    writer.add_vocab_size(len(vocabulary))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(list(vocabulary))
    writer.add_token_merges(["a b"])
    writer.add_token_types([gguf.TokenType.NORMAL] * len(vocabulary))
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    shapes = {
        "token_embd": (len(vocabulary), 32),
        "output": (len(vocabulary), 32),
        "output_norm": (32,),
        "blk.0.attn_norm": (32,),
        "blk.0.ffn_norm": (32,),
        "blk.0.attn_q": (32, 32),
        "blk.0.attn_k": (16, 32),
        "blk.0.attn_v": (16, 32),
        "blk.0.attn_output": (32, 32),
        "blk.0.ffn_gate": (48, 32),
        "blk.0.ffn_up": (48, 32),
        "blk.0.ffn_down": (32, 48),
    }
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", torch.randn(shape, generator=chance).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_is_served_with_the_tokenizer_inside_it(tmp_path: Path) -> None:
    path = tmp_path / "small.gguf"
    write_gguf(path, vocabulary=["<|end|>", *"abcdefgh", "ab"])
    engine = load_engine(str(path), device="cpu")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name)
    token_ids = [1, 5, 9, 3]
    assert torch.allclose(
        said_by(engine, [row(token_ids)]), own_words(model, token_ids), rtol=1e-4, atol=1e-4
    )
    assert engine.profile.vocabulary_size == engine.profile.head_rows == 10
    assert engine.profile.max_row_tokens == 64
    assert engine.profile.tokenizer_fingerprint != ""
    assert engine.profile.revision != ""


def test_loading_writes_nothing_into_the_log_and_leaves_the_librarys_settings(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "small.gguf"
    write_gguf(path, vocabulary=["<|end|>", *"abcdefgh", "ab"])
    switches = transformers.utils.logging
    before = switches.get_verbosity(), switches.is_progress_bar_enabled()
    capfd.readouterr()
    switches.set_verbosity_info()
    switches.enable_progress_bar()
    try:
        for model in (folder, path):
            load_engine(str(model), device="cpu")
        said = capfd.readouterr()
        assert (said.out, said.err) == ("", "")
        assert switches.get_verbosity() == logging.INFO
        assert switches.is_progress_bar_enabled()
    finally:
        switches.set_verbosity(before[0])
        if not before[1]:
            switches.disable_progress_bar()


class TestProfile:
    def test_it_says_what_the_folder_holds(self, folder: Path) -> None:
        profile = load_engine(str(folder), device="cpu").profile
        assert profile.name == "transformers"
        assert profile.vocabulary_size == V - 20
        assert profile.head_rows == V
        assert profile.max_row_tokens == 128
        assert profile.arithmetic_type == "float32"
        assert len(profile.revision) == 32
        assert profile.tokenizer_fingerprint == tokenizer_fingerprint(
            vocabulary={f"w{i}": i for i in range(V - 20)},
            added_tokens={},
            normalizer='{"type":"Lowercase"}',
        )

    def test_a_tokenizer_without_a_normaliser_says_nothing_of_one(self) -> None:
        bare = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=bare)
        assert fingerprint_of(tokenizer) == tokenizer_fingerprint(
            vocabulary={"a": 0, "b": 1}, added_tokens={}
        )

    def test_without_a_tokenizer_all_rows_of_the_head_count(self, copy: Path) -> None:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (copy / name).unlink()
        profile = load_engine(str(copy), device="cpu").profile
        assert profile.vocabulary_size == V
        assert profile.tokenizer_fingerprint == ""

    def test_a_tokenizer_from_elsewhere_counts_where_one_is_named(
        self, folder: Path, copy: Path
    ) -> None:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (copy / name).unlink()
        named = load_engine(str(copy), device="cpu", tokenizer=str(folder)).profile
        assert named == load_engine(str(folder), device="cpu").profile

    def test_weights_of_the_same_size_are_another_revision(self, folder: Path, copy: Path) -> None:
        before = load_engine(str(folder), device="cpu").profile.revision
        assert load_engine(str(copy), device="cpu").profile.revision == before
        weights = copy / "model.safetensors"
        changed = bytearray(weights.read_bytes())
        changed[-100] ^= 1
        weights.write_bytes(changed)
        assert load_engine(str(copy), device="cpu").profile.revision != before

    def test_the_servers_settings_reach_it(self, folder: Path, copy: Path) -> None:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (copy / name).unlink()
        config = ServerConfig(
            model=str(copy), dtype="bfloat16", device="cpu", tokenizer=str(folder)
        )
        profile = from_config(config).profile
        assert profile.arithmetic_type == "bfloat16"
        assert profile.vocabulary_size == V - 20


class TestRefusals:
    def refused(
        self, path: Path, *, device: str = "cpu", dtype: str = "auto", tokenizer: str = ""
    ) -> str:
        with pytest.raises(ConfigError) as told:
            load_engine(str(path), device=device, dtype=dtype, tokenizer=tokenizer)
        assert str(told.value.facts["flag"]) in told.value.message
        return told.value.message

    def test_a_folder_that_is_not_there(self, tmp_path: Path) -> None:
        assert "there is no such folder or file" in self.refused(tmp_path / "nowhere")

    def test_a_folder_that_the_user_may_not_enter(
        self, copy: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("os.access", lambda *_: False)  # the tests may run as root
        told = self.refused(copy)
        assert f"user {os.geteuid()}, as whom this runs, may not read {copy}: let it" in told

    def test_weights_that_the_user_may_not_read(
        self, copy: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def denied(self: Path, _mode: str) -> None:
            raise PermissionError(13, "Permission denied", str(self))

        monkeypatch.setattr(Path, "open", denied)
        assert f"may not read {copy}/model.safetensors: let it (chmod" in self.refused(copy)

    def test_a_server_without_a_model(self) -> None:
        with pytest.raises(ConfigError, match="--model is missing"):
            from_config(ServerConfig())

    def test_a_folder_without_weights(self, copy: Path) -> None:
        (copy / "model.safetensors").unlink()
        assert "no weights: a teacher needs model.safetensors" in self.refused(copy)

    def test_a_folder_of_pickled_weights(self, copy: Path) -> None:
        (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
        assert "no safetensors, only pickled weights" in self.refused(copy)

    def test_a_folder_that_holds_a_gguf_file(self, copy: Path) -> None:
        (copy / "model.safetensors").rename(copy / "model.gguf")
        assert "give the path of the file" in self.refused(copy)

    def test_a_folder_without_a_config(self, copy: Path) -> None:
        (copy / "config.json").unlink()
        assert "no config.json" in self.refused(copy)

    def test_a_shard_that_is_missing(self, copy: Path) -> None:
        (copy / "model.safetensors").rename(copy / "model-1.safetensors")
        index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
        (copy / "model.safetensors.index.json").write_text(json.dumps(index))
        assert "1 of 2 weight files are missing: model-2" in self.refused(copy)

    def test_an_index_that_is_none(self, copy: Path) -> None:
        (copy / "model.safetensors").unlink()
        (copy / "model.safetensors.index.json").write_text("[]")
        assert "model.safetensors.index.json cannot be read" in self.refused(copy)

    def test_weights_that_are_none(self, copy: Path) -> None:
        (copy / "model.safetensors").write_bytes(b"version https://git-lfs")
        assert "does not load" in self.refused(copy)

    def test_a_config_of_no_known_model(self, copy: Path) -> None:
        (copy / "config.json").write_text('{"model_type": "nonesuch"}')
        assert "does not load" in self.refused(copy)

    def test_a_head_that_nobody_knows(self, copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(built_in, "find_head", lambda *_, **__: None)
        assert self.refused(copy).startswith("--model: the logits of a LlamaForCausalLM")

    def test_a_folder_that_wants_its_own_code_run(self, copy: Path, tmp_path: Path) -> None:
        proof = tmp_path / "it ran"
        (copy / "theirs.py").write_text(f"open({str(proof)!r}, 'w')")
        config = {"model_type": "theirs", "auto_map": {"AutoConfig": "theirs.Config"}}
        (copy / "config.json").write_text(json.dumps(config))
        assert "does not load" in self.refused(copy)
        assert not proof.exists()

    def test_a_tokenizer_that_is_none(self, copy: Path) -> None:
        (copy / "tokenizer.json").write_text("{")
        assert "--tokenizer" in self.refused(copy)

    def test_a_tokenizer_that_is_not_there(self, folder: Path, tmp_path: Path) -> None:
        assert "there is no tokenizer there" in self.refused(folder, tokenizer=str(tmp_path))

    def test_a_file_that_is_no_gguf(self, folder: Path) -> None:
        assert "this is no GGUF file" in self.refused(folder / "config.json")

    def test_an_unknown_type(self, folder: Path) -> None:
        assert "give auto, float32, bfloat16, float16" in self.refused(folder, dtype="int8")

    @pytest.mark.parametrize("device", ["tpu", "cpu:0", "cuda:x", "cuda:1:2", ""])
    def test_an_unknown_device(self, folder: Path, device: str) -> None:
        assert "give auto, cpu, cuda or cuda:N" in self.refused(folder, device=device)

    def test_a_device_that_is_not_there(self, folder: Path) -> None:
        assert "torch sees" in self.refused(folder, device="cuda:99")

    def test_transformers_that_are_not_installed(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "transformers", None)
        monkeypatch.setitem(sys.modules, "transformers.utils", None)
        assert "install teacher-logits[transformers]" in self.refused(folder)
