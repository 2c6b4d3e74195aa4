"""News: what a step under the lock has changed, for whoever waits, told once it is let go.

Listeners are called outside the lock, on whichever thread made the change, and should only
wake somebody.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Collection


@dataclass(kw_only=True)
class News:
    """What has changed."""

    room_freed: bool = False
    steps_changed: bool = False
    teachers_changed: bool = False
    #: Sessions with mail.
    mail: set[str] = field(default_factory=set)
    #: Publishers' slabs that nobody reads any more.
    slabs_dropped: list[str] = field(default_factory=list)
    #: Leases on payloads in an object store that have ended.
    objects_let_go: list[str] = field(default_factory=list)
    #: Payloads that nobody needs any more where they were computed.
    stored_freed: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(
            self.room_freed
            or self.steps_changed
            or self.teachers_changed
            or self.mail
            or self.slabs_dropped
            or self.objects_let_go
            or self.stored_freed
        )


@dataclass(kw_only=True)
class Listeners:
    """Who wants to hear of what."""

    room_freed: list[Callable[[], None]] = field(default_factory=list)
    steps_changed: list[Callable[[], None]] = field(default_factory=list)
    teachers_changed: list[Callable[[], None]] = field(default_factory=list)
    mail: list[Callable[[Collection[str]], None]] = field(default_factory=list)
    slabs_dropped: list[Callable[[Collection[str]], None]] = field(default_factory=list)
    objects_let_go: list[Callable[[Collection[str]], None]] = field(default_factory=list)
    stored_freed: list[Callable[[Collection[str]], None]] = field(default_factory=list)

    def tell(self, news: News) -> None:
        """Tell everybody what concerns them; first of all who gives room back by it."""
        for let_go in tuple(self.stored_freed) if news.stored_freed else ():
            let_go(tuple(news.stored_freed))
        for changed, callbacks in (
            (news.room_freed, self.room_freed),
            (news.steps_changed, self.steps_changed),
            (news.teachers_changed, self.teachers_changed),
        ):
            for callback in tuple(callbacks) if changed else ():
                callback()
        for names, tellers in (
            (news.slabs_dropped, self.slabs_dropped),
            (news.objects_let_go, self.objects_let_go),
            (news.mail, self.mail),
        ):
            for teller in tuple(tellers) if names else ():
                teller(tuple(names))
