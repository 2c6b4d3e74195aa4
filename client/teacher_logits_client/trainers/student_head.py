"""A student's head, for losses from its hidden states: the array of its logits is never made.

The student's forward is asked for the logits of one position, and what it hands its head is taken
at all of them. Promises that these are the head's logits: they are held against the model's own
at that one position, with the first batch. Refuses a model or a set-up of which that is not known.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import torch

from teacher_logits.errors import ConfigError
from teacher_logits_client.losses import HeadLogits, from_hidden

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from transformers import Trainer

# Beside 16-bit products, which are rounded in another order.
_TOLERANCE = 0.05
_KNOWN_AS = "loss_from_hidden=True"


class StudentHead:
    """The head of a causal language model of ``transformers``, and where its input comes from.

    Raises:
        ConfigError: the model has no head that is a plain linear one, no body of its own, or
            always computes all logits; or the trainer shards or compiles it.

    Under adapters of PEFT it is the model that they adapt, whose own layers have them.
    """

    def __init__(self, trainer: Trainer) -> None:
        model = trainer.accelerator.unwrap_model(trainer.model)
        if hasattr(model, "get_base_model"):  # adapters of PEFT, whose layers are inside of it
            model = model.get_base_model()
        head, body = (_of(model, name) for name in ("get_output_embeddings", "base_model"))
        _check(trainer, model, head, body)
        self._head = cast("torch.nn.Linear", head)
        self._body = cast("torch.nn.Module", body)
        config = model.config.get_text_config()
        self._scale = _scale_of(config)
        self._soft_cap: float | None = getattr(config, "final_logit_softcapping", None)
        self._is_checked = False

    def forward(
        self, model: torch.nn.Module, inputs: Mapping[str, object]
    ) -> tuple[object, HeadLogits]:
        """Run the model, wrapped or not; return its outputs, and the logits [N,S,V] of its head.

        Of the outputs' own logits there is one position a row.

        Raises:
            ConfigError: with the first batch, they are not the model's own.
        """
        seen: list[object] = []
        watch = self._body.register_forward_hook(lambda module, given, out: seen.append(out))
        try:
            outputs = model(**inputs, logits_to_keep=1)
        finally:
            watch.remove()
        hidden = getattr(seen[-1], "last_hidden_state", None) if seen else None
        if not isinstance(hidden, torch.Tensor):
            raise ConfigError(
                f"{_KNOWN_AS}: {type(self._body).__name__} has no last_hidden_state to take"
            )
        check_positions(hidden.shape, inputs)
        hidden = hidden.to(self._head.weight.device)  # a model cut over devices may end elsewhere
        logits = from_hidden(
            hidden,
            _as_multiplied(self._head.weight, hidden),
            self._head.bias,
            scale=self._scale,
            soft_cap=self._soft_cap,
        )
        if not self._is_checked:
            _check_alike(logits, logits_of(outputs)[:, -1])
            self._is_checked = True
        return outputs, logits


def logits_of(outputs: object) -> torch.Tensor:
    """Return the logits that a model's outputs have, by their name or in front."""
    found: torch.Tensor = outputs["logits"] if isinstance(outputs, dict) else outputs[0]  # type: ignore[index]
    return found


def check_positions(shape: Sequence[int], inputs: Mapping[str, object]) -> None:
    """Let what a student says [N,S,...] pass if it has a position for each of its input ids.

    Raises:
        ConfigError: it has others, of which nobody knows where they belong.
    """
    ids = inputs.get("input_ids")
    if isinstance(ids, torch.Tensor) and tuple(shape[:2]) != tuple(ids.shape):
        raise ConfigError(
            f"the student was given input_ids of shape {tuple(ids.shape)} and answers with "
            f"{tuple(shape[:2])} positions: one that adds tokens of its own, as prompt tuning "
            "does, or leaves some out, cannot be held against a teacher of the ids that were given",
            facts={"given": str(tuple(ids.shape)), "answered": str(tuple(shape[:2]))},
        )


