//! `laneway say`: text in, a WAV file out.

use std::io::{IsTerminal as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use clap::{ArgGroup, Args};
use laneway_audio::{WavLength, wav_header};
use laneway_proto::v1;
use laneway_proto::v1::synthesize_response::Event;

use crate::client::{self, Connection, GatewayArguments};
use crate::stdout::{outln, written};

/// Bytes of a 16-bit sample.
const SAMPLE_BYTES: usize = 2;

/// Flags of `say`.
#[derive(Debug, Args)]
#[command(group(ArgGroup::new("what").required(true).args(["text", "file"])))]
pub(crate) struct Arguments {
    /// What to speak.
    text: Option<String>,
    /// Speak each line of this file into a WAV file of its own.
    #[arg(long)]
    file: Option<PathBuf>,
    /// With TEXT: the WAV file to write.
    #[arg(short, long, conflicts_with = "file")]
    output: Option<PathBuf>,
    /// With --file: the directory to write 000.wav, 001.wav, … into; it is made when it is not there.
    #[arg(long, conflicts_with = "text")]
    output_dir: Option<PathBuf>,
    #[command(flatten)]
    voice: VoiceArguments,
    /// Write the file as the audio comes (its header then names no length) instead of at the end.
    #[arg(long)]
    stream: bool,
    #[command(flatten)]
    gateway: GatewayArguments,
}

/// How to speak.
#[derive(Debug, Clone, Args)]
pub(crate) struct VoiceArguments {
    /// Voice; the model's only one without it.
    #[arg(long)]
    pub(crate) voice: Option<String>,
    /// Language; the model decides without it.
    #[arg(long)]
    language: Option<String>,
    /// How to speak, for models that take it.
    #[arg(long)]
    instruct: Option<String>,
    /// The same seed gives the same bytes; drawn and printed without one.
    #[arg(long)]
    pub(crate) seed: Option<u64>,
    /// Take the likeliest codes instead of drawing them.
    #[arg(long, conflicts_with_all = ["temperature", "top_k", "top_p"])]
    greedy: bool,
    #[arg(long, allow_negative_numbers = true)]
    temperature: Option<f32>,
    #[arg(long, allow_negative_numbers = true)]
    top_k: Option<u32>,
    #[arg(long, allow_negative_numbers = true)]
    top_p: Option<f32>,
    /// Most frames (80 ms each) to make.
    #[arg(long, allow_negative_numbers = true)]
    max_frames: Option<u32>,
}

pub(crate) async fn run(arguments: Arguments) -> anyhow::Result<ExitCode> {
    let jobs = jobs(&arguments)?;
    let began = Instant::now();
    let connection = arguments.gateway.connect().await?;
    let ready = began.elapsed();
    let voice = match arguments.voice.voice.clone() {
        Some(voice) => voice,
        None => only_voice(&connection).await?,
    };
    for (text, path) in &jobs {
        let request = arguments.voice.request(text, &voice);
        let spoken = speak(&connection, request, path, arguments.stream).await?;
        spoken.print(path)?;
    }
    let statuses = connection.worker_statuses().await?;
    if !statuses.is_empty() {
        outln!("ready after {:.2} s; steps by lane:", ready.as_secs_f64())?;
        statuses.iter().try_for_each(print_lanes)?;
    }
    connection.end().await?;
    Ok(ExitCode::SUCCESS)
}

fn jobs(arguments: &Arguments) -> anyhow::Result<Vec<(String, PathBuf)>> {
    match (
        &arguments.text,
        &arguments.output,
        &arguments.file,
        &arguments.output_dir,
    ) {
        (Some(text), Some(output), None, None) => Ok(vec![(text.clone(), output.clone())]),
        (None, None, Some(file), Some(directory)) => {
            let listing =
                std::fs::read_to_string(file).with_context(|| format!("read {}", file.display()))?;
            std::fs::create_dir_all(directory)
                .with_context(|| format!("make the directory {}", directory.display()))?;
            let lines = listing.lines().enumerate();
            Ok(lines
                .map(|(index, line)| (line.to_owned(), directory.join(format!("{index:03}.wav"))))
                .collect())
        }
        (_, _, Some(_), None) => Err(missing(
            "--file needs --output-dir, the directory of its WAV files",
        )),
        _ => Err(missing("TEXT needs --output, the WAV file to write")),
    }
}

/// A flag that another one needs. The parser would list those of the other form in its usage too.
fn missing(message: &str) -> anyhow::Error {
    clap::Error::raw(
        clap::error::ErrorKind::MissingRequiredArgument,
        format!("{message}\n"),
    )
    .into()
}

/// The voice of a model that has one only; none where a model has none.
pub(crate) async fn only_voice(connection: &Connection) -> anyhow::Result<String> {
    let listed = connection
        .speech()
        .list_voices(v1::ListVoicesRequest::default())
        .await;
    let models = listed
        .map_err(|status| client::explain(&status))?
        .into_inner()
        .models;
    let voices: Vec<&str> = models
        .iter()
        .flat_map(|model| &model.voices)
        .map(|voice| voice.name.as_str())
        .collect();
    match voices[..] {
        [] => Ok(String::new()),
        [voice] => Ok(voice.to_owned()),
        _ => anyhow::bail!("choose a --voice: {}", voices.join(", ")),
    }
}

impl VoiceArguments {
    /// The request for one text.
    pub(crate) fn request(&self, text: &str, voice: &str) -> v1::SynthesizeRequest {
        v1::SynthesizeRequest {
            text: text.into(),
            voice: voice.into(),
            language: self.language.clone().unwrap_or_default(),
            instruct: self.instruct.clone().unwrap_or_default(),
            seed: self.seed,
            sampling: Some(v1::SamplingParams {
                temperature: if self.greedy { Some(0.0) } else { self.temperature },
                predictor_temperature: if self.greedy { Some(0.0) } else { self.temperature },
                top_k: self.top_k,
                predictor_top_k: self.top_k,
                top_p: self.top_p,
                predictor_top_p: self.top_p,
                repetition_penalty: None,
                exact_frames: None,
            }),
            max_frames: self.max_frames,
            format: v1::AudioFormat::PcmS16le.into(),
            ..Default::default()
        }
    }
}

/// One finished text.
struct Spoken {
    accepted: v1::Accepted,
    finished: v1::SynthesisFinished,
    first_audio: Duration,
    took: Duration,
}

impl Spoken {
    fn print(&self, path: &Path) -> anyhow::Result<()> {
        outln!(
            "{}: {} frames, {:.2} s of audio ({}), first audio after {:.0} ms, real-time factor {:.3}, seed {}",
            path.display(),
            self.finished.frames,
            self.finished.seconds,
            self.finished.reason().label(),
            self.first_audio.as_secs_f64() * 1e3,
            self.took.as_secs_f64() / self.finished.seconds.max(f64::MIN_POSITIVE),
            self.accepted.seed,
        )
    }
}

async fn speak(
    connection: &Connection,
    request: v1::SynthesizeRequest,
    path: &Path,
    stream: bool,
) -> anyhow::Result<Spoken> {
    let began = Instant::now();
    let response = connection
        .speech()
        .synthesize(request)
        .await
        .map_err(|status| client::explain(&status))?;
    let mut events = response.into_inner();
    let mut file = std::fs::File::create(path).with_context(|| format!("create {}", path.display()))?;
    let mut write = |bytes: &[u8]| written(file.write_all(bytes), path.display());
    let mut accepted = None;
    let mut first_audio = None;
    let mut samples = Vec::new();
    let mut progress = Progress::new();
    loop {
        let message = events
            .message()
            .await
            .map_err(|status| client::explain(&status))?;
        match message
            .context("read the stream: it ended early")?
            .event
            .context("read an empty message")?
        {
            Event::Accepted(event) => {
                if stream {
                    write(&wav_header(
                        event.sample_rate,
                        event.channels as u16,
                        WavLength::Streamed,
                    ))?;
                }
                accepted = Some(event);
            }
            Event::Chunk(chunk) => {
                first_audio.get_or_insert_with(|| began.elapsed());
                progress.add(
                    chunk.audio.len(),
                    accepted.as_ref().map_or(0, |event| event.sample_rate),
                    began,
                );
                match stream {
                    true => write(&chunk.audio)?,
                    false => samples.extend_from_slice(&chunk.audio),
                }
            }
            Event::Finished(finished) => {
                progress.end();
                let accepted = accepted.context("read the stream: it finished before it was accepted")?;
                if !stream {
                    let length = u32::try_from(samples.len()).context("write more than a WAV file holds")?;
                    write(&wav_header(
                        accepted.sample_rate,
                        accepted.channels as u16,
                        WavLength::Whole(length),
                    ))?;
                    write(&samples)?;
                }
                let took = began.elapsed();
                let first_audio = first_audio.unwrap_or(took);
                return Ok(Spoken {
                    accepted,
                    finished,
                    first_audio,
                    took,
                });
            }
        }
    }
}

/// A line that rewrites itself while audio comes; nothing where nobody looks.
struct Progress {
    shown: bool,
    n_bytes: usize,
}

impl Progress {
    fn new() -> Self {
        Progress {
            shown: std::io::stderr().is_terminal(),
            n_bytes: 0,
        }
    }

    fn add(&mut self, n_bytes: usize, sample_rate: u32, began: Instant) {
        self.n_bytes += n_bytes;
        if !self.shown || sample_rate == 0 {
            return;
        }
        let seconds = (self.n_bytes / SAMPLE_BYTES) as f64 / f64::from(sample_rate);
        let rtf = began.elapsed().as_secs_f64() / seconds;
        let frames = (seconds * 12.5).round();
        eprint!("\r{frames:5} frames  {seconds:6.2} s of audio  real-time factor {rtf:.3} ");
    }

    fn end(&self) {
        if self.shown {
            eprintln!();
        }
    }
}

fn print_lanes(status: &v1::WorkerStatusResponse) -> anyhow::Result<()> {
    for lane in &status.lanes {
        let name = if lane.lane == 0 {
            "chain".to_owned()
        } else {
            format!("lane {}", lane.lane)
        };
        for walk in lane.walks.iter().filter(|walk| walk.steps > 0) {
            let mean_ms = walk.step_us_total as f64 / walk.steps as f64 / 1e3;
            outln!(
                "  {name:<8} {:<16} {:>6} steps, mean {mean_ms:.2} ms",
                walk.walk,
                walk.steps
            )?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Flags {
        #[command(flatten)]
        say: Arguments,
    }

    /// What these flags are refused with.
    fn refused(flags: &[&str]) -> String {
        match Flags::try_parse_from(std::iter::once(&"say").chain(flags)) {
            Ok(flags) => format!("{:#}", jobs(&flags.say).unwrap_err()),
            Err(error) => error.to_string(),
        }
    }

    #[test]
    fn a_form_asks_for_its_own_output_only() {
        let check = |flags: &[&str], wanted: &str, unwanted: &str| {
            let said = refused(flags);
            assert!(said.contains(wanted) && !said.contains(unwanted), "{said}");
        };
        check(&["--file", "lines.txt"], "--output-dir", "--output,");
        check(&["Hello."], "--output,", "--output-dir");
    }

    #[test]
    fn a_negative_number_is_refused_as_a_value() {
        let said = refused(&["Hello.", "-o", "x.wav", "--max-frames", "-1"]);
        assert!(said.contains("invalid value '-1'"), "{said}");
        let flags = ["say", "Hello.", "-o", "x.wav", "--temperature", "-1"];
        let flags = Flags::try_parse_from(flags).unwrap();
        assert_eq!(flags.say.voice.temperature, Some(-1.0));
    }

    #[test]
    fn the_directory_of_a_file_is_made() {
        let place = std::env::temp_dir().join(format!("laneway-say-{}", std::process::id()));
        std::fs::create_dir_all(&place).unwrap();
        let (file, directory) = (place.join("lines.txt"), place.join("new/wavs"));
        std::fs::write(&file, "One.\nTwo.\n").unwrap();
        let flags = ["say", "--file", file.to_str().unwrap(), "--output-dir"];
        let flags = Flags::try_parse_from(flags.into_iter().chain(directory.to_str())).unwrap();
        let jobs = jobs(&flags.say).unwrap();
        assert_eq!(jobs[1], ("Two.".to_owned(), directory.join("001.wav")));
        assert!(directory.is_dir());
        std::fs::remove_dir_all(place).unwrap();
    }
}
