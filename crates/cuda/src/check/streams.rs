//! Cases over streams of frames: what comes out must not depend on how the frames were cut into windows, on the
//! windows beside them, or on how many frames a prefill packs.

use std::sync::Arc;

use laneway_device::Result;

use super::data::Data;
use super::experiment::{Experiment, Outcome, Placed, Slot};
use super::random::Random;
use super::rig::Rig;

/// Frames `first .. first + frames` of a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Cut {
    pub(crate) stream: usize,
    pub(crate) first: usize,
    pub(crate) frames: usize,
}

/// Where a launch keeps what goes on to the next one.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StreamSlots {
    /// Carried state or cache; `None`: the operation carries nothing.
    pub(crate) pool: Option<Slot>,
    /// Output rows, packed in the order of the cuts.
    pub(crate) out: Slot,
}

/// One launch of some windows over a pool (`None`: as it is in the beginning).
pub(crate) type Launch = Arc<dyn Fn(&[Cut], Option<&Data>) -> (Experiment, StreamSlots) + Send + Sync>;

/// See the module.
#[derive(Clone)]
pub(crate) struct StreamCase {
    /// Frames of each stream.
    pub(crate) frames: Vec<usize>,
    /// Bytes of output of one frame.
    pub(crate) frame_bytes: usize,
    /// A launch may hold two cuts of a stream (as rows, not as windows).
    pub(crate) interleaves: bool,
    pub(crate) launch: Launch,
}

impl StreamCase {
    /// Every stream as one window, all in one launch.
    pub(crate) fn whole(&self) -> Vec<Cut> {
        self.frames
            .iter()
            .enumerate()
            .map(|(stream, frames)| Cut {
                stream,
                first: 0,
                frames: *frames,
            })
            .collect()
    }

    /// Cut the streams in other ways and compare outputs and state with those of the whole run. Hands out how
    /// many ways were tried, and what differed.
    pub(crate) fn cut_otherwise(
        &self,
        rig: &Rig,
        whole: &Outcome,
        placed: &Placed,
        random: &mut Random,
    ) -> Result<(usize, Option<String>)> {
        let (_, slots) = (self.launch)(&self.whole(), None);
        let mut schedules = vec![
            ("one frame at a time", self.frame_by_frame()),
            ("ragged windows", self.ragged(random, 3)),
            ("wide windows", self.ragged(random, 6)),
        ];
        if self.interleaves {
            // As a first pass of the predictor: all first positions, then all second ones.
            let mut schedule = self.frame_by_frame();
            if schedule.len() > 1 {
                let second = schedule.remove(1);
                schedule[0].extend(second);
            }
            schedules.push(("two positions together", schedule));
        }
        let tried = schedules.len();
        let want_out = slots.out.of(whole);
        for (name, schedule) in schedules {
            let mut out = vec![Vec::new(); self.frames.len()];
            let mut pool: Option<Data> = None;
            for cuts in &schedule {
                let (experiment, slots) = (self.launch)(cuts, pool.as_ref());
                let (outcome, _) = experiment.run(rig, Some(placed))?;
                let packed = slots.out.of(&outcome);
                let mut at = 0;
                for cut in cuts {
                    let len = cut.frames * self.frame_bytes;
                    out[cut.stream].extend_from_slice(&packed.bytes[at..at + len]);
                    at += len;
                }
                pool = slots.pool.map(|slot| slot.of(&outcome).clone());
            }
            let mut at = 0;
            for (stream, (got, frames)) in out.iter().zip(&self.frames).enumerate() {
                let want = &want_out.bytes[at..at + frames * self.frame_bytes];
                at += want.len();
                if let Some(byte) = got.iter().zip(want).position(|(a, b)| a != b) {
                    let frame = byte / self.frame_bytes;
                    let element = byte % self.frame_bytes / want_out.dtype.size();
                    return Ok((
                        tried,
                        Some(format!(
                            "{name}: out of stream {stream} frame {frame} element {element} has other bits"
                        )),
                    ));
                }
            }
            let want_pool = slots.pool.map(|slot| slot.of(whole));
            if let (Some(got), Some(want)) = (&pool, want_pool)
                && let Some((at, got, want)) = got.first_difference(want)
            {
                let problem = format!("{name}: state[{at}] is {got:#x}, not {want:#x} as from whole windows");
                return Ok((tried, Some(problem)));
            }
        }
        Ok((tried, None))
    }

    fn frame_by_frame(&self) -> Vec<Vec<Cut>> {
        let longest = self.frames.iter().copied().max().unwrap_or(0);
        (0..longest)
            .map(|first| {
                let left = |(_, frames): &(usize, &usize)| first < **frames;
                let cut = |(stream, _)| Cut {
                    stream,
                    first,
                    frames: 1,
                };
                self.frames.iter().enumerate().filter(left).map(cut).collect()
            })
            .collect()
    }

    /// Some streams at a time, in any order, in windows of up to `widest` frames, empty ones among them.
    fn ragged(&self, random: &mut Random, widest: usize) -> Vec<Vec<Cut>> {
        let mut done = vec![0; self.frames.len()];
        let mut launches = Vec::new();
        while done.iter().zip(&self.frames).any(|(done, frames)| done < frames) {
            let mut cuts = Vec::new();
            let some = 1 + random.below(self.frames.len());
            for stream in random.choose(some, self.frames.len()) {
                let left = self.frames[stream] - done[stream];
                let frames = random.below(widest + 1).min(left);
                cuts.push(Cut {
                    stream,
                    first: done[stream],
                    frames,
                });
                done[stream] += frames;
            }
            if cuts.iter().any(|cut| cut.frames > 0) {
                launches.push(cuts);
            }
        }
        launches
    }
}

impl Slot {
    /// What the operand holds after a run.
    pub(crate) fn of(self, outcome: &Outcome) -> &Data {
        self.get(outcome).expect("outputs are fetched")
    }
}
