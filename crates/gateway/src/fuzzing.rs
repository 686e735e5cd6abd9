//! Doors for the programs of `fuzz/`: what reads bytes of strangers, and what has to hold of it. Not part of the
//! library: only compiled for them, and for a test that runs what they begin with and what they once found.

use std::collections::VecDeque;
use std::sync::{Arc, LazyLock};

use bytes::Bytes;
use futures::FutureExt as _;
use laneway_audio::{AudioSpec, Encoding};
use laneway_proto::v1;
use tokio::time::Instant;

use crate::config::DEFAULT_MAX_TEXT_CHARS;
use crate::encode::Encoder;
use crate::facts::{ModelFacts, Worker};
use crate::progress::Progress;
use crate::samples::Samples;
use crate::sentences::{Sentences, is_speakable, parts};
use crate::session::{Shape, Speech, Told};
use crate::validate;

/// Between two pieces of a text: a caller's text has none.
const CUT: char = '\u{1f}';

/// Hz of the model.
const MODEL_RATE: u32 = 24_000;

static MODELS: LazyLock<[Arc<ModelFacts>; 1]> = LazyLock::new(|| {
    let facts = v1::ModelFacts {
        model: "nano".into(),
        sample_rate: MODEL_RATE,
        samples_per_frame: 1920,
        limits: Some(v1::ModelLimits {
            max_text_chars: 200,
            max_frames: 500,
            max_chunk_frames: 25,
            ..Default::default()
        }),
        ..Default::default()
    };
    [Arc::new(facts.try_into().expect("the facts are whole"))]
});

/// A text, cut into pieces anywhere.
///
/// # Panics
/// What is spoken depends on the cuts, is too long, or is not the text.
pub fn text(data: &[u8]) {
    let cut = String::from_utf8_lossy(data);
    let whole = cut.replace(CUT, "");
    for max_chars in [1, 40, 400] {
        let spoken = sentences(cut.split(CUT), max_chars);
        assert_eq!(
            spoken,
            sentences([whole.as_str()], max_chars),
            "the cuts changed it"
        );
        check_parts(&whole, &spoken, max_chars);
        check_parts(&whole, &parts(&whole, max_chars), max_chars);
    }
    let request = v1::SynthesizeRequest {
        text: whole,
        ..Default::default()
    };
    if let Ok(checked) = validate::check(request, &*MODELS, DEFAULT_MAX_TEXT_CHARS) {
        assert!(is_speakable(&checked.wire.text));
        assert_eq!(
            checked.parts.is_empty(),
            checked.wire.text.chars().count() <= MODELS[0].max_text_chars
        );
    }
}

fn sentences<'a>(pieces: impl IntoIterator<Item = &'a str>, max_chars: usize) -> Vec<String> {
    let mut waiting = Sentences::new(max_chars);
    let mut spoken = Vec::new();
    for piece in pieces {
        waiting.push(piece);
        spoken.extend(std::iter::from_fn(|| waiting.next_sentence()));
    }
    spoken.extend(std::iter::from_fn(|| waiting.next_of_rest()));
    assert_eq!(waiting.n_chars(), 0);
    spoken
}

fn check_parts(whole: &str, parts: &[String], max_chars: usize) {
    let letters = |text: &str| text.chars().filter(|c| c.is_alphanumeric()).collect::<String>();
    assert_eq!(
        letters(whole),
        letters(&parts.concat()),
        "something is not spoken"
    );
    for part in parts {
        assert!(is_speakable(part));
        assert!(part.chars().count() <= max_chars, "{part:?} is too long");
    }
}

/// What a session tells its caller, driven by `data`: audio, sentences, a transport that takes some of it, cancels.
///
/// # Panics
/// Indices have gaps, or an offset is not the number of samples that the caller was sent.
pub fn session(data: &[u8]) {
    let [format, rate, steps @ ..] = data else { return };
    let encodings = [Encoding::PcmS16le, Encoding::PcmF32le, Encoding::Wav];
    let encoding = encodings[usize::from(*format) % encodings.len()];
    let rates = [MODEL_RATE, 8_000, 48_000];
    let spec = AudioSpec {
        encoding,
        sample_rate: rates[usize::from(*rate) % rates.len()],
        speed: 1.0,
    };
    let encoder = Encoder::new(spec, MODEL_RATE).expect("every raw format carries every rate");
    let mut told = Told::new(encoder, Instant::now());
    let mut queue: VecDeque<v1::StreamSynthesizeResponse> = VecDeque::new();
    let mut caller = Caller::new(encoding);
    for step in steps.as_chunks::<2>().0 {
        let [what, n] = *step;
        match what % 4 {
            0 => {
                let samples = Bytes::from(vec![0; usize::from(n) * 4]);
                let samples = Samples::new(samples).expect("they are whole samples");
                let chunk = told.chunk(samples).now_or_never();
                let chunk = chunk.expect("raw audio is encoded at once");
                queue.extend(chunk.expect("it is encoded").map(message_of));
            }
            1 => queue.push_back(v1::StreamSynthesizeResponse {
                event: Some(Event::Sentence(told.sentence(String::new()))),
            }),
            2 => queue
                .drain(..usize::from(n).min(queue.len()))
                .for_each(|message| caller.take(message)),
            _ => {
                let (back, kept): (VecDeque<_>, VecDeque<_>) = std::mem::take(&mut queue)
                    .into_iter()
                    .partition(|message| message.speech().is_some_and(|speech| told.can_take_back(&speech)));
                queue = kept;
                back.iter()
                    .filter_map(Shape::speech)
                    .for_each(|speech: Speech| told.take_back(speech));
            }
        }
    }
    let rest = told.rest().now_or_never().expect("raw audio is encoded at once");
    queue.extend(rest.expect("it is encoded").map(message_of));
    queue.drain(..).for_each(|message| caller.take(message));
    assert_eq!(caller.samples, told.samples(), "the total is what was sent");
}

