"""Every surface, by its name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.fuzz.hostile_servers import Chunks, Packets, Replies
from tests.fuzz.http2 import Http2
from tests.fuzz.lines import Lines
from tests.fuzz.memory import Memory
from tests.fuzz.rpcs import Rpcs, Uploads
from tests.fuzz.texts import Arrays, Jagged, Settings

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.fuzz.house import House
    from tests.fuzz.surface import Surface

OF_THE_SERVER: dict[str, Callable[[House], Surface]] = {
    each.name: each for each in (Rpcs, Uploads, Http2, Lines)
}
OTHERS: dict[str, Callable[[], Surface]] = {
    each.name: each for each in (Chunks, Packets, Replies, Memory, Settings, Arrays, Jagged)
}
NAMES = (*OF_THE_SERVER, *OTHERS)
