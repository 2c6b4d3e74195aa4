"""Loading a model and its tokenizer with ``transformers``: from files, without code or network.

Refuses with a ``ConfigError`` that names the flag whatever does not load; what the library
said of it is in the message.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

import torch

from teacher_logits.errors import ConfigError
from teacher_logits_server.engines.model_files import ModelFiles, find_tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from transformers import PreTrainedModel

    from teacher_logits.tokenizer import Tokenizer

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

_GGUF_BAR = "tqdm"


def load_model(files: ModelFiles, *, device: str, dtype: str) -> PreTrainedModel:
    """Load a causal language model onto a device.

    Raises:
        ConfigError: the device or type is not known here, or the model does not load.
    """
    place = find_device(device)
    wanted = _find_dtype(dtype, place)
    with loading(files.weights[0]):
        from transformers import AutoModelForCausalLM

        model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(
            files.folder,
            dtype=wanted,
            local_files_only=True,
            trust_remote_code=False,
            **({"gguf_file": files.gguf_file} if files.gguf_file else {"use_safetensors": True}),
        )
        return cast("PreTrainedModel", model.to(place).eval())


def load_tokenizer(files: ModelFiles, *, path: str) -> Tokenizer | None:
    """Load the tokenizer at ``path``, or else the model's own; None where it has none.

    Raises:
        ConfigError: there is one and it does not load, or there is none at ``path``.
    """
    folder, gguf_file = files.folder, files.gguf_file
    if path:
        folder, gguf_file = find_tokenizer(path)
    elif not files.has_tokenizer:
        return None
    with loading(folder / gguf_file, flag="--tokenizer"):
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(
            folder,
            local_files_only=True,
            trust_remote_code=False,
            **({"gguf_file": gguf_file} if gguf_file else {}),
        )
        return cast("Tokenizer", tokenizer)


def find_device(name: str) -> torch.device:
    """Return the device of a name.

    Raises:
        ConfigError: it is none of auto, cpu, cuda and cuda:N, or not there.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        return torch.device("cuda" if count else "cpu")
    kind, _, index = name.partition(":")
    if name != "cpu" and (kind != "cuda" or (index and not index.isdecimal())):
        raise ConfigError(
            f"--device {name!r} is not known here: give auto, cpu, cuda or cuda:N",
            facts={"flag": "--device", "value": name},
        )
    if kind == "cuda" and int(index or 0) >= count:
        raise ConfigError(
            f"--device {name}: torch sees {count} CUDA devices here; give --device cpu, or a "
            "torch built for CUDA and a driver",
            facts={"flag": "--device", "value": name, "cuda_devices": count},
        )
    return torch.device(name)


def _find_dtype(name: str, device: torch.device) -> torch.dtype | str:
    if name == "auto":
        # Where 16 bits are no quicker they only cost digits.
        return "auto" if device.type == "cuda" else torch.float32
    if name not in _DTYPES:
        raise ConfigError(
            f"--dtype {name!r} is not known here: give auto, {', '.join(_DTYPES)}",
            facts={"flag": "--dtype", "value": name},
        )
    return _DTYPES[name]


@contextmanager
def loading(path: Path, *, flag: str = "--model") -> Iterator[None]:
    """Turn whatever a library says of a file into a refusal of the setting that named it.

    Raises:
        ConfigError: naming the flag, and the extra to install where a package is missing.
    """
    facts = {"flag": flag, "value": str(path)}
    try:
        with _quiet():
            yield
    except ConfigError:
        raise
    except ImportError as error:
        raise ConfigError(
            f"{flag} {str(path)!r} needs a package that is not here ({error}): install "
            "teacher-logits[transformers]",
            facts=facts,
        ) from error
    except Exception as error:
        said = str(error).strip().splitlines() or [""]
        raise ConfigError(
            f"{flag} {str(path)!r} does not load: {type(error).__name__}: {said[0][:300]}",
            facts=facts,
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep progress bars and notes out of the server's log; what was set comes back."""
    from transformers import modeling_gguf_pytorch_utils as gguf
    from transformers.utils import logging

    shown, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    bar = getattr(gguf, _GGUF_BAR, logging.tqdm)
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    # It takes its bar past the library's own switch.
    setattr(gguf, _GGUF_BAR, logging.tqdm)
    try:
        yield
    finally:
        setattr(gguf, _GGUF_BAR, bar)
        logging.set_verbosity(verbosity)
        if shown:
            logging.enable_progress_bar()
