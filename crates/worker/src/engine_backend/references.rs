//! Reference clips that were encoded, by content, so that one clip is encoded once.
//!
//! The cache belongs to the worker, outside every node's resources: a hit hands the engine a finished result, and the
//! RefEncoder's walk does not run. Who asks for a clip first encodes it; who asks while that runs waits for it.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use laneway_engine::node::EdgeResult;
use laneway_models::qwen3_tts::reference::ReferenceClip;
use laneway_telemetry::metric;
use parking_lot::Mutex;
use tokio::sync::watch;

/// Clips that are kept. Voices that a deployment serves, not callers.
const MAX_CLIPS: usize = 64;

/// Samples of all clips that are kept: 64 MiB, or about twelve minutes.
const MAX_SAMPLES: usize = 16 << 20;

/// Everything that the result follows from. The hash is of the content, and equality is too: no two clips are taken
/// for one.
#[derive(Debug, Clone)]
struct Key(ReferenceClip);

impl Hash for Key {
    fn hash<H: Hasher>(&self, state: &mut H) {
        for sample in &*self.0.samples {
            state.write_u32(sample.to_bits());
        }
        (self.0.sample_rate_hz, self.0.in_context).hash(state);
    }
}

impl PartialEq for Key {
    fn eq(&self, other: &Self) -> bool {
        let (a, b) = (&self.0, &other.0);
        let bits = |clip: &ReferenceClip| {
            clip.samples
                .iter()
                .map(|sample| sample.to_bits())
                .collect::<Vec<_>>()
        };
        (a.sample_rate_hz, a.in_context, a.samples.len()) == (b.sample_rate_hz, b.in_context, b.samples.len())
            && (Arc::ptr_eq(&a.samples, &b.samples) || bits(a) == bits(b))
    }
}

impl Eq for Key {}

/// A clip's state.
enum State {
    /// The sender is in the ticket of whoever encodes it.
    Encoding(watch::Receiver<Option<EdgeResult>>),
    Ready {
        result: EdgeResult,
        last_use: u64,
    },
}

#[derive(Default)]
struct Clips {
    states: HashMap<Key, State>,
    clock: u64,
}

/// The cache. Cheap to clone.
#[derive(Clone, Default)]
pub(super) struct References(Arc<Mutex<Clips>>);

impl fmt::Debug for References {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let n_clips = self.0.lock().states.len();
        f.debug_struct("References").field("n_clips", &n_clips).finish()
    }
}

/// What becomes of a clip.
pub(super) enum Answer {
    /// It was encoded before.
    Ready(EdgeResult),
    /// It is being encoded: wait, and ask again if nothing comes.
    Wait(watch::Receiver<Option<EdgeResult>>),
    /// Encode it.
    Encode(Ticket),
}

/// The duty to encode a clip. Dropped without a result (the request was killed or failed), it lets those who wait ask
/// again.
pub(super) struct Ticket {
    cache: References,
    key: Key,
    sender: watch::Sender<Option<EdgeResult>>,
    delivered: bool,
}

impl References {
    pub(super) fn ask(&self, clip: &ReferenceClip) -> Answer {
        let mut clips = self.0.lock();
        clips.clock += 1;
        let now = clips.clock;
        let (answer, outcome) = match clips.states.entry(Key(clip.clone())) {
            Entry::Occupied(mut entry) => match entry.get_mut() {
                State::Ready { result, last_use } => {
                    *last_use = now;
                    (Answer::Ready(result.clone()), "hit")
                }
                State::Encoding(receiver) => (Answer::Wait(receiver.clone()), "wait"),
            },
            Entry::Vacant(entry) => {
                let (sender, receiver) = watch::channel(None);
                let key = entry.key().clone();
                entry.insert(State::Encoding(receiver));
                let ticket = Ticket {
                    cache: self.clone(),
                    key,
                    sender,
                    delivered: false,
                };
                (Answer::Encode(ticket), "miss")
            }
        };
        metrics::counter!(metric::WORKER_REFERENCES, "outcome" => outcome).increment(1);
        answer
    }
}

impl Clips {
    /// Drop what was used longest ago until the rest is within bounds. What is being encoded is bounded by admission.
    fn trim(&mut self) {
        loop {
            let ready = self.states.iter().filter_map(|(key, state)| match state {
                State::Ready { last_use, .. } => Some((key, *last_use)),
                State::Encoding(_) => None,
            });
            let (mut n_clips, mut n_samples, mut oldest) = (0, 0, None::<(&Key, u64)>);
            for (key, last_use) in ready {
                n_clips += 1;
                n_samples += key.0.samples.len();
                if oldest.is_none_or(|(_, use_of_oldest)| last_use < use_of_oldest) {
                    oldest = Some((key, last_use));
                }
            }
            let fits = n_clips <= MAX_CLIPS && n_samples <= MAX_SAMPLES;
            let Some((key, _)) = oldest.filter(|_| !fits) else {
                return;
            };
            let key = key.clone();
            self.states.remove(&key);
        }
    }
}

