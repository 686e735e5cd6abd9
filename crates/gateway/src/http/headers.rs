//! What is read from a request's headers before anything else, and put into every answer's.

use axum::extract::Request;
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderValue};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use laneway_proto::{ErrorCode, Failure, RequestId};
use tonic::metadata::{MetadataMap, MetadataValue};

use super::error::{HttpError, Refused};
use crate::caller::{Caller, KeyName};
use crate::validate::random_request_id;

/// The id that a caller chose for its request, and that every answer has.
pub(crate) const REQUEST_ID: &str = "x-request-id";

/// Milliseconds that the caller gives the whole request.
pub(crate) const TIMEOUT: &str = "x-request-timeout-ms";

/// Most bytes of all headers together, as HTTP/2 callers are told in advance.
pub(crate) const MAX_HEADER_BYTES: u32 = 16 * 1024;

/// Headers that go on with the request: the W3C trace context.
const PASSED_ON: [&str; 2] = ["traceparent", "tracestate"];

/// Check the headers, give the request its id and the answer the same.
pub(crate) async fn check(mut request: Request, next: Next) -> Response {
    let headers = request.headers();
    let n_bytes: usize = headers
        .iter()
        .map(|(name, value)| name.as_str().len() + value.len())
        .sum();
    let chosen = headers
        .get(REQUEST_ID)
        .map(|value| RequestId::new(String::from_utf8_lossy(value.as_bytes())));
    let refused = if n_bytes > MAX_HEADER_BYTES as usize {
        let problem = format!("{n_bytes} bytes of headers are over the limit of {MAX_HEADER_BYTES}");
        Some(Failure::new(ErrorCode::HeadersTooLarge, problem))
    } else if let Some(Err(error)) = &chosen {
        Some(Failure::of_field(
            ErrorCode::InvalidArgument,
            REQUEST_ID,
            error.to_string(),
        ))
    } else {
        None
    };
    let id = match chosen {
        Some(Ok(id)) => id,
        _ => random_request_id(),
    };
    let value = HeaderValue::from_str(id.as_str());
    let key: KeyName = request.extensions().get().cloned().unwrap_or_default();
    let mut response = match refused {
        Some(failure) => HttpError::refused(failure).into_response(),
        None => {
            request.extensions_mut().insert(id);
            next.run(request).await
        }
    };
    Refused::count(&mut response, &key);
    if let Ok(value) = value {
        response.headers_mut().insert(REQUEST_ID, value);
    }
    response
}

/// What [`crate::api::Api`] is told beside the request.
///
/// # Errors
/// A timeout that is no number of milliseconds.
pub(crate) fn caller(parts: &Parts) -> Result<Caller, Failure> {
    Ok(Caller {
        metadata: metadata(&parts.headers)?,
        key: parts.extensions.get().cloned().unwrap_or_default(),
    })
}

fn metadata(headers: &HeaderMap) -> Result<MetadataMap, Failure> {
    let mut passed_on = HeaderMap::new();
    for name in PASSED_ON {
        if let Some(value) = headers.get(name) {
            passed_on.insert(name, value.clone());
        }
    }
    let mut metadata = MetadataMap::from_headers(passed_on);
    if let Some(value) = headers.get(TIMEOUT) {
        let milliseconds = value
            .to_str()
            .ok()
            .and_then(|value| value.parse::<u32>().ok())
            .filter(|milliseconds| (1..100_000_000).contains(milliseconds));
        let timeout =
            milliseconds.and_then(|milliseconds| MetadataValue::try_from(format!("{milliseconds}m")).ok());
        let Some(timeout) = timeout else {
            let problem = "it is no number of milliseconds from 1 to 99999999";
            return Err(Failure::of_field(ErrorCode::InvalidArgument, TIMEOUT, problem));
        };
        metadata.insert("grpc-timeout", timeout);
    }
    Ok(metadata)
}

#[cfg(test)]
mod tests {
    use super::*;
    use laneway_proto::grpc_timeout;
    use std::time::Duration;

    fn read(name: &'static str, value: &str) -> Result<MetadataMap, Failure> {
        let mut headers = HeaderMap::new();
        headers.insert(name, value.parse().unwrap());
        metadata(&headers)
    }

    #[test]
    fn a_timeout_is_the_deadline_and_a_trace_goes_on() {
        let read_back = grpc_timeout(&read(TIMEOUT, "1500").unwrap());
        assert_eq!(read_back, Some(Duration::from_millis(1500)));
        for bad in ["", "0", "-1", "1.5", "soon", "100000000"] {
            assert_eq!(read(TIMEOUT, bad).unwrap_err().violations[0].field, TIMEOUT);
        }
        assert!(read("traceparent", "00-1").unwrap().contains_key("traceparent"));
        assert!(read("cookie", "x").unwrap().is_empty());
    }
}
