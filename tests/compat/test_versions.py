"""Versions and features: what a client and a server of differing releases agree on."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.client.publishing.a_publisher import a_teacher
from tests.transport_suite.dense_teacher import DenseTeacher
from tests.transport_suite.writing import Embedded, a_profile, embedded_server

import teacher_logits_client as tl
from teacher_logits import __version__
from teacher_logits.errors import RequestInvalidError, SessionRefusedError
from teacher_logits.protocol import OURS, Agreed, Spoken, agree, check_protocol
from teacher_logits.v1 import registry_service_pb2, teacher_logits_service_pb2
from teacher_logits.wire.protocol import MAX_FEATURES, spoken_from_wire, spoken_to_wire

SPOKEN = st.builds(
    lambda oldest, more, features: Spoken(oldest=oldest, newest=oldest + more, features=features),
    st.integers(1, 6),
    st.integers(0, 3),
    st.frozensets(st.sampled_from(["a", "b", "c"])),
)
OPENS = (
    teacher_logits_service_pb2.OpenSessionRequest,
    registry_service_pb2.OpenPublisherRequest,
)


@given(client=SPOKEN, server=SPOKEN)
def test_they_agree_on_the_newest_version_that_both_speak_or_are_refused(
    client: Spoken, server: Spoken
) -> None:
    def versions(spoken: Spoken) -> set[int]:
        return set(range(spoken.oldest, spoken.newest + 1))

    common = versions(client) & versions(server)
    if common:
        agreed = agree(client, server)
        assert agreed == Agreed(version=max(common), features=client.features & server.features)
        return
    (violation,) = check_protocol(client, server)
    numbers = violation.facts["client_version"], violation.facts["server_version"]
    assert numbers[0] in versions(client)
    assert numbers[1] in versions(server)
    assert str(client) in violation.message
    assert str(server) in violation.message


def test_who_is_too_old_is_told_what_to_install() -> None:
    newer = replace(OURS, oldest=4, newest=5)
    (old_client,) = check_protocol(Spoken.only(3), newer)
    (old_server,) = check_protocol(newer, Spoken.only(3))
    assert old_client.message == (
        "the client speaks protocol version 3, the server versions 4 to 5; the client is too old: "
        f"install release {__version__} of it, the server's"
    )
    assert "the server, release" in old_server.message
    assert "is too old: start one of the client's release" in old_server.message


@pytest.mark.parametrize("opens", OPENS)
@given(spoken=SPOKEN)
def test_what_is_spoken_travels(opens: type, spoken: Spoken) -> None:
    assert spoken_from_wire(opens(**spoken_to_wire(spoken))) == spoken


@pytest.mark.parametrize("opens", OPENS)
def test_a_first_release_speaks_the_one_version_that_it_says(opens: type) -> None:
    assert spoken_from_wire(opens(protocol_version=1)) == Spoken.only(1)


def test_a_flood_of_features_is_refused_unread() -> None:
    request = OPENS[0](features=["f"] * (MAX_FEATURES + 1))
    with pytest.raises(RequestInvalidError, match=f"at most {MAX_FEATURES}"):
        spoken_from_wire(request)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Embedded]:
    folder = tmp_path_factory.mktemp("versions")
    with embedded_server(folder, pool_bytes=1 << 20, engine=DenseTeacher()) as running:
        yield running


@pytest.fixture
def client(server: Embedded) -> Iterator[tl.Client]:
    with tl.connect(server.address) as connected:
        yield connected


def have(monkeypatch: pytest.MonkeyPatch, *, client: Spoken, server: Spoken) -> None:
    """Have each side speak what another release of it would."""
    monkeypatch.setattr("teacher_logits_client.calls.OURS", client)
    monkeypatch.setattr("teacher_logits_client.calls.registry.OURS", client)
    for module in ("services.student", "services.registry", "admission.capability"):
        monkeypatch.setattr(f"teacher_logits_server.{module}.OURS", server)
    monkeypatch.setattr("teacher_logits_server.publishers.promises.OURS", server)


def test_a_session_has_the_features_of_both_sides_in_the_version_of_both(
    monkeypatch: pytest.MonkeyPatch, client: tl.Client
) -> None:
    newer = Spoken(oldest=1, newest=3, features=frozenset({"mail", "source"}))
    other = Spoken(oldest=1, newest=2, features=frozenset({"mail", "unheard-of"}))
    have(monkeypatch, client=other, server=newer)
    with client.open_session(a_profile(teacher_id="teacher", top_k=8)) as session:
        assert session.terms.protocol_version == 2
        assert session.terms.features == {"mail"}
    with client.open_publisher(a_teacher("versioned")) as publisher:
        assert publisher.transport is not None


@pytest.mark.parametrize(
    ("ours", "theirs"), [(Spoken.only(1), Spoken.only(2)), (Spoken.only(2), Spoken.only(1))]
)
def test_sides_with_no_version_in_common_part_at_once(
    monkeypatch: pytest.MonkeyPatch, client: tl.Client, ours: Spoken, theirs: Spoken
) -> None:
    have(monkeypatch, client=ours, server=theirs)
    for opening in (
        lambda: client.open_session(a_profile(teacher_id="teacher", top_k=8)),
        lambda: client.open_publisher(a_teacher("versioned")),
    ):
        with pytest.raises(SessionRefusedError) as refusal:
            opening()
        (violation,) = refusal.value.violations
        assert violation.rule == "protocol_version"
        assert violation.facts["client_version"] == ours.newest
        assert violation.facts["server_version"] == theirs.newest
