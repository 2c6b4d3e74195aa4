"""The command ``teacher-logits serve``: settings from a YAML file and flags; flags win.

Both come from the one definition in ``settings``. A key that is no setting, a value that
cannot be read and a setting that makes no sense are refused by name, with exit code 2.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import textwrap
from datetime import timedelta
from typing import TYPE_CHECKING

import yaml

from teacher_logits.errors import ConfigError
from teacher_logits_server import readers
from teacher_logits_server.config import ServerConfig
from teacher_logits_server.flags import Setting, settings_of
from teacher_logits_server.named_teachers import KEY, read_mapping
from teacher_logits_server.own_settings import OF_A_TEACHER
from teacher_logits_server.settings import GROUPS
from teacher_logits_server.yaml_file import read_yaml

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_DESCRIPTION = """\
Serve a teacher's logits to the students that learn from it: over shared memory where they
run on this machine, as a stream where they do not. Without a model or an engine, serve what
publishers bring, which are teachers in processes of their own.

  teacher-logits serve
  teacher-logits serve --model ./SmolLM2-135M
  teacher-logits serve --teacher math=./Qwen2.5-Math-7B --teacher code=./Qwen2.5-Coder-7B
  teacher-logits serve --model ./model.gguf --listen 0.0.0.0:5555 --tls-cert c.pem --tls-key k.pem
  teacher-logits serve --config server.yaml --log-format json"""

_EPILOG = """\
A YAML file holds the same settings under their flags' names (pool_size: 4GiB); lists for
those that may be given several times. Flags win over the file. Several teachers stand
under `teachers:`, by name, each with a model or a mapping of settings of its own (model,
device, top_k, pool_size, ...); those of --teacher are added to them.

SIGTERM or Ctrl-C drains: health says NOT_SERVING, no new work, leases run out within
--drain-grace; a second one stops at once. Exit codes: 0 drained, 1 failed, 2 settings that
cannot be served with, 3 stopped with leases still out or the teacher still at work, 130 or 143
stopped at once."""


def serve(argv: Sequence[str]) -> int:
    """Run the command and return its exit code.

    Raises:
        TeacherLogitsError: the server did not come up; of a ``ConfigError`` the flag is named.
    """
    config = read_config(argv)
    if any(":" in f"{each.engine}{each.replica_engine}" for each in config.of_each_teacher()):
        # As `python -m` has it; last, so that nothing there can stand in for what is installed.
        sys.path.append(os.getcwd())
    from teacher_logits_server import app  # grpc: not for `--help`

    code = app.serve(config)
    if code != app.EXIT_DRAINED:
        # The teacher may still be at work on its thread, and the interpreter's own end would
        # crash on it. Everything that others see was given back.
        logging.shutdown()
        os._exit(code)
    return code


def read_config(argv: Sequence[str]) -> ServerConfig:
    """Return the config of a command line and the file that it names.

    Raises:
        ConfigError: naming the flag or the key.
        SystemExit: the arguments are no flags of ours, or ask for help.
    """
    flags = vars(_parser().parse_args(argv))
    path = flags.pop("config", None)
    values = _from_file(path) if path else {}
    more = _from_flags(flags)
    # Those of a file and those of flags are there together: no teacher is left out.
    named = (*values.get("teachers", ()), *more.get("teachers", ()))  # type: ignore[misc]
    values |= {**more, "teachers": named}
    # Every value was made by the reader of its own field.
    return ServerConfig(**values)  # type: ignore[arg-type]


class _WholeWords(argparse.RawDescriptionHelpFormatter):
    """Breaks no line at a hyphen, so that what is to be typed stays in one piece."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="teacher-logits serve",
        # All flags in one line are read by nobody: they stand below, in groups.
        usage="teacher-logits serve [--config FILE] [settings, as below]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=_WholeWords,
        # Left out means left out: only then can a file have its say.
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file of settings")
    for group in GROUPS:
        section = parser.add_argument_group(group.__doc__)
        for _, default, setting in settings_of(group):
            _add_flag(section, setting, default)
    return parser


def _add_flag(section: argparse._ArgumentGroup, setting: Setting, default: object) -> None:
    help_text = (setting.help + _default_text(setting, default)).replace("%", "%%")
    if isinstance(default, bool):
        section.add_argument(setting.flag, action="store_const", const="true", help=help_text)
    else:
        section.add_argument(
            setting.flag,
            metavar=setting.reader.metavar,
            action="append" if setting.repeated else "store",
            help=help_text,
        )


def _default_text(setting: Setting, default: object) -> str:
    """Say what is meant where a setting is left out, unless its help does."""
    if default is None or default is False or default in ("", ()):
        return ""
    shown = str(default)
    if isinstance(default, timedelta):
        shown = readers.span_setting(default)
    elif isinstance(default, tuple):
        shown = readers.transports_setting(default)
    elif setting.reader is readers.SIZE and isinstance(default, int):
        shown = readers.size_setting(default)
    return f" (default: {shown})"


def _from_flags(flags: Mapping[str, object]) -> dict[str, object]:
    given = {}
    for name, _, setting in settings_of(ServerConfig):
        if setting.key in flags:
            given[name] = _read(setting, flags[setting.key], where=setting.flag)
    return given


def _from_file(path: str) -> dict[str, object]:
    """Read a YAML file, refusing whatever is no setting; a key may be written as its flag is."""
    document: dict[str, object] = {}
    for given, value in _load(path).items():
        key = str(given).replace("-", "_")
        if key in document:
            raise ConfigError(
                f"--config {path}: {key} is given twice", facts={"flag": "--config", "path": path}
            )
        document[key] = value
    by_key = {setting.key: (name, setting) for name, _, setting in settings_of(ServerConfig)}
    mapping = {KEY: document.pop(KEY)} if KEY in document else {}
    unknown = [key for key in document if key not in by_key]
    if unknown:
        raise ConfigError(
            f"--config {path}: {', '.join(unknown)} is no setting; the settings are "
            f"{', '.join(by_key)} and {KEY}",
            facts={"flag": "--config", "path": path, "unknown": ", ".join(unknown)},
        )
    values = {}
    for key, value in document.items():
        name, setting = by_key[key]
        values[name] = _read(setting, value, where=f"--config {path}: {key}")
    if mapping:
        where = f"--config {path}: {KEY}"
        options = {key: by_key[key] for key in by_key if by_key[key][0] in OF_A_TEACHER}
        made = read_mapping(mapping[KEY], options, where=where, read=_read)
        values[KEY] = (*values.get(KEY, ()), *made)  # type: ignore[misc]
    return values


def _load(path: str) -> dict[object, object]:
    try:
        document = read_yaml(path)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(
            f"--config {path} cannot be read: {error}", facts={"flag": "--config", "path": path}
        ) from error
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise ConfigError(
            f"--config {path}: a mapping of settings is expected, such as `pool_size: 4GiB`",
            facts={"flag": "--config", "path": path},
        )
    return document


def _read(setting: Setting, value: object, *, where: str) -> object:
    if setting.repeated:
        each = value if isinstance(value, list) else [value]
        return tuple(_read_one(setting, one, where=where) for one in each)
    return _read_one(setting, value, where=where)


def _read_one(setting: Setting, value: object, *, where: str) -> object:
    if not isinstance(value, str | int | float):
        raise ConfigError(
            f"{where}: {value!r} is no value for {setting.flag}", facts={"flag": setting.flag}
        )
    try:
        return setting.reader.parse(str(value))
    except ValueError as error:
        raise ConfigError(
            f"{where} {value}: {error}", facts={"flag": setting.flag, "value": str(value)}
        ) from None
