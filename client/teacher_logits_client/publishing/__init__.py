"""How a publisher comes about: the handshake, and the way that its payloads will take."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from teacher_logits.devices.probe import probe_of
from teacher_logits.errors import ConfigError, RequestInvalidError
from teacher_logits.grid import is_size
from teacher_logits.profiles import TeacherProfile
from teacher_logits.transport import Transport
from teacher_logits_client.config import HostCopies
from teacher_logits_client.line import Line
from teacher_logits_client.openers.device_choice import choose_device
from teacher_logits_client.publishing.publisher import Publisher
from teacher_logits_client.publishing.uploads import Uploads
from teacher_logits_client.sessions.agreement import shake_hands_as_publisher
from teacher_logits_client.slabs.claims import seconds_until
from teacher_logits_client.slabs.device_slab_maker import DeviceSlabMaker
from teacher_logits_client.slabs.freed_mail import FreedMail
from teacher_logits_client.slabs.own_slabs import OwnSlabs
from teacher_logits_client.slabs.publisher_room import PublisherRoom
from teacher_logits_client.slabs.slab_maker import SlabMaker

if TYPE_CHECKING:
    from teacher_logits.devices.probe import Probe
    from teacher_logits_client.calls import Calls
    from teacher_logits_client.openers.buffers import BufferPool
    from teacher_logits_client.openers.device_choice import DeviceName
    from teacher_logits_client.openers.devices import Devices
    from teacher_logits_client.payloads.returns import Returner
    from teacher_logits_client.sessions.agreement import AgreedPublisher
    from teacher_logits_client.slabs.claims import Way
    from teacher_logits_client.slabs.slab_shelf import MakesSlabs

DEFAULT_POOL_BYTES = 1 << 30
DEFAULT_SLAB_BYTES = 256 << 20

WRITABLE = (Transport.SHARED_MEMORY, Transport.STREAM)
"""Transports that a publisher can write for, most wanted first."""


@dataclass(frozen=True, kw_only=True)
class PublisherSettings:
    """What a publisher is opened with; see ``Client.open_publisher``."""

    transports: tuple[Transport, ...]
    pool_size_bytes: int
    slab_size_bytes: int
    timeout: float
    device: DeviceName | None = None
    host_copies: HostCopies = HostCopies.AS_NEEDED

    def __post_init__(self) -> None:
        """Refuse what cannot be.

        Raises:
            ConfigError: a size below 1.
            RequestInvalidError: no transport, or one that no publisher writes for.
        """
        for name in ("pool_size_bytes", "slab_size_bytes"):
            size = getattr(self, name)
            if not is_size(size):
                raise ConfigError(
                    f"{name} is {size!r}: give a whole number of bytes, of at least 1",
                    facts={name: str(size)},
                )
        others = [t.value for t in self.transports if t not in WRITABLE]
        if others or not self.transports:
            raise RequestInvalidError(
                f"a publisher cannot write for {', '.join(others) or 'no transport'}: give "
                "'shared_memory', 'stream' or both",
                facts={"transports": ", ".join(others)},
            )


def open_publisher(
    calls: Calls,
    profile: object,
    settings: PublisherSettings,
    *,
    returner: Returner,
    buffers: BufferPool,
    owner: object,
    control_timeout: float,
    devices: Devices,
) -> Publisher:
    """Be admitted as a publisher; see ``Client.open_publisher``, which ``owner`` is."""
    mail, profile = FreedMail(), _checked(profile)
    until = time.monotonic() + settings.timeout
    probe = _probe_for(settings, devices, until)
    agreed = shake_hands_as_publisher(
        calls,
        profile,
        settings.transports,
        timeout=seconds_until(until),
        make_line=partial(_make_line, mail),
        probe=probe,
    )
    return Publisher(
        agreed,
        way=_way_of(
            agreed,
            settings,
            calls=calls,
            mail=mail,
            buffers=buffers,
            probe=probe,
            devices=devices,
        ),
        calls=calls,
        returner=returner,
        owner=owner,
        timeout=control_timeout,
    )


def _checked(profile: object) -> TeacherProfile:
    if not isinstance(profile, TeacherProfile):
        raise RequestInvalidError(
            f"open_publisher was given a {type(profile).__name__}: give a TeacherProfile",
            facts={"given": type(profile).__name__},
        )
    return profile


def _probe_for(settings: PublisherSettings, devices: Devices, until: float) -> Probe | None:
    """Return what readers open on trial, where a device was named.

    Raises:
        DeadlinePassedError: the driver was not done by then; what it makes later is kept.
    """
    name = settings.device
    if name is None:
        return None
    return devices.calls.before(
        until,
        lambda: probe_of(*choose_device(name, devices)),
        undo=lambda probe: None,
        what="the publisher's probe",
    )


def _way_of(
    agreed: AgreedPublisher,
    settings: PublisherSettings,
    *,
    calls: Calls,
    mail: FreedMail,
    buffers: BufferPool,
    probe: Probe | None,
    devices: Devices,
) -> Way:
    session_id = agreed.terms.session_id
    if agreed.line is None:  # what is streamed lies on the host
        return Uploads(session_id, registry=calls.registry, buffers=buffers)
    maker: MakesSlabs = SlabMaker()
    if probe is not None:
        maker = DeviceSlabMaker(
            probe.memory,
            probe.device,
            calls=devices.calls,
            pool_size_bytes=settings.pool_size_bytes,
        )
    return OwnSlabs(
        session_id,
        line=agreed.line,
        registry=calls.registry,
        mail=mail,
        room=PublisherRoom(
            pool_size_bytes=settings.pool_size_bytes, slab_size_bytes=settings.slab_size_bytes
        ),
        maker=maker,
        host_copies=settings.host_copies,
        probe=probe,
    )


def _make_line(mail: FreedMail, path: str, timeout: float) -> Line:
    return Line(path, timeout=timeout, on_mail=mail.put)
