//! Every metric that Laneway exports: its name, kind, buckets and meaning.
//!
//! Label values come from closed sets (error-code labels, finish reasons, walk names), never from a request.

/// Requests that ended, by `outcome` (`ok`, or the label of an error code) and `key`: the name that the file of API keys
/// has for the caller, never the key itself; empty where no key is asked for.
pub const GATEWAY_REQUESTS: &str = "laneway_gateway_requests_total";
/// Requests turned away before they were admitted, by `reason` (the label of an error code) and `key`, which is empty for
/// a caller without one too.
pub const GATEWAY_REFUSALS: &str = "laneway_gateway_refusals_total";
/// Requests admitted and not ended.
pub const GATEWAY_RUNNING: &str = "laneway_gateway_running";
/// Of those, the ones without audio yet: the queue as callers see it.
pub const GATEWAY_WAITING: &str = "laneway_gateway_waiting";
/// Seconds from a request to its first audio.
pub const GATEWAY_TTFA: &str = "laneway_gateway_ttfa_seconds";
/// Seconds from a request to the first sample that can be heard.
pub const GATEWAY_TTFA_AUDIBLE: &str = "laneway_gateway_ttfa_audible_seconds";
/// Seconds between the chunks of a stream.
pub const GATEWAY_CHUNK_INTERVAL: &str = "laneway_gateway_chunk_interval_seconds";
/// Streams that ended with a last message, by `reason`.
pub const GATEWAY_FINISHED: &str = "laneway_gateway_finished_total";
/// Streams ended early, by who did it (`by`): `client`, `deadline`, `stop`, `kill`, `drain`.
pub const GATEWAY_CANCELS: &str = "laneway_gateway_cancels_total";
/// Requests sent to another worker before their first audio.
pub const GATEWAY_RETRIES: &str = "laneway_gateway_retries_total";
/// Times that a worker was left alone because it failed what it was given.
pub const GATEWAY_EJECTIONS: &str = "laneway_gateway_ejections_total";
/// Samples of audio delivered.
pub const GATEWAY_AUDIO_SAMPLES: &str = "laneway_gateway_audio_samples_total";
/// Seconds that a listener who plays from the first byte went without sound, the longest lag of a stream; one value
/// a stream with audio, 0 for one that was never late.
pub const GATEWAY_UNDERRUN: &str = "laneway_gateway_underrun_seconds";
/// Registered voices.
pub const GATEWAY_VOICES: &str = "laneway_gateway_voices";
/// Workers that take requests and can be reached.
pub const GATEWAY_WORKERS_SERVING: &str = "laneway_gateway_workers_serving";
/// Share of the rows of those workers that are in use or waited for, as they last said: what a balancer in front of
/// several gateways goes by.
pub const GATEWAY_BUSY: &str = "laneway_gateway_busy";

/// Certificates that changed on disk, by `outcome`: `taken`, or `kept` where what came could not be used and the last
/// ones stay.
pub const TLS_RELOADS: &str = "laneway_tls_reloads_total";
/// When the certificate that a role shows expires, or the first of those that lead to its authority, in seconds since 1970,
/// by `certificate`: `public`, of the gateway's API, or `internal`, between the roles.
pub const TLS_CERTIFICATE_EXPIRY: &str = "laneway_tls_certificate_expiry_timestamp_seconds";
/// Connections that did not get through their handshake: no certificate, a wrong one, no TLS, or too slow.
pub const TLS_REFUSALS: &str = "laneway_tls_refusals_total";