def last_positions(logits: torch.Tensor | HeadLogits, count: int) -> torch.Tensor | HeadLogits:
    """Return those [N,count,V] of the last ``count`` tokens: each speaks of the next one."""
    own = slice(-count - 1, -1)
    if isinstance(logits, HeadLogits):
        return replace(logits, hidden=logits.hidden[:, own])
    return logits[:, own]


def one_line(logits: torch.Tensor | HeadLogits) -> torch.Tensor | HeadLogits:
    """Return the logits [P,V] of packed rows, from [1,P,V]."""
    if isinstance(logits, HeadLogits):
        return replace(logits, hidden=logits.hidden[0])
    return logits[0]


def _as_multiplied(weight: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """Return a head's weight in the type in which autocast has a GPU multiply it.

    Hidden states in bf16 beside a weight in fp32 come from it. In fp32, as on a CPU, the products
    would take a GPU many times as long; those of fp16 are taken so all the same.
    """
    is_cast = weight.is_cuda and hidden.dtype == torch.bfloat16
    return weight.to(torch.bfloat16) if is_cast else weight


def _scale_of(config: object) -> float:
    """Return what a model's logits are multiplied by, under the names that its config has for it.

    A name that means something else in some model is found out by its logits.
    """
    for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"):
        if (factor := getattr(config, name, None)) is not None:
            return float(factor)
    divisor = getattr(config, "logits_scaling", None)
    return 1.0 if divisor is None else 1.0 / float(divisor)


def _of(model: object, name: str) -> object:
    """Return what a model has under a name, or makes there; None where it has nothing."""
    try:
        found = getattr(model, name, None)
        return found() if inspect.ismethod(found) else found
    except NotImplementedError:  # so says a model that has no head
        return None


def _check(trainer: Trainer, model: object, head: object, body: object) -> None:
    wrong = ""
    sharded = [
        name
        for name in ("is_fsdp_enabled", "is_deepspeed_enabled", "is_tp_enabled")
        if getattr(trainer, name, False)
    ]
    if type(head) is not torch.nn.Linear:
        kind = type(head)
        wrong = f"its head is a {kind.__module__}.{kind.__name__}, and no plain torch.nn.Linear"
    elif not isinstance(body, torch.nn.Module) or body is model:
        wrong = "it has no base_model that hands its head hidden states"
    elif "logits_to_keep" not in inspect.signature(model.forward).parameters:  # type: ignore[attr-defined]
        wrong = "its forward takes no logits_to_keep, and makes all logits every time"
    elif sharded:
        wrong = f"its head is cut over ranks ({sharded[0]})"
    elif trainer.args.torch_compile:
        wrong = "it is compiled (torch_compile), where nobody sees its hidden states"
    if wrong:
        raise ConfigError(
            f"{_KNOWN_AS} is not for this {type(model).__name__}: {wrong}; leave it out"
        )


@torch.no_grad()
def _check_alike(logits: HeadLogits, own: torch.Tensor) -> None:
    """Let logits pass that are the model's ``own`` [N,V] at the last position."""
    found = logits.hidden[:, -1].float() @ logits.weight.float().t() * logits.scale
    if logits.bias is not None:
        found += logits.bias.float() * logits.scale
    if logits.soft_cap is not None:
        found = logits.soft_cap * (found / logits.soft_cap).tanh()
    apart, size = float((found - own.float()).abs().max()), float(own.float().abs().max())
    if not apart <= _TOLERANCE * size + 1e-3:  # nor where they are NaN
        raise ConfigError(
            f"{_KNOWN_AS}: the logits of this model's head are up to {apart:.3g} from its own, "
            f"which are up to {size:.3g}: it changes them, or what it hands its head, in a way "
            "that is not known here; leave it out",
            facts={"apart": apart, "largest": size},
        )
