//! What the callers of a measurement say, and for how long.

use rand::rngs::StdRng;
use rand::seq::SliceRandom as _;
use rand::{Rng as _, SeedableRng as _};
use serde::Serialize;

/// Original English sentences of 20 to 180 characters, one a line.
const SENTENCES: &str = include_str!("../../../../benches/sentences.txt");

/// English read aloud.
const CHARS_PER_SECOND: f64 = 15.0;
const FRAMES_PER_SECOND: f64 = 12.5;
/// A reading is up to this share shorter or longer than its length says.
const JITTER: f64 = 0.15;

/// One thing to say. Everything of it follows from its place in the list, so that saying it again must give the
/// same bytes, whoever else speaks.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Line {
    /// Place in the list.
    pub(crate) index: usize,
    pub(crate) text: &'static str,
    /// Added to the seed of the whole measurement.
    pub(crate) seed: u64,
    /// Frames to make when lengths are forced.
    pub(crate) frames: u32,
}

/// How long the utterances are, for the report.
#[derive(Debug, Serialize)]
pub(crate) struct Workload {
    pub(crate) sentences: usize,
    pub(crate) mean_chars: f64,
    /// Where lengths come from.
    pub(crate) lengths: &'static str,
    /// Of the whole list, when lengths are forced.
    pub(crate) mean_forced_frames: Option<f64>,
}

/// The list, with the lengths that this seed draws.
pub(crate) fn lines(seed: u64) -> Vec<Line> {
    let mut random = StdRng::seed_from_u64(seed);
    SENTENCES
        .lines()
        .enumerate()
        .map(|(index, text)| {
            let seconds = text.chars().count() as f64 / CHARS_PER_SECOND;
            let jitter = random.random_range(1.0 - JITTER..1.0 + JITTER);
            Line {
                index,
                text,
                seed: seed.wrapping_add(index as u64),
                frames: (seconds * FRAMES_PER_SECOND * jitter).round().max(1.0) as u32,
            }
        })
        .collect()
}

/// The order in which a run goes through the list, again and again.
pub(crate) fn order(n_lines: usize, seed: u64) -> Vec<usize> {
    let mut order: Vec<usize> = (0..n_lines).collect();
    order.shuffle(&mut StdRng::seed_from_u64(seed));
    order
}

/// Seconds from one arrival to the next of a Poisson process.
pub(crate) fn arrivals(rate: f64, seed: u64) -> impl Iterator<Item = f64> {
    let mut random = StdRng::seed_from_u64(seed);
    std::iter::from_fn(move || {
        let share: f64 = random.random();
        // `share` is below 1, so the logarithm is finite.
        Some(-(1.0 - share).ln() / rate)
    })
}

impl Workload {
    pub(crate) fn of(lines: &[Line], forced: bool) -> Self {
        let mean = |sum: f64| sum / lines.len().max(1) as f64;
        let frames: f64 = lines.iter().map(|line| f64::from(line.frames)).sum();
        let chars: usize = lines.iter().map(|line| line.text.chars().count()).sum();
        Workload {
            sentences: lines.len(),
            mean_chars: mean(chars as f64),
            lengths: match forced {
                true => {
                    "forced: characters / 15 a second * 12.5 frames a second, times a seeded factor from 0.85 to 1.15 \
                     for each sentence; the end token of generated weights means nothing"
                }
                false => "the model's own end token",
            },
            mean_forced_frames: forced.then(|| mean(frames)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_is_what_measurements_say_it_is() {
        let lines = lines(7);
        assert!(lines.len() >= 200);
        let workload = Workload::of(&lines, true);
        assert!(
            (70.0..80.0).contains(&workload.mean_chars),
            "{}",
            workload.mean_chars
        );
        let mut texts: Vec<&str> = lines.iter().map(|line| line.text).collect();
        texts.sort_unstable();
        texts.dedup();
        assert_eq!(texts.len(), lines.len(), "a sentence is there twice");
        for line in &lines {
            let n_chars = line.text.chars().count();
            assert!((20..=180).contains(&n_chars), "{}: {n_chars}", line.text);
        }
    }

    #[test]
    fn lengths_follow_the_text_with_jitter_and_repeat_with_the_seed() {
        let lines = lines(7);
        assert_eq!(lines, super::lines(7));
        assert_ne!(lines, super::lines(8));
        for line in &lines {
            let plain = line.text.chars().count() as f64 / 15.0 * 12.5;
            let factor = f64::from(line.frames) / plain;
            // Rounding moves a length by at most half a frame.
            let slack = 0.5 / plain;
            assert!(
                (0.85 - slack..=1.15 + slack).contains(&factor),
                "{line:?}: {factor}"
            );
        }
        let mean = Workload::of(&lines, true).mean_forced_frames.unwrap();
        let plain = Workload::of(&lines, true).mean_chars / 15.0 * 12.5;
        assert!((mean / plain - 1.0).abs() < 0.03, "{mean} and {plain}");
        assert_eq!(Workload::of(&lines, false).mean_forced_frames, None);
    }

    #[test]
    fn every_order_visits_every_line_once() {
        let order = order(50, 3);
        assert_eq!(order, super::order(50, 3));
        assert_ne!(order, super::order(50, 4));
        let mut sorted = order.clone();
        sorted.sort_unstable();
        assert_eq!(sorted, (0..50).collect::<Vec<_>>());
    }

    #[test]
    fn arrivals_come_at_the_rate_and_without_memory() {
        let gaps: Vec<f64> = arrivals(20.0, 1).take(20_000).collect();
        let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
        assert!((mean * 20.0 - 1.0).abs() < 0.03, "{mean}");
        // Of an exponential distribution the deviation is the mean, and 1/e of all gaps are longer than it.
        let variance = gaps.iter().map(|gap| (gap - mean).powi(2)).sum::<f64>() / gaps.len() as f64;
        assert!((variance.sqrt() / mean - 1.0).abs() < 0.05);
        let longer = gaps.iter().filter(|gap| **gap > 1.0 / 20.0).count() as f64 / gaps.len() as f64;
        assert!((longer - (-1f64).exp()).abs() < 0.02, "{longer}");
        assert!(gaps.iter().all(|gap| gap.is_finite() && *gap >= 0.0));
    }
}