/// Requests that wait to be admitted.
pub const WORKER_QUEUED: &str = "laneway_worker_queued";
/// Requests that run.
pub const WORKER_RUNNING: &str = "laneway_worker_running";
/// Seconds a request waited to be admitted.
pub const WORKER_QUEUE_WAIT: &str = "laneway_worker_queue_wait_seconds";
/// Seconds of one step, by `lane` and `walk`.
pub const WORKER_STEP: &str = "laneway_worker_step_seconds";
/// Seconds that one step had the device, by `lane` and `walk`: by the device's own clock where it has one.
pub const WORKER_STEP_DEVICE: &str = "laneway_worker_step_device_seconds";
/// Seconds of one phase of a step (`admit`, `plan`, `launch`, `wait`, `postprocess`, `settle`), by `lane` and `phase`.
pub const WORKER_PHASE: &str = "laneway_worker_phase_seconds";
/// Frames in the windows of one step, by `lane` and `walk`.
pub const WORKER_STEP_ITEMS: &str = "laneway_worker_step_items";
/// Codec steps for each Talker step, over the last interval in which the Talker stepped.
pub const WORKER_CODEC_STEPS_PER_TALKER_STEP: &str = "laneway_worker_codec_steps_per_talker_step";
/// Share of time that a lane had a step in flight, over the last interval, by `lane`.
pub const WORKER_LANE_BUSY: &str = "laneway_worker_lane_busy";
/// Rows of one step, by `lane` and `walk`.
pub const WORKER_STEP_ROWS: &str = "laneway_worker_step_rows";
/// Slots or pages in use, by `resource`.
pub const WORKER_RESOURCE_USED: &str = "laneway_worker_resource_used";
/// Slots or pages in all, by `resource`.
pub const WORKER_RESOURCE_CAPACITY: &str = "laneway_worker_resource_capacity";
/// Of a node under `lane: auto`, by `node` and `arm` (`chain`, `lane1`, `lane1-sms32`): 1 for the arm that it is on.
pub const WORKER_ARM: &str = "laneway_worker_arm";
/// Times that such a node moved, by `node`, `to` and `reason` (`try`, `return`, `better`, `load`).
pub const WORKER_LANE_FLIPS: &str = "laneway_worker_lane_flips_total";
/// Reference clips that requests asked for, by `outcome`: `hit` (encoded before), `wait` (being encoded), `miss`.
pub const WORKER_REFERENCES: &str = "laneway_worker_references_total";
/// Requests that ended, by `outcome`: a finish reason, or the label of an error code.
pub const WORKER_FINISHED: &str = "laneway_worker_finished_total";

/// Registered workers by `state`.
pub const MANAGER_WORKERS: &str = "laneway_manager_workers";

/// Bounds of latencies that a listener feels, seconds. Dense around 0.1, where waiting starts to be noticed.
pub const LATENCY_SECONDS: &[f64] = &[
    0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0, 10.0, 30.0,
];
/// Bounds of one step, seconds. A frame lasts 0.08: a step beyond it cannot keep up.
pub const STEP_SECONDS: &[f64] = &[
    0.0005, 0.001, 0.002, 0.003, 0.005, 0.008, 0.012, 0.02, 0.03, 0.05, 0.08, 0.16, 0.5, 2.0,
];
/// Bounds of a phase of a step, seconds: from choosing rows to waiting for a device.
pub const PHASE_SECONDS: &[f64] = &[
    2e-6, 5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.2,
];
/// Bounds of an underrun, seconds. The first is what no listener hears.
pub const UNDERRUN_SECONDS: &[f64] = &[0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0];
/// Bounds of the rows or frames of one step.
pub const ROWS: &[f64] = &[
    1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0, 64.0, 96.0, 128.0, 256.0,
];

/// What a metric is.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Kind {
    /// Only grows.
    Counter,
    /// Goes up and down.
    Gauge,
    /// A histogram with these bounds.
    Histogram(&'static [f64]),
}

/// One row of [`METRICS`].
#[derive(Debug, Clone, Copy)]
pub struct Metric {
    /// Exported name.
    pub name: &'static str,
    /// What it is.
    pub kind: Kind,
    /// Help text.
    pub help: &'static str,
}

const fn metric(name: &'static str, kind: Kind, help: &'static str) -> Metric {
    Metric { name, kind, help }
}

