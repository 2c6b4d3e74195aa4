"""Device offers: device memory that a publisher has its readers open on trial.

Pure. What lies there proves that a reader can open it (``proofs``); the words here name both
sides where it could not, from what each has said of itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from teacher_logits.device_memory import PROBE_BYTES
from teacher_logits.errors import RequestInvalidError

if TYPE_CHECKING:
    from teacher_logits.device_memory import DeviceProbe
    from teacher_logits.errors import Fact
    from teacher_logits.profiles import NodeHints

_SHOWN_DEVICES = 8
_FACT_DEVICES = 4
"""As many as a fact has room for on the wire."""


@dataclass(frozen=True, kw_only=True)
class DeviceOffer:
    """A publisher's probe, and the challenge that lies where it begins."""

    probe: DeviceProbe
    challenge: bytes

    def __post_init__(self) -> None:
        """Refuse a challenge that is none (``RequestInvalidError``)."""
        if len(self.challenge) != PROBE_BYTES:
            raise RequestInvalidError(
                f"the probe's challenge has {len(self.challenge)} bytes; give {PROBE_BYTES} random "
                "ones",
                facts={"challenge_bytes": len(self.challenge), "size_bytes": PROBE_BYTES},
            )

    def of(self, writer_id: str) -> DeviceOffer:
        """Return the offer as that of a writer."""
        return replace(self, probe=replace(self.probe, writer_id=writer_id))


def both_sides(probe: DeviceProbe, reader: NodeHints) -> str:
    """Say which device the writer has, which ones the reader sees, and where the two live."""
    sees = ", ".join(reader.device_uuids[:_SHOWN_DEVICES]) or "no device that it named"
    more = len(reader.device_uuids) - _SHOWN_DEVICES
    return (
        f"the writer's memory is on {probe.memory.device_uuid}, in PID namespace "
        f"{probe.pid_namespace} of {probe.host[:48] or 'an unnamed host'}; the client sees {sees}"
        + (f" and {more} more" if more > 0 else "")
        + f", in PID namespace {reader.namespaces.get('pid', 0)} of "
        f"{reader.host_name[:48] or 'an unnamed host'}"
    )


def side_facts(probe: DeviceProbe, reader: NodeHints) -> dict[str, Fact]:
    """Return what ``both_sides`` says, by name; of the reader's devices the first."""
    return {
        "writer_device": probe.memory.device_uuid,
        "writer_pid_namespace": probe.pid_namespace,
        "reader_devices": ",".join(reader.device_uuids[:_FACT_DEVICES]),
        "reader_pid_namespace": reader.namespaces.get("pid", 0),
    }
