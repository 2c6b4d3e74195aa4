"""Late proofs: a session's device evidence for writers that come later, and its withdrawal.

A writer that came after the handshake is read through host copies until this side has shown that
it can open its memory. That is done here, on a thread of its own, so that nobody who acquires waits
for a driver. Memory that could not be opened any more is taken back before whoever needed it is
told: what its writer seals from then on has host copies.

    told of a probe     trial open -> ProveLocality with the proof     -> settled anew
    an open failed      ProveLocality with the failure and no proof    -> settled anew

Each writer's memory is tried once. What fails here is no error: the settlement stays as it was.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from concurrent.futures import CancelledError
from functools import partial
from typing import TYPE_CHECKING

from teacher_logits.errors import NotAvailable, TeacherLogitsError
from teacher_logits.transport import Refusal, RefusalReason, Transport
from teacher_logits_client.sessions.device_evidence import (
    TRIAL_SECONDS,
    DeviceEvidence,
    try_devices,
)
from teacher_logits_client.sessions.step_thread import StepThread

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from teacher_logits.device_memory import DeviceProbe
    from teacher_logits.transport import Settlement
    from teacher_logits_client.calls import Calls
    from teacher_logits_client.openers.devices import Devices
    from teacher_logits_client.sessions.agreement import Agreed

_log = logging.getLogger("teacher_logits_client")
_CALL_SECONDS = 10.0


class LateProofs:
    """Shows the server what one session can open, after its handshake.

    Args:
        settle: told how writers are settled now.
    """

    def __init__(
        self,
        agreed: Agreed,
        *,
        calls: Calls,
        devices: Devices,
        settle: Callable[[Sequence[Settlement]], None],
    ) -> None:
        self._agreed = agreed
        self._calls = calls
        self._devices = devices
        self._settle = settle
        self._jobs: queue.SimpleQueue[Sequence[DeviceProbe] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: StepThread | None = None
        #: Probes that were tried: writers of one process share their handle.
        self._tried: set[tuple[str, bytes]] = set()
        self._withdrawn: set[str] = set()
        self._closed = False

    def prove(self, settlements: Sequence[Settlement]) -> None:
        """Try the probes of settlements, soon; returns at once."""
        self.try_probes([each.probe for each in settlements if each.probe is not None])

    def try_probes(self, told: Sequence[DeviceProbe]) -> None:
        """Try those probes that were not tried before, soon; returns at once."""
        with self._lock:
            found = {(probe.writer_id, probe.memory.handle): probe for probe in told}
            probes = [found[each] for each in found.keys() - self._tried]
            self._tried |= found.keys()
        if probes:
            self._start(probes)

    def withdraw(self, writer_id: str, why: TeacherLogitsError) -> None:
        """Say that a writer's memory cannot be opened any more; once is enough."""
        with self._lock:
            if writer_id in self._withdrawn:
                return
            self._withdrawn.add(writer_id)
        refusal = Refusal(
            transport=Transport.CUDA_IPC,
            reason=RefusalReason.DRIVER_FAILED,
            message=why.message,
            writer_id=writer_id,
        )
        self._show(DeviceEvidence(failures=[refusal]))

    def close(self) -> None:
        """Show nothing more; waits for nothing."""
        self._closed = True
        self._jobs.put(None)

    def _start(self, probes: Sequence[DeviceProbe]) -> None:
        self._jobs.put(probes)
        with self._lock:
            if self._thread is None and not self._closed:
                try:
                    self._thread = StepThread(self._run, stop=partial(self._jobs.put, None))
                except NotAvailable as error:  # the next probe finds one, or there are host copies
                    _log.warning("device memory is not tried: %s", error.message)

    def _run(self) -> None:
        while not self._closed:
            probes = self._jobs.get()
            if probes is None:
                return
            self._show(self._try(probes))

    def _try(self, probes: Sequence[DeviceProbe]) -> DeviceEvidence:
        return try_devices(
            probes,
            self._devices,
            nonce=self._agreed.nonce,
            hints=self._agreed.profile.hints,
            until=time.monotonic() + 2 * TRIAL_SECONDS,
        )

    def _show(self, evidence: DeviceEvidence) -> None:
        try:
            terms = self._calls.prove_locality(
                self._agreed.terms.session_id,
                proofs=evidence.proofs,
                failures=evidence.failures,
                timeout=_CALL_SECONDS,
            )
        except TeacherLogitsError as error:
            _log.debug("session %s: not settled anew: %s", self._agreed.terms.session_id, error)
            return
        except CancelledError:
            return  # the client was closed meanwhile, and its calls with it
        self._settle(terms.settlements)