/// Every metric.
pub const METRICS: &[Metric] = &[
    metric(
        GATEWAY_REQUESTS,
        Kind::Counter,
        "Requests that ended, by outcome and name of the API key.",
    ),
    metric(
        GATEWAY_REFUSALS,
        Kind::Counter,
        "Requests turned away before they were admitted, by reason and name of the API key.",
    ),
    metric(GATEWAY_RUNNING, Kind::Gauge, "Requests admitted and not ended."),
    metric(
        GATEWAY_WAITING,
        Kind::Gauge,
        "Requests admitted and without audio yet.",
    ),
    metric(
        GATEWAY_TTFA,
        Kind::Histogram(LATENCY_SECONDS),
        "Seconds from a request to its first audio.",
    ),
    metric(
        GATEWAY_TTFA_AUDIBLE,
        Kind::Histogram(LATENCY_SECONDS),
        "Seconds from a request to the first sample that can be heard.",
    ),
    metric(
        GATEWAY_CHUNK_INTERVAL,
        Kind::Histogram(LATENCY_SECONDS),
        "Seconds between the chunks of a stream.",
    ),
    metric(
        GATEWAY_FINISHED,
        Kind::Counter,
        "Streams that ended with a last message, by reason.",
    ),
    metric(
        GATEWAY_CANCELS,
        Kind::Counter,
        "Streams ended early, by who did it.",
    ),
    metric(
        GATEWAY_RETRIES,
        Kind::Counter,
        "Requests sent to another worker before their first audio.",
    ),
    metric(
        GATEWAY_EJECTIONS,
        Kind::Counter,
        "Times that a worker was left alone because it failed what it was given.",
    ),
    metric(
        GATEWAY_AUDIO_SAMPLES,
        Kind::Counter,
        "Samples of audio delivered.",
    ),
    metric(
        GATEWAY_UNDERRUN,
        Kind::Histogram(UNDERRUN_SECONDS),
        "Longest time that the sound of a stream came late, one value a stream.",
    ),
    metric(GATEWAY_VOICES, Kind::Gauge, "Registered voices."),
    metric(
        GATEWAY_WORKERS_SERVING,
        Kind::Gauge,
        "Workers that take requests and can be reached.",
    ),
    metric(
        GATEWAY_BUSY,
        Kind::Gauge,
        "Share of the rows of serving workers that are in use or waited for.",
    ),
    metric(
        TLS_RELOADS,
        Kind::Counter,
        "Certificates that changed on disk, by outcome: taken, or kept as they were.",
    ),
    metric(
        TLS_CERTIFICATE_EXPIRY,
        Kind::Gauge,
        "When the certificate that is shown expires, in seconds since 1970: public or internal.",
    ),
    metric(
        TLS_REFUSALS,
        Kind::Counter,
        "Connections that did not get through their TLS handshake.",
    ),
    metric(WORKER_QUEUED, Kind::Gauge, "Requests that wait to be admitted."),
    metric(WORKER_RUNNING, Kind::Gauge, "Requests that run."),
    metric(
        WORKER_QUEUE_WAIT,
        Kind::Histogram(LATENCY_SECONDS),
        "Seconds a request waited to be admitted.",
    ),
    metric(
        WORKER_STEP,
        Kind::Histogram(STEP_SECONDS),
        "Seconds of one step, by lane and walk.",
    ),
    metric(
        WORKER_STEP_DEVICE,
        Kind::Histogram(PHASE_SECONDS),
        "Seconds that one step had the device, by lane and walk.",
    ),
    metric(
        WORKER_PHASE,
        Kind::Histogram(PHASE_SECONDS),
        "Seconds of one phase of a step, by lane and phase.",
    ),
    metric(
        WORKER_STEP_ITEMS,
        Kind::Histogram(ROWS),
        "Frames in the windows of one step, by lane and walk.",
    ),
    metric(
        WORKER_CODEC_STEPS_PER_TALKER_STEP,
        Kind::Gauge,
        "Codec steps for each Talker step, over the last interval.",
    ),
    metric(
        WORKER_LANE_BUSY,
        Kind::Gauge,
        "Share of time that a lane had a step in flight, over the last interval, by lane.",
    ),
    metric(
        WORKER_STEP_ROWS,
        Kind::Histogram(ROWS),
        "Rows of one step, by lane and walk.",
    ),
    metric(
        WORKER_RESOURCE_USED,
        Kind::Gauge,
        "Slots or pages in use, by resource.",
    ),
    metric(
        WORKER_RESOURCE_CAPACITY,
        Kind::Gauge,
        "Slots or pages in all, by resource.",
    ),
    metric(
        WORKER_ARM,
        Kind::Gauge,
        "1 for the arm that a node under lane: auto is on, 0 for its others.",
    ),
    metric(
        WORKER_LANE_FLIPS,
        Kind::Counter,
        "Moves of nodes under lane: auto, by node, arm and reason.",
    ),
    metric(
        WORKER_REFERENCES,
        Kind::Counter,
        "Reference clips asked for, by outcome: hit (encoded before), wait (being encoded) or miss (encoded).",
    ),
    metric(WORKER_FINISHED, Kind::Counter, "Requests that ended, by outcome."),
    metric(MANAGER_WORKERS, Kind::Gauge, "Registered workers, by state."),
];

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn names_follow_prometheus_and_buckets_grow() {
        let mut names = HashSet::new();
        for metric in METRICS {
            assert!(names.insert(metric.name), "{} twice", metric.name);
            assert!(metric.name.starts_with("laneway_"));
            assert!(
                metric
                    .name
                    .bytes()
                    .all(|byte| byte.is_ascii_lowercase() || byte == b'_')
            );
            assert_eq!(
                metric.name.ends_with("_total"),
                metric.kind == Kind::Counter,
                "{}",
                metric.name
            );
            if let Kind::Histogram(bounds) = metric.kind {
                assert!(bounds.windows(2).all(|pair| pair[0] < pair[1]), "{}", metric.name);
            }
        }
    }
}
