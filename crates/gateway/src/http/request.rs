//! The JSON of `POST /v1/audio/speech`, field by field: each has an effect or is refused by name.

use std::fmt;

use laneway_proto::{ErrorCode, Failure, RequestId, v1};
use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
use serde_json::Value;

use crate::validate::{Violations, shortened};

/// Every field that is taken. The last three are Laneway's own.
const FIELDS: [&str; 10] = [
    "model",
    "input",
    "voice",
    "instructions",
    "response_format",
    "speed",
    "stream_format",
    "language",
    "seed",
    "sample_rate",
];

/// Fields that name something, and what to write in the place of nothing.
const NAMES: [(&str, &str); 3] = [
    (
        "model",
        "name one that GET /v1/models lists, or leave it out where that is one",
    ),
    ("voice", "name one that GET /v1/audio/voices lists"),
    ("language", "name one of the model's, write auto, or leave it out"),
];

/// Formats by their name in this API.
const FORMATS: [(&str, v1::AudioFormat); 5] = [
    ("mp3", v1::AudioFormat::Mp3),
    ("opus", v1::AudioFormat::Opus),
    ("flac", v1::AudioFormat::Flac),
    ("wav", v1::AudioFormat::Wav),
    ("pcm", v1::AudioFormat::PcmS16le),
];

/// What callers of this API take raw samples for, which do not say their rate.
const PCM_SAMPLE_RATE: u32 = 24_000;

/// What the audio is packed into.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StreamFormat {
    /// Bytes of the audio and nothing else.
    Audio,
    /// Server-sent events.
    Sse,
}

/// A request as it was sent.
#[derive(Debug)]
pub(crate) struct SpeechRequest {
    pub(crate) wire: v1::SynthesizeRequest,
    pub(crate) stream_format: StreamFormat,
}

/// An object with its fields in order. A map would keep one of two fields of the same name and say nothing.
struct Object(Vec<(String, Value)>);

impl<'de> Deserialize<'de> for Object {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Fields;
        impl<'de> Visitor<'de> for Fields {
            type Value = Object;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Object, A::Error> {
                let mut fields = Vec::new();
                while let Some(field) = map.next_entry()? {
                    fields.push(field);
                }
                Ok(Object(fields))
            }
        }
        deserializer.deserialize_map(Fields)
    }
}

/// Read the body of a request that has this id.
///
/// # Errors
/// The body is no JSON object, or one failure with every field that is unknown or of the wrong type.
pub(crate) fn parse(body: &[u8], id: &RequestId) -> Result<SpeechRequest, Failure> {
    let text = std::str::from_utf8(body).map_err(|error| {
        let at = error.valid_up_to();
        let problem = format!("the body is not UTF-8 from byte {at} on");
        Failure::new(ErrorCode::InvalidArgument, problem)
    })?;
    let fields = fields(text)?;
    let mut violations = Violations::default();
    let mut wire = v1::SynthesizeRequest {
        request_id: id.to_string(),
        format: v1::AudioFormat::Mp3.into(),
        ..Default::default()
    };
    let mut stream_format = StreamFormat::Audio;
    let seen = each(&fields, &FIELDS, &mut violations, |name, value, violations| {
        read(name, value, &mut wire, &mut stream_format, violations);
    });
    if !seen.contains(&"input") {
        violations.add(ErrorCode::InvalidArgument, "input", "say what to speak");
    }
    violations.into_result()?;
    if wire.format == i32::from(v1::AudioFormat::PcmS16le) && wire.sample_rate == 0 {
        wire.sample_rate = PCM_SAMPLE_RATE;
    }
    Ok(SpeechRequest { wire, stream_format })
}

/// The fields of an object in order.
///
/// # Errors
/// It is none.
pub(super) fn fields(text: &str) -> Result<Vec<(String, Value)>, Failure> {
    let Object(fields) = serde_json::from_str(text).map_err(|error| {
        let problem = format!("it is not a JSON object as it should be: {error}");
        Failure::new(ErrorCode::InvalidArgument, problem)
    })?;
    Ok(fields)
}

