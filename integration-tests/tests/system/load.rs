//! Thousands of callers on the gateway's own binary, with a fake worker behind it.
//!
//! `make load` runs this optimised, where the figures count. The debug build of `make test` shares its cores with
//! every other test: it has fewer callers, and holds memory and answers, not milliseconds.

use std::time::Duration;

use laneway_integration_tests::load::{Front, IdleCallers, Listener, Load, Measured, percentile_us};
use laneway_integration_tests::process::Process;
use laneway_integration_tests::{PATIENCE, client};
use laneway_proto::v1::worker_client::WorkerClient;
use laneway_proto::{ErrorCode, v1};

/// What a build is held to.
struct Bounds {
    idle: usize,
    streams: usize,
    length: Duration,
    /// Resident memory for each idle connection.
    idle_bytes: u64,
    /// Resident memory for each stream, beside the gateway's own.
    stream_bytes: u64,
    /// Of the gateway's own, before any caller.
    own_bytes: u64,
    /// What the gateway may add to a chunk's latency, 99 times of 100.
    added: Option<Duration>,
    /// Streams that the gateway is told to take in a burst.
    places: usize,
    /// Until the last of those is refused who find no place.
    refused_within: Duration,
}

const BOUNDS: Bounds = if cfg!(debug_assertions) {
    Bounds {
        idle: 400,
        streams: 40,
        length: Duration::from_secs(3),
        idle_bytes: 96 << 10,
        stream_bytes: 1 << 20,
        own_bytes: 96 << 20,
        added: None,
        places: 20,
        refused_within: Duration::from_secs(2),
    }
} else {
    Bounds {
        idle: 2000,
        streams: 200,
        length: Duration::from_secs(12),
        idle_bytes: 64 << 10,
        stream_bytes: 512 << 10,
        own_bytes: 64 << 20,
        added: Some(Duration::from_millis(2)),
        places: 100,
        refused_within: Duration::from_millis(100),
    }
};

