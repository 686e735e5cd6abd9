//! A load on the gateway's own binary, with a worker that costs next to nothing behind it: callers who hold a
//! connection and ask for nothing, callers who listen, and what that took.
//!
//! A chunk's latency is from when the worker made it ([`crate::stamp`]) to when its listener has it: both
//! transports, all of the gateway, and waiting for a core. The same load straight on the worker is the part of it
//! that is not the gateway's.

mod callers;
mod idle;

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use laneway_proto::v1;
use tonic_health::pb::health_check_response::ServingStatus;

pub use idle::IdleCallers;

use crate::process::Process;
use crate::{client, open_files};

/// Files beside one for each connection.
const OTHER_FILES: u64 = 512;

/// Between two looks at a process's memory.
const LOOK: Duration = Duration::from_millis(100);

/// Who speaks to whom in which way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Listener {
    /// gRPC, in this format.
    Grpc(v1::AudioFormat),
    /// OpenAI's API over HTTP/1.1, 16-bit samples.
    Http,
    /// The worker itself, with no gateway between.
    Worker,
}

/// A load.
#[derive(Debug, Clone, Copy)]
pub struct Load {
    /// Listeners at once, each with a connection of its own.
    pub streams: usize,
    /// Frames in a chunk.
    pub chunk_frames: u32,
    /// From one chunk of a stream to the next; zero: as fast as they are taken.
    pub pause: Duration,
    /// How long each listener listens, at least.
    pub length: Duration,
}

/// What a load took.
#[derive(Debug, Clone)]
pub struct Measured {
    /// Of each chunk, ascending, microseconds.
    pub latencies_us: Vec<u64>,
    /// Bytes of audio that listeners got.
    pub audio_bytes: u64,
    /// Time of processors that the process in front took.
    pub cpu: Duration,
    /// Wall time.
    pub took: Duration,
    /// Most resident memory of the process in front.
    pub peak_resident_bytes: u64,
}

impl Measured {
    /// The latency that so many of a hundred chunks do not exceed.
    pub fn percentile_us(&self, percent: f64) -> u64 {
        percentile_us(&self.latencies_us, percent)
    }

    /// Chunks that a core passes on in a second.
    pub fn chunks_per_core_second(&self) -> f64 {
        self.latencies_us.len() as f64 / self.cpu.as_secs_f64()
    }
}

/// What a burst became.
#[derive(Debug, Clone)]
pub struct Burst {
    /// Callers who were admitted.
    pub n_admitted: usize,
    /// Of the chunks that those heard, ascending, microseconds.
    pub latencies_us: Vec<u64>,
    /// How long the others waited for their refusal, ascending.
    pub refused: Vec<Duration>,
}

/// A gateway with a fake worker behind it.
#[derive(Debug)]
pub struct Front {
    /// The gateway.
    pub gateway: Process,
    /// The worker.
    pub worker: Process,
    load: Load,
    gateway_at: SocketAddr,
    worker_at: SocketAddr,
}

impl Front {
    /// Start both for this load, and wait until they serve.
    ///
    /// # Errors
    /// The machine does not allow the load, or a process does not start.
    pub async fn serving(load: Load, n_connections: usize) -> anyhow::Result<Self> {
        Self::serving_with(load, n_connections, &[]).await
    }

    /// The same with more flags for the gateway.
    ///
    /// # Errors
    /// As [`Front::serving`].
    pub async fn serving_with(load: Load, n_connections: usize, flags: &[&str]) -> anyhow::Result<Self> {
        open_files::make_room(n_connections as u64 + load.streams as u64 + OTHER_FILES)?;
        let speech = [
            ("--frames", callers::frames(load).to_string()),
            ("--chunk-frames", load.chunk_frames.to_string()),
            ("--chunk-ms", load.pause.as_millis().to_string()),
            ("--first-chunk-ms", "0".into()),
        ];
        let speech: Vec<&str> = speech
            .iter()
            .flat_map(|(name, value)| [*name, value.as_str()])
            .collect();
        let worker = Process::start("fake-worker", &speech)?;
        let worker_at = worker.address()?;
        let uri = format!("http://{worker_at}");
        let own = ["--listen", "127.0.0.1:0", "--worker", &uri];
        let gateway = Process::start("laneway-gateway", &[&own, flags].concat())?;
        let gateway_at = gateway.address()?;
        client::until(gateway_at, ServingStatus::Serving).await?;
        Ok(Front {
            gateway,
            worker,
            load,
            gateway_at,
            worker_at,
        })
    }

    /// Where the gateway listens.
    pub fn address(&self) -> SocketAddr {
        self.gateway_at
    }

    /// Let so many callers ask at once for a stream of the load each.
    ///
    /// # Errors
    /// One was neither admitted nor refused, or its stream failed.
    pub async fn burst(&self, n_callers: usize) -> anyhow::Result<Burst> {
        let answered = callers::burst(self.gateway_at, n_callers, callers::frames(self.load)).await?;
        let chunks = answered.admitted.iter().flat_map(|heard| &heard.latencies_us);
        let mut latencies_us: Vec<u64> = chunks.copied().collect();
        latencies_us.sort_unstable();
        Ok(Burst {
            n_admitted: answered.admitted.len(),
            latencies_us,
            refused: answered.refused,
        })
    }

    /// Let the load's listeners listen, and measure.
    ///
    /// # Errors
    /// A stream failed, or a chunk has no stamp.
    pub async fn measure(&self, listener: Listener) -> anyhow::Result<Measured> {
        let (process, address) = match listener {
            Listener::Worker => (&self.worker, self.worker_at),
            Listener::Grpc(_) | Listener::Http => (&self.gateway, self.gateway_at),
        };
        let (began, cpu_before) = (Instant::now(), cpu(process)?);
        let heard = callers::listen(address, listener, self.load);
        let mut heard = std::pin::pin!(heard);
        let mut peak_resident_bytes = 0;
        let heard = loop {
            peak_resident_bytes = peak_resident_bytes.max(process.holds()?.resident_bytes);
            tokio::select! {
                heard = &mut heard => break heard?,
                () = tokio::time::sleep(LOOK) => {}
            }
        };
        Ok(Measured {
            latencies_us: heard.latencies_us,
            audio_bytes: heard.audio_bytes,
            cpu: cpu(process)? - cpu_before,
            took: began.elapsed(),
            peak_resident_bytes,
        })
    }
}

/// The value that so many of a hundred do not exceed, of ascending ones.
pub fn percentile_us(ascending: &[u64], percent: f64) -> u64 {
    let last = ascending.len().saturating_sub(1);
    let index = (last as f64 * percent / 100.0).round() as usize;
    ascending.get(index).copied().unwrap_or(u64::MAX)
}

/// Time of processors that a process has taken.
fn cpu(process: &Process) -> anyhow::Result<Duration> {
    let path = format!("/proc/{}/stat", process.id());
    let stat = std::fs::read_to_string(&path).with_context(|| path.clone())?;
    // The name in front may hold anything, but for the last parenthesis.
    let (_, fields) = stat.rsplit_once(')').context("read a process's times")?;
    let ticks: u64 = fields
        .split_whitespace()
        .skip(11)
        .take(2)
        .map(|field| field.parse().unwrap_or(0))
        .sum();
    let per_second = rustix::param::clock_ticks_per_second();
    Ok(Duration::from_secs_f64(ticks as f64 / per_second as f64))
}
