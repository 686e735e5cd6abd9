//! A gateway in this process on port 0, and a client of it.

use std::net::SocketAddr;
use std::time::Duration;

use laneway_gateway::{Config, DiscoveryConfig, LinkConfig, ServeError, Shutdown, StreamConfig};
use laneway_proto::{Failure, v1};
use tokio::task::JoinHandle;
use tonic::transport::{Channel, Endpoint};
use tonic::{Status, Streaming};
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;
use tonic_health::pb::{HealthCheckRequest, HealthCheckResponse};
use v1::models_client::ModelsClient;
use v1::requests_client::RequestsClient;
use v1::speech_client::SpeechClient;
use v1::synthesize_response::Event;

use crate::fake::{FakeManager, FakeWorker};

/// What should happen at once happens within this, also on a loaded machine.
pub(crate) async fn soon<F: Future>(work: F) -> F::Output {
    tokio::time::timeout(Duration::from_secs(20), work)
        .await
        .expect("this should have happened long ago")
}

pub(crate) struct TestGateway {
    pub(crate) address: SocketAddr,
    pub(crate) channel: Channel,
    pub(crate) shutdown: Shutdown,
    pub(crate) served: JoinHandle<Result<(), ServeError>>,
}

impl Drop for TestGateway {
    fn drop(&mut self) {
        self.shutdown.now.cancel();
    }
}

/// Whether the kernel has a connection of these ends that neither has closed.
pub(crate) fn is_established(local: SocketAddr, peer: SocketAddr) -> bool {
    const ESTABLISHED: &str = "01";
    let end = |address: SocketAddr| {
        let SocketAddr::V4(address) = address else {
            panic!("{address} is not of IPv4")
        };
        let ip = u32::from_ne_bytes(address.ip().octets());
        format!("{ip:08X}:{:04X}", address.port())
    };
    let table = std::fs::read_to_string("/proc/net/tcp").unwrap();
    let wanted = [&end(local), &end(peer), ESTABLISHED];
    table
        .lines()
        .any(|line| line.split_whitespace().skip(1).take(3).eq(wanted))
}

/// Waits that never run out by themselves in a test that is not about them, and fast discovery.
fn config(discovery: DiscoveryConfig) -> Config {
    let link = LinkConfig {
        poll_interval: Duration::from_millis(20),
        ..LinkConfig::default()
    };
    let long = Duration::from_secs(60);
    let stream = StreamConfig {
        queue: long,
        first_audio: long,
        stall: long,
        // A test that is about a replacement says so; every other one hears of a loss at once.
        replacement: Duration::ZERO,
        caller: long,
        idle: long,
    };
    Config {
        link,
        stream,
        ..Config::new(([127, 0, 0, 1], 0).into(), discovery)
    }
}

/// A gateway that asks these workers itself.
pub(crate) async fn gateway(workers: &[&FakeWorker], change: impl FnOnce(&mut Config)) -> TestGateway {
    let uris = workers
        .iter()
        .map(|worker| worker.uri().parse().unwrap())
        .collect();
    start(config(DiscoveryConfig::Static(uris)), change).await
}

/// A gateway whose workers come from elsewhere.
pub(crate) async fn gateway_at(discovery: DiscoveryConfig) -> TestGateway {
    start(config(discovery), |_| ()).await
}

/// A gateway that watches a topology.
pub(crate) async fn gateway_of(manager: &FakeManager, change: impl FnOnce(&mut Config)) -> TestGateway {
    let uri = format!("http://{}", manager.address).parse().unwrap();
    start(config(DiscoveryConfig::EngineManager(uri)), change).await
}

async fn start(mut config: Config, change: impl FnOnce(&mut Config)) -> TestGateway {
    change(&mut config);
    let gateway = config.build().await.unwrap();
    let address = gateway.address();
    let shutdown = Shutdown::default();
    let served = tokio::spawn(gateway.serve(shutdown.clone()));
    let channel = Endpoint::from_shared(format!("http://{address}"))
        .unwrap()
        .connect_lazy();
    TestGateway {
        address,
        channel,
        shutdown,
        served,
    }
}

/// Bytes that a caller on [`narrow`] has room for.
const NARROW_BYTES: u32 = 65_535;

/// A channel whose caller takes little that it has not read, as small devices do.
pub(crate) fn narrow(address: &str) -> Channel {
    Endpoint::from_shared(format!("http://{address}"))
        .unwrap()
        .initial_stream_window_size(NARROW_BYTES)
        .initial_connection_window_size(NARROW_BYTES)
        .connect_lazy()
}

pub(crate) fn request() -> v1::SynthesizeRequest {
    v1::SynthesizeRequest {
        text: "Hello there.".into(),
        voice: "ryan".into(),
        ..Default::default()
    }
}

pub(crate) fn named(request_id: &str) -> v1::SynthesizeRequest {
    v1::SynthesizeRequest {
        request_id: request_id.into(),
        ..request()
    }
}

impl TestGateway {
    pub(crate) fn speech(&self) -> SpeechClient<Channel> {
        SpeechClient::new(self.channel.clone())
    }

    pub(crate) fn models(&self) -> ModelsClient<Channel> {
        ModelsClient::new(self.channel.clone())
    }

