//! The messages of a connection, in both directions. Every field that is taken has an effect; any other is refused by
//! name.

use laneway_proto::{ErrorCode, Failure, v1};
use serde_json::{Value, json};
use v1::stream_synthesize_response::Event;

use crate::http::error::HttpError;
use crate::http::request::{self, StreamFormat};
use crate::session::Command;
use crate::validate::{Violations, shortened};

/// Fields of `session.config`. All but the last three are those of `POST /v1/audio/speech`.
const CONFIG: [&str; 12] = [
    "type",
    "model",
    "voice",
    "instructions",
    "language",
    "response_format",
    "sample_rate",
    "speed",
    "seed",
    "request_id",
    "timeout_ms",
    "api_key",
];

/// Types of message, with their fields.
const TYPES: [(&str, &[&str]); 6] = [
    ("session.config", &CONFIG),
    ("input.text", &["type", "text"]),
    ("input.flush", &["type"]),
    ("input.cancel", &["type"]),
    ("input.done", &["type"]),
    ("session.close", &["type"]),
];

/// What utterances are spoken with, until it is said anew.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Config {
    pub(super) wire: v1::SynthesizeRequest,
    /// For one whole utterance.
    pub(super) timeout_ms: Option<u32>,
    pub(super) api_key: Option<String>,
}

/// One message of a caller.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Sent {
    Config(Box<Config>),
    Command(Command),
    Close,
}

/// Read a message.
///
/// # Errors
/// `InvalidArgument`, `UnsupportedField`, `UnsupportedFormat`.
pub(super) fn parse(text: &str) -> Result<Sent, Failure> {
    let fields = request::fields(text)?;
    let kind = fields.iter().find(|(name, _)| name == "type");
    let kind = kind.and_then(|(_, value)| value.as_str()).unwrap_or("");
    let Some((kind, allowed)) = TYPES.iter().find(|(name, _)| *name == kind) else {
        let names: Vec<_> = TYPES.iter().map(|(name, _)| *name).collect();
        let problem = format!(
            "\"{}\" is no message; there are: {}",
            shortened(kind),
            names.join(", ")
        );
        return Err(Failure::of_field(ErrorCode::InvalidArgument, "type", problem));
    };
    let mut violations = Violations::default();
    let mut config = Config::default();
    // What a browser can play as it comes.
    config.wire.format = v1::AudioFormat::PcmS16le.into();
    let mut piece = None;
    request::each(
        &fields,
        allowed,
        &mut violations,
        |name, value, violations| match name {
            "type" => {}
            "text" => piece = string(name, value, violations),
            _ => read(name, value, &mut config, violations),
        },
    );
    let sent = match *kind {
        "session.config" => Sent::Config(Box::new(config)),
        "input.text" => {
            if piece.is_none() {
                violations.add(ErrorCode::InvalidArgument, "text", "say what to speak");
            }
            Sent::Command(Command::Text(piece.unwrap_or_default()))
        }
        "input.flush" => Sent::Command(Command::Flush),
        "input.cancel" => Sent::Command(Command::Cancel),
        "input.done" => Sent::Command(Command::End),
        _ => Sent::Close,
    };
    violations.into_result()?;
    Ok(sent)
}

fn string(name: &str, value: &Value, violations: &mut Violations) -> Option<String> {
    let text = value.as_str().map(str::to_owned);
    if text.is_none() {
        violations.add(ErrorCode::InvalidArgument, name, "it is not a string");
    }
    text
}

/// Read a field of `session.config`.
fn read(name: &str, value: &Value, config: &mut Config, violations: &mut Violations) {
    match name {
        "request_id" => config.wire.request_id = string(name, value, violations).unwrap_or_default(),
        "api_key" => config.api_key = string(name, value, violations),
        "timeout_ms" => {
            let milliseconds = value.as_u64().and_then(|number| u32::try_from(number).ok());
            config.timeout_ms = milliseconds.filter(|number| (1..100_000_000).contains(number));
            if config.timeout_ms.is_none() {
                let problem = "it is no number of milliseconds from 1 to 99999999";
                violations.add(ErrorCode::InvalidArgument, name, problem);
            }
        }
        _ => request::read(
            name,
            value,
            &mut config.wire,
            &mut StreamFormat::Audio,
            violations,
        ),
    }
}

