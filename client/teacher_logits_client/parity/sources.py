"""Where ``inspect --parity`` has its reference from: a model's folder, or a file of tensors.

    folder, .gguf          a causal language model; rows of ids are drawn and scored here
    .npz, .safetensors     input_ids [N,S], lengths [N] or attention_mask [N,S] unless every row is
                           whole, and either logits or logprobs [N,S,V], or topk_ids and
                           topk_logprobs [N,S,K]; nothing else

Promises: nothing is fetched, no code of a folder is run, and nothing is unpickled. A model
scores each row alone, without padding or cache, on the CPU. The drawn ids are the same each
time. Refuses (``ConfigError``) what cannot be read, naming the flag.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from teacher_logits.errors import ConfigError, PayloadInvalidError
from teacher_logits.tokenizer import fingerprint_of
from teacher_logits_client.parity.lookup import EntryReference
from teacher_logits_client.parity.npz import read_npz
from teacher_logits_client.rows.flat_rows import flatten

if TYPE_CHECKING:
    from collections.abc import Mapping

    from teacher_logits_client.parity.lookup import Reference

FLAG = "--parity"
_SEED = 20
_FILES = (".npz", ".safetensors")
_OF_POSITIONS = ("logprobs", "logits", "topk_ids", "topk_logprobs")
_OF_ROWS = ("input_ids", "lengths", "attention_mask")
_ROUNDING_NATS = 0.25
"""So far above 0 may rounding in bf16 have brought a log-probability."""
_TYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True, eq=False)
class Computed:
    """Rows of token ids, and what the reference says at all of their positions, flat.

    ``notes`` say what is likely the cause where nothing fits.
    """

    rows: list[list[int]]
    reference: torch.Tensor | Reference
    name: str
    notes: tuple[str, ...] = ()


def is_file_of_tensors(path: str) -> bool:
    """Whether the reference is read from a file rather than computed."""
    return Path(path).suffix.lower() in _FILES


def read_file(path: str, *, row_limit: int | None) -> Computed:
    """Read rows and their reference; of the first ``row_limit`` rows, where given.

    Raises:
        ConfigError: the file cannot be read, or holds something else.
    """
    tensors = _read(Path(path))
    if "input_ids" not in tensors:
        raise refusal(path, f"has no input_ids, only {', '.join(sorted(tensors)) or 'nothing'}")
    ids = tensors["input_ids"]
    if ids.dim() != 2 or ids.is_floating_point():
        raise refusal(path, f"has input_ids {_shape(ids)}: they are integers [N,S]")
    unknown = sorted(tensors.keys() - {*_OF_ROWS, *_OF_POSITIONS})
    if unknown:
        known = ", ".join((*_OF_ROWS, *_OF_POSITIONS))
        raise refusal(
            path,
            f"has {', '.join(unknown)}, which is not read here: leave it out; read are {known}",
        )
    lengths = _lengths(tensors, ids, path)
    count = len(ids) if row_limit is None else min(row_limit, len(ids))
    kept = torch.arange(ids.shape[1]) < lengths.unsqueeze(1)
    kept[count:] = False
    flat = {}
    for name in _OF_POSITIONS:
        values = tensors.get(name)
        if values is None:
            continue
        if values.dim() != 3 or values.shape[:2] != ids.shape:
            raise refusal(
                path, f"has {name} {_shape(values)} beside input_ids {_shape(ids)}: give [N,S,...]"
            )
        flat[name] = values[kept]
    rows = [ids[row, : int(lengths[row])].tolist() for row in range(count)]
    notes = () if {"lengths", "attention_mask"} & tensors.keys() else _padding_notes(ids[:count])
    return Computed(rows=rows, reference=_reference(flat, path), name=path, notes=notes)


def _lengths(tensors: Mapping[str, torch.Tensor], ids: torch.Tensor, path: str) -> torch.Tensor:
    """Return the true tokens of each row [N]."""
    lengths, mask = tensors.get("lengths"), tensors.get("attention_mask")
    if lengths is not None and mask is not None:
        raise refusal(path, "has lengths and attention_mask: give one of them")
    if mask is not None:
        try:
            lengths = flatten(ids, attention_mask=mask, what="input_ids", shortest=1).lengths
        except PayloadInvalidError as error:
            raise refusal(path, f"cannot be taken: {error.message}") from error
    if lengths is None:
        lengths = torch.full((len(ids),), ids.shape[1])
    if lengths.shape != ids.shape[:1] or bool(((lengths < 1) | (lengths > ids.shape[1])).any()):
        raise refusal(path, f"has lengths that are not one number a row, 1 to {ids.shape[1]}")
    return lengths.long()


def _padding_notes(ids: torch.Tensor) -> tuple[str, ...]:
    """Say so where rows without lengths end as padded ones do: in one id, twice or more."""
    if ids.shape[1] < 2:
        return ()
    last = ids[ids[:, -1] == ids[:, -2], -1]
    if not len(last):
        return ()
    padding = int(last.mode().values)
    return (
        f"{int((last == padding).sum())} of {len(ids)} rows end in id {padding} repeated, and the "
        "file has no lengths: if that is padding, add lengths [N] or attention_mask [N,S]",
    )


def _reference(flat: Mapping[str, torch.Tensor], path: str) -> torch.Tensor | Reference:
    if "logprobs" in flat:
        _check_logprobs("logprobs", flat["logprobs"], path)
        return flat["logprobs"]
    if "logits" in flat:
        return flat["logits"]
    if "topk_ids" in flat and "topk_logprobs" in flat:
        ids, logprobs = flat["topk_ids"].long(), flat["topk_logprobs"]
        if ids.shape == logprobs.shape:
            _check_logprobs("topk_logprobs", logprobs[ids >= 0], path)
        return EntryReference(ids, logprobs)
    raise refusal(
        path, "has neither logprobs nor logits [N,S,V], nor topk_ids with topk_logprobs [N,S,K]"
    )


def _check_logprobs(name: str, values: torch.Tensor, path: str) -> None:
    """Refuse what is no log-probability. A NaN is for ``DenseReference`` to refuse."""
    if not values.numel():
        return
    least, highest = float(values.min()), float(values.max())
    if 0 <= least and 0 < highest <= 1:
        span = f"{least:.3g} to {highest:.3g}"
        raise refusal(path, f"has probabilities as {name}, {span}: give their natural logarithms")
    if highest > _ROUNDING_NATS:
        raise refusal(
            path,
            f"has {name} up to {highest:.3g}: no log-probability is above 0; give what is not "
            "normalised as logits [N,S,V]",
        )


class LocalModel:
    """A causal language model, loaded here, and the fingerprint of its tokenizer, if it has one."""

    def __init__(self, path: str, *, arithmetic_type: str) -> None:
        """Load it, in the arithmetic type given, or in its own where that is none known here.

        Raises:
            ConfigError: it does not load, or ``transformers`` is not installed.
        """
        self._path = path
        place = Path(path)
        if not place.exists():
            raise refusal(
                path, "is not there: give a model's folder, a .gguf, a .npz or a .safetensors"
            )
        files = {"gguf_file": place.name} if place.suffix == ".gguf" else {}
        folder = place.parent if files else place
        known: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _TYPES}
        self.arithmetic_type = arithmetic_type if arithmetic_type in known else "its own type"
        try:
            from transformers import AutoModelForCausalLM, AutoTokenizer

            local = {"local_files_only": True, "trust_remote_code": False, **files}
            self._model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(
                folder, dtype=known.get(arithmetic_type, "auto"), **local
            ).eval()
            self.fingerprint = ""
            if files or any(folder.glob("tokenizer*")):
                self.fingerprint = fingerprint_of(AutoTokenizer.from_pretrained(folder, **local))
        except ImportError as error:
            raise refusal(
                path, f"needs a package that is not here ({error}): teacher-logits[transformers]"
            ) from error
        except Exception as error:
            said = (str(error).strip().splitlines() or [""])[0][:300]
            raise refusal(path, f"does not load: {type(error).__name__}: {said}") from error

    def score(self, *, row_count: int, row_tokens: int, id_count: int) -> Computed:
        """Draw rows of ids below ``id_count`` and score them.

        Raises:
            ConfigError: the model knows fewer ids.
        """
        known: int = self._model.get_input_embeddings().num_embeddings  # type: ignore[operator]
        if known < id_count:
            raise refusal(
                self._path, f"knows {known:,} ids, and the teacher {id_count:,}: give its own model"
            )
        generator = torch.Generator().manual_seed(_SEED)
        ids = torch.randint(id_count, (row_count, row_tokens), generator=generator)
        with torch.inference_mode():
            said = [self._model(input_ids=row.unsqueeze(0), use_cache=False) for row in ids]
        logits = torch.cat([each.logits[0].float() for each in said])
        name = f"{self._path} in {self.arithmetic_type}"
        return Computed(rows=ids.tolist(), reference=logits, name=name)


def _read(path: Path) -> Mapping[str, torch.Tensor]:
    try:
        if path.suffix.lower() == ".npz":
            return read_npz(path)
        from safetensors.torch import load_file

        tensors: dict[str, torch.Tensor] = load_file(path)
        return tensors
    except ImportError as error:
        raise refusal(
            str(path), f"needs a package that is not here ({error}): teacher-logits[transformers]"
        ) from error
    except Exception as error:
        said = (str(error).strip().splitlines() or [""])[0][:300]
        raise refusal(str(path), f"cannot be read: {type(error).__name__}: {said}") from error


def refusal(path: str, why: str) -> ConfigError:
    """Return the refusal of a reference, by its flag."""
    return ConfigError(f"{FLAG} {path!r} {why}", facts={"flag": FLAG, "value": path})


def _shape(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