    pub(crate) async fn begin(&self, request: v1::SynthesizeRequest) -> Result<Call, Status> {
        self.begin_with(tonic::Request::new(request)).await
    }

    pub(crate) async fn begin_with(
        &self,
        request: tonic::Request<v1::SynthesizeRequest>,
    ) -> Result<Call, Status> {
        soon(self.speech().synthesize(request)).await.map(Call::of)
    }

    /// A call of a caller who takes little that it has not read.
    pub(crate) async fn begin_narrow(&self, request: v1::SynthesizeRequest) -> Result<Call, Status> {
        let mut speech = SpeechClient::new(narrow(&self.address.to_string()));
        soon(speech.synthesize(request)).await.map(Call::of)
    }

    /// Speak to the end.
    pub(crate) async fn speak(&self, request: v1::SynthesizeRequest) -> Result<Spoken, Status> {
        self.begin(request).await?.rest().await.2
    }

    /// The failure that a request ends with.
    pub(crate) async fn fails(&self, request: v1::SynthesizeRequest) -> Failure {
        ours(
            self.speak(request)
                .await
                .map(|spoken| spoken.finished)
                .unwrap_err(),
        )
    }

    pub(crate) async fn cancel(&self, id: &str, strength: v1::CancelStrength) -> Result<(), Status> {
        let request = v1::CancelRequest {
            request_id: id.into(),
            strength: strength.into(),
        };
        soon(RequestsClient::new(self.channel.clone()).cancel(request))
            .await
            .map(|_| ())
    }

    /// Health as it changes.
    pub(crate) async fn health(&self) -> Health {
        let request = HealthCheckRequest {
            service: "laneway.v1.Speech".into(),
        };
        let mut client = HealthClient::new(self.channel.clone());
        Health(soon(client.watch(request)).await.unwrap().into_inner())
    }

    pub(crate) async fn serving(&self) {
        self.health().await.until(ServingStatus::Serving).await;
    }

    pub(crate) async fn not_serving(&self) {
        self.health().await.until(ServingStatus::NotServing).await;
    }
}

pub(crate) struct Health(Streaming<HealthCheckResponse>);

impl Health {
    pub(crate) async fn until(&mut self, status: ServingStatus) {
        while soon(self.0.message())
            .await
            .unwrap()
            .expect("a health watch goes on")
            .status()
            != status
        {}
    }
}

/// Every failure is one of ours, and says nothing of addresses or libraries.
#[track_caller]
pub(crate) fn ours(status: Status) -> Failure {
    let failure = Failure::from_status(&status).unwrap_or_else(|| panic!("a foreign status: {status:?}"));
    for internal in ["127.0.0.1", "h2", "hyper", "transport", "tcp", "secret"] {
        assert!(
            !status.message().contains(internal),
            "{status:?} tells of {internal}"
        );
    }
    failure
}

pub(crate) struct Call {
    pub(crate) events: Streaming<v1::SynthesizeResponse>,
}

/// A stream that ended well.
#[derive(Debug)]
pub(crate) struct Spoken {
    pub(crate) accepted: v1::Accepted,
    pub(crate) chunks: Vec<v1::AudioChunk>,
    pub(crate) finished: v1::SynthesisFinished,
}

impl Call {
    pub(crate) fn of(response: tonic::Response<Streaming<v1::SynthesizeResponse>>) -> Self {
        Self {
            events: response.into_inner(),
        }
    }

    pub(crate) async fn accepted(&mut self) -> v1::Accepted {
        match soon(self.events.message()).await.unwrap().unwrap().event.unwrap() {
            Event::Accepted(accepted) => accepted,
            other => panic!("{other:?} before Accepted"),
        }
    }

    pub(crate) async fn chunk(&mut self) -> v1::AudioChunk {
        match soon(self.events.message()).await.unwrap().unwrap().event.unwrap() {
            Event::Chunk(chunk) => chunk,
            other => panic!("{other:?} in place of a chunk"),
        }
    }

    /// Read to the end: `Accepted` if it was still to come, the chunks, how it ended.
    pub(crate) async fn rest(
        mut self,
    ) -> (Option<v1::Accepted>, Vec<v1::AudioChunk>, Result<Spoken, Status>) {
        let (mut accepted, mut chunks, mut finished) = (None, Vec::new(), None);
        loop {
            match soon(self.events.message()).await {
                Ok(Some(message)) => match message.event.expect("an event") {
                    Event::Accepted(event) => assert!(accepted.replace(event).is_none() && chunks.is_empty()),
                    Event::Chunk(chunk) => chunks.push(chunk),
                    Event::Finished(event) => assert!(finished.replace(event).is_none()),
                },
                Ok(None) => {
                    let finished = finished.expect("a stream that ends well has a last message");
                    let spoken = Spoken {
                        accepted: accepted.clone().unwrap_or_default(),
                        chunks: chunks.clone(),
                        finished,
                    };
                    return (accepted, chunks, Ok(spoken));
                }
                Err(status) => {
                    assert!(finished.is_none(), "no status but OK follows the last message");
                    return (accepted, chunks, Err(status));
                }
            }
        }
    }

    /// The failure that it ends with.
    pub(crate) async fn failure(self) -> Failure {
        ours(self.rest().await.2.unwrap_err())
    }
}
