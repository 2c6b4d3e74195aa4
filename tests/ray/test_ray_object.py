"""Payloads as objects of a Ray cluster's store: the conformance suite, and what is Ray's alone.

This process is a driver of the cluster, and the server that runs in it has joined the same one.
"""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeAlias

import pytest
import ray
import torch
from tests.client.publishing.a_publisher import a_student, a_teacher, expected, some_rows
from tests.transport_suite.conftest import OpenSession, clients, open_session, server
from tests.transport_suite.contents import ROWS, Content, every_kind
from tests.transport_suite.test_bits import (
    test_a_digest_tells_one_changed_bit,
    test_every_element_type_comes_bit_by_bit,
    test_every_k_and_form_of_rows_comes_bit_by_bit,
    test_every_way_of_mapping_shows_the_same_bits,
    test_one_payload_has_one_digest_over_every_transport,
    test_rows_without_a_single_position_come_too,
)
from tests.transport_suite.test_generations import (
    content,
    test_a_copy_that_was_complete_in_time_minds_no_reuse,
    test_generations_rise_with_every_reuse_of_a_room,
)
from tests.transport_suite.test_isolation import (
    test_a_digest_check_at_the_end_finds_the_readers_own_writes_too,
    test_in_place_writes_are_gone_from_the_next_payload_in_the_same_room,
    test_in_place_writes_are_gone_when_the_same_payload_is_leased_again,
    test_in_place_writes_of_one_page_leave_the_neighbours_room_alone,
    test_in_place_writes_reach_neither_the_writer_nor_another_reader,
)
from tests.transport_suite.test_room import (
    test_gives_no_new_lease_once_it_is_free,
    test_holds_nothing_for_a_closed_lease_to_show,
    test_is_free_once_writer_and_reader_are_done,
    test_is_given_back_with_the_session_that_was_closed_first,
    test_is_taken_while_one_of_two_readers_is_left,
    test_keeps_its_bytes_for_a_view_that_outlives_the_lease,
    test_of_a_lease_closed_twice_is_given_back_once,
    test_stays_taken_for_a_view_where_it_is_the_writers_own_and_not_for_a_copy,
    test_stays_taken_while_a_graph_of_autograd_has_a_view,
)
from tests.transport_suite.test_scored import (
    test_the_dense_teacher_is_heard_in_the_servers_own_process_too,
)
from tests.transport_suite.ways import RAY_OBJECT, Way
from tests.transport_suite.writing import Embedded, a_profile, embedded_server


@pytest.fixture(params=[RAY_OBJECT], ids=str)
def way(request: pytest.FixtureRequest) -> Way:
    found: Way = request.param
    return found


@pytest.fixture(scope="module")
def running_server(
    cluster: "Cluster", tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Embedded]:
    folder = tmp_path_factory.mktemp("suite")
    with embedded_server(
        folder, pool_bytes=16 << 20, ray_address=cluster.address, ray_budget_bytes=8 << 20
    ) as server:
        yield server
