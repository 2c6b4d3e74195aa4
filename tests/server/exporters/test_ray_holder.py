"""The holder hands a reference to whoever has the server's token for a lease that lasts."""

from __future__ import annotations

from teacher_logits_server.exporters.ray_holder import Holder, token_of

KEY = bytes(range(32))
REFERENCE = object()


def a_holder() -> Holder:
    holder = Holder(b"challenge", KEY)
    holder.keep("o", [REFERENCE], ["early"])
    return holder


def token(lease_id: str = "l", object_id: str = "o") -> bytes:
    return token_of(KEY, object_id, lease_id)


def test_it_says_its_challenge_to_whoever_asks() -> None:
    assert a_holder().challenge() == b"challenge"


def test_a_token_is_good_for_its_lease_and_object_alone() -> None:
    holder = a_holder()
    holder.keep("other", [object()], [])
    assert holder.take("o", "l", token()) == [REFERENCE]
    assert holder.take("o", "m", token()) == []
    assert holder.take("other", "l", token()) == []
    assert holder.take("o", "l", token_of(bytes(32), "o", "l")) == []
    assert holder.take("o", "l", b"") == []


def test_a_lease_that_was_revoked_gets_nothing_and_the_others_do() -> None:
    holder = a_holder()
    holder.revoke("o", "l")
    assert holder.take("o", "l", token()) == []
    assert holder.take("o", "early", token("early")) == []
    assert holder.take("o", "m", token("m")) == [REFERENCE]


def test_what_was_dropped_is_handed_out_no_more() -> None:
    holder = a_holder()
    holder.drop("o")
    holder.drop("o")
    holder.revoke("o", "l")
    assert holder.take("o", "l", token()) == []
