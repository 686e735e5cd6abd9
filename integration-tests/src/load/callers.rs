//! Callers who listen, and when each chunk was there.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use laneway_proto::v1;
use laneway_proto::v1::speech_client::SpeechClient;
use laneway_proto::v1::worker_client::WorkerClient;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tonic::transport::{Channel, Endpoint};

use super::{Listener, Load};
use crate::{PATIENCE, client, stamp};

/// Callers of a burst who share a connection.
const CALLERS_PER_CONNECTION: usize = 32;

/// Milliseconds of a frame.
const FRAME_MS: u128 = 80;

/// What one or all of them heard.
#[derive(Debug, Default)]
pub(super) struct Heard {
    pub(super) latencies_us: Vec<u64>,
    pub(super) audio_bytes: u64,
}

impl Heard {
    fn chunk(&mut self, audio: &[u8], made: Option<u64>) -> anyhow::Result<()> {
        let now = stamp::now_ns();
        let made = made.context("a chunk without a stamp")?;
        let latency = now
            .checked_sub(made)
            .context("a chunk that was there before it was made")?;
        self.latencies_us.push(latency / 1000);
        self.audio_bytes += audio.len() as u64;
        Ok(())
    }
}

/// Listen with all of them, the beginnings spread over one pause between chunks, as they are in a real load.
pub(super) async fn listen(address: SocketAddr, listener: Listener, load: Load) -> anyhow::Result<Heard> {
    let mut listeners = JoinSet::new();
    let frames = frames(load);
    for index in 0..load.streams {
        let delay = load.pause * index as u32 / load.streams.max(1) as u32;
        listeners.spawn(async move {
            tokio::time::sleep(delay).await;
            match listener {
                Listener::Grpc(format) => grpc(connect(address).await?, format, frames).await,
                Listener::Http => http(address, frames, load.chunk_frames).await,
                Listener::Worker => worker(address, format!("stream-{index}.0")).await,
            }
        });
    }
    let mut all = Heard::default();
    while let Some(heard) = listeners.join_next().await {
        let heard = heard.context("a listener died")??;
        all.latencies_us.extend(heard.latencies_us);
        all.audio_bytes += heard.audio_bytes;
    }
    all.latencies_us.sort_unstable();
    Ok(all)
}

/// What became of a burst.
#[derive(Debug, Default)]
pub(super) struct Answered {
    /// What those heard who were admitted.
    pub(super) admitted: Vec<Heard>,
    /// How long each other one waited for its refusal.
    pub(super) refused: Vec<Duration>,
}

/// Callers who all ask at the same moment, over a few connections that are there already.
pub(super) async fn burst(address: SocketAddr, n_callers: usize, frames: u32) -> anyhow::Result<Answered> {
    let mut channels = Vec::new();
    for _ in 0..n_callers.div_ceil(CALLERS_PER_CONNECTION) {
        channels.push(connect(address).await?);
    }
    let mut callers = JoinSet::new();
    let gate = watch::Sender::new(false);
    for index in 0..n_callers {
        let channel = channels[index % channels.len()].clone();
        let mut gate = gate.subscribe();
        callers.spawn(async move {
            // The sender is there until all have ended.
            let _ = gate.wait_for(|open| *open).await;
            let asked = Instant::now();
            match grpc(channel, v1::AudioFormat::PcmS16le, frames).await {
                Ok(heard) => Ok(Ok(heard)),
                Err(error) => match error.downcast_ref::<tonic::Status>().map(tonic::Status::code) {
                    Some(tonic::Code::ResourceExhausted) => Ok(Err(asked.elapsed())),
                    _ => Err(error),
                },
            }
        });
    }
    gate.send_replace(true);
    let mut answered = Answered::default();
    while let Some(outcome) = callers.join_next().await {
        match outcome.context("a caller died")?? {
            Ok(heard) => answered.admitted.push(heard),
            Err(waited) => answered.refused.push(waited),
        }
    }
    answered.refused.sort_unstable();
    Ok(answered)
}

/// Frames of a stream that goes on for as long as the load does.
pub(super) fn frames(load: Load) -> u32 {
    let chunks = match load.pause.is_zero() {
        // Real time is then no measure.
        true => load.length.as_millis() / FRAME_MS / u128::from(load.chunk_frames),
        false => load.length.as_millis().div_ceil(load.pause.as_millis().max(1)),
    };
    u32::try_from(chunks)
        .unwrap_or(u32::MAX)
        .saturating_mul(load.chunk_frames)
}