use v1::stream_synthesize_response::Event;

fn message_of(chunk: v1::AudioChunk) -> v1::StreamSynthesizeResponse {
    v1::StreamSynthesizeResponse {
        event: Some(Event::Chunk(chunk)),
    }
}

/// What a caller has been sent.
struct Caller {
    encoding: Encoding,
    samples: u64,
    chunks: u32,
    sentences: u32,
}

impl Caller {
    fn new(encoding: Encoding) -> Self {
        Self {
            encoding,
            samples: 0,
            chunks: 0,
            sentences: 0,
        }
    }

    fn take(&mut self, message: v1::StreamSynthesizeResponse) {
        match message.event {
            Some(Event::Chunk(chunk)) => {
                assert_eq!((chunk.index, chunk.sample_offset), (self.chunks, self.samples));
                let header = match self.encoding {
                    Encoding::Wav if self.chunks == 0 => laneway_audio::WAV_HEADER_BYTES,
                    _ => 0,
                };
                let width = if self.encoding == Encoding::PcmF32le { 4 } else { 2 };
                self.samples += ((chunk.audio.len() - header) / width) as u64;
                self.chunks += 1;
            }
            Some(Event::Sentence(sentence)) => {
                assert_eq!(
                    (sentence.index, sentence.sample_offset),
                    (self.sentences, self.samples)
                );
                self.sentences += 1;
            }
            other => panic!("{other:?} was never said"),
        }
    }
}

/// What a worker says of itself and sends, read from `data`.
///
/// # Panics
/// Something of it is taken that should be refused.
pub fn worker(data: &[u8]) {
    let words: Vec<String> = data
        .split(|byte| *byte == b'\n')
        .map(|word| String::from_utf8_lossy(word).into_owned())
        .collect();
    let word = |index: usize| words.get(index).cloned().unwrap_or_default();
    let number = |index: usize| {
        let bytes = data.get(index * 4..).and_then(<[u8]>::first_chunk);
        bytes.map_or(0, |bytes| u32::from_le_bytes(*bytes))
    };
    let facts = v1::ModelFacts {
        model: word(2),
        languages: words.clone(),
        sample_rate: number(0),
        samples_per_frame: number(1),
        limits: Some(v1::ModelLimits {
            max_text_chars: number(2),
            max_instruct_chars: number(3),
            max_frames: number(4),
            max_chunk_frames: number(5),
            max_reference_ms: number(6),
            max_utterance_chars: number(7),
        }),
        ..Default::default()
    };
    let info = v1::WorkerInfo {
        worker_id: word(0),
        address: word(1),
        state: v1::WorkerState::Serving.into(),
        takes_requests: true,
        facts: Some(facts),
        ..Default::default()
    };
    if let Ok(worker) = Worker::try_from(info)
        && let Some(model) = worker.model
    {
        assert!(worker.serving && worker.address.host().is_some());
        assert!(model.sample_rate > 0 && model.max_text_chars > 0);
        let request = v1::SynthesizeRequest {
            text: word(3),
            language: word(4),
            ..Default::default()
        };
        let _ = validate::check(request, &[Arc::new(model)], DEFAULT_MAX_TEXT_CHARS);
    }
    let Ok(samples) = Samples::new(Bytes::copy_from_slice(data)) else {
        assert!(!data.len().is_multiple_of(4));
        return;
    };
    // Nothing that a worker may send as a sample, infinite or none at all, is anything but sound or silence.
    let mut progress = Progress::new(Instant::now(), MODEL_RATE);
    progress.chunk(samples.iter(), Instant::now());
    for encoding in [Encoding::PcmS16le, Encoding::Wav, Encoding::PcmF32le] {
        let spec = AudioSpec {
            encoding,
            sample_rate: MODEL_RATE,
            speed: 1.0,
        };
        let mut encoder = Encoder::new(spec, MODEL_RATE).expect("every raw format carries every rate");
        let chunk = encoder.chunk(samples.clone()).now_or_never();
        assert!(chunk.is_some_and(|chunk| chunk.is_ok()));
        assert_eq!(encoder.n_samples(), samples.len() as u64);
    }
}

/// A body of OpenAI's speech API.
///
/// # Panics
/// What is made of it cannot be checked.
pub fn body(data: &[u8]) {
    let id = validate::random_request_id();
    if let Ok(request) = crate::http::parse(data, &id) {
        let _ = validate::check(request.wire, &*MODELS, DEFAULT_MAX_TEXT_CHARS);
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    /// Run what a program begins with and what it once found.
    #[track_caller]
    fn check(name: &str, run: impl Fn(&[u8])) {
        let seeds = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../../fuzz/seeds")
            .join(name);
        let mut n_seeds = 0;
        for seed in std::fs::read_dir(seeds).unwrap() {
            run(&std::fs::read(seed.unwrap().path()).unwrap());
            n_seeds += 1;
        }
        assert!(n_seeds > 2, "{n_seeds} seeds of {name}");
    }

    #[test]
    fn seeds_of_the_text_hold() {
        check("text", text);
    }

    #[test]
    fn seeds_of_the_protocol_hold() {
        check("protocol", |data| {
            session(data);
            worker(data);
            body(data);
        });
    }
}
