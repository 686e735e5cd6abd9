//! `laneway bench`: closed loop through the gateway, as JSON.
//!
//! At each concurrency c, c callers send the project's sentences one behind the other. Audio counts when it
//! arrives inside the measured window; what was in flight before it (the warm-up) is left out.

mod machine;

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use clap::Args;
use laneway_proto::v1;
use laneway_proto::v1::synthesize_response::Event;
use serde::Serialize;

use crate::client::{self, Connection, GatewayArguments};
use crate::say::{VoiceArguments, only_voice};

/// Original English sentences of 20 to 180 characters, one a line.
const SENTENCES: &str = include_str!("../../../benches/sentences.txt");

/// Flags of `bench`.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Callers at once; several values are measured one behind the other.
    #[arg(long, value_delimiter = ',', default_value = "1")]
    concurrency: Vec<usize>,
    /// Seconds of each measured window.
    #[arg(long, default_value_t = 20.0)]
    seconds: f64,
    /// Seconds of load before each window.
    #[arg(long, default_value_t = 3.0)]
    warm_up_s: f64,
    /// Write the JSON here too.
    #[arg(long)]
    output: Option<PathBuf>,
    #[command(flatten)]
    voice: VoiceArguments,
    #[command(flatten)]
    gateway: GatewayArguments,
}

#[derive(Debug, Serialize)]
struct Report {
    version: &'static str,
    debug_build: bool,
    machine: machine::Machine,
    runs: Vec<Run>,
}

/// One concurrency.
#[derive(Debug, Serialize)]
struct Run {
    concurrency: usize,
    window_s: f64,
    finished: usize,
    failures: Vec<String>,
    runaways: usize,
    audio_s: f64,
    audio_s_per_s: f64,
    /// Wall seconds for a second of audio, over all callers.
    real_time_factor: f64,
    /// The same inside one stream, median.
    stream_real_time_factor_p50: Option<f64>,
    ttfa_ms: Percentiles,
    /// Longest that a listener who plays from the first byte on would wait, per stream.
    underrun_ms: Percentiles,
}

#[derive(Debug, Serialize)]
struct Percentiles {
    p50: Option<f64>,
    p95: Option<f64>,
    p99: Option<f64>,
}

pub(crate) async fn run(arguments: Arguments) -> anyhow::Result<ExitCode> {
    let connection = Arc::new(arguments.gateway.connect().await?);
    let voice = match arguments.voice.voice.clone() {
        Some(voice) => voice,
        None => only_voice(&connection).await?,
    };
    let mut runs = Vec::new();
    for concurrency in arguments.concurrency {
        let load = Load {
            connection: connection.clone(),
            arguments: arguments.voice.clone(),
            voice: voice.clone(),
        };
        eprintln!("measuring {concurrency} at once");
        runs.push(
            load.measure(concurrency, arguments.warm_up_s, arguments.seconds)
                .await?,
        );
    }
    let failed = runs.iter().any(|run| !run.failures.is_empty());
    let report = Report {
        version: env!("CARGO_PKG_VERSION"),
        debug_build: cfg!(debug_assertions),
        machine: machine::Machine::read(),
        runs,
    };
    let json = serde_json::to_string_pretty(&report).context("write the report")?;
    println!("{json}");
    if let Some(path) = arguments.output {
        std::fs::write(&path, json + "\n").with_context(|| format!("write {}", path.display()))?;
    }
    let connection = Arc::into_inner(connection).context("end the callers")?;
    connection.end().await?;
    Ok(if failed {
        ExitCode::FAILURE
    } else {
        ExitCode::SUCCESS
    })
}

/// What every caller shares.
#[derive(Clone)]
struct Load {
    connection: Arc<Connection>,
    arguments: VoiceArguments,
    voice: String,
}

/// One stream as its caller heard it.
#[derive(Debug)]
struct Heard {
    sent: Instant,
    /// When each chunk came, and its seconds of audio.
    chunks: Vec<(Instant, f64)>,
    outcome: Result<v1::FinishReason, String>,
    ended: Instant,
}

impl Load {
    async fn measure(self, concurrency: usize, warm_up_s: f64, seconds: f64) -> anyhow::Result<Run> {
        let from = Instant::now() + Duration::from_secs_f64(warm_up_s);
        let to = from + Duration::from_secs_f64(seconds);
        let next_sentence = Arc::new(AtomicUsize::new(0));
        let callers =
            (0..concurrency).map(|_| tokio::spawn(self.clone().call_until(to, next_sentence.clone())));
        let mut heard = Vec::new();
        for caller in callers.collect::<Vec<_>>() {
            heard.extend(caller.await.context("run a caller")?);
        }
        Ok(Run::of(concurrency, from, to, &heard))
    }

    async fn call_until(self, end: Instant, next_sentence: Arc<AtomicUsize>) -> Vec<Heard> {
        let sentences: Vec<&str> = SENTENCES.lines().collect();
        let mut heard = Vec::new();
        while Instant::now() < end {
            let index = next_sentence.fetch_add(1, Ordering::Relaxed);
            let mut request = self
                .arguments
                .request(sentences[index % sentences.len()], &self.voice);
            request.seed = Some(self.arguments.seed.unwrap_or(0).wrapping_add(index as u64));
            heard.push(self.listen(request).await);
        }
        heard
    }

    async fn listen(&self, request: v1::SynthesizeRequest) -> Heard {
        let sent = Instant::now();
        let mut chunks = Vec::new();
        let outcome = self
            .chunks(request, &mut chunks)
            .await
            .map_err(|error| format!("{error:#}"));
        Heard {
            sent,
            chunks,
            outcome,
            ended: Instant::now(),
        }
    }

