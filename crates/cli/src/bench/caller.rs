//! Callers: each listens to one stream after another and writes down what came when.

use std::hash::{DefaultHasher, Hasher as _};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use laneway_proto::v1;
use laneway_proto::v1::speech_client::SpeechClient;
use laneway_proto::v1::synthesize_response::Event;
use tokio::task::JoinSet;

use super::sentences::{self, Line};
use crate::client;
use crate::client::Channel;
use crate::say::VoiceArguments;

/// A 16-bit sample above this can be heard (−40 dBFS).
const AUDIBLE: u16 = 327;

/// How long the last streams of a run may take to end.
const LAST_STREAMS: Duration = Duration::from_secs(300);

/// How long a wave of callers may take before the window opens.
const WARM_UP_DEADLINE: Duration = Duration::from_secs(900);

/// Pause between looks at how many callers are warm.
const WARM_UP_POLL: Duration = Duration::from_millis(10);

/// Audio that came in one message.
#[derive(Debug, Clone, Copy)]
pub(super) struct Chunk {
    pub(super) at: Instant,
    pub(super) seconds: f64,
    /// It has a sample that can be heard.
    pub(super) audible: bool,
}

/// How a stream ended.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Ended {
    pub(super) reason: v1::FinishReason,
    pub(super) frames: u32,
    pub(super) prompt_positions: u32,
    /// Of all audio bytes.
    pub(super) hash: u64,
}

/// One stream as its caller heard it.
#[derive(Debug)]
pub(super) struct Heard {
    /// Which sentence it was.
    pub(super) line: usize,
    pub(super) sent: Instant,
    pub(super) chunks: Vec<Chunk>,
    pub(super) outcome: Result<Ended, String>,
    pub(super) ended: Instant,
}

/// What every caller shares.
pub(super) struct Load {
    /// Connections to the gateway, taken in turn.
    pub(super) channels: Vec<Channel>,
    pub(super) voice_arguments: VoiceArguments,
    pub(super) voice: String,
    pub(super) lines: Vec<Line>,
    /// Voices to clone, for models that do; none for others.
    pub(super) clips: Vec<v1::ReferenceClip>,
    /// Frames are forced.
    pub(super) forced: bool,
}

/// When a run may be measured.
#[derive(Debug, Clone, Copy)]
pub(super) struct WarmUp {
    /// Seconds of load at least.
    pub(super) seconds: f64,
    /// Streams that end before, for each caller.
    pub(super) waves: usize,
}

/// A run in progress: callers that come back until they are told to stop.
pub(super) struct Callers {
    tasks: JoinSet<Vec<Heard>>,
    shared: Arc<Shared>,
}

struct Shared {
    load: Arc<Load>,
    order: Vec<usize>,
    next: AtomicUsize,
    n_ended: AtomicUsize,
    stop: AtomicBool,
}

impl Callers {
    fn new(load: Arc<Load>, seed: u64) -> Self {
        let order = sentences::order(load.lines.len(), seed);
        let shared = Shared {
            load,
            order,
            next: AtomicUsize::new(0),
            n_ended: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
        };
        Callers {
            tasks: JoinSet::new(),
            shared: Arc::new(shared),
        }
    }

    /// `concurrency` callers, each of which sends the next sentence when its last one has ended.
    pub(super) fn closed_loop(load: Arc<Load>, concurrency: usize, seed: u64) -> Self {
        let mut callers = Self::new(load, seed);
        for _ in 0..concurrency {
            let shared = callers.shared.clone();
            callers.tasks.spawn(async move {
                let mut heard = Vec::new();
                while !shared.stop.load(Ordering::Relaxed) {
                    heard.push(shared.call_next().await);
                }
                heard
            });
        }
        callers
    }

    /// Callers that arrive at this rate whether or not those before them have ended.
    pub(super) fn open_loop(load: Arc<Load>, rate: f64, seed: u64) -> Self {
        let mut callers = Self::new(load, seed);
        let shared = callers.shared.clone();
        callers.tasks.spawn(async move {
            let mut calls = JoinSet::new();
            let mut at = tokio::time::Instant::now();
            for gap in sentences::arrivals(rate, seed) {
                at += Duration::from_secs_f64(gap);
                tokio::time::sleep_until(at).await;
                if shared.stop.load(Ordering::Relaxed) {
                    break;
                }
                let shared = shared.clone();
                calls.spawn(async move { shared.call_next().await });
            }
            calls.join_all().await
        });
        callers
    }

