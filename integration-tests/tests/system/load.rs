//! Thousands of callers on the gateway's own binary, with a fake worker behind it.
//!
//! `make load` runs this optimised, where the figures count. The debug build of `make test` shares its cores with
//! every other test: it has fewer callers, and holds memory and answers, not milliseconds.

use std::time::Duration;

use laneway_integration_tests::load::{Front, IdleCallers, Listener, Load, Measured};
use laneway_proto::v1;

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
    }
} else {
    Bounds {
        idle: 2000,
        streams: 200,
        length: Duration::from_secs(20),
        idle_bytes: 64 << 10,
        stream_bytes: 512 << 10,
        own_bytes: 64 << 20,
        added: Some(Duration::from_millis(2)),
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

    let bare = front.measure(Listener::Worker).await?;
    report("straight from the worker", &bare);
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