/// Have each of `fields` read that is `allowed` and there once, and not null. Any other is a violation. Gives the names
/// of those that are allowed.
pub(super) fn each(
    fields: &[(String, Value)],
    allowed: &[&'static str],
    violations: &mut Violations,
    mut read: impl FnMut(&'static str, &Value, &mut Violations),
) -> Vec<&'static str> {
    let mut seen = Vec::new();
    for (name, value) in fields {
        let Some(name) = allowed.iter().find(|field| *field == name) else {
            let problem = format!("there is no such field; there are: {}", allowed.join(", "));
            violations.add(ErrorCode::UnsupportedField, &shortened(name), problem);
            continue;
        };
        if seen.contains(name) {
            violations.add(ErrorCode::InvalidArgument, name, "it is there twice");
            continue;
        }
        seen.push(*name);
        if !value.is_null() {
            read(name, value, violations);
        }
    }
    seen
}

/// A format by its name in this API.
pub(super) fn format_name(format: v1::AudioFormat) -> &'static str {
    let found = FORMATS.iter().find(|(_, each)| *each == format);
    found.map_or("pcm", |(name, _)| name)
}

pub(super) fn read(
    name: &str,
    value: &Value,
    wire: &mut v1::SynthesizeRequest,
    stream_format: &mut StreamFormat,
    violations: &mut Violations,
) {
    let number = |number: Option<u64>| number.ok_or("a whole number that is not negative");
    let text = || value.as_str().map(str::to_string).ok_or("a string");
    // What is empty on the wire was left out. Here it was named, and nothing takes the place of what was.
    let is_empty = match name {
        "voice" => voice(value).is_some_and(|voice| voice.is_empty()),
        _ => value.as_str() == Some(""),
    };
    if let Some((_, remedy)) = NAMES.iter().find(|(named, _)| is_empty && *named == name) {
        violations.add(ErrorCode::InvalidArgument, name, format!("it is empty; {remedy}"));
        return;
    }
    let outcome = match name {
        "model" => text().map(|text| wire.model = text),
        "input" => text().map(|text| wire.text = text),
        "voice" => voice(value)
            .map(|voice| wire.voice = voice)
            .ok_or("a string, or an object with an `id`"),
        "instructions" => text().map(|text| wire.instruct = text),
        "language" => text().map(|text| wire.language = text),
        "seed" => number(value.as_u64()).map(|seed| wire.seed = Some(seed)),
        "sample_rate" => number(value.as_u64().filter(|rate| *rate > 0))
            .map(|rate| wire.sample_rate = u32::try_from(rate).unwrap_or(u32::MAX)),
        "speed" => match value.as_f64() {
            Some(speed) => {
                wire.speed = Some(speed as f32);
                Ok(())
            }
            None => Err("a number"),
        },
        "response_format" => text().map(|text| match FORMATS.iter().find(|(name, _)| *name == text) {
            Some((_, format)) => wire.format = (*format).into(),
            None => {
                let names: Vec<_> = FORMATS.iter().map(|(name, _)| *name).collect();
                let problem = format!(
                    "\"{}\" is not served; there are: {}",
                    shortened(&text),
                    names.join(", ")
                );
                violations.add(ErrorCode::UnsupportedFormat, name, problem);
            }
        }),
        _ => text().map(|text| match text.as_str() {
            "audio" => *stream_format = StreamFormat::Audio,
            "sse" => *stream_format = StreamFormat::Sse,
            other => {
                let problem = format!("\"{}\" is not served; there are: audio, sse", shortened(other));
                violations.add(ErrorCode::InvalidArgument, name, problem);
            }
        }),
    };
    if let Err(wanted) = outcome {
        violations.add(ErrorCode::InvalidArgument, name, format!("it is not {wanted}"));
    }
}

