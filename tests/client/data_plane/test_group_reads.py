"""One rank of a replica reads for all, by processes of gloo."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.client.data_plane.replica_stories import fields_of, in_words, of_what_failed, shared
from tests.client.losses.gloo_ranks import Ranks

from teacher_logits.errors import ConfigError
from teacher_logits_client.data_plane.group_reads import GroupReads

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    made = Ranks(2, tmp_path_factory.mktemp("gloo"))
    yield made
    made.close()


def test_every_rank_has_the_leaders_fields_bit_for_bit(ranks: Ranks) -> None:
    found = ranks.run(2, shared)

    assert [leads for leads, _, _ in found] == [True, False]
    assert [reads for _, reads, _ in found] == [1, 0]
    assert found[0][2] == found[1][2] == in_words(fields_of(0))


def test_no_rank_waits_for_a_leader_that_could_not_read(ranks: Ranks) -> None:
    leader, other = ranks.run(2, of_what_failed)

    assert leader == "RowsMissingError: row 'c' is not there"
    assert other.startswith("TransportFailure: the leader of this replica could not read the rows")
    assert leader in other


def test_a_replica_without_a_group_is_refused() -> None:
    with pytest.raises(ConfigError, match="no process group yet"):
        GroupReads()
