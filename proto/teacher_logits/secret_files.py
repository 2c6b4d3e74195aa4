"""Secret files: tokens and private keys in files that other users cannot read; certificates too.

Refuses a file that others may read, or that its group may write to. The group may read it: that
is how a secret gets into a container. What is in a file is in no message. No read waits: a pipe, a
device or a folder is refused.
"""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

from teacher_logits.errors import ConfigError

if TYPE_CHECKING:
    from teacher_logits.errors import Fact

MAX_BYTES = 1 << 20
_OTHERS = stat.S_IRWXO | stat.S_IWGRP


def read_secret_file(path: str, *, what: str) -> str:
    """Return the text of a file; ``what`` names it in messages: a flag, or an argument.

    Raises:
        ConfigError: as ``read_secret_bytes`` does, or it holds no text.
    """
    try:
        # Some editors put a mark in front that says that it is UTF-8.
        return read_secret_bytes(path, what=what).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ConfigError(
            f"{what} {path} holds no text in UTF-8", facts=_facts(path, what=what)
        ) from None


def read_secret_bytes(path: str, *, what: str) -> bytes:
    """Return what is in a file; ``what`` names it in messages: a flag, or an argument.

    Raises:
        ConfigError: as ``read_file_bytes`` does, or it is open to other users.
    """
    return _read(path, what=what, is_secret=True)


def read_file_bytes(path: str, *, what: str) -> bytes:
    """Return what is in a file that anybody may read, such as a certificate.

    Raises:
        ConfigError: it cannot be read, is no file, or is over 1 MiB.
    """
    return _read(path, what=what, is_secret=False)


def _read(path: str, *, what: str, is_secret: bool) -> bytes:
    facts = _facts(path, what=what)
    try:
        # Not blocking: the path may be a pipe that nobody writes to.
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            mode = os.fstat(file.fileno()).st_mode  # of the file that is read, not of its name
            if not stat.S_ISREG(mode):
                raise ConfigError(f"{what} {path} is no file", facts=facts)
            if is_secret and mode & _OTHERS:
                raise _open_to_others(path, stat.S_IMODE(mode), what=what)
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"{what} {path} cannot be read: {error.strerror or error}", facts=facts
        ) from error
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{what} {path} has more than {MAX_BYTES} bytes", facts=facts)
    return data


def _open_to_others(path: str, mode: int, *, what: str) -> ConfigError:
    return ConfigError(
        f"{what} {path} is open to other users (mode {mode:04o}), who could take what is in it: "
        "chmod 600, or 640 where its group may read it (of a Kubernetes Secret, defaultMode: 0440 "
        "beside fsGroup)",
        facts={**_facts(path, what=what), "mode": f"{mode:04o}"},
    )


def _facts(path: str, *, what: str) -> dict[str, Fact]:
    return {"flag" if what.startswith("--") else "argument": what, "path": path}
