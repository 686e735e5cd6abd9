//! A stream's events as the body of an answer. Dropping the body, which is what happens when its caller goes away,
//! drops the stream and so ends the work.

use std::convert::Infallible;

use axum::body::Body;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use futures::{Stream, StreamExt as _, future, stream};
use laneway_proto::v1;
use serde_json::json;
use tonic::Status;
use v1::synthesize_response::Event;

use super::error::HttpError;
use crate::delivery::Outgoing;

fn with_first(first: Event, outgoing: Outgoing) -> impl Stream<Item = Result<Event, Status>> {
    let rest = outgoing.filter_map(|item| future::ready(item.map(|message| message.event).transpose()));
    stream::once(future::ready(Ok(first))).chain(rest)
}

/// The audio and nothing else. A stream that fails is cut off, so that nobody takes it for a whole one.
pub(crate) fn audio(first: Event, outgoing: Outgoing) -> Body {
    let bytes = with_first(first, outgoing).filter_map(async |item| match item {
        Ok(Event::Chunk(chunk)) => Some(Ok(chunk.audio)),
        Ok(Event::Accepted(_) | Event::Finished(_)) => None,
        Err(status) => {
            // The transport drops what it has not sent when a body fails; while it waits, it sends.
            tokio::task::yield_now().await;
            Some(Err(status))
        }
    });
    Body::from_stream(bytes)
}

/// Server-sent events: a `speech.audio.delta` for each chunk, then `speech.audio.done` or an error.
pub(crate) fn events(first: Event, outgoing: Outgoing) -> Body {
    let bytes = with_first(first, outgoing).filter_map(|item| {
        let event = match item {
            Ok(Event::Chunk(chunk)) => Some(delta(&chunk)),
            Ok(Event::Finished(finished)) => Some(event(&done(&finished))),
            Ok(Event::Accepted(_)) => None,
            Err(status) => serde_json::to_value(HttpError::ended(&status).envelope())
                .ok()
                .map(|error| event(&error)),
        };
        future::ready(event.map(Ok::<_, Infallible>))
    });
    Body::from_stream(bytes)
}

fn event(value: &serde_json::Value) -> Bytes {
    format!("data: {value}\n\n").into()
}

/// Audio is most of a stream, so its event is written once, into as much as it takes: base64 has nothing that JSON
/// would write in another way.
fn delta(chunk: &v1::AudioChunk) -> Bytes {
    const BEGIN: &str = r#"data: {"audio":""#;
    const END: &str = "\",\"type\":\"speech.audio.delta\"}\n\n";
    let n_chars = chunk.audio.len().div_ceil(3) * 4;
    let mut text = String::with_capacity(BEGIN.len() + n_chars + END.len());
    text.push_str(BEGIN);
    STANDARD.encode_string(&chunk.audio, &mut text);
    text.push_str(END);
    text.into()
}

/// Tokens are positions of the model's context: the prompt's, and one for each frame. What the API does not have is
/// Laneway's own.
fn done(finished: &v1::SynthesisFinished) -> serde_json::Value {
    let timings = finished.timings.unwrap_or_default();
    json!({
        "type": "speech.audio.done",
        "usage": {
            "input_tokens": finished.prompt_positions,
            "output_tokens": finished.frames,
            "total_tokens": finished.prompt_positions + finished.frames,
        },
        "finish_reason": finished.reason().label(),
        "seconds": finished.seconds,
        "samples": finished.samples,
        "first_audio_ms": timings.first_audio_us as f64 / 1e3,
        "total_ms": timings.total_us as f64 / 1e3,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::delivery::{Last, delivery};
    use http_body_util::BodyExt as _;

    #[test]
    fn an_event_of_audio_is_json_and_written_once() {
        for audio in [&b""[..], b"a", b"ab", b"abc", &[0xff; 1000]] {
            let audio = Bytes::copy_from_slice(audio);
            let bytes = delta(&v1::AudioChunk {
                audio: audio.clone(),
                ..Default::default()
            });
            let text = std::str::from_utf8(&bytes).unwrap();
            let json = text.strip_prefix("data: ").unwrap().strip_suffix("\n\n").unwrap();
            let wanted = json!({ "type": "speech.audio.delta", "audio": STANDARD.encode(&audio) });
            assert_eq!(serde_json::from_str::<serde_json::Value>(json).unwrap(), wanted);
            let n_bytes = bytes.len();
            assert_eq!(bytes.try_into_mut().unwrap().capacity(), n_bytes);
        }
    }

    #[tokio::test]
    async fn raw_audio_goes_from_the_delivery_into_the_body_uncopied() {
        let (sender, outgoing) = delivery();
        let chunk = |audio: &Bytes| {
            Event::Chunk(v1::AudioChunk {
                audio: audio.clone(),
                ..Default::default()
            })
        };
        let parts = [Bytes::from(vec![1; 100]), Bytes::from(vec![2; 100])];
        sender.put(v1::SynthesizeResponse {
            event: Some(chunk(&parts[1])),
        });
        sender.end(Last::Message(v1::SynthesizeResponse::default()), None);
        let mut body = audio(chunk(&parts[0]), outgoing);
        for part in &parts {
            let frame = body.frame().await.unwrap().unwrap().into_data().unwrap();
            assert_eq!(frame.as_ptr(), part.as_ptr());
        }
        assert!(body.frame().await.is_none());
    }
}
