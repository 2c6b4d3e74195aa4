"""Which test answers which report from the field, and what was read in the peers' own source.

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
SEVERAL = "reports/test_several_teachers.py"
BYTES = "reports/test_hostile_bytes.py"
HANDSHAKE = "reports/test_handshake_refusals.py"
BITS = "transport_suite/test_bits.py"
SCORED = "transport_suite/test_scored.py"
GIB = "transport_suite/test_one_gib.py"
SECOND = "processes/test_second_server.py"
CLIENT = "client/sessions/test_client.py"
CHOSEN = "client/scoring/test_scored_ids.py"
GUARDS = "client/payloads/test_guards.py"
LIFETIMES = "client/sessions/test_lifetimes.py"
PROCESSES = "client/sessions/test_processes.py"
ERRORS = "contract/wire/test_wire_errors.py"
SOURCE = "packaging/test_source_rules.py"
BROKER = "reports/test_broken_broker.py"
CONFIG = "server/test_config.py"
NAMED = "server/test_named_teachers.py"
ENGINE = "server/engines/test_custom_engine.py"
TRANSFORMERS = "server/engines/test_transformers_engine.py"
CONNECTIONS = "reports/test_connections.py"
PREFIXES = "reports/test_prefixes.py"
NAMESPACES = "reports/test_namespaces.py"
PARITY = "reports/test_parity.py"
REGISTERED = "reports/test_registered.py"
ROUNDS = "reports/test_rounds.py"
ROOM = "transport_suite/test_room.py"
ISOLATION = "transport_suite/test_isolation.py"
GENERATIONS = "transport_suite/test_generations.py"
FIFTY = "processes/test_fifty_steps.py"
PUBLISHING = "processes/test_publishing.py"
LEASES = "processes/faults/test_leases.py"
PRODUCERS = "processes/faults/test_producers.py"
SERVERS = "processes/faults/test_servers.py"
FORKS = "client/test_fork.py"
HEARTBEAT = "client/sessions/test_heartbeat.py"
OPENERS = "client/openers/test_openers.py"
PUBLISHER = "client/publishing/test_publisher.py"
STEP_CHECKS = "client/steps/test_step_checks.py"
ALIGNMENT = "client/rows/test_alignment.py"
ROWS_GIVEN = "client/rows/test_rows.py"
SLAB = "contract/test_slab.py"
RELAYS = "server/lending/test_relays.py"
LINES = "server/services/test_line_publishers.py"
PROOFS = "server/ledger/test_ledger.py"
REGISTRY = "server/services/test_registry_service.py"
ACCESS = "processes/test_access.py"
APART = "deploy/test_apart.py"
DEFERRED = "ray/test_deferred.py"
DRIVER = "fake_cuda/test_driver.py"
STEPS = "server/steps/test_steps.py"
TEACHER_HEALTH = "server/test_teacher_health.py"
TURNS = "server/test_fair_turns.py"
RAY_OBJECTS = "ray/test_ray_object.py"
TWO_NODES = "ray/test_two_nodes.py"
LEDGER = "server/ledger/test_registered.py"
BULK = "server/services/test_bulk.py"
EXPORTERS = "server/exporters/test_exporters.py"
DEVICE_BUFFERS = "cuda/test_buffers.py"
DEVICE_BYTES = "contract/devices/test_device_bytes.py"
DEVICE_COUNTS = "cuda/test_counts.py"
DEVICE_ORDER = "cuda/test_order.py"
DEVICE_REFUSALS = "cuda/test_refusals.py"
DEVICE_ROOMS = "cuda/test_rooms.py"
GPU_CHECK = "gpu/test_check.py"
BULK_BENCH = "bench/test_bulk_bench.py"
REPORTS_BENCH = "bench/test_reports_bench.py"

NAMED_AFTER_ROWS = (
    BROKER,
    BYTES,
    CONNECTIONS,
    COST,
    NAMESPACES,
    PARITY,
    PREFIXES,
    REGISTERED,
    ROUNDS,
    SERVICE,
    SEVERAL,
    VALUES,
)

STUDENTS = "reports/test_students.py"
LOSSES = "client/losses/test_losses.py"
CUTS = "client/normalisation/test_normalisation_cuts.py"
TRANSFORMERS_TRAINER = "client/trainers/test_transformers_trainer.py"
TRL_TRAINER = "client/trainers/test_trl_trainer.py"
TRAINER_ROWS = "client/trainers/test_trainer_rows.py"

ROWS: dict[str, list[tuple[str, str]]] = {
    # A driver that everything passes through.
    "R01": [
        (DEFERRED, "test_the_drivers_memory_does_not_grow_by_the_payloads"),
        (DEFERRED, "test_a_student_gets_what_its_teacher_rank_said"),
    ],
    # A handle of another node, found out in the middle of training.
    "R02": [
        (CONNECTIONS, "test_r02_a_student_on_another_node_is_streamed_to_and_told_why"),
        (CONNECTIONS, "test_r02_a_student_on_another_node_that_insists_is_refused_with_the_shard"),
        (HANDSHAKE, "test_a_broken_rule_is_named_with_its_numbers"),
    ],
    # A full-vocabulary temporary in the loss.
    "R03": [
        (
            STUDENTS,
            "test_r03_a_loss_over_4096_tokens_of_151936_ids_takes_less_than_50_mb_beside_its_gradient",
        ),
        (LOSSES, "test_the_gradient_is_the_only_array_of_the_size_of_the_logits"),
    ],
    # A padded length in the payload.
    "R04": [
        (PUBLISHER, "test_rows_of_another_width_are_refused_with_both_numbers"),
        (LEDGER, "test_positions_must_be_those_of_the_rows"),
    ],
    # A teacher that runs out of memory over prompt log-probabilities: all positions at once.
    "R05": [
        (COST, "test_r05_memory_does_not_grow_with_the_tokens_scored"),
        (COST, "test_r05_nor_with_the_most_that_a_row_has"),
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
    # A cost that explodes with K; the figure is `stream` by `top_k` of ``benchmarks.reports``.
    "R09": [
        (REPORTS_BENCH, "test_text_and_sizes_of_k_are_measured"),
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
    # Rows that share a prefix, answered from a cache.
    "R12": [
        (PREFIXES, "test_r12_rows_that_share_a_prefix_are_scored_as_each_is_alone"),
    ],
    # Fetches stall in the garbage collector.
    "R13": [
        (PROCESSES, "test_fetches_leave_nothing_for_the_garbage_collector"),
    ],
    # Text; the figure is `round_trip` of ``benchmarks.reports``.
    "R14": [
        (REPORTS_BENCH, "test_text_and_sizes_of_k_are_measured"),
        (REPORTS_BENCH, "test_each_form_of_text_says_the_same"),
    ],
    # One large request stalls others; the figure is `control_p99` of ``benchmarks.control``.
    "R15": [
        (BULK_BENCH, "test_control_calls_are_measured_alone_and_under_streams"),
        (BULK, "test_under_several_streams_others_are_heard_between_any_two_chunks"),
    ],
    # A truncated KL below zero, clamped, and its gradient with it.
    "R16": [
        (
            STUDENTS,
            "test_r16_with_the_tail_as_a_bucket_kl_never_falls_below_zero_nor_its_gradient_dies",
        ),
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
        (SERVICE, "test_r17_whoever_says_no_deadline_is_told_one_of_less_than_ten_minutes"),
        (
            SEVERAL,
            "test_r17_who_asks_a_published_teacher_for_scores_is_told_at_the_first_call",
        ),
    ],
    # Idle pools that stay: teachers of publishers, in a server without a model.
    "R18": [
        (SEVERAL, "test_r18_two_publishers_of_two_teachers_publish_where_no_model_is_loaded"),
        (SEVERAL, "test_r30_a_publisher_of_a_name_that_an_engine_has_is_refused_with_the_names"),
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
    # A loss that depends on how the step was cut.
    "R20": [
        (CUTS, "test_loss_and_gradient_are_those_of_one_batch"),
        (
            TRANSFORMERS_TRAINER,
            "test_r20_the_gradient_is_that_of_one_batch_however_it_is_cut",
        ),
        (TRANSFORMERS_TRAINER, "test_r20_two_ranks_take_the_step_of_one"),
        (TRL_TRAINER, "test_r20_the_gradient_is_that_of_one_batch_however_it_is_cut"),
        (TRL_TRAINER, "test_r20_two_ranks_take_the_step_of_one"),
    ],
    # A finite loss whose gradient is NaN.
    "R21": [
        (
            STUDENTS,
            "test_r21_ragged_rows_have_no_infinity_in_their_targets_and_none_in_a_gradient",
        ),
        (
            TRANSFORMERS_TRAINER,
            "test_r21_gradients_of_ragged_rows_are_finite_in_reverse_kl",
        ),
    ],
    # A server that stands still.
    "R22": [
        (PROCESSES, "test_a_call_ends_by_its_deadline_and_the_client_goes_on_afterwards"),
        (PROCESSES, "test_a_stream_that_stops_half_way_ends_by_its_deadline"),
        (PUBLISHING, "test_a_seal_that_a_stopped_server_does_not_answer_can_be_tried_again"),
    ],
    # No server teacher in the trainers that people have.
    "R23": [
        (TRANSFORMERS_TRAINER, "test_r23_a_student_learns_at_every_beta"),
        (TRL_TRAINER, "test_r23_the_loss_and_its_gradient_are_those_of_trls_dense_one"),
        (
            TRL_TRAINER,
            "test_r23_served_it_is_what_trl_computes_with_the_teacher_in_the_process",
        ),
    ],
    # A first token that one side alone has.
    "R25": [
        (STEP_CHECKS, "test_say_that_only_the_first_token_differs"),
        (ALIGNMENT, "test_that_differ_are_named_with_their_cause"),
    ],
    # As many ids, other tokens.
    "R26": [
        (VALUES, "test_r26_a_tokenizer_with_its_ids_permuted_is_refused_with_both_fingerprints"),
        (VALUES, "test_r26_a_tokenizer_that_is_not_said_is_unchecked_and_not_passed"),
    ],
    # One id of one row differs.
    "R27": [
        (REGISTERED, "test_r27_one_altered_id_fails_the_rank_that_has_its_row_and_no_other"),
        (STEP_CHECKS, "test_name_a_row_with_other_tokens_by_its_global_number"),
    ],
    # A teacher that dropped the last token.
    "R28": [
        (STEP_CHECKS, "test_refuse_a_teacher_that_dropped_the_last_token"),
        (PARITY, "test_without_its_last_token_is_refused_before_anything_is_compared"),
        (PARITY, "test_r28_the_same_numbers_are_called_so"),
        (
            PARITY,
            "test_r28_a_teacher_that_is_one_token_late_is_found_which_no_guard_of_a_payload_can",
        ),
        (PARITY, "test_r28_a_script_learns_it_from_the_exit_code"),
        (PARITY, "test_r28_a_server_that_is_not_there_is_no_other_numbers"),
        (PARITY, "test_r28_a_temperature_that_was_applied_already_is_found"),
    ],
    # Hundreds of payloads alive.
    "R29": [
        (ROUNDS, "test_r29_many_requests_at_once_are_all_answered_within_the_pool"),
        (PUBLISHING, "test_a_teacher_of_two_ranks_waits_for_its_students_step_by_step"),
    ],
    # Several teachers wanted, and no key by which a row goes to one.
    "R30": [
        (
            SEVERAL,
            "test_r30_each_row_of_a_mixed_batch_is_scored_by_the_teacher_that_has_its_tag",
        ),
        (SEVERAL, "test_r30_rows_of_one_teacher_are_its_own_payload"),
        (SEVERAL, "test_r30_sessions_with_profiles_of_their_own_make_one_batch_of_the_widest"),
        (SEVERAL, "test_r30_a_profile_that_names_a_teacher_itself_is_refused"),
        (SEVERAL, "test_r30_what_is_taken_out_ends_with_the_answer"),
        (SEVERAL, "test_r30_prefixes_and_windows_go_with_their_rows"),
        (SEVERAL, "test_r30_ids_of_ones_own_choice_are_scored_by_the_teacher_of_their_row"),
        (SEVERAL, "test_r30_ids_that_are_not_of_the_batch_are_refused"),
        (
            SEVERAL,
            "test_r30_a_row_with_a_tag_that_nobody_has_is_refused_before_anything_is_sent",
        ),
        (
            SEVERAL,
            "test_r30_a_tag_that_two_teachers_have_is_refused_before_a_session_is_opened",
        ),
        (
            SEVERAL,
            "test_r30_a_teacher_that_is_not_there_is_told_with_those_that_are_and_no_session_is_left",
        ),
        (SEVERAL, "test_r30_who_names_no_teacher_of_several_is_told_them"),
        (
            SEVERAL,
            "test_r30_one_teacher_that_fails_is_named_and_what_the_others_said_is_not_lost",
        ),
        (
            SEVERAL,
            "test_r30_what_is_wrong_with_a_row_names_its_place_in_the_batch_and_nothing_is_left_asked",
        ),
        (SEVERAL, "test_r30_a_publisher_of_a_name_that_an_engine_has_is_refused_with_the_names"),
    ],
    # An engine whose numbers are not the trainer's.
    "R31": [
        (STUDENTS, "test_r31_who_computed_a_payload_and_how_is_told_and_may_be_insisted_on"),
    ],
    # Shapes that differ under context parallelism.
    "R32": [
        (
            TRAINER_ROWS,
            "test_r32_context_parallel_parts_of_uneven_rows_add_up_to_the_whole",
        ),
    ],
    # A teacher fails, and ranks wait for ever.
    "R33": [
        (REGISTERED, "test_r33_all_eight_that_wait_hear_of_their_teachers_end"),
        (PRODUCERS, "test_all_who_wait_for_a_dead_publisher_hear_of_it"),
        (REGISTRY, "test_a_step_whose_publisher_dies_is_told_at_once"),
    ],
    # Another temperature; text that is tokenised once more.
    "R34": [
        (CONNECTIONS, "test_r34_no_call_takes_text_to_be_tokenised"),
        (ROWS_GIVEN, "test_bad_rows_are_refused_with_their_numbers"),
        (GUARDS, "test_other_temperatures_than_were_asked_for_are_refused"),
        (STEP_CHECKS, "test_refuse_a_payload_without_a_temperature_that_was_asked_for"),
    ],
    # Another token's log-probability; an error read as data.
    "R35": [
        (VALUES, "test_r35_a_token_outside_the_k_ids_has_its_own_log_probability"),
        (VALUES, "test_r35_a_teacher_that_fails_is_an_error_and_never_data"),
        (VALUES, "test_r35_a_neighbour_of_a_request_that_fails_gets_its_own_answer"),
        (GUARDS, "test_scores_that_are_one_token_off_are_refused"),
    ],
    # Containers that share a node and no PID namespace.
    "R37": [
        (APART, "test_memory_is_shared_with_a_student_that_has_of_its_own"),
        (APART, "test_a_student_without_the_folder_is_streamed_to"),
        (APART, "test_on_an_old_kernel_a_student_of_another_pid_namespace_is_streamed_to"),
        (DEVICE_REFUSALS, "test_another_pid_namespace_is_named_and_streamed_to_or_refused"),
        (
            NAMESPACES,
            "test_t08_other_namespaces_and_another_boot_id_keep_nobody_from_memory_that_is_shared",
        ),
    ],
    # An allocator whose memory few can open.
    "R38": [
        (DEVICE_BUFFERS, "test_a_teacher_of_such_memory_hands_over_by_slabs_all_the_same"),
        (GPU_CHECK, "test_runs_over_the_fake_and_does_nothing_undefined"),
    ],
    # A topology on which no handle opens.
    "R39": [
        (CLIENT, "test_a_slab_that_cannot_be_opened_is_streamed_and_said_once"),
        (DEVICE_REFUSALS, "test_under_prefer_the_rank_is_streamed_to_and_told_why"),
        (DEVICE_REFUSALS, "test_through_host_copies_it_is_local_all_the_same"),
    ],
    # An object whose owner is gone.
    "R40": [
        (RAY_OBJECTS, "test_what_a_task_published_outlives_its_process"),
        (RAY_OBJECTS, "test_what_publishers_register_comes_too"),
        (RAY_OBJECTS, "test_is_a_typed_error_before_the_deadline_and_has_a_successor"),
        (RAY_OBJECTS, "test_a_server_whose_ray_process_died_serves_on_and_joins_again"),
    ],
    # A limit of 4 MiB.
    "R41": [
        (GIB, "test_a_gib_comes_whole_through_a_stock_channel_without_options"),
    ],
    # Large tensors, slowly; the figure is `stream` of ``benchmarks.stream``.
    "R42": [
        (BULK_BENCH, "test_a_stream_is_measured_beside_every_anchor"),
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
    # K of 20 where 256 were wanted; one slow teacher stalls the step.
    "R44": [
        (SCORED, "test_every_k_and_value_type_is_the_dense_teachers"),
        (
            SEVERAL,
            "test_r44_while_one_of_eight_teachers_is_held_up_the_other_seven_have_answered",
        ),
        (SEVERAL, "test_r44_what_has_come_is_had_while_another_teacher_is_late"),
        (SEVERAL, "test_r44_leases_on_one_teachers_share_of_the_pool_leave_the_others_theirs"),
    ],
    # The teacher's log-probabilities of the student's own ids.
    "R45": [
        (CHOSEN, "test_is_what_the_dense_teacher_says_of_them"),
        (CHOSEN, "test_grow_with_positions_times_ids_and_with_nothing_else"),
    ],
    # Transports that compete: one suite, in which a transport is a line.
    "R46": [
        (BITS, "test_every_k_and_form_of_rows_comes_bit_by_bit"),
        (BITS, "test_one_payload_has_one_digest_over_every_transport"),
        (TWO_NODES, "test_all_learn_the_same_each_over_its_own_transport"),
    ],
    # Other backends: a teacher of one's own in 30 lines.
    "R47": [
        (ENGINE, "test_an_engine_of_ones_own_is_found_probed_and_served"),
        (SCORED, "test_every_k_and_value_type_is_the_dense_teachers"),
    ],
    # A prompt that only the teacher sees.
    "R48": [
        (
            STUDENTS,
            "test_r48_a_prompt_17_tokens_longer_for_the_teacher_leaves_the_students_positions",
        ),
        (
            TRANSFORMERS_TRAINER,
            "test_r48_a_prompt_that_only_the_teacher_sees_leaves_positions_where_they_are",
        ),
    ],
    # K = 10 breaks.
    "R50": [
        (BITS, "test_every_k_and_form_of_rows_comes_bit_by_bit"),
        (SCORED, "test_every_k_and_value_type_is_the_dense_teachers"),
        (VALUES, "test_r50_k_may_be_the_whole_vocabulary_and_then_nothing_is_left"),
        (VALUES, "test_r50_k_beyond_the_vocabulary_is_refused_with_both_numbers"),
    ],
    # Put from the driver, and read into one's own buffers.
    "R51": [
        (RAY_OBJECTS, "test_what_publishers_register_comes_too"),
        (RAY_OBJECTS, "test_copies_come_into_one_buffer_that_is_used_again"),
        (
            DEFERRED,
            "test_a_payload_of_the_drivers_own_is_handed_on_and_copied_into_a_callers_buffer",
        ),
    ],
    # A teacher's entry, silently dropped.
    "R52": [
        (SEVERAL, "test_r52_a_default_and_named_teachers_are_all_there"),
        (SEVERAL, "test_r52_a_start_in_which_one_teacher_does_not_load_is_refused_by_its_name"),
        (NAMED, "test_and_named_ones_are_there_together"),
        (NAMED, "test_one_that_cannot_be_is_refused_by_its_name"),
        (NAMED, "test_all_that_cannot_be_are_told_at_once"),
        (NAMED, "test_a_name_that_stands_there_twice_is_refused"),
        (NAMED, "test_named_and_without_a_model_is_refused_and_not_left_out"),
    ],
    # One row's failure, swallowed.
    "R53": [
        (VALUES, "test_r35_a_teacher_that_fails_is_an_error_and_never_data"),
        (VALUES, "test_r11_a_masked_row_is_named_teaches_nothing_and_harms_no_other"),
        (PUBLISHING, "test_students_that_wait_go_on_waiting_when_a_bad_row_is_refused"),
    ],
    # A count that goes below nothing, and room that never comes back.
    "T01": [
        (ROUNDS, "test_t01_what_three_clients_read_in_changing_shapes_leaves_no_room_taken"),
        (ROOM, "test_is_taken_while_one_of_two_readers_is_left"),
    ],
    # Room used again while a slow rank still reads.
    "T03": [
        (LEASES, "test_room_is_used_again_only_when_the_slowest_student_has_returned_it"),
    ],
    # A release before the reader is done; a leak that only a collection hid.
    "T05": [
        (LIFETIMES, "test_a_view_that_outlives_its_lease_is_named_and_keeps_the_room"),
        (LIFETIMES, "test_memory_that_autograd_holds_is_a_view"),
        (FIFTY, "test_fifty_steps_come_row_by_row_and_leave_nothing_behind"),
    ],
    # Memory made and exported anew with each step.
    "T06": [
        (ROUNDS, "test_t01_what_three_clients_read_in_changing_shapes_leaves_no_room_taken"),
        (OPENERS, "test_maps_a_slab_once_whatever_comes_in_it"),
        (DEVICE_COUNTS, "test_handles_are_as_many_as_slabs_however_many_payloads_there_are"),
    ],
    # Memory that is read before it was written.
    "T07": [
        (DEVICE_ORDER, "test_a_seal_waits_for_what_the_writers_stream_was_given"),
        (DEVICE_ORDER, "test_every_publication_waits_and_not_only_the_first_of_a_slab"),
    ],
    # Names that say that it is the same node.
    "T08": [
        (CONNECTIONS, "test_t08_the_servers_own_name_boot_id_and_namespaces_open_nothing"),
        (CONNECTIONS, "test_t08_a_brokers_packets_through_a_tunnel_lack_what_proves"),
        (
            NAMESPACES,
            "test_t08_the_servers_name_boot_id_and_namespaces_through_a_tunnel_open_nothing",
        ),
        (
            NAMESPACES,
            "test_t08_other_namespaces_and_another_boot_id_keep_nobody_from_memory_that_is_shared",
        ),
        (PROOFS, "test_a_proof_without_a_line_is_no_proof"),
        (PROOFS, "test_another_sessions_proof_is_no_proof"),
    ],
    # "Failed to open CUDA IPC handle: invalid argument."
    "T10": [
        (DEVICE_REFUSALS, "test_under_prefer_the_rank_is_streamed_to_and_told_why"),
        (DEVICE_REFUSALS, "test_under_require_the_rank_is_refused_with_the_same_facts"),
    ],
    # Exporter and importer in one process.
    "T12": [
        (DRIVER, "test_no_process_opens_a_handle_of_its_own"),
        (ISOLATION, "test_nothing_moves_in_the_writers_own_process"),
        (OPENERS, "test_gives_the_writers_own_memory"),
    ],
    # An engine that dies of error 101 at its start.
    "T13": [
        (DEVICE_REFUSALS, "test_under_prefer_the_rank_is_streamed_to_and_told_why"),
        (DEVICE_REFUSALS, "test_under_require_the_rank_is_refused_with_the_same_facts"),
    ],
    # Expandable segments, which few can open.
    "T14": [
        (
            DEVICE_BUFFERS,
            "test_memory_that_cannot_be_handed_over_is_refused_with_the_setting_to_change",
        ),
    ],
    # A handle "from a future version of torch".
    "T16": [
        (DEVICE_BYTES, "test_a_slab_that_is_passed_to_a_reader"),
        (DEVICE_BYTES, "test_a_slab_that_a_publisher_hands_over"),
        (DEVICE_BYTES, "test_it_is_read_where_torch_cannot_even_be_imported"),
    ],
    # Memory that was received, and sent on.
    "T18": [
        (DEVICE_COUNTS, "test_the_server_relays_handles_and_opens_nothing"),
    ],
    # Another tensor's bytes: an offset that was ignored.
    "T20": [
        (ISOLATION, "test_in_place_writes_of_one_page_leave_the_neighbours_room_alone"),
        (SLAB, "test_that_do_not_are_refused_with_their_numbers"),
        (OPENERS, "test_refuses_an_extent_outside_its_slab"),
        (RELAYS, "test_an_extent_that_cannot_be_is_refused"),
        (DEVICE_BUFFERS, "test_what_lies_in_a_registered_buffer_is_read_where_it_lies"),
    ],
    # A region that goes while it is used.
    "T21": [
        (LINES, "test_that_was_dropped_is_closed_once_nothing_lies_there"),
        (LINES, "test_that_is_dropped_under_a_reader_is_read_whole_and_then_closed"),
        (RELAYS, "test_a_descriptor_is_needed_until_the_last_extent_is_free"),
        (EXPORTERS, "test_room_is_not_reused_under_a_stream_that_is_under_way"),
    ],
    # A small /dev/shm.
    "T23": [
        (SERVERS, "test_a_small_dev_shm_does_not_matter"),
    ],
    # A segment that goes with the first reader that ends.
    "T24": [
        (CONNECTIONS, "test_t24_what_one_process_mapped_stays_there_for_the_next"),
        (PUBLISHING, "test_what_was_sealed_is_read_from_a_process_that_has_ended"),
        (SOURCE, "test_unpickles_nothing_and_shares_no_python_segments"),
    ],
    # A /dev/shm that fills up with what the killed left.
    "T25": [
        (SERVERS, "test_a_server_killed_twenty_times_in_the_middle_of_a_put_leaves_nothing"),
    ],
    # Bytes that were overwritten before they were read.
    "T27": [
        (LEASES, "test_a_reader_of_torn_bytes_always_learns_of_it"),
        (GENERATIONS, "test_room_that_was_reused_while_it_was_read_is_found_at_the_end"),
        (GENERATIONS, "test_room_that_is_being_written_anew_is_no_better"),
    ],
    # "Received message larger than max."
    "T29": [
        (GIB, "test_a_gib_comes_whole_through_a_stock_channel_without_options"),
        (CONFIG, "test_a_setting_that_makes_no_sense_is_refused_by_its_flag"),
    ],
    # A child that hangs after the fork, told as stories in ``client/fork_stories.py``.
    "T30": [
        (FORKS, "test_fork"),
    ],
    # Clients sent away for their pings.
    "T31": [
        (CONNECTIONS, "test_t31_a_client_that_pings_often_is_answered_and_not_sent_away"),
    ],
    # Threads that dead clients keep.
    "T32": [
        (CONNECTIONS, "test_t32_fifty_readers_that_are_killed_hold_up_nobody_and_keep_nothing"),
        (BULK, "test_a_reader_that_goes_away_gives_the_room_back"),
        (BULK, "test_a_reader_that_takes_nothing_is_given_up_and_told_so"),
    ],
    # A second server that takes the first one's socket.
    "T35": [
        (SECOND, "test_on_the_same_socket_it_is_refused_with_the_firsts_pid"),
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
    # A healthy client declared dead.
    "T42": [
        (PROCESSES, "test_a_local_session_lives_and_a_remote_one_says_that_it_does_not"),
    ],
    # An idle client dropped.
    "T43": [
        (CLIENT, "test_an_idle_session_is_renewed_and_lives"),
        (HEARTBEAT, "test_an_idle_session_lives_for_as_long_as_it_is_renewed"),
    ],
    # A get that copies each time.
    "T45": [
        (RAY_OBJECTS, "test_two_views_of_a_payload_share_one_address"),
        (RAY_OBJECTS, "test_one_object_serves_all_readers_of_a_payload"),
        (DEFERRED, "test_two_reads_share_one_address_and_take_no_memory_of_the_readers"),
    ],
    # A get that never ends, or an owner that exited.
    "T46": [
        (RAY_OBJECTS, "test_a_server_whose_ray_process_died_serves_on_and_joins_again"),
        (RAY_OBJECTS, "test_is_a_typed_error_before_the_deadline_and_has_a_successor"),
        (RAY_OBJECTS, "test_a_server_that_is_killed_leaves_nothing_in_the_cluster"),
        (
            DEFERRED,
            "test_a_worker_that_dies_with_its_payload_is_a_typed_error_within_the_deadline",
        ),
    ],
    # Objects that are never freed.
    "T47": [
        (RAY_OBJECTS, "test_payload_after_payload_leaves_the_store_as_it_was"),
        (RAY_OBJECTS, "test_no_reference_is_in_any_message"),
    ],
    # Tensors that pass through whoever only hands them on.
    "T50": [
        (REGISTERED, "test_t50_a_payload_between_processes_passes_the_server_by"),
    ],
    # A fallback that nobody sees.
    "T52": [
        (CLIENT, "test_a_slab_that_cannot_be_opened_is_streamed_and_said_once"),
        (CLIENT, "test_where_locality_is_required_the_failure_is_raised_and_the_lease_given_back"),
        (BROKER, "test_t52_what_is_shared_stays_shared_where_only_the_sockets_name_went"),
        (BROKER, "test_t52_the_next_session_streams_where_it_may_and_everybody_says_so"),
        (BROKER, "test_t52_the_next_session_is_refused_where_it_insists"),
        (BROKER, "test_t52_a_session_whose_line_was_cut_has_ended_and_streams_nothing"),
        (BROKER, "test_t52_after_a_cut_the_next_get_streams_or_fails_by_the_mode"),
    ],
    # Storage that an importer keeps after it is gone.
    "T53": [
        (DEVICE_ROOMS, "test_an_arena_that_grows_five_times_leaves_no_old_slab_mapped"),
    ],
}

#: Of features that come later: replay, imports, hidden states.
LATER = {"R24", "R36", "R49"}

#: What nobody reported, and was found by reading: what it says on the left must not be so here.
READ: dict[str, list[tuple[str, str]]] = {
    "no call works after one that timed out": [
        (PROCESSES, "test_a_call_ends_by_its_deadline_and_the_client_goes_on_afterwards"),
    ],
    "an odd number of items never completes": [
        (VALUES, "test_r35_a_neighbour_of_a_request_that_fails_gets_its_own_answer"),
    ],
    "the buffer of a step is used again while the one before it is read": [
        (FIFTY, "test_fifty_steps_come_row_by_row_and_leave_nothing_behind"),
        (ISOLATION, "test_in_place_writes_of_one_page_leave_the_neighbours_room_alone"),
    ],
    "a data-parallel size that does not divide leaves a rank out": [
        (HANDSHAKE, "test_a_broken_rule_is_named_with_its_numbers"),
    ],
    "checks are gone under python -O": [
        (SOURCE, "test_is_the_same_under_python_o"),
    ],
    "a client asks again for what was refused": [
        (ACCESS, "test_a_wrong_one_opens_nothing"),
        (ACCESS, "test_an_operator_is_no_student"),
    ],
    "who is put back goes to the end of the queue": [
        (TURNS, "test_a_session_alone_is_served_in_the_order_of_arrival"),
        (STEPS, "test_a_lost_reservation_keeps_its_place_in_the_order_of_room"),
    ],
    "health is well while a teacher is dead": [
        (
            TEACHER_HEALTH,
            "test_each_teacher_has_a_health_and_the_server_is_well_while_one_of_them_is",
        ),
    ],
    "a default deadline of a day": [
        (SERVICE, "test_r17_whoever_says_no_deadline_is_told_one_of_less_than_ten_minutes"),
    ],
    "other lengths are a warning": [
        (ALIGNMENT, "test_that_differ_are_named_with_their_cause"),
        (STEP_CHECKS, "test_refuse_a_teacher_that_dropped_the_last_token"),
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
    [(row, module, name) for row, tests in (ROWS | READ).items() for module, name in tests],
)
def test_the_test_that_answers_a_row_is_there(row: str, module: str, name: str) -> None:
    assert name in names_in(module), f"{row} was answered by {name} in {module}, which is gone"


def test_every_row_is_answered_or_comes_later() -> None:
    assert {row for row in ROWS if row[0] == "R"} == {f"R{n:02}" for n in range(1, 54)} - LATER
    assert len([row for row in ROWS if row[0] == "T"]) == 34


@pytest.mark.parametrize("module", NAMED_AFTER_ROWS)
def test_a_test_that_is_named_after_a_row_stands_in_the_table(module: str) -> None:
    listed = {(module, name) for tests in ROWS.values() for module, name in tests}
    for name in names_in(module):
        named = name.split("_")[1].upper() in ROWS
        assert (module, name) in listed or not named, f"{name} is missing in the table"
