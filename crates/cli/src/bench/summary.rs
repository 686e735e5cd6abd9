//! From what callers heard to the figures of a run.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use laneway_proto::v1;
use serde::Serialize;

use super::caller::{Chunk, Ended, Heard};
use super::roofline::{Figures, Limit, Size, figures};
use super::steps::Steps;

/// Context that limits are compared at.
const FIXED_CONTEXT: f64 = 200.0;

/// How requests came.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(tag = "loop", rename_all = "snake_case")]
pub(super) enum Arrivals {
    /// Each caller sends its next request when its last one has ended.
    Closed { concurrency: usize },
    /// A seeded Poisson process.
    Open { requests_per_s: f64 },
}

/// One concurrency or rate.
#[derive(Debug, Serialize)]
pub(super) struct Run {
    #[serde(flatten)]
    arrivals: Arrivals,
    window_s: f64,
    /// Streams that started in the window.
    started: usize,
    finished: usize,
    /// Of streams that started in the window, by what they say.
    pub(super) failures: BTreeMap<String, usize>,
    /// Streams that ran into their frame cap instead of an end token; forced lengths are no runaways.
    runaways: usize,
    audio_s: f64,
    pub(super) audio_s_per_s: f64,
    /// Wall seconds for a second of audio, over all callers.
    real_time_factor: f64,
    /// The same inside one stream.
    stream_real_time_factor: Percentiles,
    /// From the request to the first byte of audio.
    ttfa_ms: Percentiles,
    /// From the request to the first chunk with a sample above −40 dBFS.
    ttfa_audible_ms: Percentiles,
    /// From one chunk of a stream to its next.
    itl_ms: Percentiles,
    /// Longest that a listener who plays from the first byte on would wait, per stream.
    underrun_ms: Percentiles,
    /// Share of streams whose listener would never wait 50 ms.
    gap_free_at_50_ms: f64,
    /// Positions that a frame attended over, mean over all frames.
    pub(super) mean_context: Option<f64>,
    /// Streams in flight, mean over the window.
    mean_in_flight: f64,
    steps: Option<Steps>,
    /// Of one H200, at a context of 200 and at the mean context.
    limits: Vec<Limit>,
    figures: Option<Figures>,
}

#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(super) struct Percentiles {
    p50: Option<f64>,
    p95: Option<f64>,
    p99: Option<f64>,
}

/// What a run is compared with.
#[derive(Debug, Clone, Copy)]
pub(super) struct Yardstick {
    /// The size that is served, when it is one whose limit is known.
    pub(super) size: Option<Size>,
    /// It runs on the GPU that limits are for.
    pub(super) on_h200: bool,
    /// Lengths are forced.
    pub(super) forced: bool,
}

impl Run {
    pub(super) fn of(
        arrivals: Arrivals,
        window: (Instant, Instant),
        heard: &[Heard],
        steps: Option<Steps>,
        yardstick: Yardstick,
    ) -> Run {
        let (from, to) = window;
        let window_s = (to - from).as_secs_f64();
        let inside = |at: Instant| (from..to).contains(&at);
        // Audio counts when it comes in the window, whenever its stream started.
        let chunks = heard.iter().flat_map(|heard| &heard.chunks);
        let audio_s: f64 = chunks
            .filter(|chunk| inside(chunk.at))
            .map(|chunk| chunk.seconds)
            .sum();
        // A stream belongs to the window that it started in.
        let streams: Vec<&Heard> = heard.iter().filter(|heard| inside(heard.sent)).collect();
        let ms = |duration: Duration| duration.as_secs_f64() * 1e3;
        let since_sent = |heard: &&Heard, wanted: fn(&Chunk) -> bool| {
            let chunk = heard.chunks.iter().find(|chunk| wanted(chunk))?;
            Some(ms(chunk.at - heard.sent))
        };
        let first = |wanted: fn(&Chunk) -> bool| {
            Percentiles::of(
                streams
                    .iter()
                    .filter_map(|heard| since_sent(heard, wanted))
                    .collect(),
            )
        };
        let stream_rtf = |heard: &&Heard| {
            let seconds: f64 = heard.chunks.iter().map(|chunk| chunk.seconds).sum();
            (seconds > 0.0).then(|| (heard.ended - heard.sent).as_secs_f64() / seconds)
        };
        let gaps = streams.iter().flat_map(|heard| {
            let pairs = heard.chunks.windows(2);
            pairs.map(|pair| ms(pair[1].at - pair[0].at))
        });
        let underruns: Vec<f64> = streams
            .iter()
            .filter(|heard| !heard.chunks.is_empty())
            .map(|heard| ms(underrun(&heard.chunks)))
            .collect();
        let smooth = underruns.iter().filter(|underrun| **underrun <= 50.0).count();
        let ended: Vec<&Ended> = streams
            .iter()
            .filter_map(|heard| heard.outcome.as_ref().ok())
            .collect();
        let mut failures = BTreeMap::new();
        for failure in streams.iter().filter_map(|heard| heard.outcome.as_ref().err()) {
            *failures.entry(failure.clone()).or_default() += 1;
        }
        let at_cap = ended
            .iter()
            .filter(|ended| ended.reason == v1::FinishReason::Length)
            .count();
        let audio_s_per_s = audio_s / window_s;
        let mean_context = mean_context(&ended);
        let reached = yardstick.on_h200.then_some(audio_s_per_s);
        let (limits, figures) = match (arrivals, yardstick.size) {
            (Arrivals::Closed { concurrency }, Some(size)) => (
                [Some(FIXED_CONTEXT), mean_context]
                    .into_iter()
                    .flatten()
                    .map(|context| size.limit(concurrency, context, reached))
                    .collect(),
                Some(figures(size, concurrency)),
            ),
            _ => (Vec::new(), None),
        };
        Run {
            arrivals,
            window_s,
            started: streams.len(),
            finished: ended.len(),
            failures,
            runaways: if yardstick.forced { 0 } else { at_cap },
            audio_s,
            audio_s_per_s,
            real_time_factor: 1.0 / audio_s_per_s,
            stream_real_time_factor: Percentiles::of(streams.iter().filter_map(stream_rtf).collect()),
            ttfa_ms: first(|_| true),
            ttfa_audible_ms: first(|chunk| chunk.audible),
            itl_ms: Percentiles::of(gaps.collect()),
            gap_free_at_50_ms: smooth as f64 / underruns.len().max(1) as f64,
            underrun_ms: Percentiles::of(underruns),
            mean_context,
            mean_in_flight: in_flight(window, heard),
            steps,
            limits,
            figures,
        }
    }
}

