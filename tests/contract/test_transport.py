"""Which transport a session settles on, and what proves that memory is shared."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from teacher_logits.transport import (
    PREFERENCE,
    Refusal,
    RefusalReason,
    Transport,
    proof_holds,
    proof_of,
    settle,
)

LOCAL, SHARED, STREAM = Transport.LOCAL, Transport.SHARED_MEMORY, Transport.STREAM
subsets = st.frozensets(st.sampled_from(Transport))


def test_only_transports_that_share_memory_need_proof() -> None:
    assert {t for t in Transport if t.is_local} == {LOCAL, Transport.CUDA_IPC, SHARED}


def test_every_transport_has_its_place_in_the_preference() -> None:
    assert sorted(PREFERENCE, key=list(Transport).index) == list(Transport)
    assert PREFERENCE[-1] is STREAM


def test_the_first_wanted_that_is_offered_and_proven_wins() -> None:
    settlement = settle(
        writer_id="w",
        wanted=(LOCAL, SHARED, STREAM),
        offered=frozenset(PREFERENCE),
        proven=frozenset({SHARED}),
        failures={},
    )

    assert settlement.transport is SHARED
    assert [r.transport for r in settlement.refusals] == [LOCAL]


def test_streaming_needs_no_proof() -> None:
    settlement = settle(
        writer_id="w",
        wanted=(STREAM,),
        offered=frozenset({STREAM}),
        proven=frozenset(),
        failures={},
    )

    assert settlement.transport is STREAM


def test_the_students_order_counts_and_not_ours() -> None:
    settlement = settle(
        writer_id="w",
        wanted=(STREAM, SHARED),
        offered=frozenset(PREFERENCE),
        proven=frozenset({SHARED}),
        failures={},
    )

    assert settlement.transport is STREAM
    assert settlement.refusals == ()


def test_what_the_writer_has_not_is_refused_with_what_it_has() -> None:
    settlement = settle(
        writer_id="w",
        wanted=(Transport.CUDA_IPC, STREAM),
        offered=frozenset({STREAM, SHARED}),
        proven=frozenset(),
        failures={},
    )

    (refusal,) = settlement.refusals
    assert refusal.reason is RefusalReason.NOT_OFFERED
    assert refusal.message == "writer 'w' offers shared_memory, stream"


def test_a_failed_proof_is_refused_with_what_failed() -> None:
    failure = Refusal(
        transport=SHARED, reason=RefusalReason.SLAB_NOT_MAPPABLE, message="mmap: EPERM"
    )

    settlement = settle(
        writer_id="w",
        wanted=(LOCAL, SHARED),
        offered=frozenset({LOCAL, SHARED}),
        proven=frozenset(),
        failures={SHARED: failure},
    )

    assert settlement.transport is None
    assert settlement.refusals[1] is failure
    assert settlement.refusals[0].reason is RefusalReason.PROOF_MISSING


@given(
    wanted=st.lists(st.sampled_from(Transport), unique=True),
    offered=subsets,
    proven=subsets,
)
def test_all_that_stands_before_the_chosen_one_is_refused_and_nothing_else(
    wanted: list[Transport], offered: frozenset[Transport], proven: frozenset[Transport]
) -> None:
    possible = [t for t in wanted if t in offered and (t in proven or not t.needs_proof)]

    settlement = settle(writer_id="w", wanted=wanted, offered=offered, proven=proven, failures={})

    assert settlement.transport is (possible[0] if possible else None)
    before = wanted[: wanted.index(possible[0])] if possible else wanted
    assert [r.transport for r in settlement.refusals] == before


class TestProof:
    def test_holds_for_what_was_read(self) -> None:
        mac = proof_of(b"page", nonce=b"nonce", transport=SHARED)

        assert proof_holds(mac, b"page", nonce=b"nonce", transport=SHARED)

    @pytest.mark.parametrize(
        ("challenge", "nonce", "transport"),
        [
            (b"other page", b"nonce", SHARED),
            (b"page", b"other nonce", SHARED),
            (b"page", b"nonce", LOCAL),
        ],
    )
    def test_holds_for_nothing_else(
        self, challenge: bytes, nonce: bytes, transport: Transport
    ) -> None:
        mac = proof_of(b"page", nonce=b"nonce", transport=SHARED)

        assert not proof_holds(mac, challenge, nonce=nonce, transport=transport)

    @pytest.mark.parametrize("mac", [b"", b"x" * 32])
    def test_is_not_guessed(self, mac: bytes) -> None:
        assert not proof_holds(mac, b"page", nonce=b"nonce", transport=SHARED)