fn report(what: &str, measured: &Measured) {
    let of = |percent| measured.percentile_us(percent);
    println!(
        "{what}: {} chunks in {:.1} s, latency p50 {} us, p99 {} us, most {} us; {:.0} chunks a core-second; {} MiB",
        measured.latencies_us.len(),
        measured.took.as_secs_f64(),
        of(50.0),
        of(99.0),
        of(100.0),
        measured.chunks_per_core_second(),
        measured.peak_resident_bytes >> 20,
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn idle_connections_and_streams_are_bounded_in_memory_and_add_little_to_a_chunk() -> anyhow::Result<()>
{
    let load = Load {
        streams: BOUNDS.streams,
        chunk_frames: 4,
        pause: Duration::from_millis(320),
        length: BOUNDS.length,
    };
    let front = Front::serving(load, BOUNDS.idle).await?;
    let own = front.gateway.holds()?.resident_bytes;
    assert!(own < BOUNDS.own_bytes, "{own} bytes before any caller");
    let bare = front.measure(Listener::Worker).await?;
    report("straight from the worker", &bare);
    // Not before: over HTTP/1 a connection is closed that says nothing for half a minute.
    let mut idle = IdleCallers::open(front.address(), BOUNDS.idle).await?;
    let with_idle = front.gateway.holds()?.resident_bytes;
    println!(
        "{} idle connections: {} bytes each",
        BOUNDS.idle,
        (with_idle.saturating_sub(own)) / BOUNDS.idle as u64
    );
    assert!(
        with_idle < own + BOUNDS.idle as u64 * BOUNDS.idle_bytes,
        "{} idle connections took {own} bytes to {with_idle}",
        BOUNDS.idle
    );

    let through = front.measure(Listener::Grpc(v1::AudioFormat::PcmS16le)).await?;
    report("through the gateway", &through);
    assert_eq!(through.latencies_us.len(), bare.latencies_us.len());
    let streams = through.peak_resident_bytes.saturating_sub(with_idle);
    assert!(
        streams < BOUNDS.streams as u64 * BOUNDS.stream_bytes,
        "{} streams took {streams} bytes",
        BOUNDS.streams
    );
    if let Some(bound) = BOUNDS.added {
        let added = through
            .percentile_us(99.0)
            .saturating_sub(bare.percentile_us(99.0));
        assert!(
            added < bound.as_micros() as u64,
            "the gateway added {added} us to 99 of 100 chunks"
        );
    }
    assert_eq!(
        idle.answered().await,
        BOUNDS.idle,
        "connections that still answer behind the load"
    );
    Ok(())
}

/// Three times as many as there is room for, all at once.
#[tokio::test(flavor = "multi_thread")]
async fn a_burst_of_three_times_the_capacity_is_refused_at_once_and_the_admitted_keep_their_latency()
-> anyhow::Result<()> {
    let load = Load {
        streams: BOUNDS.places,
        chunk_frames: 4,
        pause: Duration::from_millis(100),
        length: Duration::from_secs(2),
    };
    let places = BOUNDS.places.to_string();
    let front = Front::serving_with(load, 3 * BOUNDS.places, &["--max-in-flight", &places]).await?;
    // All of them begin together here too.
    let alone = front.burst(BOUNDS.places).await?;
    assert_eq!((alone.n_admitted, alone.refused.len()), (BOUNDS.places, 0));
    let burst = front.burst(3 * BOUNDS.places).await?;
    let last = burst.refused.last().copied().unwrap_or_default();
    let (p99_alone, p99) = (
        percentile_us(&alone.latencies_us, 99.0),
        percentile_us(&burst.latencies_us, 99.0),
    );
    println!(
        "{} admitted, {} refused within {last:?}; latency p99 {p99} us, {p99_alone} us without the burst",
        burst.n_admitted,
        burst.refused.len()
    );
    assert_eq!(
        (burst.n_admitted, burst.refused.len()),
        (BOUNDS.places, 2 * BOUNDS.places)
    );
    assert!(
        last < BOUNDS.refused_within,
        "the last one was refused after {last:?}"
    );
    if BOUNDS.added.is_some() {
        assert!(
            p99 <= 2 * p99_alone + 5_000,
            "p99 {p99} us, and {p99_alone} us without the burst"
        );
    }
    Ok(())
}

/// `deploy/tests/churn.py` counts on it: streams that come to a worker while it drains are told of, and how late they were.
#[tokio::test(flavor = "multi_thread")]
async fn a_fake_worker_that_drains_tells_of_each_stream_that_it_refuses() -> anyhow::Result<()> {
    let mut worker = Process::start("fake-worker", &["--chunk-ms", "50", "--first-chunk-ms", "0"])?;
    let mut caller = WorkerClient::new(client::channel(worker.address()?));
    let request = |id: &str, frames| v1::WorkerSynthesizeRequest {
        request_id: id.into(),
        max_frames: Some(frames),
        ..Default::default()
    };
    let stream = caller.synthesize(request("runs", 200)).await?;
    let drains = |line: &str| line.contains("refused_ms_into_drain").then(|| line.to_owned());
    assert!(
        worker.log().lines().find_map(drains).is_none(),
        "{}",
        worker.log()
    );
    worker.signal("TERM")?;
    let refused = async {
        loop {
            match caller.synthesize(request("comes-late", 1)).await {
                Ok(taken) => drop(taken),
                Err(status) => return status,
            }
        }
    };
    let refused = tokio::time::timeout(PATIENCE, refused).await?;
    assert_eq!(client::failure(&refused).code, ErrorCode::Draining);
    let line = worker.wait_for_line("that it refused a stream", drains)?;
    let told: serde_json::Value = serde_json::from_str(&line)?;
    assert!(told["refused_ms_into_drain"].is_u64(), "{line}");
    let mut stream = stream.into_inner();
    let mut last = None;
    while let Some(message) = stream.message().await? {
        last = message.event;
    }
    assert!(
        matches!(last, Some(v1::worker_synthesize_response::Event::Finished(_))),
        "what ran was cut: {last:?}"
    );
    assert_eq!(worker.ended().await?.code(), Some(0));
    Ok(())
}
