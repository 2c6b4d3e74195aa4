"""Protocol versions and features: what two sides of differing releases have in common.

A side speaks a run of versions, and has features. A session is in the newest version that both
speak, with the features that both have; a side that speaks none of the other's is refused with
both numbers.

    version   rises where a side that does not know of the change would go wrong. A release may
              speak older ones too.
    feature   a name for what a side of the same version may lack, where the other must not use it
              unasked: a new kind of mail on a broker line, which ends the line of a client that
              cannot read it, or a new source of a lease. Whatever is safely left unread needs
              none: protobuf drops fields that it does not know.

A first release says one version and no feature, and that is how it is understood.
"""

from __future__ import annotations

from dataclasses import dataclass

from teacher_logits import __version__
from teacher_logits.errors import SessionRefusedError, Violation
from teacher_logits.profiles import PROTOCOL_VERSION

OLDEST_PROTOCOL_VERSION = 1
"""The oldest that this release speaks, beside ``PROTOCOL_VERSION``."""

FEATURES: frozenset[str] = frozenset()
"""What this release has and the first one, 0.1.0, had not; none so far."""


@dataclass(frozen=True, kw_only=True)
class Spoken:
    """What one side speaks: the versions from ``oldest`` to ``newest``, and its features."""

    oldest: int
    newest: int
    features: frozenset[str] = frozenset()

    @classmethod
    def only(cls, version: int) -> Spoken:
        """Return what a side speaks that has one version and no feature."""
        return cls(oldest=version, newest=version)

    def __str__(self) -> str:
        many = self.oldest != self.newest
        return f"versions {self.oldest} to {self.newest}" if many else f"version {self.newest}"


@dataclass(frozen=True, kw_only=True)
class Agreed:
    """What both sides of a session speak."""

    version: int
    features: frozenset[str]


FIRST_RELEASE = Agreed(version=1, features=frozenset())
"""What a side of the first release and any other agree on."""

OURS = Spoken(oldest=OLDEST_PROTOCOL_VERSION, newest=PROTOCOL_VERSION, features=FEATURES)
"""What this release speaks."""


def agree(client: Spoken, server: Spoken) -> Agreed:
    """Return what a client and a server have in common.

    Raises:
        SessionRefusedError: they have no version in common (``protocol_version``).
    """
    violations = check_protocol(client, server)
    if violations:
        raise SessionRefusedError(violations)
    return Agreed(
        version=min(client.newest, server.newest), features=client.features & server.features
    )


def check_protocol(client: Spoken, server: Spoken) -> list[Violation]:
    """Return ``protocol_version`` where the two sides speak no version in common.

    Its numbers are the two that do not meet: the newest of the older side, the oldest of the
    newer.
    """
    if client.newest < server.oldest:
        numbers = client.newest, server.oldest
        way_out = f"the client is too old: install release {__version__} of it, the server's"
    elif client.oldest > server.newest:
        numbers = client.oldest, server.newest
        way_out = (
            f"the server, release {__version__}, is too old: start one of the client's release, "
            f"or use a client of release {__version__}"
        )
    else:
        return []
    return [
        Violation(
            rule="protocol_version",
            message=f"the client speaks protocol {client}, the server {server}; {way_out}",
            facts={
                "client_version": numbers[0],
                "server_version": numbers[1],
                "server_release": __version__,
            },
        )
    ]
