//! Which pages' scripts may call.
//!
//! A browser says where the script comes from that calls. It asks first over HTTP and gRPC-Web (CORS), and keeps the
//! answer from a script that may not have it. A WebSocket it just opens: there the gateway has to look itself.

use std::sync::Arc;
use std::time::Duration;

use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, Uri, header};
use laneway_proto::{ErrorCode, Failure};
use tower_http::cors::{AllowOrigin, CorsLayer};

/// How long a browser may keep what it was answered.
const MAX_AGE: Duration = Duration::from_secs(600);

/// Headers that a script may send.
const ALLOWED: [&str; 11] = [
    "authorization",
    "content-type",
    "grpc-timeout",
    "openai-organization",
    "openai-project",
    "traceparent",
    "tracestate",
    "x-grpc-web",
    "x-request-id",
    "x-request-timeout-ms",
    "x-user-agent",
];

/// Headers of an answer that a script may read.
const EXPOSED: [&str; 8] = [
    "grpc-message",
    "grpc-status",
    "grpc-status-details-bin",
    "laneway-model",
    "laneway-sample-rate",
    "laneway-seed",
    "retry-after",
    "x-request-id",
];

/// The pages that may call from a browser beside the gateway's own. Cheap to clone.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Origins {
    any: bool,
    listed: Arc<[HeaderValue]>,
}

impl Origins {
    /// Read them as they are written: `https://host` or `http://host:port`, or `*` for every page there is.
    ///
    /// # Errors
    /// The one that is no origin, with what to write instead.
    pub fn parse(values: &[String]) -> Result<Self, (String, String)> {
        let mut origins = Self::default();
        let mut listed = Vec::new();
        for value in values {
            if value == "*" {
                origins.any = true;
                continue;
            }
            let problem = || {
                (
                    value.clone(),
                    "not an origin; write https://host, http://host:port or *".into(),
                )
            };
            let (Some(_), Ok(header)) = (authority(value), HeaderValue::from_str(value)) else {
                return Err(problem());
            };
            if value.ends_with('/') || value.bytes().any(|byte| byte.is_ascii_uppercase()) {
                return Err((
                    value.clone(),
                    format!(
                        "browsers write it otherwise; write {}",
                        value.trim_end_matches('/').to_ascii_lowercase()
                    ),
                ));
            }
            listed.push(header);
        }
        origins.listed = listed.into();
        Ok(origins)
    }

    /// Answers for browsers. None where no page but the gateway's own may call, which asks for no answers.
    pub(crate) fn layer(&self) -> Option<CorsLayer> {
        let allowed = match self.any {
            true => AllowOrigin::any(),
            false if self.listed.is_empty() => return None,
            false => AllowOrigin::list(self.listed.iter().cloned()),
        };
        let cors = CorsLayer::new()
            .allow_origin(allowed)
            .allow_methods([Method::GET, Method::POST])
            .allow_headers(ALLOWED.map(HeaderName::from_static))
            .expose_headers(EXPOSED.map(HeaderName::from_static))
            .max_age(MAX_AGE);
        Some(cors)
    }

    /// Whether a WebSocket may be opened from where these headers say. Who is no browser says nothing.
    ///
    /// # Errors
    /// `OriginNotAllowed`.
    pub(crate) fn check(&self, headers: &HeaderMap) -> Result<(), Failure> {
        let Some(origin) = headers.get(header::ORIGIN) else {
            return Ok(());
        };
        if self.any || self.listed.contains(origin) || is_own(origin, headers) {
            return Ok(());
        }
        let problem = "pages of this origin may not call; the gateway's --cors-origin lists those that may";
        Err(Failure::new(ErrorCode::OriginNotAllowed, problem))
    }
}

/// Whether a page came from where it calls. The scheme may differ, as it does behind a proxy that ends TLS.
fn is_own(origin: &HeaderValue, headers: &HeaderMap) -> bool {
    let host = headers.get(header::HOST).and_then(|host| host.to_str().ok());
    let origin = origin.to_str().ok().and_then(authority);
    let is_same = |(host, origin): (&str, String)| host.eq_ignore_ascii_case(&origin);
    host.zip(origin).is_some_and(is_same)
}

/// `host` or `host:port` of an origin.
fn authority(origin: &str) -> Option<String> {
    let uri: Uri = origin.parse().ok()?;
    let web = matches!(uri.scheme_str(), Some("http" | "https"));
    let bare = uri.path() == "/" && uri.query().is_none();
    let authority = uri.authority()?.as_str();
    (web && bare && !authority.contains('@')).then(|| authority.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn origins(values: &[&str]) -> Origins {
        let values: Vec<_> = values.iter().map(|value| (*value).to_owned()).collect();
        Origins::parse(&values).unwrap()
    }

    #[track_caller]
    fn check(listed: &[&str], headers: &[(&'static str, &str)], allowed: bool) {
        let map = headers
            .iter()
            .map(|(name, value)| (HeaderName::from_static(name), value.parse().unwrap()))
            .collect();
        assert_eq!(
            origins(listed).check(&map).is_ok(),
            allowed,
            "{listed:?} {headers:?}"
        );
    }

    #[test]
    fn a_page_may_open_a_socket_where_it_is_from_or_listed() {
        let host = ("host", "speech.example:8080");
        check(&[], &[host], true);
        check(&[], &[host, ("origin", "https://speech.example:8080")], true);
        check(&[], &[host, ("origin", "https://speech.example")], false);
        check(&[], &[host, ("origin", "https://other.example")], false);
        check(&[], &[host, ("origin", "null")], false);
        check(&[], &[("origin", "https://other.example")], false);
        let listed = ["https://other.example"];
        check(&listed, &[host, ("origin", "https://other.example")], true);
        check(&listed, &[host, ("origin", "http://other.example")], false);
        check(&listed, &[host, ("origin", "https://other.example.evil")], false);
        check(&["*"], &[host, ("origin", "null")], true);
    }

    #[test]
    fn what_is_no_origin_is_refused() {
        for (value, words) in [
            ("other.example", "not an origin"),
            ("ftp://other.example", "not an origin"),
            ("https://other.example/page", "not an origin"),
            ("https://me@other.example", "not an origin"),
            ("https://other.example/", "write https://other.example"),
            ("https://Other.example", "write https://other.example"),
        ] {
            let (named, problem) = Origins::parse(&[value.to_owned()]).unwrap_err();
            assert_eq!(named, value);
            assert!(problem.contains(words), "{problem}");
        }
        assert!(origins(&[]).layer().is_none());
        assert!(origins(&["https://other.example"]).layer().is_some());
    }
}