    /// Wait until the load is as it will be.
    ///
    /// # Errors
    /// The waves do not end.
    pub(super) async fn warm_up(&self, warm_up: WarmUp, concurrency: usize) -> anyhow::Result<()> {
        let began = Instant::now();
        tokio::time::sleep(Duration::from_secs_f64(warm_up.seconds)).await;
        while self.shared.n_ended.load(Ordering::Relaxed) < warm_up.waves * concurrency {
            anyhow::ensure!(
                began.elapsed() < WARM_UP_DEADLINE,
                "{} streams ended in {WARM_UP_DEADLINE:?}, and the warm-up needs {}: ask for fewer --warm-up-waves",
                self.shared.n_ended.load(Ordering::Relaxed),
                warm_up.waves * concurrency
            );
            tokio::time::sleep(WARM_UP_POLL).await;
        }
        Ok(())
    }

    /// Let every stream end, and return them all.
    ///
    /// # Errors
    /// A caller panicked, or streams do not end.
    pub(super) async fn finish(mut self) -> anyhow::Result<Vec<Heard>> {
        self.shared.stop.store(true, Ordering::Relaxed);
        let mut heard = Vec::new();
        let join = async {
            while let Some(caller) = self.tasks.join_next().await {
                heard.extend(caller.context("run a caller")?);
            }
            anyhow::Ok(())
        };
        tokio::time::timeout(LAST_STREAMS, join)
            .await
            .with_context(|| format!("wait {LAST_STREAMS:?} for the last streams"))??;
        Ok(heard)
    }
}

impl Shared {
    async fn call_next(&self) -> Heard {
        let n = self.next.fetch_add(1, Ordering::Relaxed);
        let line = &self.load.lines[self.order[n % self.order.len()]];
        let channel = self.load.channels[n % self.load.channels.len()].clone();
        let sent = Instant::now();
        let mut chunks = Vec::new();
        let outcome = self
            .load
            .listen(channel, line, &mut chunks)
            .await
            .map_err(|error| format!("{error:#}"));
        self.n_ended.fetch_add(1, Ordering::Relaxed);
        Heard {
            line: line.index,
            sent,
            chunks,
            outcome,
            ended: Instant::now(),
        }
    }
}

/// The request for one sentence. Everything of it follows from the sentence.
pub(crate) fn request(
    voice_arguments: &VoiceArguments,
    voice: &str,
    clips: &[v1::ReferenceClip],
    forced: bool,
    line: &Line,
) -> v1::SynthesizeRequest {
    let mut request = voice_arguments.request(line.text, voice);
    request.seed = Some(line.seed);
    if forced {
        request
            .sampling
            .get_or_insert_default()
            .exact_frames
            .replace(line.frames);
    }
    if !clips.is_empty() {
        request.reference = Some(clips[line.index % clips.len()].clone());
    }
    request
}

impl Load {
    fn request(&self, line: &Line) -> v1::SynthesizeRequest {
        request(&self.voice_arguments, &self.voice, &self.clips, self.forced, line)
    }

    async fn listen(&self, channel: Channel, line: &Line, chunks: &mut Vec<Chunk>) -> anyhow::Result<Ended> {
        let response = SpeechClient::new(channel)
            .synthesize(self.request(line))
            .await
            .map_err(|status| client::explain(&status))?;
        let mut events = response.into_inner();
        let mut accepted = v1::Accepted::default();
        let mut hash = DefaultHasher::new();
        while let Some(message) = events
            .message()
            .await
            .map_err(|status| client::explain(&status))?
        {
            match message.event.context("read an empty message")? {
                Event::Accepted(event) => accepted = event,
                Event::Chunk(chunk) => {
                    let at = Instant::now();
                    anyhow::ensure!(accepted.sample_rate > 0, "audio came before it was accepted");
                    hash.write(&chunk.audio);
                    let (samples, _) = chunk.audio.as_chunks::<2>();
                    chunks.push(Chunk {
                        at,
                        seconds: samples.len() as f64 / f64::from(accepted.sample_rate),
                        audible: samples
                            .iter()
                            .any(|sample| i16::from_le_bytes(*sample).unsigned_abs() > AUDIBLE),
                    });
                }
                Event::Finished(finished) => {
                    anyhow::ensure!(
                        !self.forced || finished.frames == line.frames,
                        "{} frames were made of the {} asked for",
                        finished.frames,
                        line.frames
                    );
                    return Ok(Ended {
                        reason: finished.reason(),
                        frames: finished.frames,
                        prompt_positions: finished.prompt_positions,
                        hash: hash.finish(),
                    });
                }
            }
        }
        anyhow::bail!("the stream ended early")
    }
}
