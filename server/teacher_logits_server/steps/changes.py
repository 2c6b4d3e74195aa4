"""Changes: what a teacher's steps have decided, gathered until it is carried out. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Changes:
    """What became of payloads: those of retired steps, and reservations that ended with them.

    ``decided`` are the steps of which whoever waits can be told now. ``is_news``: whoever waits
    for room should look again.
    """

    retired: tuple[str, ...]
    lapsed: tuple[str, ...]
    decided: tuple[int, ...]
    is_news: bool


@dataclass(kw_only=True)
class ChangeLog:
    """What has changed and was not taken yet."""

    retired: list[str] = field(default_factory=list)
    lapsed: list[str] = field(default_factory=list)
    decided: list[int] = field(default_factory=list)
    is_news: bool = False

    @property
    def is_any(self) -> bool:
        """Whether something has changed of what there is to read, or of who may write it."""
        return self.is_news or bool(self.decided)

    def take(self) -> Changes:
        """Return all of it, once."""
        changes = Changes(
            retired=tuple(self.retired),
            lapsed=tuple(self.lapsed),
            decided=tuple(self.decided),
            is_news=self.is_news,
        )
        self.retired, self.lapsed, self.decided, self.is_news = [], [], [], False
        return changes
