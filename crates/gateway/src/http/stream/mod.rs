//! `GET /v1/audio/speech/stream`: text in pieces to speech over a WebSocket, for browsers and for clients of that path.
//!
//! One connection speaks one utterance after the other, each of them a call of [`Api::converse`]. Messages are JSON
//! text ([`messages`]), audio is binary. The handler here checks who asks from where and lets the connection begin;
//! [`connection`] is its life.

mod connection;
mod messages;

use axum::Extension;
use axum::extract::ws::WebSocketUpgrade;
use axum::extract::{FromRequestParts as _, Request, State};
use axum::http::{HeaderMap, header};
use axum::response::Response;
use laneway_proto::{ErrorCode, Failure, RequestId};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use self::connection::Connection;
use super::error::HttpError;
use super::origin::Origins;
use super::{headers, speech};
use crate::api::Api;
use crate::keys::ApiKeys;

/// Where it is.
pub(crate) const PATH: &str = "/v1/audio/speech/stream";

/// What a connection speaks, for callers who ask for it by name.
const PROTOCOL: &str = "laneway.v1";

/// A browser's script sets no headers: what follows this in the list of protocols is an API key.
const KEY_PROTOCOL: &str = "laneway-api-key.";

/// Most bytes that wait in the library for a caller; one chunk of audio is less.
const MAX_WRITE_BYTES: usize = 4 << 20;

/// What all connections share.
#[derive(Debug, Clone)]
pub(crate) struct Sockets {
    /// Pages that may open one.
    pub(crate) origins: Origins,
    /// The gateway has nothing running any more and closes.
    pub(crate) stopped: CancellationToken,
    /// Those that are open.
    pub(crate) open: TaskTracker,
}

/// Begin a connection.
pub(crate) async fn upgrade(
    State(api): State<Api>,
    Extension(sockets): Extension<Sockets>,
    Extension(id): Extension<RequestId>,
    request: Request,
) -> Result<Response, HttpError> {
    let (mut parts, _) = request.into_parts();
    sockets
        .origins
        .check(&parts.headers)
        .map_err(HttpError::refused)?;
    let caller = headers::caller(&parts).map_err(HttpError::refused)?;
    let keys: Option<ApiKeys> = parts.extensions.get().cloned();
    let secret = secret(&parts.headers);
    if let (Some(keys), Some(secret)) = (&keys, &secret) {
        keys.check(secret)
            .map_err(|turned_away| HttpError::refused(turned_away.failure))?;
    }
    let upgrade = WebSocketUpgrade::from_request_parts(&mut parts, &())
        .await
        .map_err(|_| HttpError::refused(no_handshake()))?;
    let connection = Connection {
        api: api.clone(),
        keys,
        secret,
        caller,
        id,
        stopped: sockets.stopped,
    };
    // From here on: the answer is sent before the connection's own task begins.
    let open = sockets.open.token();
    let max_message_bytes = speech::max_body_bytes(api.max_text_chars);
    Ok(upgrade
        .protocols([PROTOCOL])
        .max_message_size(max_message_bytes)
        .max_frame_size(max_message_bytes)
        .max_write_buffer_size(MAX_WRITE_BYTES)
        .on_upgrade(async move |socket| {
            connection.run(socket).await;
            drop(open);
        }))
}

fn no_handshake() -> Failure {
    let problem = format!("{PATH} is a WebSocket; open it as one, with version 13 over HTTP/1.1");
    Failure::new(ErrorCode::InvalidArgument, problem)
}

/// The key that a caller says before its first message: in `authorization`, or in the list of protocols.
fn secret(headers: &HeaderMap) -> Option<Vec<u8>> {
    if let Some(value) = headers.get(header::AUTHORIZATION) {
        return Some(
            crate::keys::bearer(value.as_bytes())
                .unwrap_or_default()
                .to_owned(),
        );
    }
    let lists = headers.get_all(header::SEC_WEBSOCKET_PROTOCOL).iter();
    let all = lists
        .filter_map(|list| list.to_str().ok())
        .flat_map(|list| list.split(','));
    all.filter_map(|protocol| protocol.trim().strip_prefix(KEY_PROTOCOL))
        .map(|key| key.as_bytes().to_owned())
        .next()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(name: &'static str, value: &str, wanted: Option<&str>) {
        let mut headers = HeaderMap::new();
        headers.insert(name, value.parse().unwrap());
        assert_eq!(secret(&headers), wanted.map(|key| key.as_bytes().to_owned()));
    }

    #[test]
    fn a_key_is_said_in_a_header_or_beside_the_protocol() {
        check("authorization", "Bearer a-key", Some("a-key"));
        check("authorization", "Basic a-key", Some(""));
        check(
            "sec-websocket-protocol",
            "laneway.v1, laneway-api-key.a-key",
            Some("a-key"),
        );
        check("sec-websocket-protocol", "laneway.v1", None);
        check("cookie", "laneway-api-key.a-key", None);
    }
}
