//! Failures as OpenAI's API tells them.

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use laneway_proto::{ErrorCode, Failure};
use laneway_telemetry::metric;
use serde::Serialize;
use tonic::Status;

use super::headers::REQUEST_ID;
use crate::access;
use crate::caller::KeyName;

/// Fields of a request whose name in this API is another than on the wire.
const NAMES: [(&str, &str); 4] = [
    ("text", "input"),
    ("instruct", "instructions"),
    ("format", "response_format"),
    ("request_id", REQUEST_ID),
];

/// The name that callers of this API know a field by.
fn name(field: &str) -> &str {
    NAMES
        .iter()
        .find(|(wire, _)| *wire == field)
        .map_or(field, |(_, here)| here)
}

/// A failure that is answered over HTTP.
#[derive(Debug)]
pub(crate) struct HttpError {
    failure: Failure,
    refused: bool,
}

/// On an answer that refuses a request which did not reach [`crate::api::Api`], which counts its own refusals: for
/// the layer that knows whose request it was.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Refused(pub(crate) ErrorCode);

impl Refused {
    /// Count what `response` refused of who has `key`, once.
    pub(crate) fn count(response: &mut Response, key: &KeyName) {
        if let Some(Refused(code)) = response.extensions_mut().remove() {
            let reason = code.label();
            metrics::counter!(metric::GATEWAY_REFUSALS, "reason" => reason, "key" => key.label())
                .increment(1);
            access::refused(code, key);
        }
    }
}

/// The error envelope of the API.
#[derive(Debug, Serialize)]
pub(crate) struct Envelope {
    error: Body,
}

#[derive(Debug, Serialize)]
struct Body {
    message: String,
    #[serde(rename = "type")]
    kind: &'static str,
    param: Option<String>,
    code: &'static str,
}

impl HttpError {
    /// A request that is refused before it reached [`crate::api::Api`].
    pub(crate) fn refused(failure: Failure) -> Self {
        Self {
            refused: true,
            ..failure.into()
        }
    }

    /// How a stream ended. What is not one of our failures is nothing for callers.
    pub(crate) fn ended(status: &Status) -> Self {
        Failure::from_status(status)
            .unwrap_or_else(Failure::internal)
            .into()
    }

    pub(crate) fn envelope(&self) -> Envelope {
        let failure = &self.failure;
        let message = if failure.violations.is_empty() {
            failure.message.clone()
        } else {
            let lines: Vec<_> = failure
                .violations
                .iter()
                .map(|each| format!("{}: {}", name(&each.field), each.description))
                .collect();
            lines.join("; ")
        };
        let kind = match failure.code.http() {
            401 => "authentication_error",
            429 => "rate_limit_error",
            500.. => "server_error",
            _ => "invalid_request_error",
        };
        Envelope {
            error: Body {
                message,
                kind,
                param: failure
                    .violations
                    .first()
                    .map(|first| name(&first.field).to_string()),
                code: failure.code.label(),
            },
        }
    }
}

impl From<Failure> for HttpError {
    fn from(failure: Failure) -> Self {
        Self {
            failure,
            refused: false,
        }
    }
}

impl IntoResponse for HttpError {
    fn into_response(self) -> Response {
        let status =
            StatusCode::from_u16(self.failure.code.http()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let mut response = (status, axum::Json(self.envelope())).into_response();
        if self.refused {
            response.extensions_mut().insert(Refused(self.failure.code));
        }
        if let Some(delay) = self.failure.retry_after {
            let seconds = delay.as_millis().div_ceil(1000).max(1) as u64;
            response
                .headers_mut()
                .insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use laneway_proto::{ERROR_CODES, Violation};
    use std::time::Duration;

    #[test]
    fn every_code_has_its_status_and_an_envelope() {
        for row in &ERROR_CODES {
            let response = HttpError::from(Failure::new(row.code, "what it is")).into_response();
            assert_eq!(response.status().as_u16(), row.http);
            let envelope = HttpError::from(Failure::new(row.code, "what it is")).envelope();
            let json = serde_json::to_value(envelope).unwrap();
            assert_eq!(json["error"]["code"], row.label);
            assert_eq!(json["error"]["message"], "what it is");
            assert!(json["error"]["param"].is_null());
            let server = json["error"]["type"] == "server_error";
            assert_eq!(server, row.http >= 500);
        }
    }

    #[test]
    fn fields_have_the_names_of_this_api() {
        let violation = |field: &str| Violation {
            field: field.into(),
            description: "no good".into(),
        };
        let failure = Failure {
            violations: vec![violation("text"), violation("format"), violation("voice")],
            ..Failure::new(ErrorCode::InvalidText, "text: no good")
        };
        let json = serde_json::to_value(HttpError::from(failure).envelope()).unwrap();
        assert_eq!(
            json["error"]["message"],
            "input: no good; response_format: no good; voice: no good"
        );
        assert_eq!(json["error"]["param"], "input");
    }

    #[test]
    fn when_to_try_again_is_said_in_whole_seconds() {
        for (delay, seconds) in [(1, "1"), (1000, "1"), (1001, "2")] {
            let failure = Failure::new(ErrorCode::Overloaded, "full");
            let failure = failure.retry_after(Duration::from_millis(delay));
            let response = HttpError::from(failure).into_response();
            assert_eq!(response.headers()[header::RETRY_AFTER], seconds);
        }
    }
}
