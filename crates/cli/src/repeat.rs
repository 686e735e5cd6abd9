//! `laneway repeat`: whether the same request always has the same sound.
//!
//! Each of a few requests is spoken alone; then callers repeat them, of other lengths and in company that changes all the
//! time, and every sample is compared. Where a stream differs tells where to look: frames of the Talker depend on all
//! frames before, so a difference there lasts to the end of the stream; what the codec carries fades after a while.

use std::fmt;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use clap::Args;
use laneway_device::Priority;
use laneway_engine::{Engine, EngineHandle, OutputEvent, Submission};
use laneway_models::qwen3_tts::Qwen3Tts;
use laneway_models::qwen3_tts::request::SpeechInput;

use crate::alone::{Alone, Chosen, CodecLane};

/// What is spoken, each with a seed of its own.
const TEXTS: [&str; 4] = [
    "The evening train was late again, so we walked home along the quiet river.",
    "No.",
    "A kettle, two cups, and the letter that nobody had opened since the spring.",
    "Please wait here until the second bell, and then follow the blue line to the gate.",
];
/// Samples that are the same between two runs of different ones.
const GAP: usize = 64;
/// Runs of a difference that are told.
const MOST_RUNS: usize = 6;
/// Differences that are told one by one.
const MOST_TOLD: usize = 12;

/// Flags of `repeat`.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    chosen: Chosen,
    /// Requests at once; several values are run one behind the other.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 2, 4, 8, 16, 32, 64])]
    rows: Vec<usize>,
    /// Longest request, in frames; each has from a quarter of that.
    #[arg(long, default_value_t = 60)]
    frames: u32,
    /// Seconds of each number of rows.
    #[arg(long, default_value_t = 10)]
    seconds: u64,
    /// Engines that do this at once on the device, in each other's way.
    #[arg(long, default_value_t = 1)]
    engines: usize,
    /// The codec on a lane of its own.
    #[arg(long)]
    codec_lane: bool,
}

/// A stream that was not as it was alone.
struct Difference {
    text: usize,
    rows: usize,
    frames: u32,
    first: usize,
    last: usize,
    differing: usize,
    samples_per_frame: usize,
    largest: f32,
    /// Where samples differ: from, to, how many. Gaps of less than [`GAP`] are left out.
    runs: Vec<(usize, usize, usize)>,
    /// The windows that these lie in, by frames: first, how many.
    windows: Vec<(u32, u32)>,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let per = self.samples_per_frame.max(1);
        write!(
            f,
            "text {} in company of {}: frames {} to {} of {} differ, {} samples from {} on, by up to {:e}",
            self.text,
            self.rows,
            self.first / per,
            self.last / per,
            self.frames,
            self.differing,
            self.first,
            self.largest
        )?;
        for (from, to, differing) in self.runs.iter().take(MOST_RUNS) {
            let frame = (from / per) as u32;
            let window = self.windows.iter().rev().find(|window| window.0 <= frame);
            let (first, n) = window.copied().unwrap_or_default();
            let within = from - first as usize * per;
            write!(
                f,
                "\n    {differing} samples of {from} to {to}, from sample {within} of the window of {n} frames from frame {first}"
            )?;
        }
        Ok(())
    }
}

/// Numbers for the callers' choices; what they choose need not be good, only different.
struct Choices(u64);

impl Choices {
    fn below(&mut self, most: u64) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % most.max(1)
    }
}

/// Samples, and the windows that they came in, by frames: first, how many.
type Spoken = (Vec<f32>, Vec<(u32, u32)>);

struct Speaker {
    handle: EngineHandle,
    model: Arc<Qwen3Tts>,
    next: AtomicUsize,
}

impl Speaker {
    fn speak(&self, text: usize, frames: u32) -> anyhow::Result<Spoken> {
        let input = SpeechInput {
            text: TEXTS[text].to_owned(),
            voice: self.model.requests().voices().next().map(str::to_owned),
            seed: text as u64,
            max_frames: Some(frames),
            min_frames: Some(frames),
            ..SpeechInput::default()
        };
        let request = self
            .model
            .requests()
            .build(&input)
            .map_err(|error| anyhow::anyhow!("build a request: {}", error.message))?;
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let mut stream = self
            .handle
            .submit(Submission {
                id: format!("repeat-{id}"),
                payload: Arc::new(request),
                chunk: None,
                deadline: None,
                results: Vec::new(),
            })
            .context("submit a request")?;
        let (mut sound, mut windows) = (Vec::new(), Vec::new());
        while let Some(event) = stream.blocking_recv() {
            match event {
                OutputEvent::Samples {
                    samples,
                    first_item,
                    n_items,
                } => {
                    sound.extend_from_slice(&samples);
                    windows.push((first_item, n_items));
                }
                OutputEvent::Failed(failure) => anyhow::bail!("a request failed: {failure:?}"),
                _ => {}
            }
        }
        Ok((sound, windows))
    }
}

/// What callers found.
#[derive(Default)]
struct Found {
    streams: usize,
    frames: usize,
    differences: Vec<Difference>,
}

pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let (device, model) = arguments.chosen.open()?;
    let most_rows = arguments.rows.iter().copied().max().unwrap_or(1);
    let mut engines: Vec<(Engine, Speaker)> = Vec::new();
    for _ in 0..arguments.engines.max(1) {
        let alone = Alone {
            rows: most_rows,
            frames: arguments.frames,
            codec_lane: arguments.codec_lane.then_some(CodecLane {
                priority: Priority::High,
                sms: None,
            }),
            buckets: (0..)
                .map(|power| 1 << power)
                .take_while(|&rows| rows < most_rows)
                .chain([most_rows])
                .collect(),
        };
        let (engine, handle) = alone.start(device.clone(), &model)?;
        let next = AtomicUsize::new(0);
        engines.push((
            engine,
            Speaker {
                handle,
                model: model.clone(),
                next,
            },
        ));
    }
    let (_, first) = engines.first().context("no engine")?;
    let alone: Vec<Vec<f32>> = (0..TEXTS.len())
        .map(|text| Ok(first.speak(text, arguments.frames)?.0))
        .collect::<anyhow::Result<_>>()?;
    let mut differ = 0;
    for &rows in &arguments.rows {
        let until = Instant::now() + Duration::from_secs(arguments.seconds);
        let found = repeat(arguments, &engines, &alone, rows, until)?;
        println!(
            "{rows} rows, {} engines: {} streams of {} frames, {} differ",
            engines.len(),
            found.streams,
            found.frames,
            found.differences.len()
        );
        for difference in found.differences.iter().take(MOST_TOLD) {
            println!("  {difference}");
        }
        differ += found.differences.len();
    }
    Ok(if differ == 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

fn repeat(
    arguments: &Arguments,
    engines: &[(Engine, Speaker)],
    alone: &[Vec<f32>],
    rows: usize,
    until: Instant,
) -> anyhow::Result<Found> {
    std::thread::scope(|scope| {
        let mut callers = Vec::new();
        for (e, (_, speaker)) in engines.iter().enumerate() {
            for row in 0..rows {
                let mut choices = Choices(((e * rows + row) as u64) << 20 | rows as u64);
                callers.push(scope.spawn(move || -> anyhow::Result<Found> {
                    let mut found = Found::default();
                    while Instant::now() < until {
                        let text = choices.below(TEXTS.len() as u64) as usize;
                        let least = arguments.frames.div_ceil(4);
                        let more = choices.below(u64::from(arguments.frames - least) + 1) as u32;
                        let frames = least + more;
                        let (sound, windows) = speaker.speak(text, frames)?;
                        found.streams += 1;
                        found.frames += frames as usize;
                        let difference = compare(&sound, &alone[text], (text, rows, frames));
                        found
                            .differences
                            .extend(difference.map(|found| Difference { windows, ..found }));
                    }
                    Ok(found)
                }));
            }
        }
        let mut all = Found::default();
        for caller in callers {
            let found = caller
                .join()
                .map_err(|_| anyhow::anyhow!("a caller panicked"))??;
            all.streams += found.streams;
            all.frames += found.frames;
            all.differences.extend(found.differences);
        }
        Ok(all)
    })
}

/// `sound` has to be how `alone` begins.
fn compare(sound: &[f32], alone: &[f32], (text, rows, frames): (usize, usize, u32)) -> Option<Difference> {
    let differs = |(a, b): (&f32, &f32)| a.to_bits() != b.to_bits();
    let first = sound.iter().zip(alone).position(differs);
    let missing = sound.len() > alone.len() || sound.is_empty();
    if first.is_none() && !missing {
        return None;
    }
    let last = sound.iter().zip(alone).rposition(differs);
    Some(Difference {
        text,
        rows,
        frames,
        first: first.unwrap_or(alone.len()),
        last: last.unwrap_or(sound.len()),
        differing: sound.iter().zip(alone).filter(|pair| differs(*pair)).count(),
        samples_per_frame: sound.len() / frames.max(1) as usize,
        runs: runs(sound, alone),
        windows: Vec::new(),
        largest: sound
            .iter()
            .zip(alone)
            .map(|(a, b)| (a - b).abs())
            .fold(0.0, f32::max),
    })
}

/// See [`Difference::runs`].
fn runs(sound: &[f32], alone: &[f32]) -> Vec<(usize, usize, usize)> {
    let mut runs: Vec<(usize, usize, usize)> = Vec::new();
    let pairs = sound.iter().zip(alone).enumerate();
    for (i, _) in pairs.filter(|(_, (a, b))| a.to_bits() != b.to_bits()) {
        match runs.last_mut() {
            Some((_, to, n)) if i < *to + GAP => (*to, *n) = (i + 1, *n + 1),
            _ => runs.push((i, i + 1, 1)),
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_has_to_be_how_the_same_one_begins_alone() {
        let alone = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0];
        for (sound, expected) in [
            (&[0.0, 1.0, 2.0, 3.0][..], None),
            (&[0.0, 1.0, 2.5, 3.0], Some((2, 2, 1))),
            (&[0.0, -1.0, 2.0, 3.5], Some((1, 3, 2))),
            (&[-0.0, 1.0], Some((0, 0, 1))),
            (&[], Some((6, 0, 0))),
            (&[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0], Some((6, 7, 0))),
        ] {
            let found = compare(sound, &alone, (0, 1, 2));
            let seen = found
                .as_ref()
                .map(|found| (found.first, found.last, found.differing));
            assert_eq!(seen, expected, "{sound:?}");
        }
    }
}
