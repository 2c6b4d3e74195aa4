"""Memory that its owner registered: taken in beside the pool's slabs, waited for, let go of.

What is still read, or may yet be, when its publisher is closed stays with its readers until this
process ends. See ``own_buffers`` for what may be registered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from teacher_logits.errors import ServerUnreachableError, SessionExpiredError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from teacher_logits_client.slabs.own_room import OwnRoom
    from teacher_logits_client.slabs.placed_columns import Registered
    from teacher_logits_client.slabs.slab_shelf import PublisherSlab


class OwnMemory:
    """What one publisher has registered; used from any thread.

    ``registered`` is that, by slab.
    """

    def __init__(self, room: OwnRoom) -> None:
        self.registered: Mapping[str, Registered] = {}
        self._room = room
        self._is_closed = False
        #: Slabs that were read, or may have been, when it was closed.
        self._kept: frozenset[str] = frozenset()

    def register(self, slab: PublisherSlab, registered: Registered) -> None:
        """Take in memory that its owner keeps."""
        self._room.shelf.register(slab)
        with self._room.lock:
            self.registered = {**self.registered, slab.slab_id: registered}

    def unregister(self, slab_id: str, *, until: float) -> None:
        """Let go of it once nothing lies there; again is fine.

        Raises:
            DeadlinePassedError: something does after ``until``; it stays registered.
            SessionExpiredError: as for ``wait_placed``.
        """
        while True:
            self.wait_placed(slab_id, until=until)
            if slab_id not in self.registered:
                return
            self._room.shelf.drop([slab_id])
            with self._room.lock:
                if slab_id not in self._room.shelf:  # else room was taken there meanwhile
                    left = {k: v for k, v in self.registered.items() if k != slab_id}
                    self.registered = left

    def wait_placed(self, slab_id: str, *, until: float) -> None:
        """Wait until nothing lies there.

        Raises:
            DeadlinePassedError: something does after ``until``.
            SessionExpiredError: the publisher was closed, and something did then.
        """
        try:
            if slab_id in self.registered:
                self._room.wait_free(slab_id, until=until)
        except ServerUnreachableError:
            if not self._is_closed:
                raise
            raise _kept_to_the_end(slab_id) from None
        if slab_id in self._kept:
            raise _kept_to_the_end(slab_id)

    def closing(self) -> None:
        """Note that the publisher closes: who finds its line ended is told so, and of no server."""
        self._is_closed = True

    def closed(self, kept: frozenset[str]) -> None:
        """Note what of all slabs was read, or may have been, as the publisher was closed."""
        self._kept = kept
        self.registered = {}


def _kept_to_the_end(slab_id: str) -> SessionExpiredError:
    return SessionExpiredError(
        f"the publisher of {slab_id} was closed while students read what lies there, or may yet: "
        "it is kept alive until this process ends; close buffers before their publisher, or wait "
        "for its `wait_free` first",
        facts={"slab_id": slab_id},
    )
