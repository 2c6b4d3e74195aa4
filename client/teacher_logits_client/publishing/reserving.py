"""Reserving: from what a publisher was asked for to a draft, or back to nothing."""

from __future__ import annotations

import logging
import secrets
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from teacher_logits import tracing
from teacher_logits.errors import DeadlinePassedError, PayloadInvalidError, TeacherLogitsError
from teacher_logits.grid import is_whole
from teacher_logits.keys import STEP_LIMIT
from teacher_logits_client.drafts import Draft
from teacher_logits_client.drafts.columns import columns_of, describe
from teacher_logits_client.drafts.rows import make_draft_rows
from teacher_logits_client.drafts.shard_rows import hold_part
from teacher_logits_client.publishing.publisher_rows import rows_to_write
from teacher_logits_client.slabs.claims import Claim
from teacher_logits_client.slabs.placed_columns import place_columns

if TYPE_CHECKING:
    from teacher_logits.profiles import TeacherProfile
    from teacher_logits_client.drafts.rows import DraftRows, Given
    from teacher_logits_client.publishing.desk import PublisherDesk
    from teacher_logits_client.slabs.claims import Way
    from teacher_logits_client.slabs.placed_columns import OwnColumns

_log = logging.getLogger("teacher_logits_client")


@dataclass(frozen=True, kw_only=True, eq=False)
class Asked:
    """What ``Publisher.reserve`` was asked for; see there."""

    step: int
    rows: range | None
    given: Given
    real_rows: int | None
    columns: OwnColumns | None
    bad_rows: str


def reserve_draft(
    desk: PublisherDesk, profile: TeacherProfile, asked: Asked, *, until: float, owner: object
) -> Draft:
    """Claim rows and wait for room; see ``Publisher.reserve``. What fails is given up."""
    _check_asked(asked)
    own, padded = rows_to_write(profile, asked.rows, real_rows=asked.real_rows)
    rows = hold_part(profile, make_draft_rows(profile, own, padded, asked.given), asked.given)
    claim = _claim(desk.way, profile, asked, rows)
    way = desk.way
    desk.settle(until=until)
    try:
        with desk.liveness.noting(), tracing.span("reserve", {"step": claim.step}):
            granted = way.reserve(claim, until=until)
    except BaseException as error:
        if isinstance(error, DeadlinePassedError) or not isinstance(error, TeacherLogitsError):
            desk.later(partial(_give_up, way, claim))  # it may be granted all the same
        raise
    grid = profile.batch_grid
    try:
        draft = Draft(
            granted,
            payload=replace(claim.payload, payload_id=granted.reservation.payload_id),
            rows=rows,
            micro_batch_size=grid.micro_batch_size if grid is not None else 1,
            mask_bad_rows=asked.bad_rows == "mask",
            desk=desk,
            owner=owner,
        )
    except BaseException:
        desk.later(partial(_give_up, way, claim))
        raise
    try:
        if not draft.is_repeat:
            with desk.liveness.noting():
                way.announce(draft.payload_id, rows.valid_count)
    except BaseException:
        draft.abandon()  # nobody was handed it
        raise
    return draft


def _claim(way: Way, profile: TeacherProfile, asked: Asked, rows: DraftRows) -> Claim:
    placed = None
    if asked.columns is not None:
        promised, _ = columns_of(profile, rows)
        placed = place_columns(promised, asked.columns, tuple(way.registered.values()))
    return Claim(
        request_id=secrets.token_hex(12),
        payload=describe(profile, int(asked.step), rows, placed=placed),
        row_positions=tuple(rows.row_positions),
        real_rows=0 if asked.real_rows is None else int(asked.real_rows),
        place=None if placed is None else placed.place,
    )


def _check_asked(asked: Asked) -> None:
    if not is_whole(asked.step) or not 0 <= asked.step < STEP_LIMIT:
        raise PayloadInvalidError(
            f"step is {asked.step!r}: give a whole number from 0 to 2**62 - 1",
            facts={"step": str(asked.step)},
        )
    if asked.bad_rows not in ("reject", "mask"):
        raise PayloadInvalidError(
            f"bad_rows={asked.bad_rows!r} is no policy: give 'reject' or 'mask'",
            facts={"bad_rows": str(asked.bad_rows)},
        )


def _give_up(way: Way, claim: Claim) -> None:
    try:
        way.give_up(claim)
    except TeacherLogitsError as error:
        # Once: what is left of it goes with the session.
        _log.debug("a claim on step %d was not given up: %s", claim.step, error.message)
