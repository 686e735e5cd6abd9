//! `POST /v1/audio/speech`.

use std::time::Duration;

use axum::Extension;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, header};
use axum::response::Response;
use bytes::Bytes;
use futures::StreamExt as _;
use http_body_util::{BodyExt as _, LengthLimitError, Limited};
use laneway_proto::{ErrorCode, Failure, RequestId, v1};
use v1::synthesize_response::Event;

use super::body::{audio, events};
use super::error::HttpError;
use super::headers;
use super::request::{StreamFormat, parse};
use crate::api::Api;
use crate::delivery::Outgoing;

/// Most bytes of one character in JSON: two escapes of a surrogate pair.
const BYTES_OF_CHAR: usize = 12;

/// Room in a body for everything beside its text.
const OTHER_BYTES: usize = 64 * 1024;

/// Until the body has arrived.
const BODY_TIMEOUT: Duration = Duration::from_secs(10);

/// Speak. The answer begins with the first audio, so that whatever goes wrong before that has its status code; a
/// stream that fails later is cut off, or, as events, ends in an error.
pub(crate) async fn speak(
    State(api): State<Api>,
    Extension(id): Extension<RequestId>,
    request: Request,
) -> Result<Response, HttpError> {
    let (parts, body) = request.into_parts();
    check_media_type(&parts.headers).map_err(HttpError::refused)?;
    let caller = headers::caller(&parts).map_err(HttpError::refused)?;
    let limit = max_body_bytes(api.max_text_chars);
    let body = read(&parts.headers, body, limit, BODY_TIMEOUT)
        .await
        .map_err(HttpError::refused)?;
    let request = parse(&body, &id).map_err(HttpError::refused)?;
    drop(body);
    let mut outgoing = api.speak(request.wire, caller)?;
    let (accepted, first) = begin(&mut outgoing).await?;

    let is_sse = request.stream_format == StreamFormat::Sse;
    let media_type = if is_sse {
        "text/event-stream"
    } else {
        media_type(accepted.format())
    };
    let body = match is_sse {
        true => events(first, outgoing),
        false => audio(first, outgoing),
    };
    let mut response = Response::new(body);
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(media_type));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    // Proxies that would collect a stream before they pass it on.
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    headers.insert("laneway-seed", HeaderValue::from(accepted.seed));
    headers.insert("laneway-sample-rate", HeaderValue::from(accepted.sample_rate));
    if let Ok(model) = HeaderValue::from_str(&accepted.model) {
        headers.insert("laneway-model", model);
    }
    Ok(response)
}

/// Most bytes of JSON with a text of so many characters in it.
pub(super) fn max_body_bytes(max_text_chars: usize) -> usize {
    max_text_chars
        .saturating_mul(BYTES_OF_CHAR)
        .saturating_add(OTHER_BYTES)
}

fn media_type(format: v1::AudioFormat) -> &'static str {
    match format {
        v1::AudioFormat::Mp3 => "audio/mpeg",
        v1::AudioFormat::Opus => "audio/opus",
        v1::AudioFormat::Flac => "audio/flac",
        v1::AudioFormat::Wav => "audio/wav",
        _ => "audio/pcm",
    }
}

fn check_media_type(headers: &HeaderMap) -> Result<(), Failure> {
    let media_type = headers
        .get(header::CONTENT_TYPE)
        .and_then(|value| value.to_str().ok())
        .unwrap_or("");
    let essence = media_type.split(';').next().unwrap_or("").trim();
    if essence.eq_ignore_ascii_case("application/json") {
        return Ok(());
    }
    let problem = "the body is to be JSON; send it with content-type: application/json";
    Err(Failure::new(ErrorCode::UnsupportedMediaType, problem))
}

/// The whole body, which has `patience` to arrive.
///
/// # Errors
/// `RequestTooLarge`, `RequestTimeout`, or it was cut off.
pub(super) async fn read(
    headers: &HeaderMap,
    body: Body,
    limit: usize,
    patience: Duration,
) -> Result<Bytes, Failure> {
    let too_large = || {
        let problem = format!("the body is over the limit of {limit} bytes");
        Failure::new(ErrorCode::RequestTooLarge, problem)
    };
    let stated = headers
        .get(header::CONTENT_LENGTH)
        .and_then(|value| value.to_str().ok())
        .and_then(|value| value.parse::<u64>().ok());
    if stated.is_some_and(|n_bytes| n_bytes > limit as u64) {
        return Err(too_large());
    }
    let whole = Limited::new(body, limit).collect();
    match tokio::time::timeout(patience, whole).await {
        Ok(Ok(body)) => Ok(body.to_bytes()),
        Ok(Err(error)) if error.is::<LengthLimitError>() => Err(too_large()),
        Ok(Err(_)) => Err(Failure::new(
            ErrorCode::InvalidArgument,
            "the body ended before it was whole",
        )),
        Err(_) => Err(Failure::new(
            ErrorCode::RequestTimeout,
            format!("the body took more than {} seconds to arrive", patience.as_secs()),
        )),
    }
}

/// What the request became, and its first audio, or its end when it has none.
async fn begin(outgoing: &mut Outgoing) -> Result<(v1::Accepted, Event), HttpError> {
    let mut accepted = None;
    loop {
        match outgoing.next().await {
            Some(Ok(v1::SynthesizeResponse {
                event: Some(Event::Accepted(event)),
            })) => accepted = Some(event),
            Some(Ok(v1::SynthesizeResponse { event: Some(event) })) => {
                return Ok((accepted.unwrap_or_default(), event));
            }
            Some(Ok(v1::SynthesizeResponse { event: None })) => {}
            Some(Err(status)) => return Err(HttpError::ended(&status)),
            None => return Err(Failure::internal().into()),
        }
    }
}
