//! What the gateway itself costs, as JSON: chunks that a core passes on in a second, and what it adds to a chunk's
//! latency with two hundred listeners and two thousand idle callers. `make bench` builds the programs first.

use std::time::Duration;

use anyhow::Context as _;
use laneway_integration_tests::load::{Front, IdleCallers, Listener, Load, Measured};
use laneway_proto::v1;
use serde_json::{Value, json};

/// A full load of chunks: a few listeners who take what there is.
const FULL: Load = Load {
    streams: 16,
    chunk_frames: 4,
    pause: Duration::ZERO,
    // Of sound.
    length: Duration::from_secs(400),
};

/// Listeners in real time.
const LISTENING: Load = Load {
    streams: 200,
    chunk_frames: 4,
    pause: Duration::from_millis(320),
    length: Duration::from_secs(12),
};

const IDLE: usize = 2000;

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let mut full = serde_json::Map::new();
    let front = Front::serving(FULL, 0).await?;
    for (name, listener) in [
        ("grpc_f32", Listener::Grpc(v1::AudioFormat::PcmF32le)),
        ("grpc_s16", Listener::Grpc(v1::AudioFormat::PcmS16le)),
        ("http_s16", Listener::Http),
    ] {
        // The first streams of a process are slower than all others.
        front.measure(listener).await?;
        full.insert(name.into(), throughput(&front.measure(listener).await?));
    }
    drop(front);

    let front = Front::serving(LISTENING, IDLE).await?;
    let own = front.gateway.holds()?.resident_bytes;
    let bare = front.measure(Listener::Worker).await?;
    let mut idle = IdleCallers::open(front.address(), IDLE).await?;
    let with_idle = front.gateway.holds()?.resident_bytes;
    let through = front.measure(Listener::Grpc(v1::AudioFormat::PcmS16le)).await?;
    let report = json!({
        "commit": commit()?,
        "command": "cargo bench -p laneway-integration-tests --bench gateway",
        "machine": machine(),
        "chunk": { "frames": FULL.chunk_frames, "f32_bytes": FULL.chunk_frames * 1920 * 4 },
        "full_load": full,
        "listening": {
            "streams": LISTENING.streams,
            "idle_connections": IDLE,
            "idle_connections_answered_behind_it": idle.answered().await,
            "straight_from_the_worker": latency(&bare),
            "through_the_gateway": latency(&through),
            "resident_bytes": {
                "alone": own,
                "with_idle_connections": with_idle,
                "most": through.peak_resident_bytes,
            },
        },
    });
    println!("{report:#}");
    Ok(())
}

fn throughput(measured: &Measured) -> Value {
    let n_chunks = measured.latencies_us.len() as f64;
    json!({
        "chunks": measured.latencies_us.len(),
        "chunks_per_core_second": measured.chunks_per_core_second().round(),
        "cpu_us_per_chunk": (measured.cpu.as_secs_f64() * 1e7 / n_chunks).round() / 10.0,
        "chunks_per_second": (n_chunks / measured.took.as_secs_f64()).round(),
    })
}

fn latency(measured: &Measured) -> Value {
    json!({
        "chunks": measured.latencies_us.len(),
        "p50_us": measured.percentile_us(50.0),
        "p99_us": measured.percentile_us(99.0),
        "most_us": measured.percentile_us(100.0),
        "cpu_us_per_chunk": (measured.cpu.as_secs_f64() * 1e7 / measured.latencies_us.len() as f64).round() / 10.0,
    })
}

fn commit() -> anyhow::Result<String> {
    let output = std::process::Command::new("git")
        .args(["describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"])
        .output()
        .context("ask git for the commit")?;
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

fn machine() -> Value {
    let cpu = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = cpu.lines().find_map(|line| line.strip_prefix("model name"));
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    json!({
        "cpu": model.unwrap_or_default().trim_start_matches(['\t', ':', ' ']),
        "cores": std::thread::available_parallelism().map_or(0, usize::from),
        "load_average_behind_it": load.split(' ').next().unwrap_or_default(),
    })
}
