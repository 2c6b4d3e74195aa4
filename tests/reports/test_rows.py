"""Which test answers which report from the field; the rows are those of the first release.

A row is answered where its behaviour lives, and not once more here. What is tried here keeps the
table true: every row has a test, and every test that it names is there.
"""

import ast
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]

COST = "reports/test_cost.py"
VALUES = "reports/test_values.py"
SERVICE = "reports/test_service.py"
BYTES = "reports/test_hostile_bytes.py"
HANDSHAKE = "reports/test_handshake_refusals.py"
BITS = "transport_suite/test_bits.py"
SCORED = "transport_suite/test_scored.py"
GIB = "transport_suite/test_one_gib.py"
SECOND = "processes/test_second_server.py"
CLIENT = "client/test_client.py"
GUARDS = "client/test_guards.py"
LIFETIMES = "client/test_lifetimes.py"
PROCESSES = "client/test_processes.py"
ERRORS = "contract/test_wire_errors.py"
SOURCE = "packaging/test_source_rules.py"
CONFIG = "server/test_config.py"
ENGINE = "server/test_custom_engine.py"
TRANSFORMERS = "server/test_transformers_engine.py"

ROWS: dict[str, list[tuple[str, str]]] = {
    # A teacher that runs out of memory over prompt log-probabilities: all positions at once.
    "R05": [
        (COST, "test_r05_memory_does_not_grow_with_the_tokens_scored"),
        (TRANSFORMERS, "test_chunks_are_small_fp32_and_the_callers_to_write_into"),
    ],
    # A transient of gigabytes that no formula tells.
    "R06": [
        (COST, "test_r06_memory_is_what_the_formula_of_a_chunk_says"),
    ],
    # One request allocates tens of gigabytes.
    "R07": [
        (COST, "test_r07_k_of_the_vocabulary_is_refused_at_the_door"),
        (COST, "test_r07_a_request_of_gigabytes_is_refused_before_anything_is_made_for_it"),
        (COST, "test_r07_what_fits_the_pool_and_not_beside_others_waits_and_is_answered"),
    ],
    # A Python object an entry.
    "R08": [
        (LIFETIMES, "test_a_fetch_makes_no_objects_by_entry"),
    ],
    # Asked for 64 entries, got 20.
    "R10": [
        (VALUES, "test_r10_more_entries_than_the_teacher_gives_are_refused_with_both_numbers"),
        (VALUES, "test_r10_never_fewer_entries_come_than_were_asked_for"),
        (VALUES, "test_r10_another_sessions_payload_with_fewer_entries_is_refused"),
        (GUARDS, "test_fewer_entries_than_were_asked_for_are_refused"),
    ],
    # A -inf or a NaN ends in an internal error, or in the data.
    "R11": [
        (BITS, "test_every_element_type_comes_bit_by_bit"),
        (VALUES, "test_r11_a_row_that_cannot_be_scored_fails_its_request_by_row_and_position"),
        (VALUES, "test_r11_a_masked_row_is_named_teaches_nothing_and_harms_no_other"),
    ],
    # Fetches stall in the garbage collector.
    "R13": [
        (PROCESSES, "test_fetches_leave_nothing_for_the_garbage_collector"),
    ],
    # A teacher that is not there or cannot do what is asked, found late; deadlines misprinted.
    "R17": [
        (CLIENT, "test_nobody_at_the_port_is_said_within_the_deadline"),
        (HANDSHAKE, "test_a_broken_rule_is_named_with_its_numbers"),
        (SERVICE, "test_r17_a_wait_that_the_server_cuts_short_names_the_wait_that_counted"),
        (
            SERVICE,
            "test_r17_a_wait_that_the_server_leaves_alone_names_the_callers_or_its_default",
        ),
    ],
    # A head of 152,064 columns beside one of 151,936.
    "R19": [
        (VALUES, "test_r19_another_vocabulary_size_is_refused_with_both_and_the_way_out"),
        (
            VALUES,
            "test_r19_truncation_is_the_dense_answer_without_the_columns_dropped",
        ),
        (VALUES, "test_r19_an_id_that_the_student_lacks_cannot_be_sent"),
        (VALUES, "test_r19_a_student_with_more_columns_than_the_teacher_gets_the_teachers"),
        (SCORED, "test_padded_columns_of_the_head_are_never_selected"),
    ],
    # As many ids, other tokens.
    "R26": [
        (VALUES, "test_r26_a_tokenizer_with_its_ids_permuted_is_refused_with_both_fingerprints"),
        (VALUES, "test_r26_a_tokenizer_that_is_not_said_is_unchecked_and_not_passed"),
    ],
    # Another token's log-probability; an error read as data.
    "R35": [
        (VALUES, "test_r35_a_token_outside_the_k_ids_has_its_own_log_probability"),
        (VALUES, "test_r35_a_teacher_that_fails_is_an_error_and_never_data"),
        (VALUES, "test_r35_a_neighbour_of_a_request_that_fails_gets_its_own_answer"),
        (GUARDS, "test_scores_that_are_one_token_off_are_refused"),
    ],
    # Bytes of a stranger become code.
    "R43": [
        (BYTES, "test_r43_a_pickle_at_any_rpc_is_refused_and_never_opened"),
        (BYTES, "test_r43_bytes_that_are_no_message_are_refused_at_any_rpc"),
        (BYTES, "test_r43_noise_is_refused_or_means_nothing_at_any_rpc"),
        (BYTES, "test_r43_a_pickle_or_noise_at_the_broker_ends_a_strangers_line_and_no_other"),
        (SOURCE, "test_unpickles_nothing_and_shares_no_python_segments"),
        (CONFIG, "test_other_hosts_reach_a_server_only_where_that_was_asked_for"),
        (CONFIG, "test_the_default_is_a_socket_in_the_users_runtime_folder"),
        (BYTES, "test_r43_every_rpc_needs_a_deadline_but_the_watch_over_health"),
        (BYTES, "test_r43_a_pickle_in_every_text_and_bytes_of_a_request_stays_text"),
        (BYTES, "test_r43_what_is_no_http_at_all_does_not_stop_the_server"),
        (BYTES, "test_r43_the_bombs_would_have_gone_off"),
    ],
    # Other backends: a teacher of one's own in 30 lines.
    "R47": [
        (ENGINE, "test_an_engine_of_ones_own_is_found_probed_and_served"),
        (SCORED, "test_every_k_and_value_type_is_the_dense_teachers"),
    ],
    # K = 10 breaks.
    "R50": [
        (BITS, "test_every_k_and_form_of_rows_comes_bit_by_bit"),
        (SCORED, "test_every_k_and_value_type_is_the_dense_teachers"),
        (VALUES, "test_r50_k_may_be_the_whole_vocabulary_and_then_nothing_is_left"),
        (VALUES, "test_r50_k_beyond_the_vocabulary_is_refused_with_both_numbers"),
    ],
    # "Received message larger than max."
    "T29": [
        (GIB, "test_a_gib_comes_whole_through_a_stock_channel_without_options"),
        (CONFIG, "test_a_setting_that_makes_no_sense_is_refused_by_its_flag"),
    ],
    # Two servers on one port.
    "T36": [
        (SECOND, "test_on_the_same_port_it_is_refused_with_the_address"),
        (SECOND, "test_on_the_same_socket_it_is_refused_with_the_firsts_pid"),
    ],
    # "AF_UNIX path length cannot exceed 107 bytes."
    "T37": [
        (SERVICE, "test_t37_a_socket_path_that_is_too_long_is_refused_with_its_length"),
        (
            SERVICE,
            "test_t37_a_path_too_long_for_the_broker_beside_it_names_the_brokers_flag",
        ),
    ],
    # An error larger than a trailer hides itself.
    "T39": [
        (SERVICE, "test_t39_a_profile_that_breaks_everything_at_length_keeps_code_and_first_rules"),
        (SERVICE, "test_t39_an_error_that_quotes_its_caller_is_cut_and_still_arrives"),
        (ERRORS, "test_five_hundred_rules_and_a_long_message_keep_code_and_first_rules"),
    ],
}


@cache
def names_in(module: str) -> frozenset[str]:
    """Return the names of the tests of a module, in whichever class they stand."""
    tree = ast.parse((TESTS / module).read_text(encoding="utf-8"))
    names = (node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    return frozenset(name for name in names if name.startswith("test_"))


@pytest.mark.parametrize(
    ("row", "module", "name"),
    [(row, module, name) for row, tests in ROWS.items() for module, name in tests],
)
def test_the_test_that_answers_a_row_is_there(row: str, module: str, name: str) -> None:
    assert name in names_in(module), f"{row} was answered by {name} in {module}, which is gone"


@pytest.mark.parametrize("module", [COST, VALUES, SERVICE, BYTES])
def test_a_test_that_is_named_after_a_row_stands_in_the_table(module: str) -> None:
    listed = {(module, name) for tests in ROWS.values() for module, name in tests}
    for name in names_in(module):
        named = name.split("_")[1].upper() in ROWS
        assert (module, name) in listed or not named, f"{name} is missing in the table"
