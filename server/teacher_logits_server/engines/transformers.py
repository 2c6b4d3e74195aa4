"""The built-in engine: any local causal language model that ``transformers`` can load.

    rows -> padded on the right -> body, once -> wanted positions -> head, in chunks

Promises: nothing is fetched and no code of the model's folder is run; the body runs once over
the rows of a pass, the head over the wanted positions alone, and never all of them at once.
Refuses (``ConfigError``) what it cannot load, naming the flag, and a model whose logits are
not those of its body and head: that is tried when it is loaded.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch.nn.utils.rnn import pad_sequence

from teacher_logits.errors import ConfigError
from teacher_logits.tokenizer import fingerprint_of, id_count
from teacher_logits_server.engines import EngineProfile, Row
from teacher_logits_server.engines.head import CHUNK_BYTES, Head, find_head
from teacher_logits_server.engines.heap import WORTHWHILE_TOKENS, give_back_freed_memory
from teacher_logits_server.engines.loading import load_model, load_tokenizer, loading
from teacher_logits_server.engines.model_files import find_model, revision_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from transformers import PreTrainedModel

    from teacher_logits_server.config import ServerConfig

# Rotary embeddings that change with the length of the longest row in a pass.
_LENGTH_BOUND_ROPES = frozenset({"dynamic", "longrope"})
_NO_LIMIT_TOKENS = 1 << 20
_TRIAL_TOKENS = 12


class TransformersEngine:
    """An engine over one loaded model. One pass at a time; the model stays the caller's."""

    def __init__(
        self, model: PreTrainedModel, *, profile: EngineProfile, chunk_bytes: int | None = None
    ) -> None:
        """Take a loaded model.

        ``chunk_bytes`` bounds the memory of a chunk of logits: 128 MiB on a CPU unless given.
        ``profile.head_rows`` is taken from the model.

        Raises:
            ConfigError: its logits are not those of its body and head.
        """
        self._model = model.eval()
        self._device = model.device
        self._one_length_a_pass = _has_length_bound_rope(model.config.get_text_config())
        budget = chunk_bytes or CHUNK_BYTES.get(self._device.type, CHUNK_BYTES["cuda"])
        self._head = self._find_head(budget)
        self._profile = replace(
            profile,
            head_rows=self._head.rows,
            vocabulary_size=min(profile.vocabulary_size or self._head.rows, self._head.rows),
        )

    @property
    def profile(self) -> EngineProfile:
        """Return what the engine says of its teacher."""
        return self._profile

    def logits(self, rows: Sequence[Row]) -> Iterator[torch.Tensor]:
        """Yield the logits of the wanted positions, fp32 [c, head_rows] a chunk."""
        yield from self._head.chunks(self._hidden(rows))

    def _hidden(self, rows: Sequence[Row]) -> torch.Tensor:
        """Run the body once; return what goes into the head at the wanted positions, [P,H]."""
        passes = [[row] for row in rows] if self._one_length_a_pass else [rows]
        wanted = []
        for some in passes:
            hidden = self._run_body([row.token_ids for row in some])
            for place, row in enumerate(some):
                wanted.append(hidden[place, row.first : row.first + row.count])
        tokens = sum(len(row.token_ids) for row in rows)
        if self._device.type == "cpu" and tokens >= WORTHWHILE_TOKENS:
            give_back_freed_memory()
        return torch.cat(wanted)

    def _run_body(self, token_ids: Sequence[torch.Tensor]) -> torch.Tensor:
        # No mask: in a causal model nothing behind a position reaches it, so neither does
        # padding on the right (the probe tries it at every start). A mask would take [N,S,S]
        # and bar attention from its fastest way.
        padded = pad_sequence(list(token_ids), batch_first=True).to(self._device)
        with torch.no_grad():
            body = self._model.base_model(input_ids=padded, use_cache=False)
        hidden = body.last_hidden_state
        if not isinstance(hidden, torch.Tensor):
            raise TypeError(f"the body of {type(self._model).__name__} gives no hidden states")
        return hidden

    def _find_head(self, budget_bytes: int) -> Head:
        model, name = self._model, type(self._model).__name__
        module = model.get_output_embeddings()
        token_ids = _trial_tokens(int(model.get_input_embeddings().weight.shape[0]))
        with torch.no_grad():
            own = model(input_ids=token_ids.unsqueeze(0).to(self._device), use_cache=False).logits
        row = Row(token_ids=token_ids, first=0, count=len(token_ids))
        head = module and find_head(
            module,
            config=model.config.get_text_config(),
            hidden=self._hidden([row]),
            logits=own[0],
            budget_bytes=budget_bytes,
        )
        if head is None:
            raise ConfigError(
                f"--model: the logits of a {name} are not those of its body and head, so it does "
                "something to them that this engine does not know: serve it with an engine of "
                "your own, --engine package.module:function",
                facts={"flag": "--model", "model": name},
            )
        return head


def _trial_tokens(vocabulary_size: int) -> torch.Tensor:
    return torch.arange(1, _TRIAL_TOKENS + 1) * 7919 % vocabulary_size


def _has_length_bound_rope(config: object) -> bool:
    stated = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    if not isinstance(stated, dict):
        return False
    layers = [each for each in stated.values() if isinstance(each, dict)] or [stated]
    return any(each.get("rope_type") in _LENGTH_BOUND_ROPES for each in layers)


def load_engine(
    path: str,
    *,
    device: str = "auto",
    dtype: str = "auto",
    tokenizer: str = "",
    chunk_bytes: int | None = None,
) -> TransformersEngine:
    """Load a teacher from a folder of safetensors, or from a GGUF file.

    ``device`` is ``auto`` (CUDA where there is one), ``cpu``, ``cuda`` or ``cuda:N``; ``dtype``
    ``float32``, ``bfloat16``, ``float16`` or ``auto``: the weights' own type on CUDA, fp32 on a
    CPU. ``tokenizer`` names a folder or a GGUF file, where the model's own will not do.

    Raises:
        ConfigError: naming the flag to change.
    """
    files = find_model(path)
    model = load_model(files, device=device, dtype=dtype)
    found = load_tokenizer(files, path=tokenizer)
    config = model.config.get_text_config()
    profile = EngineProfile(
        name="transformers",
        vocabulary_size=id_count(found) if found else 0,
        head_rows=0,
        max_row_tokens=getattr(config, "max_position_embeddings", None) or _NO_LIMIT_TOKENS,
        arithmetic_type=str(model.dtype).removeprefix("torch."),
        revision=revision_of(files),
        tokenizer_fingerprint=fingerprint_of(found) if found else "",
    )
    with loading(files.weights[0]):
        return TransformersEngine(model, profile=profile, chunk_bytes=chunk_bytes)


def from_config(config: ServerConfig) -> TransformersEngine:
    """Load the teacher that a server was told to serve.

    Raises:
        ConfigError: naming the flag to change.
    """
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    return load_engine(
        config.model, device=config.device, dtype=config.dtype, tokenizer=config.tokenizer
    )
