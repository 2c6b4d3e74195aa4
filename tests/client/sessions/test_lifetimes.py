"""How long a payload's bytes stay good, when its room goes back, and what is said about it."""

import tracemalloc
import warnings
from concurrent.futures import CancelledError
from dataclasses import replace
from typing import NoReturn

import pytest
import torch
from tests.client.conftest import LOCAL, SHARED_MEMORY, STREAM, Service, a_profile

import teacher_logits_client as tl
from teacher_logits.errors import DeadlinePassedError, LeaseLostError, StalePayloadError
from teacher_logits_client.sessions.reader import Reader

EACH = pytest.mark.parametrize(
    "transports", [LOCAL, SHARED_MEMORY, STREAM], ids=lambda t: t[0].value
)
SHARED = pytest.mark.parametrize("transports", [LOCAL, SHARED_MEMORY], ids=lambda t: t[0].value)
REMOTE = pytest.mark.parametrize("transports", [SHARED_MEMORY, STREAM], ids=lambda t: t[0].value)
IDS = torch.arange(40).view(4, 10) * 5 % 256
OTHER = IDS.flip(1)


def settle(client: tl.Client) -> tl.ClientStatistics:
    """The statistics once all that was let go of has come back."""
    assert client._returner.wait(30)
    return client.statistics()


class TestClosing:
    @EACH
    def test_empties_the_payload_and_whatever_was_made_from_it(
        self, service: Service, transports: tuple[tl.Transport]
    ) -> None:
        with service.session(transports, temperatures=(2.0,)) as (_, session):
            with session.score(IDS).result() as payload:
                columns = payload.columns
                made = [payload.targets, payload.targets_at(2.0), payload.targets.rectangular()]
                made.append(replace(made[0], temperature=5.0))
                assert all(targets.topk_ids.numel() for targets in made)

            with pytest.raises(LeaseLostError, match="is closed"):
                columns["topk_ids"]
            for targets in made:
                for name in ("topk_ids", "log_tail", "valid", "row_offsets", "row_firsts"):
                    with pytest.raises(LeaseLostError, match="is closed"):
                        getattr(targets, name)
                with pytest.raises(LeaseLostError, match="is closed"):
                    assert targets.present is not None
            assert made[1].temperature == 2.0
            assert repr(made[0]) == "<targets of a closed lease>"

    def test_what_is_asked_of_a_closed_payload_is_refused(self, service: Service) -> None:
        with service.session() as (_, session):
            with session.score(IDS).result() as payload:
                pass
            for ask in (
                lambda: payload.columns,
                lambda: payload.targets,
                lambda: payload.row_offsets,
                payload.digest,
                payload.__enter__,
            ):
                with pytest.raises(LeaseLostError, match="is closed"):
                    ask()

    def test_targets_that_outlived_their_lease_are_refused_by_name(self, service: Service) -> None:
        with service.session() as (_, session):
            with session.score(IDS).result() as payload:
                payload_id, targets = payload.payload.payload_id, payload.targets
                other = targets.rectangular()
            for outlived in (targets, other):
                with pytest.raises(LeaseLostError, match=f"payload {payload_id} is closed"):
                    tl.losses.forward_kl(torch.zeros(40, 256), outlived)
                with pytest.raises(LeaseLostError, match=f"payload {payload_id} is closed"):
                    outlived.rectangular()

    @EACH
    def test_returns_the_room(self, service: Service, transports: tuple[tl.Transport]) -> None:
        with service.session(transports) as (client, session):
            with session.score(IDS).result() as payload:
                assert client.statistics().open_leases == 1
                assert service.lease_count(client) == 1
                assert payload.targets is payload.targets

            assert service.lease_count(client) == 0
            statistics = client.statistics()
            assert (statistics.open_leases, statistics.returned_leases) == (0, 1)
            assert statistics.outlived_leases == 0

    def test_twice_is_fine(self, service: Service) -> None:
        with service.session() as (client, session):
            payload = session.score(IDS).result()
            payload.close()
            payload.close()

            assert settle(client).returned_leases == 1

    def test_a_payload_that_is_dropped_is_named_and_returned(self, service: Service) -> None:
        with service.session() as (client, session):
            payload = session.score(IDS).result()
            with pytest.warns(ResourceWarning, match=f"lease {payload.lease_id} .* dropped"):
                del payload

            statistics = settle(client)
            assert (statistics.dropped_leases, statistics.returned_leases) == (1, 1)
            assert service.lease_count(client) == 0