/// Frame f of a stream attends over its prompt, the frames before it and itself.
fn mean_context(ended: &[&Ended]) -> Option<f64> {
    let frames: f64 = ended.iter().map(|ended| f64::from(ended.frames)).sum();
    let attended = |ended: &&Ended| {
        let n = f64::from(ended.frames);
        n * f64::from(ended.prompt_positions) + n * (n - 1.0) / 2.0
    };
    (frames > 0.0).then(|| ended.iter().map(attended).sum::<f64>() / frames)
}

/// Mean number of streams between their request and their end.
fn in_flight((from, to): (Instant, Instant), heard: &[Heard]) -> f64 {
    let overlap = |heard: &Heard| {
        let (start, end) = (heard.sent.max(from), heard.ended.min(to));
        end.saturating_duration_since(start).as_secs_f64()
    };
    heard.iter().map(overlap).sum::<f64>() / (to - from).as_secs_f64()
}

/// The play clock starts at the first byte: the most that a chunk came too late.
fn underrun(chunks: &[Chunk]) -> Duration {
    let Some(first) = chunks.first() else {
        return Duration::ZERO;
    };
    let mut sent_before = 0.0;
    let mut worst = Duration::ZERO;
    for chunk in chunks {
        worst = worst.max((chunk.at - first.at).saturating_sub(Duration::from_secs_f64(sent_before)));
        sent_before += chunk.seconds;
    }
    worst
}

impl Percentiles {
    /// By nearest rank.
    pub(super) fn of(mut values: Vec<f64>) -> Self {
        values.sort_by(f64::total_cmp);
        let at = |percent: usize| {
            values
                .get((values.len() * percent).div_ceil(100).saturating_sub(1))
                .copied()
        };
        Percentiles {
            p50: at(50),
            p95: at(95),
            p99: at(99),
        }
    }
}

/// Whether the same request gave the same bytes whenever it was sent.
#[derive(Debug, Default, PartialEq, Serialize)]
pub(crate) struct Determinism {
    /// Streams that repeated an earlier one of this measurement.
    repeated: usize,
    /// Of these, with other bytes than the first time.
    pub(crate) differing: usize,
    #[serde(skip)]
    first: BTreeMap<usize, u64>,
}

impl Determinism {
    pub(super) fn add(&mut self, heard: &[Heard]) {
        for heard in heard {
            if let Ok(ended) = &heard.outcome {
                self.note(heard.line, ended.hash);
            }
        }
    }

    /// A sentence ended with these bytes.
    pub(crate) fn note(&mut self, line: usize, hash: u64) {
        match self.first.get(&line) {
            None => {
                self.first.insert(line, hash);
            }
            Some(first) => {
                self.repeated += 1;
                self.differing += usize::from(*first != hash);
            }
        }
    }