    async fn chunks(
        &self,
        request: v1::SynthesizeRequest,
        chunks: &mut Vec<(Instant, f64)>,
    ) -> anyhow::Result<v1::FinishReason> {
        let response = self
            .connection
            .speech()
            .synthesize(request)
            .await
            .map_err(|s| client::explain(&s))?;
        let mut events = response.into_inner();
        let mut sample_rate = 0;
        while let Some(message) = events
            .message()
            .await
            .map_err(|status| client::explain(&status))?
        {
            match message.event.context("read an empty message")? {
                Event::Accepted(accepted) => sample_rate = accepted.sample_rate,
                Event::Chunk(chunk) => {
                    chunks.push((
                        Instant::now(),
                        chunk.audio.len() as f64 / 2.0 / f64::from(sample_rate),
                    ));
                }
                Event::Finished(finished) => return Ok(finished.reason()),
            }
        }
        anyhow::bail!("the stream ended early")
    }
}

impl Run {
    fn of(concurrency: usize, from: Instant, to: Instant, heard: &[Heard]) -> Run {
        let window_s = (to - from).as_secs_f64();
        let inside = |at: &Instant| (from..to).contains(at);
        let chunks = heard.iter().flat_map(|heard| &heard.chunks);
        let audio_s: f64 = chunks
            .filter(|(at, _)| inside(at))
            .map(|(_, seconds)| seconds)
            .sum();
        // A stream belongs to the window that it started in.
        let streams: Vec<&Heard> = heard.iter().filter(|heard| inside(&heard.sent)).collect();
        let ms = |duration: Duration| duration.as_secs_f64() * 1e3;
        let first = |heard: &&Heard| heard.chunks.first().map(|(at, _)| ms(*at - heard.sent));
        let stream_rtf = |heard: &&Heard| {
            let seconds: f64 = heard.chunks.iter().map(|(_, seconds)| seconds).sum();
            (seconds > 0.0).then(|| (heard.ended - heard.sent).as_secs_f64() / seconds)
        };
        let reason = |wanted| streams.iter().filter(|heard| heard.outcome == Ok(wanted)).count();
        let failures = streams
            .iter()
            .filter_map(|heard| heard.outcome.clone().err())
            .collect();
        let audio_s_per_s = audio_s / window_s;
        Run {
            concurrency,
            window_s,
            finished: streams.iter().filter(|heard| heard.outcome.is_ok()).count(),
            failures,
            runaways: reason(v1::FinishReason::Length),
            audio_s,
            audio_s_per_s,
            real_time_factor: 1.0 / audio_s_per_s,
            stream_real_time_factor_p50: Percentiles::of(streams.iter().filter_map(stream_rtf).collect()).p50,
            ttfa_ms: Percentiles::of(streams.iter().filter_map(first).collect()),
            underrun_ms: Percentiles::of(streams.iter().map(|heard| ms(underrun(&heard.chunks))).collect()),
        }
    }
}

/// The play clock starts at the first byte: the most that a chunk came too late.
fn underrun(chunks: &[(Instant, f64)]) -> Duration {
    let Some((first, _)) = chunks.first() else {
        return Duration::ZERO;
    };
    let mut sent_before = 0.0;
    let mut worst = Duration::ZERO;
    for (at, seconds) in chunks {
        worst = worst.max((*at - *first).saturating_sub(Duration::from_secs_f64(sent_before)));
        sent_before += seconds;
    }
    worst
}

impl Percentiles {
    /// By nearest rank.
    fn of(mut values: Vec<f64>) -> Self {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_values_that_were_measured() {
        let all = Percentiles::of((1..=100).rev().map(f64::from).collect());
        assert_eq!((all.p50, all.p95, all.p99), (Some(50.0), Some(95.0), Some(99.0)));
        assert_eq!(Percentiles::of(vec![7.0]).p99, Some(7.0));
        assert_eq!(Percentiles::of(vec![]).p50, None);
    }

    #[test]
    fn an_underrun_is_the_longest_silence_of_the_play_clock() {
        let began = Instant::now();
        let at = |ms| began + Duration::from_millis(ms);
        // 0.1 s of audio at 0 and at 50 ms: the clock has audio until 200 ms; the next chunk comes at 260 ms.
        let late = [(at(0), 0.1), (at(50), 0.1), (at(260), 0.5), (at(300), 0.1)];
        assert_eq!(underrun(&late), Duration::from_millis(60));
        assert_eq!(underrun(&late[..2]), Duration::ZERO);
        assert_eq!(underrun(&[]), Duration::ZERO);
    }

    #[test]
    fn audio_counts_in_the_window_it_comes_in_and_a_stream_where_it_starts() {
        let began = Instant::now();
        let at = |ms| began + Duration::from_millis(ms);
        let heard = |sent, chunks: &[(u64, f64)], outcome| Heard {
            sent: at(sent),
            chunks: chunks.iter().map(|(ms, seconds)| (at(*ms), *seconds)).collect(),
            outcome,
            ended: at(chunks.last().map_or(sent, |(ms, _)| *ms)),
        };
        let all = [
            heard(0, &[(900, 1.0), (1100, 2.0)], Ok(v1::FinishReason::Stop)),
            heard(1200, &[(1300, 4.0), (3100, 8.0)], Ok(v1::FinishReason::Length)),
            heard(1500, &[], Err("overloaded".into())),
        ];
        let run = Run::of(2, at(1000), at(3000), &all);
        assert_eq!((run.audio_s, run.audio_s_per_s), (6.0, 3.0));
        assert_eq!((run.finished, run.runaways, run.failures.len()), (1, 1, 1));
        assert_eq!(run.ttfa_ms.p50, Some(100.0));
    }
}
