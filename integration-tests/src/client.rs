//! A caller of the public API.

use std::net::SocketAddr;

use anyhow::Context as _;
use laneway_proto::v1::speech_client::SpeechClient;
use laneway_proto::v1::synthesize_response::Event;
use laneway_proto::{Failure, v1};
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Status, Streaming};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

use crate::PATIENCE;

/// A channel that connects on its first call.
pub fn channel(address: SocketAddr) -> Channel {
    Endpoint::from_shared(format!("http://{address}"))
        .expect("an address is a URI")
        .connect_lazy()
}

/// Health as it is now.
///
/// # Errors
/// No answer within the patience.
pub async fn health(address: SocketAddr) -> anyhow::Result<ServingStatus> {
    let mut client = HealthClient::new(channel(address));
    let check = client.check(HealthCheckRequest {
        service: String::new(),
    });
    let response = tokio::time::timeout(PATIENCE, check)
        .await
        .context("ask for health")??;
    Ok(response.into_inner().status())
}

/// Wait until health says so.
///
/// # Errors
/// It never does.
pub async fn until(address: SocketAddr, wanted: ServingStatus) -> anyhow::Result<()> {
    let mut client = HealthClient::new(channel(address));
    let reached = async {
        loop {
            if let Ok(response) = client
                .watch(HealthCheckRequest {
                    service: String::new(),
                })
                .await
            {
                let mut updates = response.into_inner();
                while let Ok(Some(update)) = updates.message().await {
                    if update.status() == wanted {
                        return;
                    }
                }
            }
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(PATIENCE, reached)
        .await
        .with_context(|| format!("wait for {address} to be {wanted:?}"))
}

/// What was spoken.
#[derive(Debug, Clone, PartialEq)]
pub struct Spoken {
    /// Little-endian f32 samples.
    pub audio: Vec<u8>,
    /// How it ended.
    pub finished: v1::SynthesisFinished,
}

/// A request for the demo voice.
pub fn request(text: &str, seed: u64) -> v1::SynthesizeRequest {
    v1::SynthesizeRequest {
        text: text.into(),
        voice: "nano".into(),
        seed: Some(seed),
        format: v1::AudioFormat::PcmF32le.into(),
        ..Default::default()
    }
}

/// Speaks through a gateway.
#[derive(Debug, Clone)]
pub struct Speaker(pub SpeechClient<Channel>);

impl Speaker {
    /// Through this gateway.
    pub fn new(gateway: SocketAddr) -> Self {
        Speaker(SpeechClient::new(channel(gateway)))
    }

    /// Start a stream.
    ///
    /// # Errors
    /// It was refused.
    pub async fn start(
        &self,
        request: impl tonic::IntoRequest<v1::SynthesizeRequest>,
    ) -> Result<Stream, Status> {
        let request: Request<v1::SynthesizeRequest> = request.into_request();
        let response = self.0.clone().synthesize(request).await?;
        Ok(Stream(response.into_inner()))
    }

    /// Speak a whole text.
    ///
    /// # Errors
    /// The status that it ended with.
    pub async fn speak(
        &self,
        request: impl tonic::IntoRequest<v1::SynthesizeRequest>,
    ) -> Result<Spoken, Status> {
        self.start(request).await?.rest().await
    }
}

/// A stream that runs.
#[derive(Debug)]
pub struct Stream(Streaming<v1::SynthesizeResponse>);

impl Stream {
    /// The next event.
    ///
    /// # Errors
    /// The status that the stream ended with; DEADLINE_EXCEEDED of our own when nothing comes.
    pub async fn next(&mut self) -> Result<Option<Event>, Status> {
        let message = tokio::time::timeout(PATIENCE, self.0.message()).await;
        let message =
            message.map_err(|_| Status::deadline_exceeded("the test heard nothing for too long"))??;
        Ok(message.and_then(|message| message.event))
    }

    /// Up to the first audio.
    ///
    /// # Errors
    /// As [`Stream::next`].
    pub async fn first_audio(&mut self) -> Result<v1::AudioChunk, Status> {
        loop {
            match self.next().await? {
                Some(Event::Chunk(chunk)) => return Ok(chunk),
                Some(Event::Accepted(_)) => {}
                other => return Err(Status::internal(format!("no audio but {other:?}"))),
            }
        }
    }

    /// Everything up to the end, checked for gaps.
    ///
    /// # Errors
    /// As [`Stream::next`].
    pub async fn rest(mut self) -> Result<Spoken, Status> {
        let mut audio = Vec::new();
        let mut offset = None;
        loop {
            match self.next().await? {
                Some(Event::Accepted(_)) => {}
                Some(Event::Chunk(chunk)) => {
                    let begin = *offset.get_or_insert(chunk.sample_offset);
                    if chunk.sample_offset != begin + audio.len() as u64 / 4 {
                        return Err(Status::internal(format!(
                            "a gap before sample {}",
                            chunk.sample_offset
                        )));
                    }
                    audio.extend_from_slice(&chunk.audio);
                }
                Some(Event::Finished(finished)) => return Ok(Spoken { audio, finished }),
                None => return Err(Status::internal("the stream ended without its last message")),
            }
        }
    }
}

/// The failure inside a status of ours.
///
/// # Panics
/// The status is not one of ours.
#[track_caller]
pub fn failure(status: &Status) -> Failure {
    Failure::from_status(status).unwrap_or_else(|| panic!("not a failure of ours: {status}"))
}