/// The name of a voice, or the id of a registered one as this API has it.
fn voice(value: &Value) -> Option<String> {
    let name = match value.as_object() {
        Some(object) if object.len() == 1 => object.get("id")?,
        Some(_) => return None,
        None => value,
    };
    name.as_str().map(str::to_string)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(body: &str) -> Result<SpeechRequest, Failure> {
        parse(body.as_bytes(), &RequestId::new("mine").unwrap())
    }

    #[test]
    fn every_field_has_an_effect() {
        let request = parsed(
            r#"{"model": "nano", "input": "Hello.", "voice": "ryan", "instructions": "calm", "speed": 1.5,
                "response_format": "flac", "stream_format": "sse", "language": "english", "seed": 7,
                "sample_rate": 16000}"#,
        )
        .unwrap();
        let want = v1::SynthesizeRequest {
            text: "Hello.".into(),
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
        assert_eq!(request.wire, want);
        assert_eq!(request.stream_format, StreamFormat::Sse);
        let by_id = parsed(r#"{"input": "Hello.", "voice": {"id": "voice_1"}}"#).unwrap();
        assert_eq!(by_id.wire.voice, "voice_1");
    }

    #[test]
    fn defaults_are_those_of_the_api() {
        let request = parsed(r#"{"input": "Hello.", "speed": null}"#).unwrap();
        assert_eq!(request.wire.format(), v1::AudioFormat::Mp3);
        assert_eq!((request.wire.speed, request.wire.sample_rate), (None, 0));
        assert_eq!(request.stream_format, StreamFormat::Audio);
        let pcm = parsed(r#"{"input": "Hello.", "response_format": "pcm"}"#).unwrap();
        assert_eq!(pcm.wire.sample_rate, 24_000, "raw samples do not say their rate");
    }

    #[track_caller]
    fn refused(body: &str, code: ErrorCode, wanted: &[(&str, &str)]) {
        let failure = parsed(body).map(|_| ()).unwrap_err();
        assert_eq!(failure.code, code, "{failure}");
        assert_eq!(failure.violations.len(), wanted.len(), "{failure}");
        for (violation, (field, words)) in failure.violations.iter().zip(wanted) {
            assert_eq!(violation.field, *field);
            assert!(violation.description.contains(words), "{failure}");
        }
    }

    #[test]
    fn what_has_no_effect_is_refused_by_name_and_all_at_once() {
        refused(
            r#"{"input": 5, "speeed": 1, "voice": {"id": "x", "name": "y"}, "seed": -1, "speed": "fast", "sample_rate": 0}"#,
            ErrorCode::InvalidArgument,
            &[
                ("input", "not a string"),
                ("speeed", "there are: model, input"),
                ("voice", "not a string, or an object with an `id`"),
                ("seed", "whole number"),
                ("speed", "a number"),
                ("sample_rate", "whole number"),
            ],
        );
        refused(
            r#"{"input": "a", "model": "", "voice": "", "language": "", "response_format": ""}"#,
            ErrorCode::InvalidArgument,
            &[
                ("model", "it is empty; name one that GET /v1/models lists"),
                ("voice", "it is empty; name one that GET /v1/audio/voices lists"),
                ("language", "it is empty; name one of the model's, write auto"),
                ("response_format", "there are: mp3"),
            ],
        );
        refused(
            r#"{"input": "a", "voice": {"id": ""}}"#,
            ErrorCode::InvalidArgument,
            &[("voice", "it is empty")],
        );
        refused(
            r#"{"input": "a", "input": "b"}"#,
            ErrorCode::InvalidArgument,
            &[("input", "twice")],
        );
        refused(
            "{}",
            ErrorCode::InvalidArgument,
            &[("input", "say what to speak")],
        );
        refused(
            r#"{"input": "a", "response_format": "aac"}"#,
            ErrorCode::UnsupportedFormat,
            &[(
                "response_format",
                "\"aac\" is not served; there are: mp3, opus, flac, wav, pcm",
            )],
        );
        refused(
            r#"{"input": "a", "stream_format": "ndjson"}"#,
            ErrorCode::InvalidArgument,
            &[("stream_format", "audio, sse")],
        );
    }

    #[test]
    fn a_body_that_is_no_object_is_told_where() {
        for (body, words) in [
            (&b"{\"input\": "[..], "line 1 column 10"),
            (b"[1]", "an object"),
            (b"", "EOF"),
            (b"{\"input\": \"\xff\"}", "not UTF-8 from byte 11 on"),
            (b"{\"input\": \"a\"} x", "trailing"),
        ] {
            let failure = parse(body, &RequestId::new("mine").unwrap()).unwrap_err();
            assert_eq!(failure.code, ErrorCode::InvalidArgument);
            assert!(failure.message.contains(words), "{failure}");
        }
        // As deep as it likes: refused, not recursed into until the stack ends.
        let deep = "[".repeat(100_000);
        assert!(parsed(&format!("{{\"input\": {deep}")).is_err());
    }
}