impl Ticket {
    /// The clip is encoded.
    pub(super) fn deliver(mut self, result: &EdgeResult) {
        self.delivered = true;
        let mut clips = self.cache.0.lock();
        let state = State::Ready {
            result: result.clone(),
            last_use: clips.clock,
        };
        clips.states.insert(self.key.clone(), state);
        clips.trim();
        drop(clips);
        self.sender.send_replace(Some(result.clone()));
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if !self.delivered {
            // Behind this nobody finds the receiver, and those who have it see the sender go.
            self.cache.0.lock().states.remove(&self.key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn clip(samples: &[f32]) -> ReferenceClip {
        ReferenceClip {
            samples: samples.into(),
            sample_rate_hz: ReferenceClip::SAMPLE_RATE_HZ,
            in_context: false,
        }
    }

    fn encode(cache: &References, clip: &ReferenceClip, result: u32) {
        match cache.ask(clip) {
            Answer::Encode(ticket) => ticket.deliver(&(Arc::new(result) as EdgeResult)),
            _ => panic!("it was encoded before"),
        }
    }

    fn ready(cache: &References, clip: &ReferenceClip) -> Option<u32> {
        match cache.ask(clip) {
            Answer::Ready(result) => result.downcast_ref().copied(),
            _ => None,
        }
    }

    #[test]
    fn a_clip_is_known_by_its_content_and_by_all_of_it() {
        let cache = References::default();
        encode(&cache, &clip(&[0.1, 0.2]), 1);
        assert_eq!(ready(&cache, &clip(&[0.1, 0.2])), Some(1));
        let in_context = ReferenceClip {
            in_context: true,
            ..clip(&[0.1, 0.2])
        };
        for (n, other) in [
            clip(&[0.1, 0.3]),
            clip(&[0.1]),
            clip(&[0.1, 0.2, 0.0]),
            in_context,
        ]
        .iter()
        .enumerate()
        {
            encode(&cache, other, 10 + n as u32);
        }
        assert_eq!(ready(&cache, &clip(&[0.1, 0.2])), Some(1));
    }

    #[tokio::test]
    async fn who_asks_meanwhile_waits_and_takes_over_when_the_first_gives_up() {
        let cache = References::default();
        let Answer::Encode(first) = cache.ask(&clip(&[0.5])) else {
            panic!("nobody asked before")
        };
        let Answer::Wait(mut waits) = cache.ask(&clip(&[0.5])) else {
            panic!("it is being encoded")
        };
        drop(first);
        assert!(
            waits.wait_for(Option::is_some).await.is_err(),
            "the first gave up"
        );
        let Answer::Encode(second) = cache.ask(&clip(&[0.5])) else {
            panic!("nobody encodes it now")
        };
        let Answer::Wait(mut waits) = cache.ask(&clip(&[0.5])) else {
            panic!("it is being encoded")
        };
        second.deliver(&(Arc::new(7_u32) as EdgeResult));
        let result = waits.wait_for(Option::is_some).await.unwrap().clone().unwrap();
        assert_eq!(result.downcast_ref(), Some(&7_u32));
        assert_eq!(ready(&cache, &clip(&[0.5])), Some(7));
    }

    #[test]
    fn what_was_used_longest_ago_makes_room() {
        let cache = References::default();
        let clips: Vec<_> = (0..=MAX_CLIPS).map(|n| clip(&[n as f32])).collect();
        for (n, clip) in clips[..MAX_CLIPS].iter().enumerate() {
            encode(&cache, clip, n as u32);
        }
        assert_eq!(ready(&cache, &clips[0]), Some(0), "used again");
        encode(&cache, &clips[MAX_CLIPS], 64);
        assert_eq!(ready(&cache, &clips[0]), Some(0));
        assert_eq!(ready(&cache, &clips[MAX_CLIPS]), Some(64));
        assert_eq!(cache.0.lock().states.len(), MAX_CLIPS);
        assert_eq!(ready(&cache, &clips[1]), None, "it made room");

        let large = vec![0.25; MAX_SAMPLES - 10];
        encode(&cache, &clip(&large), 99);
        assert_eq!(ready(&cache, &clip(&large)), Some(99));
        assert!(cache.0.lock().states.len() <= 12);
    }
}
