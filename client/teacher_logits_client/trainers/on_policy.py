"""On-policy batches: the student continues the prompts itself, and learns from the teacher there.

A prompt is what stands in front of a row's first label. With probability ``lmbda`` a batch's
completions are generated anew by the student as it is at the beginning of the step, and the
teacher scores those. Ranks draw alike, and generate each their own.

Promises: chance that is a function of seed, rank and the batch's number, whatever else was drawn
before; the training's own chance, such as that of dropout, is left where it is.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

import torch

from teacher_logits.errors import ConfigError
from teacher_logits.selection.uniforms import uniforms
from teacher_logits_client.trainers.batch_rows import tokens_and_labels

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

IGNORED = -100
"""The label of a token that is none to learn."""

SAMPLED_AS_IT_IS: dict[str, object] = {"do_sample": True, "top_k": 0}
"""What ``generate`` is told, beside nothing else, for samples of the student's own distribution."""


class Coin:
    """Says of each batch whether the student continues it; the same on every rank."""

    def __init__(self, lmbda: float, *, seed: int) -> None:
        self._lmbda = lmbda
        self._seed = seed

    def toss(self, number: int) -> bool:
        """Return True with probability ``lmbda``, always the same for a batch's number."""
        return _uniform(self._seed, number, 0, 0) < self._lmbda


def sampling_seed(seed: int, *, rank: int, number: int) -> int:
    """Return the seed by which a rank samples its completions of a batch."""
    return int(_uniform(seed, number, rank, 1) * 2**53)


def _uniform(seed: int, *counters: int) -> float:
    number, rank, draw = (torch.tensor(each) for each in counters)
    return float(uniforms(seed % 2**64, number, rank, draw))


class Generates(Protocol):
    """A model of ``transformers`` as it is asked to continue rows."""

    training: bool
    generation_config: object

    def generate(self, **arguments: object) -> torch.Tensor:
        """Return rows [N,P+C]: the prompts [N,P] as given, and what follows."""
        ...

    def train(self, mode: bool = True) -> object:
        """Put the model into training mode, or out of it."""
        ...


def prompts_of(batch: Mapping[str, object]) -> list[torch.Tensor]:
    """Return each row's tokens in front of its first label, on the CPU; all where it has none.

    Raises:
        ConfigError: a row has no prompt, so there is nothing to continue; or see ``rows_of``.
        PayloadInvalidError: see ``rows_of``.
    """
    prompts = []
    for number, (row, labels) in enumerate(tokens_and_labels(batch)):
        learnt = (labels != IGNORED).nonzero().flatten()
        prompts.append(row[: int(learnt[0])] if len(learnt) else row)
        if not len(prompts[-1]):
            raise ConfigError(
                f"row {number} has labels from its first token on, so it has no prompt that the "
                "student could continue: mask the prompt's labels with -100, or set lmbda=0",
                facts={"row": number},
            )
    return prompts


@torch.no_grad()
def continue_prompts(
    model: Generates,
    prompts: Sequence[torch.Tensor],
    *,
    device: torch.device,
    pad_id: int,
    end_ids: Sequence[int],
    seed: int,
    settings: dict[str, object],
) -> dict[str, torch.Tensor]:
    """Have the model continue prompts; return ``input_ids``, ``attention_mask`` and ``labels``.

    Rows are the prompt and what was generated up to the first end, padded on the right; only
    the generated tokens have labels. They are sampled by ``seed``, and chance is as it was
    before. ``settings`` go to ``generate``, with ``SAMPLED_AS_IT_IS``; the model's own
    ``generation_config`` has no say.
    """
    width = max(map(len, prompts))
    given = torch.full((len(prompts), width), pad_id)
    tokens = torch.zeros_like(given)
    for row, prompt in enumerate(prompts):
        given[row, width - len(prompt) :] = prompt
        tokens[row, width - len(prompt) :] = 1
    was_training = model.training
    model.train(False)
    try:
        with _told_alone(model), _sampling_by(seed, device):
            out = model.generate(
                input_ids=given.to(device),
                attention_mask=tokens.to(device),
                pad_token_id=pad_id,
                eos_token_id=list(end_ids) or None,
                **SAMPLED_AS_IT_IS,
                **settings,
            )
    finally:
        model.train(was_training)
    completions = [_until_end(row, end_ids) for row in out[:, width:].cpu()]
    return _padded(prompts, completions, pad_id=pad_id, device=device)


@contextmanager
def _told_alone(model: Generates) -> Iterator[None]:
    """Have a model generate by what it is told, and by nothing of its ``generation_config``.

    That of a chat model cuts or bends its distribution, and any may have it answer with more
    rows, or with something else than rows. A model under adapters is handed its wrapper's.
    """
    of_base = getattr(model, "get_base_model", None)
    both = [model, of_base()] if callable(of_base) else [model]
    kept = [(each, own) for each in both if (own := vars(each).get("generation_config"))]
    for each, own in kept:
        each.generation_config = type(own)()
    try:
        yield
    finally:
        for each, own in kept:
            each.generation_config = own


@contextmanager
def _sampling_by(seed: int, device: torch.device) -> Iterator[None]:
    """Have torch draw by a seed inside, on the CPU and where the model is."""
    kept = device.type in ("cuda", "xpu")
    devices = [0 if device.index is None else device.index] if kept else []
    with torch.random.fork_rng(devices, device_type=device.type if kept else "cuda"):
        torch.manual_seed(seed)
        yield


def special_ids(tokenizer: object, model: object) -> tuple[list[int], int]:
    """Return the ids that end a completion, and the one that pads; 0 where neither is known."""
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # of a processor
    generation = getattr(model, "generation_config", None)
    ends = getattr(generation, "eos_token_id", None)
    if ends is None:
        ends = getattr(tokenizer, "eos_token_id", None)
    found = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
    pad = getattr(tokenizer, "pad_token_id", None)
    return found, next((each for each in (pad, *found) if isinstance(each, int)), 0)


def _until_end(completion: torch.Tensor, end_ids: Sequence[int]) -> torch.Tensor:
    """Return the tokens up to the first end, itself included."""
    ends = torch.isin(completion, torch.tensor(list(end_ids), dtype=torch.int64)).nonzero()
    return completion[: int(ends[0]) + 1] if len(ends) else completion


def _padded(
    prompts: Sequence[torch.Tensor],
    completions: Sequence[torch.Tensor],
    *,
    pad_id: int,
    device: torch.device,
) -> dict[str, torch.Tensor]:
    rows = [torch.cat(both) for both in zip(prompts, completions, strict=True)]
    width = max(map(len, rows))
    input_ids = torch.full((len(rows), width), pad_id)
    attention_mask = torch.zeros_like(input_ids)
    labels = torch.full_like(input_ids, IGNORED)
    for number, (row, prompt) in enumerate(zip(rows, prompts, strict=True)):
        input_ids[number, : len(row)] = row
        attention_mask[number, : len(row)] = 1
        labels[number, len(prompt) : len(row)] = row[len(prompt) :]
    made = {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}
    return {name: each.to(device) for name, each in made.items()}
