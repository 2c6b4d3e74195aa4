"""Hellos: which process may have a session's broker line, and what it is given to prove by.

Promises: a session has one line, by its nonce; it goes to a process that may map memory shared
with the server, and whose end the kernel tells. Any other is refused, and its session is told why:
it streams. Its gRPC calls show a secret that came over the line, if it said that they would.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import TYPE_CHECKING

from teacher_logits.errors import LimitReachedError, NotAllowedError, RequestInvalidError
from teacher_logits.keys import new_secret
from teacher_logits.session_page import WriterPage
from teacher_logits.transport import Refusal, RefusalReason, Transport
from teacher_logits.v1 import line_pb2
from teacher_logits_server.broker.lines import Answer, Line
from teacher_logits_server.caps import Cap
from teacher_logits_server.services.session_log import PUBLISHER

if TYPE_CHECKING:
    from teacher_logits_server.ledger import Ledger


class HelloDesk:
    """Answers the first packet of each line.

    Args:
        allowed_uids: users whose processes may map shared memory, besides root and our own.
        max_user_lines: how many lines the processes of one user may have.
    """

    def __init__(
        self, *, ledger: Ledger, allowed_uids: tuple[int, ...], max_user_lines: int
    ) -> None:
        self._ledger = ledger
        self._lines: Counter[int] = Counter()
        self._cap = Cap(
            name="user_lines",
            most=max_user_lines,
            flag="--max-user-lines",
            what="broker lines of this user's processes",
            way_out="close some sessions",
        )
        self._allowed_uids = frozenset({0, os.geteuid(), *allowed_uids})

    def answer(self, line: Line, request: line_pb2.LineRequest) -> Answer:
        """Let a process speak for a session, and pass it the page that it proves by.

        Raises:
            RequestInvalidError: the packet is no hello.
            NotAllowedError: the nonce is wrong or was shown, or the process may not map memory.
            LimitReachedError: its user's processes have as many lines as they may.
            SessionExpiredError: the session has ended.
        """
        if request.WhichOneof("body") != "hello":
            raise RequestInvalidError("the first packet of a line is a hello, and only that")
        session_id = request.hello.session_id
        self._ledger.check_hello(session_id, request.hello.nonce)
        self._check_peer(line, session_id)
        page = WriterPage()
        secret = new_secret() if request.hello.shows_secret else ""
        descriptor = page.take_fd()
        try:
            self._ledger.line_opened(
                session_id,
                pid=line.peer.pid,
                challenge=page.challenge,
                started=line.peer.started(),
                page=page,
                secret=secret,
            )
        except BaseException:
            os.close(descriptor)
            raise
        line.session_id = session_id
        self._lines[line.peer.uid] += 1
        line.takes_descriptors = self._ledger.describe(session_id).get("kind") == PUBLISHER
        reply = line_pb2.LineReply(call_id=request.call_id)
        reply.hello.challenge_size_bytes = len(page.challenge)
        reply.hello.secret = secret
        return Answer(reply.SerializeToString(), descriptor)

    def ended(self, line: Line) -> None:
        """Learn that a session's line has ended."""
        self._lines[line.peer.uid] -= 1
        if not self._lines[line.peer.uid]:
            del self._lines[line.peer.uid]

    def _check_peer(self, line: Line, session_id: str) -> None:
        """Refuse a process that may not map memory, or whose end the kernel cannot tell us."""
        peer = line.peer
        if peer.uid not in self._allowed_uids:
            reason = RefusalReason.BROKER_REFUSED
            message = (
                f"the client runs as user {peer.uid}, and the server shares memory with users "
                f"{', '.join(map(str, sorted(self._allowed_uids)))}: start it with --allow-uid "
                f"{peer.uid}"
            )
        elif not peer.is_proven or not peer.is_alive():
            reason = RefusalReason.PEER_UNPROVEN
            message = (
                "the kernel does not tell the server which process the client is (it takes Linux "
                "6.5, or 5.15 within one PID namespace)"
            )
        else:
            return self._check_count(line, session_id)
        self._note_refusal(session_id, reason, message)
        raise NotAllowedError(message, facts={"uid": peer.uid, "reason": reason.value})

    def _check_count(self, line: Line, session_id: str) -> None:
        """Refuse one line too many of a user's."""
        try:
            self._cap.check(self._lines[line.peer.uid])
        except LimitReachedError as error:
            self._note_refusal(session_id, RefusalReason.BROKER_REFUSED, error.message)
            raise

    def _note_refusal(self, session_id: str, reason: RefusalReason, message: str) -> None:
        refusal = Refusal(transport=Transport.SHARED_MEMORY, reason=reason, message=message)
        self._ledger.line_unproven(session_id, refusal)