async fn within<T>(work: impl Future<Output = Result<T, tonic::Status>>) -> anyhow::Result<T> {
    Ok(timeout(PATIENCE, work)
        .await
        .context("nothing came for too long")??)
}

async fn connect(address: SocketAddr) -> anyhow::Result<Channel> {
    let endpoint = Endpoint::from_shared(format!("http://{address}"))?;
    endpoint.connect().await.context("connect")
}

async fn grpc(channel: Channel, format: v1::AudioFormat, frames: u32) -> anyhow::Result<Heard> {
    use v1::synthesize_response::Event;
    let read = match format {
        v1::AudioFormat::PcmF32le => stamp::of_f32le,
        _ => stamp::of_s16le,
    };
    let request = v1::SynthesizeRequest {
        format: format.into(),
        ..client::request("Hello there.", 1)
    };
    let mut speech = SpeechClient::new(channel);
    let mut events = within(speech.synthesize(request)).await?.into_inner();
    let mut heard = Heard::default();
    loop {
        match within(events.message()).await?.and_then(|message| message.event) {
            Some(Event::Chunk(chunk)) => heard.chunk(&chunk.audio, read(&chunk.audio))?,
            Some(Event::Accepted(_)) => {}
            Some(Event::Finished(finished)) => {
                anyhow::ensure!(
                    finished.frames == frames,
                    "{} of {frames} frames",
                    finished.frames
                );
            }
            None => return Ok(heard),
        }
    }
}

async fn worker(address: SocketAddr, id: String) -> anyhow::Result<Heard> {
    use v1::worker_synthesize_response::Event;
    let request = v1::WorkerSynthesizeRequest {
        request_id: id,
        ..Default::default()
    };
    let mut worker = WorkerClient::new(connect(address).await?);
    let mut events = within(worker.synthesize(request)).await?.into_inner();
    let mut heard = Heard::default();
    loop {
        match within(events.message()).await?.and_then(|message| message.event) {
            Some(Event::Audio(audio)) => heard.chunk(&audio.samples, stamp::of_f32le(&audio.samples))?,
            Some(Event::Started(_) | Event::Frames(_) | Event::Finished(_)) => {}
            None => return Ok(heard),
        }
    }
}

/// A chunked body of HTTP/1.1: each of its chunks is one of ours.
async fn http(address: SocketAddr, frames: u32, chunk_frames: u32) -> anyhow::Result<Heard> {
    let mut stream = BufReader::new(TcpStream::connect(address).await?);
    let body = r#"{"model":"nano","voice":"nano","input":"Hello there.","response_format":"pcm"}"#;
    let request = format!(
        "POST /v1/audio/speech HTTP/1.1\r\nhost: gateway\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    timeout(PATIENCE, stream.write_all(request.as_bytes())).await??;
    let mut line = String::new();
    timeout(PATIENCE, stream.read_line(&mut line)).await??;
    anyhow::ensure!(line.starts_with("HTTP/1.1 200 "), "answered with {line}");
    while line != "\r\n" {
        line.clear();
        timeout(PATIENCE, stream.read_line(&mut line)).await??;
    }
    let (mut heard, mut chunk) = (Heard::default(), Vec::new());
    loop {
        line.clear();
        timeout(PATIENCE, stream.read_line(&mut line)).await??;
        let n_bytes = usize::from_str_radix(line.trim(), 16).context("read the length of a chunk")?;
        chunk.resize(n_bytes + 2, 0);
        timeout(PATIENCE, stream.read_exact(&mut chunk)).await??;
        if n_bytes == 0 {
            let wanted = frames.div_ceil(chunk_frames) as usize;
            anyhow::ensure!(
                heard.latencies_us.len() == wanted,
                "{} of {wanted} chunks",
                heard.latencies_us.len()
            );
            return Ok(heard);
        }
        heard.chunk(&chunk[..n_bytes], stamp::of_s16le(&chunk))?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_lasts_as_long_as_its_load() {
        let load = Load {
            streams: 1,
            chunk_frames: 4,
            pause: Duration::from_millis(320),
            length: Duration::from_secs(10),
        };
        assert_eq!(frames(load), 32 * 4);
        let fast = Load {
            pause: Duration::ZERO,
            ..load
        };
        assert_eq!(frames(fast), 31 * 4);
    }
}
