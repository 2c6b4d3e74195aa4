"""The holders of a server's replicas: an actor on each node, which hands out what stays there.

One that dies is replaced when its node is asked for next; one that Ray cannot start, since its node
is gone, comes to one that has died.
"""

from __future__ import annotations

import logging
import os
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import ray
from ray.exceptions import RayError

from teacher_logits.terms import RayHolder
from teacher_logits_server.exporters.ray_store import make_holder

if TYPE_CHECKING:
    from collections.abc import Callable

    from ray.actor import ActorHandle

    from teacher_logits_server.exporters.ray_holder import Holder
    from teacher_logits_server.exporters.ray_store import HolderActor

_log = logging.getLogger(__name__)


@dataclass(kw_only=True, eq=False)
class Holding:
    """One holder: how readers find it, its handle here, and the how-many-th after the first."""

    terms: RayHolder
    actor: HolderActor
    restarts: int
    is_gone: bool = False


class Holders:
    """The holders by node.

    Args:
        namespace, epoch: of their names.
        key: of the tokens that they ask for.
        on_gone: called when one has died; it should only wake.
    """

    def __init__(
        self, *, namespace: str, epoch: str, key: bytes, on_gone: Callable[[], None]
    ) -> None:
        self._namespace, self._epoch, self._key = namespace, epoch, key
        self._tell = on_gone
        self._holders: dict[str, Holding] = {}
        self._is_closed = False
        # Held while one is made, so that a node has one; Ray answers in milliseconds.
        self._making = threading.Lock()

    def of(self, node_id: str) -> Holding:
        """Return a node's holder, or start one."""
        with self._making:
            found = self._holders.get(node_id)
            if found is not None and not found.is_gone:
                return found
            made = self._make(node_id, 0 if found is None else found.restarts + 1)
            self._holders[node_id] = made
        made.actor.stay.remote().future().add_done_callback(lambda _: self._on_gone(made))
        return made

    def known(self, node_id: str) -> Holding | None:
        """Return the holder that a node has, or had last."""
        return self._holders.get(node_id)

    def close(self) -> None:
        """End them all."""
        self._is_closed = True
        for each in list(self._holders.values()):
            with suppress(ValueError, RayError):  # it is gone already
                ray.kill(cast("ActorHandle[Holder]", each.actor))

    def _make(self, node_id: str, restarts: int) -> Holding:
        again = f"/{restarts}" if restarts else ""
        terms = RayHolder(
            namespace=self._namespace,
            name=f"teacher-logits-holder/{self._epoch}/{node_id[:16]}/replicas{again}",
            cluster_address=str(ray.get_runtime_context().gcs_address),
            node_id=node_id,
        )
        actor = make_holder(
            terms.name,
            namespace=self._namespace,
            node_id=node_id,
            arguments=(os.urandom(32), self._key),
        )
        return Holding(terms=terms, actor=actor, restarts=restarts)

    def _on_gone(self, holder: Holding) -> None:
        holder.is_gone = True
        if not self._is_closed:
            facts = {"holder": holder.terms.name, "node": holder.terms.node_id}
            _log.warning("a holder of replicas' payloads is gone", extra={"facts": facts})
            self._tell()
