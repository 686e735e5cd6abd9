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
            Ok(Event::Finished(finished)) => Some(done(&finished)),
            Ok(Event::Accepted(_)) => None,
            Err(status) => serde_json::to_value(HttpError::ended(&status).envelope()).ok(),
        };
        future::ready(event.map(|event| Ok::<_, Infallible>(Bytes::from(format!("data: {event}\n\n")))))
    });
    Body::from_stream(bytes)
}

fn delta(chunk: &v1::AudioChunk) -> serde_json::Value {
    json!({ "type": "speech.audio.delta", "audio": STANDARD.encode(&chunk.audio) })
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
