"""A teacher's files on disk: which weights there are, and which revision they make.

Takes a folder as ``save_pretrained`` writes it (``config.json`` and safetensors, in one file or
in shards), or a GGUF file. Refuses by name what is not there, and pickled weights: unpickling
runs whatever code the file brings.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from teacher_logits.errors import ConfigError

_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_GGUF_MAGIC = b"GGUF"
_HUB_NAME = re.compile(r"\w[\w.-]*/[\w.-]+")
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)
# A revision looks at this many samples of a weight file, so that a checkpoint of 100 GB has
# one in milliseconds and the next checkpoint of the same training has another.
_SAMPLES, _SAMPLE_BYTES = 64, 4096


@dataclass(frozen=True, kw_only=True)
class ModelFiles:
    """Where a teacher's files are. ``gguf_file`` is a name in ``folder``, empty for safetensors."""

    folder: Path
    weights: tuple[Path, ...]
    gguf_file: str = ""

    @property
    def has_tokenizer(self) -> bool:
        """Whether a tokenizer lies beside the weights; a GGUF file has one inside."""
        return bool(self.gguf_file) or holds_tokenizer(self.folder)


def holds_tokenizer(folder: Path) -> bool:
    """Return whether a folder has the files of a tokenizer."""
    return any((folder / name).is_file() for name in _TOKENIZER_FILES)


def find_model(path: str) -> ModelFiles:
    """Find a teacher's files.

    Raises:
        ConfigError: nothing is there, the config or weights are missing, may not be read by this
            user, or the weights are pickled.
    """
    if not path:
        raise ConfigError(
            "--model is missing: give the folder or the GGUF file of a causal language model",
            facts={"flag": "--model"},
        )
    try:
        files = _find(path, Path(path))
        for each in files.weights:
            each.open("rb").close()
    except PermissionError as error:
        raise _refuse(
            path,
            f"user {os.geteuid()}, as whom this runs, may not read {error.filename}: let it "
            f"(chmod -R a+rX {shlex.quote(path)}, and a+x for the folders above), or serve as "
            "another user",
        ) from None
    return files


def _find(path: str, place: Path) -> ModelFiles:
    if not place.exists():
        raise _refuse(path, _why_nothing(path))
    if place.is_dir() and not os.access(place, os.R_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
    if place.is_file():
        with place.open("rb") as file:
            if file.read(len(_GGUF_MAGIC)) != _GGUF_MAGIC:
                raise _refuse(path, "this is no GGUF file; give one, or the folder of a model")
        return ModelFiles(folder=place.parent, weights=(place,), gguf_file=place.name)
    weights = _safetensors(place)
    if not weights:
        raise _refuse(path, _why_no_weights(place))
    if not (place / "config.json").is_file():
        raise _refuse(path, "the folder has weights and no config.json, so nobody knows the model")
    return ModelFiles(folder=place, weights=weights)


def find_tokenizer(path: str) -> tuple[Path, str]:
    """Return the folder of a tokenizer, and the name of its file where it is not the folder.

    Raises:
        ConfigError: there is none.
    """
    place = Path(path)
    if place.is_file():
        return place.parent, place.name
    if holds_tokenizer(place):
        return place, ""
    raise ConfigError(
        f"--tokenizer {path!r}: there is no tokenizer there",
        facts={"flag": "--tokenizer", "value": path},
    )


def revision_of(files: ModelFiles) -> str:
    """Return 32 hex digits that change with the weights or the config.

    BLAKE2b over ``config.json``, and over name, size and 64 evenly spread samples of 4 KiB of
    every weight file. It tells checkpoints apart; it is no proof against an attacker.
    """
    digest = hashlib.blake2b(digest_size=16, person=b"tls-revision-v1")
    config = files.folder / "config.json"
    if not files.gguf_file:
        digest.update(config.read_bytes())
    for path in files.weights:
        size = path.stat().st_size
        digest.update(f"\0{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            for sample in range(_SAMPLES):
                file.seek(sample * max(size - _SAMPLE_BYTES, 0) // (_SAMPLES - 1), os.SEEK_SET)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _safetensors(folder: Path) -> tuple[Path, ...]:
    if (folder / _WEIGHTS).is_file():
        return (folder / _WEIGHTS,)
    index = folder / _INDEX
    if not index.is_file():
        return ()
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _refuse(str(folder), f"{_INDEX} cannot be read ({error})") from error
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise _refuse(
            str(folder), f"{len(missing)} of {len(names)} weight files are missing: {missing[0]}"
        )
    return tuple(folder / name for name in names)


def _why_nothing(path: str) -> str:
    why = "there is no such folder or file"
    if _HUB_NAME.fullmatch(path):
        why += (
            ", and names of a model hub are not taken, since a server fetches nothing: download "
            f"it first, `hf download {path} --local-dir DIR`, and give --model DIR"
        )
    return why


def _why_no_weights(folder: Path) -> str:
    if any(folder.glob("*.gguf")):
        return "no safetensors in the folder; to serve a GGUF file, give the path of the file"
    if any(folder.glob("*.bin")):
        return (
            "no safetensors, only pickled weights, which may run code when they are loaded: save "
            "the model again with save_pretrained, which writes safetensors"
        )
    return "no weights: a teacher needs model.safetensors, or its shards and their index"


def _refuse(path: str, why: str) -> ConfigError:
    return ConfigError(f"--model {path!r}: {why}", facts={"flag": "--model", "value": path})