class TestViews:
    @SHARED
    def test_a_view_that_outlives_its_lease_is_named_and_keeps_the_room(
        self, service: Service, transports: tuple[tl.Transport]
    ) -> None:
        with service.session(transports) as (client, session):
            payload = session.score(IDS).result()
            view = payload.columns["log_tail"][3:5]
            expected = view.clone()
            with pytest.warns(ResourceWarning, match=r"tensors over log_tail are alive"):
                payload.close()

            with session.score(OTHER).result():
                assert torch.equal(view, expected)
                assert service.lease_count(client) == 2
            assert settle(client).viewed_leases == 1
            del view
            statistics = settle(client)
            assert (statistics.viewed_leases, statistics.outlived_leases) == (0, 1)
            assert service.lease_count(client) == 0

    def test_memory_that_autograd_holds_is_a_view(self, service: Service) -> None:
        with service.session() as (client, session):
            payload = session.score(IDS).result()
            weight = torch.ones(40, 1, requires_grad=True)
            loss = (payload.columns["log_tail"] * weight).sum()
            with pytest.warns(ResourceWarning, match="log_tail"):
                payload.close()
            assert settle(client).viewed_leases == 1

            loss.backward()
            del loss

            assert settle(client).viewed_leases == 0

    def test_streamed_room_is_returned_at_the_close_and_the_buffer_kept_for_its_view(
        self, service: Service
    ) -> None:
        with service.session(STREAM) as (client, session):
            payload = session.score(IDS).result()
            view = payload.columns["log_tail"]
            expected = view.clone()
            with pytest.warns(ResourceWarning, match="log_tail"):
                payload.close()

            assert service.lease_count(client) == 0
            with session.score(OTHER).result():
                assert torch.equal(view, expected)
            settle(client)
            idle = client._buffers.idle_bytes
            del view
            settle(client)
            assert client._buffers.idle_bytes == 2 * idle > 0

    def test_the_buffer_of_a_stream_is_used_for_the_next(self, service: Service) -> None:
        with service.session(STREAM) as (client, session):
            places = set()
            for _ in range(3):
                with session.score(IDS).result() as payload:
                    places.add(payload.columns["topk_ids"].data_ptr())
                settle(client)

        assert len(places) == 1

    def test_the_line_of_a_closed_session_lasts_as_long_as_its_last_view(
        self, service: Service
    ) -> None:
        with service.session() as (client, session):
            payload = session.score(IDS).result()
            view = payload.columns["log_tail"]
            session.close()
            line = session._reader.line
            assert line is not None
            assert payload.columns["log_tail"] is view
            with pytest.warns(ResourceWarning, match="log_tail"):
                payload.close()
            settle(client)
            assert not line.has_ended
            del view
            settle(client)

            assert line.has_ended
            assert service.lease_count(client) == 0

    @EACH
    def test_a_view_outlives_the_client_and_then_its_room_goes_back(
        self, service: Service, transports: tuple[tl.Transport]
    ) -> None:
        with service.session(transports) as (client, session):
            payload = session.score(IDS).result()
            view = payload.columns["topk_ids"]
            expected = view.clone()
            with pytest.warns(ResourceWarning):
                payload.close()
        with service.session() as (_, other), other.score(OTHER).result():
            assert torch.equal(view, expected)
        thread = client._returner._thread
        assert thread.is_alive()
        del view
        thread.join(30)

        assert not thread.is_alive()
        assert len(service.inspect().leases) == 0
        assert session._reader.line is None or session._reader.line.has_ended