/// What a caller is told of one event, in order: JSON, and audio behind it.
#[derive(Debug, Default)]
pub(super) struct Teller {
    /// The sentence whose audio is being sent.
    open: Option<u32>,
    sentences: u32,
    format: &'static str,
    sample_rate: u32,
}

impl Teller {
    /// What an event is told as. A chunk's audio follows what is told of it.
    pub(super) fn tell(&mut self, event: &Event) -> Vec<Value> {
        match event {
            Event::Accepted(accepted) => {
                self.format = request::format_name(accepted.format());
                self.sample_rate = accepted.sample_rate;
                vec![json!({
                    "type": "session.started",
                    "request_id": accepted.request_id,
                    "model": accepted.model,
                    "seed": accepted.seed,
                    "response_format": self.format,
                    "sample_rate": accepted.sample_rate,
                    "channels": accepted.channels,
                })]
            }
            Event::Sentence(sentence) => {
                let done = self.done(sentence.sample_offset);
                self.open = Some(sentence.index);
                self.sentences = sentence.index + 1;
                let start = json!({
                    "type": "audio.start",
                    "sentence_index": sentence.index,
                    "sentence_text": sentence.text,
                    "sample_offset": sentence.sample_offset,
                    "format": self.format,
                    "sample_rate": self.sample_rate,
                });
                done.into_iter().chain([start]).collect()
            }
            Event::Chunk(chunk) => vec![json!({
                "type": "audio.chunk",
                "index": chunk.index,
                "sample_offset": chunk.sample_offset,
                "bytes": chunk.audio.len(),
            })],
            Event::Cancelled(cancelled) => {
                self.open = None;
                vec![self::cancelled(cancelled.sample_offset)]
            }
            Event::Finished(finished) => {
                let done = self.done(finished.samples);
                done.into_iter().chain([self.finished(finished)]).collect()
            }
        }
    }

    /// The end of the sentence that was begun last.
    fn done(&mut self, sample_offset: u64) -> Option<Value> {
        let sentence = self.open.take()?;
        Some(json!({
            "type": "audio.done",
            "sentence_index": sentence,
            "sample_offset": sample_offset,
        }))
    }

    fn finished(&self, finished: &v1::SynthesisFinished) -> Value {
        let timings = finished.timings.unwrap_or_default();
        json!({
            "type": "session.done",
            "total_sentences": self.sentences,
            "finish_reason": finished.reason().label(),
            "frames": finished.frames,
            "samples": finished.samples,
            "seconds": finished.seconds,
            "first_audio_ms": timings.first_audio_us as f64 / 1e3,
            "first_audible_ms": timings.first_audible_us.map(|us| us as f64 / 1e3),
            "total_ms": timings.total_us as f64 / 1e3,
        })
    }
}

/// The answer to one `input.cancel`.
pub(super) fn cancelled(sample_offset: u64) -> Value {
    json!({ "type": "audio.cancelled", "sample_offset": sample_offset })
}

