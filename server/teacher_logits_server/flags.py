"""Flags: what a setting is beside the type and the default of its field.

A class of settings is a dataclass whose fields are made by ``setting``. From that one definition
come a setting's flag, its key in YAML, how its text is read, and its help.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterator

    from teacher_logits_server.readers import Reader

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What defines one setting besides its field's type and default.

    ``repeated`` settings take their flag several times, or a list in YAML.
    """

    flag: str
    reader: Reader
    help: str
    repeated: bool

    @property
    def key(self) -> str:
        """The setting's name in a YAML file: the flag with underscores, without its dashes."""
        return self.flag.lstrip("-").replace("-", "_")

    @property
    def holds_many(self) -> bool:
        """Whether its value is a tuple."""
        return self.repeated or self.reader.many

    @property
    def type_text(self) -> str:
        """What its value is in Python, for messages."""
        name = self.reader.makes.__name__
        return f"a tuple of {name}" if self.holds_many else name

    def fits(self, value: object) -> bool:
        """Return whether a value that was given in Python is of this setting's type."""
        makes = (int, float) if self.reader.makes is float else self.reader.makes
        if self.holds_many:
            return isinstance(value, tuple) and all(isinstance(each, makes) for each in value)
        return isinstance(value, makes)


def setting(default: T, flag: str, reader: Reader, help: str, *, repeated: bool = False) -> T:
    """Return a dataclass's field for a setting."""
    made = Setting(flag=flag, reader=reader, help=help, repeated=repeated)
    return field(default=default, metadata={"setting": made})


def settings_of(group: type) -> Iterator[tuple[str, object, Setting]]:
    """Yield (field name, default, setting) of every setting of a group or of the whole."""
    for each in fields(group):
        yield each.name, each.default, each.metadata["setting"]
