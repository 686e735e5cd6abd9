//! What callers rely on, and where each of it is tested. A row whose test is gone or renamed fails here.

use std::collections::BTreeMap;

use laneway_integration_tests::deployment::checkout;

/// A file of tests, under the checkout.
const GATEWAY: &str = "crates/gateway/tests/gateway/";
const SYSTEM: &str = "integration-tests/tests/system/";
const ENGINE: &str = "crates/engine/tests/engine/";

/// (folder, file, test)
type Place = (&'static str, &'static str, &'static str);

/// Situation, answer, tests.
const ROWS: [(&str, &[Place]); 19] = [
    (
        "a text with no letter and no digit: INVALID_ARGUMENT (400), naming the field; \"8...\" speaks",
        &[
            (
                GATEWAY,
                "streams.rs",
                "bad_requests_are_refused_by_field_before_any_worker_sees_them",
            ),
            (
                GATEWAY,
                "http/requests.rs",
                "bad_requests_are_refused_by_field_before_any_worker_sees_them",
            ),
            (GATEWAY, "riva.rs", "failures_name_rivas_fields_and_what_exists"),
            (SYSTEM, "life.rs", "bad_input_is_named"),
        ],
    ),
    (
        "a text over the limit: INVALID_ARGUMENT with the limit and the length",
        &[
            (
                GATEWAY,
                "streams.rs",
                "bad_requests_are_refused_by_field_before_any_worker_sees_them",
            ),
            (GATEWAY, "sessions.rs", "what_is_no_text_ends_the_stream_by_name"),
            (GATEWAY, "overload.rs", "a_request_over_the_size_bound_is_told_so"),
        ],
    ),
    (
        "an unknown voice, language, model, format: what exists is listed, and nothing takes its place",
        &[
            (
                GATEWAY,
                "streams.rs",
                "bad_requests_are_refused_by_field_before_any_worker_sees_them",
            ),
            (
                GATEWAY,
                "http/requests.rs",
                "bad_requests_are_refused_by_field_before_any_worker_sees_them",
            ),
            (GATEWAY, "riva.rs", "failures_name_rivas_fields_and_what_exists"),
        ],
    ),
    (
        "the bytes are of the requested format; a streamed WAV header has sizes of 0xFFFFFFFF",
        &[
            (GATEWAY, "streams.rs", "the_bytes_are_in_the_format_asked_for"),
            (
                GATEWAY,
                "http/requests.rs",
                "the_bytes_are_in_the_format_asked_for",
            ),
            (GATEWAY, "streams.rs", "a_wav_without_audio_is_still_a_file"),
            (
                "crates/audio/src/",
                "wav.rs",
                "an_independent_reader_agrees_with_a_whole_file",
            ),
            (
                "crates/audio/src/encoder/",
                "tests.rs",
                "every_format_decodes_back_at_every_rate",
            ),
        ],
    ),
    (
        "rates of 8 to 48 kHz: resampled with state across chunks, no clicks at seams",
        &[
            (
                GATEWAY,
                "streams.rs",
                "rates_speeds_and_compressed_formats_are_as_asked_for",
            ),
            (
                "crates/audio/src/encoder/",
                "tests.rs",
                "how_a_stream_is_cut_changes_no_byte",
            ),
        ],
    ),
    (
        "a duplicate request id: ALREADY_EXISTS",
        &[
            (
                GATEWAY,
                "streams.rs",
                "a_running_request_id_cannot_be_used_again_until_it_ends",
            ),
            (
                GATEWAY,
                "http/rows.rs",
                "a_running_request_id_cannot_be_used_again_until_it_ends",
            ),
            (
                "crates/worker/src/tests/",
                "single.rs",
                "a_second_request_of_the_same_id_is_refused_and_the_first_runs_on",
            ),
        ],
    ),
    (
        "more than capacity and queue: RESOURCE_EXHAUSTED (429) within 100 ms, with when to try again; admitted streams \
         keep their latency",
        &[
            (
                SYSTEM,
                "load.rs",
                "a_burst_of_three_times_the_capacity_is_refused_at_once_and_the_admitted_keep_their_latency",
            ),
            (
                GATEWAY,
                "overload.rs",
                "requests_beyond_the_bound_are_refused_at_once_and_admitted_ones_go_on",
            ),
            (
                GATEWAY,
                "http/rows.rs",
                "requests_beyond_the_bound_are_refused_at_once_and_admitted_ones_go_on",
            ),
            (GATEWAY, "http/rows.rs", "all_shapes_share_the_places"),
            (
                SYSTEM,
                "life.rs",
                "one_more_than_running_and_waiting_is_refused_at_once",
            ),
        ],
    ),
    (
        "a deadline passes: DEADLINE_EXCEEDED, and the slot is free within two steps",
        &[
            (
                GATEWAY,
                "overload.rs",
                "a_deadline_ends_the_stream_and_frees_its_place",
            ),
            (
                GATEWAY,
                "http/rows.rs",
                "a_deadline_before_the_first_audio_has_its_status_and_frees_its_place",
            ),
            (
                GATEWAY,
                "http/rows.rs",
                "a_deadline_behind_the_first_audio_cuts_the_stream_off",
            ),
            (GATEWAY, "sessions.rs", "the_deadline_is_of_the_whole_stream"),
            (ENGINE, "behaviour.rs", "a_deadline_ends_a_request"),
            (
                SYSTEM,
                "life.rs",
                "a_listener_who_leaves_a_deadline_and_a_kill_free_the_slot",
            ),
        ],
    ),
    (
        "a client goes away: the work stops within two steps, then slot, pages and permits are free",
        &[
            (
                GATEWAY,
                "overload.rs",
                "a_caller_who_leaves_stops_the_work_and_frees_its_place",
            ),
            (
                GATEWAY,
                "http/rows.rs",
                "a_caller_who_leaves_stops_the_work_and_frees_its_place",
            ),
            (
                GATEWAY,
                "sessions.rs",
                "a_caller_who_leaves_ends_every_utterance_and_frees_the_place",
            ),
            (
                GATEWAY,
                "riva.rs",
                "a_caller_who_leaves_a_whole_answer_ends_its_work",
            ),
            (
                GATEWAY,
                "silent.rs",
                "a_listener_who_is_gone_without_a_word_is_noticed_and_what_it_held_is_free",
            ),
            (
                GATEWAY,
                "silent.rs",
                "who_begins_something_and_says_no_more_is_ended",
            ),
            (
                "crates/worker/src/tests/",
                "single.rs",
                "a_caller_that_answers_no_ping_is_ended",
            ),
            (
                ENGINE,
                "invariants/endings.rs",
                "invariant_13_a_cancelled_request_is_released_once_when_its_last_step_landed",
            ),
            (
                SYSTEM,
                "life.rs",
                "a_listener_who_leaves_a_deadline_and_a_kill_free_the_slot",
            ),
        ],
    ),
    (
        "one row fails in a step: its stream ends with its status, and the others do not notice",
        &[
            (
                GATEWAY,
                "failures.rs",
                "one_failed_row_ends_alone_and_says_nothing_internal",
            ),
            (GATEWAY, "http/rows.rs", "one_failed_row_ends_alone"),
            (
                ENGINE,
                "invariants.rs",
                "invariant_05_a_refused_step_fails_its_rows_and_puts_the_rest_back",
            ),
        ],
    ),
    (
        "a worker dies or stalls: its streams end UNAVAILABLE, health is NOT_SERVING, and what has no audio yet is tried \
         elsewhere",
        &[
            (
                GATEWAY,
                "failures.rs",
                "a_worker_that_dies_ends_its_own_streams_and_nobody_elses",
            ),
            (
                GATEWAY,
                "failures.rs",
                "a_worker_that_stalls_is_unavailable_after_audio_and_replaced_before",
            ),
            (
                GATEWAY,
                "failures.rs",
                "a_request_without_audio_is_tried_elsewhere",
            ),
            (
                GATEWAY,
                "failures.rs",
                "health_follows_the_last_worker_down_and_back_up",
            ),
            (
                GATEWAY,
                "http/rows.rs",
                "a_worker_that_dies_ends_its_own_streams_and_one_without_audio_is_spoken_elsewhere",
            ),
            (
                ENGINE,
                "invariants/endings.rs",
                "invariant_14_what_is_stuck_or_dead_ends_its_own_requests_only",
            ),
            (
                SYSTEM,
                "life.rs",
                "a_killed_worker_ends_its_streams_unavailable_and_health_tells",
            ),
            (
                SYSTEM,
                "workers.rs",
                "a_killed_codec_worker_is_started_again_and_only_streams_with_audio_are_lost",
            ),
        ],
    ),
    (
        "a runaway stops at a budget from the text's length, which the caller may raise: finish reason `length`, counted",
        &[
            (GATEWAY, "streams.rs", "a_runaway_ends_with_length"),
            (
                "crates/models/src/qwen3_tts/",
                "prompt.rs",
                "the_budget_grows_with_what_must_be_said",
            ),
            (
                "crates/models/src/qwen3_tts/request/",
                "tests.rs",
                "a_caller_may_raise_the_budget_up_to_the_cap",
            ),
            (GATEWAY, "lifecycle.rs", "every_metric_of_the_gateway_moves"),
        ],
    ),
    (
        "the same seed in other company: the same bytes",
        &[
            (
                SYSTEM,
                "speech.rs",
                "the_same_seed_gives_the_same_bytes_wherever_the_codec_runs",
            ),
            (
                ENGINE,
                "behaviour.rs",
                "eight_together_make_what_each_makes_alone",
            ),
        ],
    ),
    (
        "SIGTERM: not ready at once, new calls UNAVAILABLE, running streams finish, exit 0; a second one exits now",
        &[
            (
                GATEWAY,
                "binary.rs",
                "sigterm_lets_a_running_stream_finish_and_exits_0",
            ),
            (GATEWAY, "binary.rs", "a_second_sigterm_exits_now"),
            (
                GATEWAY,
                "lifecycle.rs",
                "a_drain_refuses_new_calls_and_lets_running_streams_finish",
            ),
            (
                GATEWAY,
                "lifecycle.rs",
                "a_stream_that_does_not_finish_is_ended_at_the_drain_bound",
            ),
            (
                GATEWAY,
                "http/rows.rs",
                "a_drain_refuses_new_requests_and_lets_running_streams_finish",
            ),
            (
                "crates/worker/src/tests/",
                "single.rs",
                "a_drain_refuses_the_new_and_finishes_the_old",
            ),
            (
                SYSTEM,
                "life.rs",
                "sigterm_refuses_the_new_finishes_the_old_and_exits_0",
            ),
            (SYSTEM, "life.rs", "a_second_signal_exits_now"),
        ],
    ),
    (
        "start: not SERVING before weights and a warm-up; health answers within a second at full load",
        &[
            (SYSTEM, "life.rs", "nothing_serves_before_a_worker_is_ready"),
            (
                "crates/worker/src/tests/",
                "single.rs",
                "nothing_is_served_before_the_model_is_loaded",
            ),
            (
                GATEWAY,
                "lifecycle.rs",
                "health_is_serving_exactly_while_a_worker_serves",
            ),
            (
                GATEWAY,
                "overload.rs",
                "a_full_gateway_answers_health_and_refuses_on_the_same_connection",
            ),
        ],
    ),
    (
        "a wrong configuration: exit code 2 with every violation, and nothing half-started",
        &[
            (
                SYSTEM,
                "configuration.rs",
                "every_violation_is_printed_and_the_exit_code_is_2",
            ),
            (
                GATEWAY,
                "binary.rs",
                "a_wrong_configuration_exits_2_and_names_everything",
            ),
        ],
    ),
    (
        "no TLS or a wrong certificate where one is asked for: refused, and told what to write; a new one on disk: taken",
        &[
            (
                SYSTEM,
                "tls.rs",
                "roles_on_their_own_speak_to_each_other_over_mutual_tls",
            ),
            (SYSTEM, "tls.rs", "certificates_are_replaced_without_a_restart"),
            (
                GATEWAY,
                "tls.rs",
                "a_stream_goes_on_while_the_certificate_changes",
            ),
        ],
    ),
    (
        "a certificate that has expired, or that peers will refuse: told at the start, when it is read again, and before",
        &[
            (
                SYSTEM,
                "tls.rs",
                "a_certificate_that_will_be_refused_is_told_of_at_the_start",
            ),
            (
                "crates/tls/src/",
                "term.rs",
                "what_will_be_refused_is_told_with_its_date",
            ),
            (
                "crates/tls/tests/",
                "handshakes.rs",
                "when_a_certificate_expires_is_told_and_follows_the_file",
            ),
        ],
    ),
    (
        "a registered voice: in every API until it is deleted, by the key that registered it and no other",
        &[
            (
                GATEWAY,
                "voices.rs",
                "a_voice_registered_over_http_speaks_in_every_api_and_survives_a_restart",
            ),
            (
                GATEWAY,
                "voices.rs",
                "a_voice_belongs_to_the_key_that_registered_it",
            ),
            (SYSTEM, "voices.rs", "one_process_keeps_voices_too"),
        ],
    ),
];

#[test]
fn every_row_has_its_tests() {
    let mut files = BTreeMap::new();
    let mut missing = Vec::new();
    for (row, places) in ROWS {
        assert!(!places.is_empty(), "no test of: {row}");
        for (folder, file, test) in places {
            let path = checkout().join(folder).join(file);
            let text = files
                .entry(path.clone())
                .or_insert_with(|| std::fs::read_to_string(path).unwrap_or_default());
            let is_there = ["#[test]", "#[tokio::test"].iter().any(|attribute| {
                text.split(attribute)
                    .skip(1)
                    .any(|after| after.contains(&format!("fn {test}(")))
            });
            if !is_there {
                missing.push(format!("{folder}{file}: {test}, for: {row}"));
            }
        }
    }
    assert!(missing.is_empty(), "{missing:#?}");
}
