"""Proofs under the ledger's lock: what a session has shown, and what its writers come to by that.

A base of ``ledger.Ledger``, over ``admitting``. A session is settled once. After that device memory
alone is proven, writer by writer: of those who came later, and a client that finds that it cannot
read some takes its proof back by saying so.
"""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import TYPE_CHECKING

from teacher_logits.errors import (
    HostCopyNeededError,
    NoCommonTransportError,
    ProducerLostError,
    SessionRefusedError,
)
from teacher_logits.grid import rows_of_rank
from teacher_logits.terms import SERVER_WRITER
from teacher_logits.transport import RefusalReason, Transport
from teacher_logits_server.ledger.admitting import Admitting
from teacher_logits_server.sessions.session import Phase, Session
from teacher_logits_server.settlement.proofs import Proof, judge, judge_devices
from teacher_logits_server.steps.parts import Stage

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from teacher_logits.terms import SessionTerms
    from teacher_logits.transport import Refusal, Settlement
    from teacher_logits_server.steps.parts import Step

_NO_PROOFS: Mapping[str, bytes] = {}


class Proving(Admitting):
    """How sessions are settled. For its arguments see ``Handshake``."""

    def prove_locality(
        self,
        session_id: str,
        *,
        proofs: Mapping[Transport, bytes],
        failures: Sequence[Refusal],
        device_proofs: Mapping[str, bytes] = _NO_PROOFS,
    ) -> SessionTerms:
        """Settle a session's transport, once; a call repeated gets what was settled.

        Of device memory a call repeated counts too, and settles the writers anew that it names.

        Args:
            proofs: by transport, of what the server itself has shown.
            failures: what the client could not prove, and why.
            device_proofs: of the device memory of writers, by their ids.

        Raises:
            SessionRefusedError: locality was insisted on and is not proven (the session has
                ended with that, if it was not settled before).
            NoCommonTransportError: nothing the student wants is left (likewise).
            SessionExpiredError: the session has ended.
        """
        with self._step() as now:
            session = self._living(session_id, now)
            if session.phase is not Phase.OPENING:
                self._prove_more(session, device_proofs, failures)
                return self._terms(session)
            proof = judge(
                nonce=session.nonce,
                challenges=self._challenges(session),
                proofs=proofs,
                # That the line ended says least: the client may know what ended it.
                failures=sorted(
                    [*filter(None, [session.line_refusal]), *failures],
                    key=lambda refusal: refusal.reason is RefusalReason.PROOF_MISSING,
                ),
            )
            session.proof = self._with_devices(session, proof, device_proofs, failures)
            try:
                settlements = self._settle_all(session)
            except (SessionRefusedError, NoCommonTransportError):
                self._end(session)
                raise
            self._sessions.settle(session, settlements, now=now)
            self._note_life(session)
            self._pass_over(session)
            return self._terms(session)

    def add_objects(self, challenge: bytes) -> None:
        """Let sessions have payloads from an object store that prove to have read this there."""
        with self._step():
            self._object_challenge = challenge
            self._offered |= {Transport.RAY_OBJECT}

    def lose_objects(self) -> None:
        """Settle nobody on the object store from now on: it is gone.

        Who was settled on it keeps its leases, and is streamed to.
        """
        with self._step():
            self._object_challenge = b""
            self._offered -= {Transport.RAY_OBJECT}

    def lacks_writers(self, session_id: str, *, patience: float) -> bool:
        """Whether all whose rows a student is to read died while it was being admitted.

        Settled on nothing it would be streamed to for good, whatever it has proven. Where it is so,
        the session does not lapse for ``patience`` seconds: its call waits as long for others.

        Raises:
            SessionExpiredError: the session has ended.
        """
        with self._step() as now:
            session = self._living(session_id, now)
            published = self._publishers.find(session.teacher_id)
            if published is None or session.is_publisher or session.phase is not Phase.OPENING:
                return False
            lacks = published.profile.batch_grid is not None and not self._needed(session)
            if lacks:
                session.awaited_until = now + patience
            return lacks

    def _prove_more(
        self, session: Session, proofs: Mapping[str, bytes], failures: Sequence[Refusal]
    ) -> None:
        """Take proofs and failures of device memory of a settled session.

        All or nothing of the writers that it knows. What waits for them is looked at anew.
        """
        if session.is_publisher:
            return
        named = {each.writer_id for each in failures if each.transport is Transport.CUDA_IPC}
        if not named and not proofs:
            return
        before = session.proof
        session.proof = self._with_devices(session, before, proofs, failures)
        anew = self._offers(session).keys() & {*self._needed(session)}
        if "" not in named:
            anew &= {*named, *proofs}
        settlements = {}
        for writer_id in sorted(anew):
            try:
                settlements[writer_id] = self._settle(session, writer_id)
            except (SessionRefusedError, NoCommonTransportError):
                if writer_id in session.settlements:
                    session.proof = before
                    raise  # else its steps will say so
        session.has_shared = session.shares_memory
        # A step may be granted before this call's answer is read: it tells them again.
        session.untold |= settlements.keys() - session.settlements.keys()
        session.settlements |= settlements
        self._news.mail.add(session.session_id)
        self._news.steps_changed = True
        self._pass_over(session)

    def _pass_over(self, session: Session) -> None:
        """Have no complete step wait for a reader that can never read it.

        It lies in device memory alone, and was sealed before the reader came, or its device broke.
        """
        published = self._publishers.find(session.teacher_id)
        seat = published.steps.seats.of(session.session_id) if published is not None else None
        if published is None or seat is None:
            return
        for step in published.steps:
            why = self._why_barred(session, step) if step.stage is Stage.COMPLETE else None
            if why is not None:
                self._mail.bar(session.session_id, step.number, why)
                published.steps.consume(step.number, seat)
        self._carry_out(published)

    def _why_barred(self, session: Session, step: Step) -> HostCopyNeededError | None:
        """Say why a reader can never read its rows of a step; None where it can."""
        mine = rows_of_rank(session.student.batch_grid, session.student.data_parallel_rank)
        for part in step.sealed:
            rows, sealed = part.claim.rows, self._lending.held(part.claim.payload_id)
            is_known = sealed.writer_id in session.settlements
            if not is_known or rows.start >= mine.stop or mine.start >= rows.stop:
                continue
            try:
                self._reads_device(session, sealed)
            except HostCopyNeededError as why:
                return why
            except ProducerLostError:
                continue
        return None

    def _with_devices(
        self,
        session: Session,
        proof: Proof,
        proofs: Mapping[str, bytes],
        failures: Sequence[Refusal],
    ) -> Proof:
        return judge_devices(
            proof,
            nonce=session.nonce,
            reader=session.profile.hints,
            offers=self._offers(session),
            proofs=proofs,
            failures=failures,
        )

    def _settle_all(self, session: Session) -> list[Settlement]:
        """Return how a session reads every writer that it needs; or writes, as a publisher."""
        if session.is_publisher:
            return [self._settle_publisher(session)]
        return [self._settle(session, writer_id) for writer_id in self._needed(session)]

    def _settle_publisher(self, session: Session) -> Settlement:
        """Choose where a publisher writes: into slabs of its own, or by stream into ours."""
        member = self._publishers.member(session.teacher_id, session.session_id)
        if member is None:
            raise ValueError(f"session {session.session_id} is no publisher")
        settlement = self._settle(session, f"publisher-{member.shard}-{secrets.token_hex(4)}")
        streams = settlement.transport is Transport.STREAM
        if streams:
            settlement = replace(settlement, writer_id=SERVER_WRITER)
        member.settle(settlement.writer_id, streams=streams)
        self._news.teachers_changed = True
        self._tell_of(session.teacher_id, settlement.writer_id)
        return settlement

    def _tell_of(self, teacher_id: str, writer_id: str) -> None:
        """Tell the students that are there of a writer's device memory, if it has some."""
        published = self._publishers.find(teacher_id)
        for session_id in published.steps.seats.sessions() if published is not None else ():
            reader = self._sessions.find(session_id)
            is_there = reader is not None and reader.phase is Phase.LOCAL
            if reader is None or not is_there or writer_id not in self._needed(reader):
                continue
            if self._may_try(reader, writer_id):
                self._mail.note_came(session_id, writer_id)
                self._news.mail.add(session_id)

    def _challenges(self, session: Session) -> dict[Transport, bytes]:
        """Return what the client could have read, by the transport that this would prove."""
        challenges = {}
        if self._local_secret:
            challenges[Transport.LOCAL] = self._local_secret
        if session.line is not None:
            challenges[Transport.SHARED_MEMORY] = session.line.challenge
        if self._object_challenge:
            challenges[Transport.RAY_OBJECT] = self._object_challenge
        return challenges
