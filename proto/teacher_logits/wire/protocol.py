"""What a client says that it speaks, between its Python form and the requests that open a session.

A first release says one version, in ``protocol_version``. A later one says its oldest there, so
that a server of the first release, which compares that number alone, takes it as long as it may.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypedDict

from teacher_logits.protocol import Spoken
from teacher_logits.wire import check_count

if TYPE_CHECKING:
    from collections.abc import Collection

MAX_FEATURES = 256
"""Most features of one side; what is read at all."""


class Opens(Protocol):
    """A request that opens a student's or a publisher's session."""

    protocol_version: int
    newest_protocol_version: int

    @property
    def features(self) -> Collection[str]:
        """What its client has, by name."""


class SpokenFields(TypedDict):
    """The fields by which such a request says what its client speaks."""

    protocol_version: int
    newest_protocol_version: int
    features: list[str]


def spoken_to_wire(spoken: Spoken) -> SpokenFields:
    """Return the fields of a request that say what its client speaks."""
    return SpokenFields(
        protocol_version=spoken.oldest,
        newest_protocol_version=spoken.newest,
        features=sorted(spoken.features),
    )


def spoken_from_wire(request: Opens) -> Spoken:
    """Return what a client speaks; of a first release its one version.

    Raises:
        RequestInvalidError: it names more features than are read.
    """
    check_count(request.features, MAX_FEATURES, field="features")
    oldest = request.protocol_version
    return Spoken(
        oldest=oldest,
        newest=max(oldest, request.newest_protocol_version),
        features=frozenset(request.features),
    )
