//! A worker without a model: it speaks the workers' protocol, and its audio is a hum whose chunks carry the moment
//! they were made at ([`crate::stamp`]). What it costs is next to nothing, so that a load on it is a load on what
//! is in front of it, and dozens of it run on a small machine.
//!
//! Gateways find it by its status; with `--engine-manager` it also registers and reports like any other. It drains
//! on SIGTERM as they do: it says so at once, refuses new requests, those that run finish, exit code 0. Each refusal of a
//! drain is a line on stderr, `{"refused_ms_into_drain":N}`.

mod registration;
mod service;
mod voice;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use clap::{Args, Parser};
use laneway_proto::v1;
use laneway_proto::v1::worker_server::WorkerServer;
use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tonic::transport::Server;
use tonic::transport::server::TcpIncoming;
use tonic_health::ServingStatus;

use registration::Registration;
use service::{Service, Shared};

/// Samples of a frame.
const SAMPLES_PER_FRAME: u32 = crate::SAMPLES_PER_FRAME as u32;

/// Hz.
const SAMPLE_RATE: u32 = 24_000;

/// Longest stream that a caller may ask for.
const MAX_FRAMES: u32 = 100_000;

/// Longest that running streams are waited for.
const DRAIN_BOUND: Duration = Duration::from_secs(30);

/// Longest that connections are waited for behind the last stream.
const CLOSING: Duration = Duration::from_secs(1);

/// A worker without a model, for tests and loads.
#[derive(Debug, Clone, Parser)]
#[command(name = "fake-worker")]
pub struct Arguments {
    /// Address to listen on; port 0 takes a free one.
    #[arg(long, env = "LANEWAY_LISTEN", default_value = "127.0.0.1:0")]
    pub listen: SocketAddr,
    /// Its name; one of its address without it.
    #[arg(long)]
    pub id: Option<String>,
    /// Where the engine-manager answers; without it nobody is told of this worker.
    #[arg(long, env = "LANEWAY_ENGINE_MANAGER")]
    pub engine_manager: Option<String>,
    /// The rank to register for.
    #[arg(long, env = "LANEWAY_RANK", default_value_t = 0)]
    pub rank: u32,
    /// Host that others dial, when it is not the one listened on.
    #[arg(long, env = "LANEWAY_ADVERTISE")]
    pub advertise: Option<String>,
    /// Requests that run at once; more are refused.
    #[arg(long, default_value_t = 1024)]
    pub capacity: u32,
    /// What it serves.
    #[arg(long, default_value = "nano")]
    pub model: String,
    /// How its streams go.
    #[command(flatten)]
    pub speech: Speech,
}

/// How a stream goes.
#[derive(Debug, Clone, Copy, Args)]
pub struct Speech {
    /// Frames of 80 ms in a stream whose request sets no `max_frames`.
    #[arg(long, default_value_t = 25)]
    pub frames: u32,
    /// Frames in a chunk.
    #[arg(long, default_value_t = 4)]
    pub chunk_frames: u32,
    /// Milliseconds until the first chunk.
    #[arg(long, default_value_t = 50)]
    pub first_chunk_ms: u64,
    /// Milliseconds from one chunk to the next; 0 makes them as fast as they are taken.
    #[arg(long, default_value_t = 320)]
    pub chunk_ms: u64,
}

/// A bound worker.
#[derive(Debug)]
pub struct FakeWorker {
    arguments: Arguments,
    listener: TcpListener,
    address: SocketAddr,
}

impl FakeWorker {
    /// Bind its address. Nothing is answered before [`FakeWorker::serve`].
    ///
    /// # Errors
    /// The address cannot be bound, or the speech has no frames.
    pub async fn bind(arguments: Arguments) -> anyhow::Result<Self> {
        let Speech {
            frames, chunk_frames, ..
        } = arguments.speech;
        anyhow::ensure!(
            (1..=MAX_FRAMES).contains(&frames) && (1..=MAX_FRAMES).contains(&chunk_frames),
            "--frames and --chunk-frames are from 1 to {MAX_FRAMES}"
        );
        let listener = TcpListener::bind(arguments.listen)
            .await
            .with_context(|| format!("bind {}", arguments.listen))?;
        let address = listener.local_addr()?;
        Ok(FakeWorker {
            arguments,
            listener,
            address,
        })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Serve until told to drain, and the drain is done.
    ///
    /// # Errors
    /// The transport failed, or the engine-manager refuses it.
    pub async fn serve(self, told_to_drain: impl Future<Output = ()>) -> anyhow::Result<()> {
        let FakeWorker {
            arguments,
            listener,
            address,
        } = self;
        let host = arguments
            .advertise
            .clone()
            .unwrap_or_else(|| address.ip().to_string());
        let reached_at = format!("http://{host}:{}", address.port());
        let id = arguments
            .id
            .clone()
            .unwrap_or_else(|| format!("fake-{host}-{}", address.port()));
        let shared = Arc::new(Shared::new(
            id,
            arguments.capacity,
            facts(&arguments.model),
            arguments.speech,
        ));
        let (reporter, health) = tonic_health::server::health_reporter();
        let set_health = |status| reporter.set_service_status("", status);
        set_health(ServingStatus::Serving).await;
        let (stop, stopped) = oneshot::channel::<()>();
        let server = Server::builder()
            .add_service(health)
            .add_service(WorkerServer::new(Service(shared.clone())))
            .serve_with_incoming_shutdown(TcpIncoming::from(listener).with_nodelay(Some(true)), async move {
                drop(stopped.await)
            });
        let mut server = std::pin::pin!(server);
        let drained = async {
            told_to_drain.await;
            set_health(ServingStatus::NotServing).await;
            shared.drain();
            let _ = tokio::time::timeout(DRAIN_BOUND, shared.idle()).await;
        };
        let registration = arguments.engine_manager.map(|manager| Registration {
            manager,
            rank: arguments.rank,
            address: reached_at,
            shared: shared.clone(),
        });
        let left = async {
            match registration {
                Some(registration) => registration.run(drained).await,
                None => {
                    drained.await;
                    Ok(())
                }
            }
        };
        tokio::select! {
            served = &mut server => return Ok(served?),
            left = left => left?,
        }
        drop(stop);
        // What was said last is on its way still; a connection that stays open is not waited for.
        match tokio::time::timeout(CLOSING, server).await {
            Ok(served) => Ok(served?),
            Err(_) => Ok(()),
        }
    }
}

fn facts(model: &str) -> v1::ModelFacts {
    v1::ModelFacts {
        model: model.into(),
        voices: vec![v1::Voice {
            name: "nano".into(),
            language: "english".into(),
            ..Default::default()
        }],
        languages: vec!["english".into()],
        sample_rate: SAMPLE_RATE,
        samples_per_frame: SAMPLES_PER_FRAME,
        limits: Some(v1::ModelLimits {
            max_text_chars: 400,
            max_frames: MAX_FRAMES,
            max_chunk_frames: MAX_FRAMES,
            ..Default::default()
        }),
        ..Default::default()
    }
}

#[cfg(test)]
mod tests;