    pub(crate) fn repeated(&self) -> usize {
        self.repeated
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NO_YARDSTICK: Yardstick = Yardstick {
        size: None,
        on_h200: false,
        forced: false,
    };

    fn chunks(began: Instant, chunks: &[(u64, f64)]) -> Vec<Chunk> {
        chunks
            .iter()
            .enumerate()
            .map(|(i, (ms, seconds))| Chunk {
                at: began + Duration::from_millis(*ms),
                seconds: *seconds,
                audible: i > 0,
            })
            .collect()
    }

    fn ended(reason: v1::FinishReason, frames: u32) -> Result<Ended, String> {
        Ok(Ended {
            reason,
            frames,
            prompt_positions: 20,
            hash: 1,
        })
    }

    #[test]
    fn percentiles_are_values_that_were_measured() {
        let all = Percentiles::of((1..=100).rev().map(f64::from).collect());
        assert_eq!((all.p50, all.p95, all.p99), (Some(50.0), Some(95.0), Some(99.0)));
        assert_eq!(Percentiles::of(vec![7.0]).p99, Some(7.0));
        assert_eq!(Percentiles::of(vec![]).p50, None);
    }

    #[test]
    fn an_underrun_is_the_longest_silence_of_the_play_clock() {
        // 0.1 s of audio at 0 and at 50 ms: the clock has audio until 200 ms; the next chunk comes at 260 ms.
        let late = chunks(Instant::now(), &[(0, 0.1), (50, 0.1), (260, 0.5), (300, 0.1)]);
        assert_eq!(underrun(&late), Duration::from_millis(60));
        assert_eq!(underrun(&late[..2]), Duration::ZERO);
        assert_eq!(underrun(&[]), Duration::ZERO);
    }

    #[test]
    fn audio_counts_in_the_window_it_comes_in_and_a_stream_where_it_starts() {
        let began = Instant::now();
        let at = |ms| began + Duration::from_millis(ms);
        let heard = |sent, audio: &[(u64, f64)], outcome| Heard {
            line: 0,
            sent: at(sent),
            chunks: chunks(began, audio),
            outcome,
            ended: at(audio.last().map_or(sent, |(ms, _)| *ms)),
        };
        let all = [
            heard(0, &[(900, 1.0), (1100, 2.0)], ended(v1::FinishReason::Stop, 10)),
            heard(
                1200,
                &[(1300, 4.0), (3100, 8.0)],
                ended(v1::FinishReason::Length, 11),
            ),
            heard(1500, &[], Err("overloaded".into())),
            heard(1600, &[], Err("overloaded".into())),
        ];
        let arrivals = Arrivals::Closed { concurrency: 2 };
        let run = |yardstick| Run::of(arrivals, (at(1000), at(3000)), &all, None, yardstick);
        let plain = run(NO_YARDSTICK);
        assert_eq!((plain.audio_s, plain.audio_s_per_s), (6.0, 3.0));
        assert_eq!((plain.started, plain.finished, plain.runaways), (3, 1, 1));
        assert_eq!(plain.failures, [("overloaded".to_owned(), 2)].into());
        assert_eq!(plain.ttfa_ms.p50, Some(100.0));
        assert_eq!(plain.ttfa_audible_ms.p50, Some(1900.0));
        assert_eq!(plain.itl_ms.p99, Some(1800.0));
        // 11 frames behind 20 positions attend over 20 to 30.
        assert_eq!(plain.mean_context, Some(25.0));
        // 100 ms of the first stream and 1800 ms of the second.
        assert!((plain.mean_in_flight - 0.95).abs() < 1e-9);
        assert!(plain.limits.is_empty() && plain.figures.is_none());

        let measured = run(Yardstick {
            size: Some(Size::B1_7),
            on_h200: true,
            forced: true,
        });
        assert_eq!(measured.runaways, 0, "a forced length is none");
        let [fixed, mean] = &measured.limits[..] else {
            panic!("{:?}", measured.limits)
        };
        assert_eq!((fixed.context, mean.context, mean.rows), (200.0, 25.0, 2));
        assert_eq!(mean.fraction, Some(3.0 / mean.audio_s_per_s));
    }

    #[test]
    fn the_same_request_is_held_to_its_first_bytes() {
        let stream = |line, hash| Heard {
            line,
            sent: Instant::now(),
            chunks: Vec::new(),
            outcome: ended(v1::FinishReason::Stop, 1).map(|ended| Ended { hash, ..ended }),
            ended: Instant::now(),
        };
        let mut determinism = Determinism::default();
        determinism.add(&[stream(0, 5), stream(1, 6)]);
        determinism.add(&[stream(1, 6), stream(0, 7), stream(2, 7)]);
        assert_eq!((determinism.repeated, determinism.differing), (2, 1));
    }
}