/// The last message of a connection that fails: the envelope that HTTP has, and the same words beside it.
pub(super) fn error(failure: &Failure) -> Value {
    let envelope = HttpError::from(failure.clone()).envelope();
    let error = serde_json::to_value(envelope).unwrap_or_default()["error"].take();
    json!({
        "type": "error",
        "message": error["message"],
        "error": error,
        "retry_after_ms": failure.retry_after.map(|delay| delay.as_millis() as u64),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_message_is_read() {
        let command = |command| Sent::Command(command);
        for (text, wanted) in [
            (
                r#"{"type": "input.text", "text": "Hi"}"#,
                command(Command::Text("Hi".into())),
            ),
            (r#"{"type": "input.flush"}"#, command(Command::Flush)),
            (r#"{"type": "input.cancel"}"#, command(Command::Cancel)),
            (r#"{"type": "input.done"}"#, command(Command::End)),
            (r#"{"type": "session.close"}"#, Sent::Close),
        ] {
            assert_eq!(parse(text).unwrap(), wanted);
        }
        let sent = parse(
            r#"{"type": "session.config", "model": "nano", "voice": "ryan", "instructions": "calm",
                "language": "english", "response_format": "flac", "sample_rate": 16000, "speed": 1.5, "seed": 7,
                "request_id": "mine", "timeout_ms": 1500, "api_key": "secret"}"#,
        )
        .unwrap();
        let wire = v1::SynthesizeRequest {
            model: "nano".into(),
            voice: "ryan".into(),
            language: "english".into(),
            instruct: "calm".into(),
            seed: Some(7),
            request_id: "mine".into(),
            format: v1::AudioFormat::Flac.into(),
            sample_rate: 16_000,
            speed: Some(1.5),
            ..Default::default()
        };
        let wanted = Config {
            wire,
            timeout_ms: Some(1500),
            api_key: Some("secret".into()),
        };
        assert_eq!(sent, Sent::Config(Box::new(wanted)));
    }

    #[track_caller]
    fn refused(text: &str, code: ErrorCode, field: &str, words: &str) {
        let failure = parse(text).unwrap_err();
        assert_eq!(failure.code, code, "{failure}");
        let named = failure.violations.first().map_or("", |each| each.field.as_str());
        assert_eq!(named, field, "{failure}");
        assert!(failure.message.contains(words), "{failure}");
    }

    #[test]
    fn what_is_no_message_is_refused_by_name() {
        use ErrorCode::{InvalidArgument, UnsupportedField, UnsupportedFormat};
        refused("hello", InvalidArgument, "", "JSON");
        refused("[]", InvalidArgument, "", "JSON");
        refused("{}", InvalidArgument, "type", "session.config, input.text");
        refused(
            r#"{"type": "input.audio"}"#,
            InvalidArgument,
            "type",
            "input.audio",
        );
        refused(r#"{"type": "input.text"}"#, InvalidArgument, "text", "say what");
        refused(
            r#"{"type": "input.text", "text": 5}"#,
            InvalidArgument,
            "text",
            "not a string",
        );
        refused(
            r#"{"type": "input.done", "text": "x"}"#,
            UnsupportedField,
            "text",
            "there are: type",
        );
        refused(
            r#"{"type": "session.config", "input": "x"}"#,
            UnsupportedField,
            "input",
            "there are",
        );
        refused(
            r#"{"type": "session.config", "seed": 1, "seed": 2}"#,
            InvalidArgument,
            "seed",
            "twice",
        );
        refused(
            r#"{"type": "session.config", "timeout_ms": 0}"#,
            InvalidArgument,
            "timeout_ms",
            "milliseconds",
        );
        refused(
            r#"{"type": "session.config", "response_format": "aac"}"#,
            UnsupportedFormat,
            "response_format",
            "aac",
        );
        refused(
            r#"{"type": "session.config", "api_key": 5}"#,
            InvalidArgument,
            "api_key",
            "string",
        );
    }

    #[test]
    fn a_sentence_ends_where_the_next_begins_and_a_cancel_ends_none() {
        let sentence = |index, sample_offset| {
            Event::Sentence(v1::SentenceBegun {
                index,
                sample_offset,
                text: "x".into(),
            })
        };
        let mut teller = Teller::default();
        let mut told = |event| -> Vec<(String, u64)> {
            let values = teller.tell(&event).into_iter();
            let short = |value: Value| {
                let kind = value["type"].as_str().unwrap().to_owned();
                let offset = value["sample_offset"].as_u64();
                (kind, offset.or(value["total_sentences"].as_u64()).unwrap())
            };
            values.map(short).collect()
        };
        let kind = |name: &str, offset| (name.to_owned(), offset);
        assert_eq!(told(sentence(0, 0)), [kind("audio.start", 0)]);
        assert_eq!(
            told(sentence(1, 10)),
            [kind("audio.done", 10), kind("audio.start", 10)]
        );
        let cancelled = Event::Cancelled(v1::UtteranceCancelled { sample_offset: 12 });
        assert_eq!(told(cancelled), [kind("audio.cancelled", 12)]);
        assert_eq!(told(sentence(2, 12)), [kind("audio.start", 12)]);
        let finished = Event::Finished(v1::SynthesisFinished {
            samples: 20,
            ..Default::default()
        });
        assert_eq!(told(finished), [kind("audio.done", 20), kind("session.done", 3)]);
    }
}