class TestInPlaceArithmetic:
    def test_the_next_payload_in_the_same_room_shows_nothing_of_it(self, service: Service) -> None:
        with service.session() as (client, session):
            with session.score(OTHER).result() as payload:
                expected = payload.digest()
            places = []
            for ids in (IDS, OTHER):
                assert service.lease_count(client) == 0
                with session.score(ids).result() as payload:
                    places.append(payload.columns["topk_ids"].data_ptr())
                    found = payload.digest()
                    payload.targets.topk_ids.fill_(5)
                    for column in payload.columns.values():
                        column.fill_(77)
                    del column

            assert places[0] == places[1]
            assert found == expected
            assert settle(client).dirtied_bytes > 0

    def test_other_readers_of_the_payload_see_nothing_of_it(self, service: Service) -> None:
        with (
            service.session() as (_, session),
            service.session() as (_, other),
            session.score(IDS).result() as payload,
            other.acquire(payload_id=payload.payload.payload_id) as same,
        ):
            payload.columns["topk_ids"].zero_()

            assert not torch.equal(same.columns["topk_ids"], payload.columns["topk_ids"])

    def test_other_leases_of_the_same_session_see_nothing_of_it(self, service: Service) -> None:
        with service.session() as (client, session):
            first = session.score(IDS).result()
            payload_id, expected = first.payload.payload_id, first.digest()
            view = first.columns["topk_ids"].fill_(3)
            with session.acquire(payload_id=payload_id, input_ids=IDS) as second:
                assert second.digest() == expected
                second.columns["topk_ids"].fill_(4)
                with pytest.warns(ResourceWarning, match="topk_ids"):
                    first.close()

                with session.acquire(payload_id=payload_id, input_ids=IDS) as third:
                    assert third.digest() == expected
                assert second.columns["topk_ids"].unique().tolist() == [4]
            assert view.unique().tolist() == [3]
            del view

            assert settle(client).viewed_leases == 0
            assert service.lease_count(client) == 0

    @EACH
    def test_a_digest_check_at_the_exit_notices_it(
        self, service: Service, transports: tuple[tl.Transport]
    ) -> None:
        with service.session(transports, check_digest=True) as (client, session):
            with session.score(IDS).result():
                pass
            payload = session.score(IDS).result()
            payload.columns["topk_ids"][0, 0] += 1
            with pytest.raises(StalePayloadError, match="were changed"):
                payload.close()
            assert service.lease_count(client) == 0


class TestOpeningThatTakesTooLong:
    """A result whose teacher was in time, and whose bytes were not."""

    def be_late_once(self, session: tl.Session) -> None:
        def late(*_: object) -> NoReturn:
            setattr(opener, name, way)
            raise DeadlinePassedError("late")

        way_of = session._reader._openers.by_transport
        opener = way_of[next(iter(session.transports.values()))]  # type: ignore[index]
        name = {"stream": "_read", "shared_memory": "_get_slab"}[opener.transport.value]
        way = getattr(opener, name)
        setattr(opener, name, late)

    @REMOTE
    def test_may_be_asked_for_again(
        self, service: Service, transports: tuple[tl.Transport]
    ) -> None:
        with service.session(transports) as (client, session):
            self.be_late_once(session)
            future = session.score(IDS)
            with pytest.raises(DeadlinePassedError, match="late"):
                future.result()
            assert service.lease_count(client) == 1

            with future.result() as payload:
                assert payload.transport is transports[0]
                assert payload.columns["topk_ids"].numel()
            assert service.lease_count(client) == 0

    @REMOTE
    @pytest.mark.parametrize("how", ["cancelled", "dropped"])
    def test_gives_its_room_back_when_it_is_given_up(
        self, service: Service, transports: tuple[tl.Transport], how: str
    ) -> None:
        with service.session(transports) as (client, session):
            self.be_late_once(session)
            future = session.score(IDS)
            with pytest.raises(DeadlinePassedError, match="late"):
                future.result()
            if how == "cancelled":
                future.cancel()
                assert service.lease_count(client) == 0
                with pytest.raises(CancelledError):
                    future.result()
            del future
            assert service.lease_count(client) == 0
            session.close()
            line = session._reader.line

            assert line is None or line.has_ended

    @REMOTE
    def test_gives_the_room_of_a_payload_that_was_acquired_back_at_once(
        self, service: Service, transports: tuple[tl.Transport]
    ) -> None:
        with (
            service.session() as (_, writer),
            writer.score(IDS).result() as payload,
            service.session(transports) as (client, session),
        ):
            self.be_late_once(session)
            with pytest.raises(DeadlinePassedError, match="late"):
                session.acquire(payload_id=payload.payload.payload_id)

            assert service.lease_count(client) == 1


