"""Selection rules between their Python form and their messages.

A message in which no rule is set means the K best: releases that knew nothing else set none.
"""

from __future__ import annotations

from teacher_logits.errors import RequestInvalidError
from teacher_logits.selection_rules import (
    TOP_K,
    ClientIds,
    Nucleus,
    Sampled,
    SelectionRule,
)
from teacher_logits.v1 import selection_pb2


def selection_to_wire(rule: SelectionRule) -> selection_pb2.Selection:
    """Return the message of a rule."""
    if isinstance(rule, Nucleus):
        nucleus = selection_pb2.Nucleus(mass=rule.mass, least=rule.least)
        return selection_pb2.Selection(nucleus=nucleus)
    if isinstance(rule, Sampled):
        return selection_pb2.Selection(sampled=selection_pb2.Sampled(seed=rule.seed))
    if isinstance(rule, ClientIds):
        return selection_pb2.Selection(client_ids=selection_pb2.ClientIds())
    return selection_pb2.Selection(top_k=selection_pb2.TopK())


def selection_from_wire(message: selection_pb2.Selection) -> SelectionRule:
    """Return the rule of a message.

    Raises:
        RequestInvalidError: its numbers select nothing, or the message names a rule that this
            release does not know.
    """
    which = message.WhichOneof("rule")
    if which == "nucleus":
        return Nucleus(mass=message.nucleus.mass, least=message.nucleus.least)
    if which == "sampled":
        return Sampled(seed=message.sampled.seed)
    if which == "client_ids":
        return ClientIds()
    if which is None and message.ByteSize():
        raise RequestInvalidError(
            "the selection is of a kind that this release does not know: use the same release on "
            "both sides",
            facts={"field": "selection"},
        )
    return TOP_K
