//! The callers of a soak, and who cancels some of their streams in the middle.

use std::hash::{DefaultHasher, Hasher as _};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use laneway_proto::v1;
use laneway_proto::v1::speech_client::SpeechClient;
use laneway_proto::v1::synthesize_response::Event;
use parking_lot::Mutex;
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use tokio::sync::oneshot;

use super::ledger::{End, Ledger, Then};
use crate::bench::caller;
use crate::bench::sentences::{self, Line};
use crate::client::Channel;
use crate::say::VoiceArguments;

/// Pause before another stream is looked for that is in its middle.
const NOBODY_YET: Duration = Duration::from_millis(20);

/// Bytes of a sample on the wire.
const SAMPLE_BYTES: usize = 2;

/// What every caller shares.
pub(super) struct Shared {
    pub(super) channels: Vec<Channel>,
    pub(super) voice_arguments: VoiceArguments,
    pub(super) voice: String,
    pub(super) lines: Vec<Line>,
    pub(super) clips: Vec<v1::ReferenceClip>,
    /// Lengths are.
    pub(super) forced: bool,
    /// Of each request.
    pub(super) deadline: Duration,
    pub(super) order: Vec<usize>,
    pub(super) next: AtomicUsize,
    pub(super) stop: AtomicBool,
    /// Of each caller, while its stream is in its middle.
    pub(super) cancels: Vec<Mutex<Option<oneshot::Sender<()>>>>,
    /// Cancels that were due.
    pub(super) cancels_due: AtomicU64,
    pub(super) ledger: Mutex<Ledger>,
}

/// One caller, until it is told to stop: a request, and the next when that has ended.
pub(super) async fn call(shared: Arc<Shared>, caller: usize) {
    while !shared.stop.load(Ordering::Relaxed) {
        let n = shared.next.fetch_add(1, Ordering::Relaxed);
        let line = shared.order[n % shared.order.len()];
        loop {
            let end = shared.listen(caller, n, line).await;
            // What an end may be depends on what was known when it came.
            let then = shared
                .ledger
                .lock()
                .note(line, end, shared.forced, Instant::now());
            match then {
                Then::GoOn => break,
                Then::Again(pause) => tokio::time::sleep(pause).await,
            }
            if shared.stop.load(Ordering::Relaxed) {
                break;
            }
        }
    }
}

/// Cancel streams in their middle at this rate, until dropped. When, and whose, follows from the seed; which sentence
/// that hits, and where, from how fast the system is.
pub(super) async fn cancel(shared: Arc<Shared>, per_minute: f64, seed: u64) {
    let mut random = StdRng::seed_from_u64(seed);
    let mut at = tokio::time::Instant::now();
    for gap in sentences::arrivals(per_minute / 60.0, seed) {
        at += Duration::from_secs_f64(gap);
        tokio::time::sleep_until(at).await;
        shared.cancels_due.fetch_add(1, Ordering::Relaxed);
        let n_callers = shared.cancels.len();
        let mut cancelled = false;
        while !cancelled {
            let first = random.random_range(0..n_callers);
            let mut callers = (0..n_callers).map(|n| (first + n) % n_callers);
            let sender = callers.find_map(|caller| shared.cancels[caller].lock().take());
            // One whose stream ended meanwhile was none.
            cancelled = sender.is_some_and(|sender| sender.send(()).is_ok());
            if !cancelled {
                tokio::time::sleep(NOBODY_YET).await;
            }
        }
    }
}

impl Shared {
    async fn listen(&self, caller: usize, n: usize, line: usize) -> End {
        let (sender, mut cancelled) = oneshot::channel();
        let mut sender = Some(sender);
        let listening = self.stream(n, line, || {
            if let Some(sender) = sender.take() {
                *self.cancels[caller].lock() = Some(sender);
            }
        });
        tokio::pin!(listening);
        let end = tokio::select! {
            biased;
            told = &mut cancelled => match told {
                // Dropping the stream is what a listener who leaves does.
                Ok(()) => End::Cancelled,
                // Somebody took the sender and did not use it: nobody else will.
                Err(_) => listening.await,
            },
            end = &mut listening => end,
        };
        self.cancels[caller].lock().take();
        end
    }

    async fn stream(&self, n: usize, line: usize, mut in_its_middle: impl FnMut()) -> End {
        let line = &self.lines[line];
        let body = caller::request(&self.voice_arguments, &self.voice, &self.clips, self.forced, line);
        let mut request = tonic::Request::new(body);
        request.set_timeout(self.deadline);
        let channel = self.channels[n % self.channels.len()].clone();
        let mut with_audio = false;
        let failed = |status, with_audio| End::Failed { status, with_audio };
        let mut events = match SpeechClient::new(channel).synthesize(request).await {
            Ok(response) => response.into_inner(),
            Err(status) => return failed(status, false),
        };
        let mut hash = DefaultHasher::new();
        let (mut rate, mut n_samples) = (0, 0_u64);
        loop {
            let message = match events.message().await {
                Ok(Some(message)) => message,
                Ok(None) => return End::Broken("a stream ended without its last message".into()),
                Err(status) => return failed(status, with_audio),
            };
            match message.event {
                Some(Event::Accepted(accepted)) => rate = accepted.sample_rate,
                Some(Event::Chunk(chunk)) => {
                    if chunk.sample_offset != n_samples {
                        return End::Broken("chunks were out of order".into());
                    }
                    n_samples += (chunk.audio.len() / SAMPLE_BYTES) as u64;
                    hash.write(&chunk.audio);
                    with_audio = true;
                    in_its_middle();
                }
                Some(Event::Finished(finished)) => {
                    if finished.samples != n_samples {
                        return End::Broken("a stream has not as many samples as it says".into());
                    }
                    if self.forced && finished.frames != line.frames {
                        return End::Broken("a stream has not as many frames as were asked for".into());
                    }
                    self.ledger.lock().audio_s += n_samples as f64 / f64::from(rate.max(1));
                    return End::Finished {
                        reason: finished.reason(),
                        hash: hash.finish(),
                    };
                }
                None => return End::Broken("a message was empty".into()),
            }
        }
    }
}