def test_an_interrupt_before_a_lease_is_opened_gives_it_back(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> NoReturn:
        raise KeyboardInterrupt

    with service.session() as (client, session):
        future = session.score(IDS)
        monkeypatch.setattr(Reader, "open_bytes", interrupt)
        with pytest.raises(KeyboardInterrupt):
            future.result()
        assert service.lease_count(client) == 0


class TestReuseUnderAReader:
    @SHARED
    def test_is_raised_at_the_exit(self, service: Service, transports: tuple[tl.Transport]) -> None:
        with service.session(transports) as (client, session):
            payload = session.score(IDS).result()
            with pytest.raises(StalePayloadError, match="discard everything") as caught, payload:
                reuse_under(service, payload)
            assert caught.value.facts["payload_id"] == payload.payload.payload_id
            assert settle(client).stale_payloads == 1
            assert service.lease_count(client) == 0

    @SHARED
    def test_is_what_is_said_of_bytes_that_are_others_when_they_are_checked(
        self,
        service: Service,
        transports: tuple[tl.Transport],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        check = tl.LeasedPayload.check

        def overwritten(payload: tl.LeasedPayload, *given: object, **more: object) -> None:
            reuse_under(service, payload)
            payload.columns["row_digests"].zero_()
            check(payload, *given, **more)  # type: ignore[arg-type]

        monkeypatch.setattr(tl.LeasedPayload, "check", overwritten)
        with service.session(transports) as (client, session):
            with pytest.raises(StalePayloadError, match="discard everything"):
                session.score(IDS).result()
            assert service.lease_count(client) == 0

    def test_explains_an_error_that_it_may_have_caused(self, service: Service) -> None:
        with service.session() as (_, session):
            payload = session.score(IDS).result()
            with pytest.raises(StalePayloadError) as caught, payload:
                fail_with(ValueError("loss is NaN"), service, payload)
            assert isinstance(caught.value.__context__, ValueError)

    def test_does_not_stand_in_for_an_interrupt(self, service: Service) -> None:
        with service.session() as (_, session):
            payload = session.score(IDS).result()
            with pytest.raises(KeyboardInterrupt), payload:
                fail_with(KeyboardInterrupt(), service, payload)

    def test_an_error_of_the_block_is_not_hidden_behind_a_warning(self, service: Service) -> None:
        """Its traceback holds the views that would be warned about."""
        with service.session() as (_, session), warnings.catch_warnings():
            warnings.simplefilter("error")
            payload = session.score(IDS).result()
            kept = payload.columns["log_tail"]
            with pytest.raises(ValueError, match="mine"), payload:
                raise ValueError("mine")
            assert kept.shape == (40, 1)


class TestModes:
    @EACH
    def test_a_copy_outlives_its_lease_without_a_word(
        self, service: Service, transports: tuple[tl.Transport]
    ) -> None:
        with service.session(transports, mode=tl.MapMode.COPY) as (client, session):
            with session.score(IDS).result() as payload:
                mine = payload.columns["topk_ids"]
                expected = mine.clone()
                mine.add_(0)

            assert service.lease_count(client) == 0
            for _ in range(3):
                session.score(OTHER).result().close()
            assert torch.equal(mine, expected)
            assert settle(client).outlived_leases == 0

    def test_a_read_only_map_reads_the_same(self, service: Service) -> None:
        digests = set()
        for mode in (tl.MapMode.COW, tl.MapMode.READ_ONLY):
            with (
                service.session(mode=mode) as (_, session),
                session.score(IDS).result() as payload,
            ):
                digests.add(payload.digest())
                assert payload.targets.topk_ids.shape == (40, 8)

        assert len(digests) == 1


class TestCost:
    def test_a_fetch_makes_no_objects_by_entry(self, service: Service) -> None:
        """512 positions of 64 entries, fetched by row or by batch: as many objects."""
        ids = torch.zeros(1, 512, dtype=torch.int64)
        with service.session(top_k=64) as (_, session):
            session.score(ids).result().close()
            future = session.score(ids)
            future._pending.result(30)
            tracemalloc.start()
            try:
                with future.result() as payload:
                    payload.targets  # noqa: B018
                    snapshot = tracemalloc.take_snapshot()
            finally:
                tracemalloc.stop()

        ours = snapshot.filter_traces([tracemalloc.Filter(True, "*teacher_logits*")])
        assert sum(statistic.count for statistic in ours.statistics("filename")) < 200


def test_a_client_that_is_dropped_leaves_no_thread_behind(service: Service) -> None:
    client = tl.connect(service.address)
    thread = client._returner._thread
    with client.open_session(a_profile()) as session:
        session.score(IDS).result().close()
    del client, session
    thread.join(30)

    assert not thread.is_alive()


def reuse_under(service: Service, payload: tl.LeasedPayload) -> None:
    """What only an operator's forced reclaim does."""
    slab, slot = service.slab_of(payload)
    slab.mark(slot, slab.generation(slot) + 1)


def fail_with(error: BaseException, service: Service, payload: tl.LeasedPayload) -> None:
    reuse_under(service, payload)
    raise error
