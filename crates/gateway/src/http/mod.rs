//! The HTTP shapes of the public API, on the listener that serves gRPC: OpenAI's speech API, the same over a
//! WebSocket, and a page to try it.
//!
//! Each handler turns what it was sent into a [`laneway_proto::v1::SynthesizeRequest`] for [`Api::speak`], and its
//! events into a body. A refusal is an [`error::HttpError`], whatever refused it.

mod body;
pub(crate) mod connection;
mod error;
pub(crate) mod guard;
pub(crate) mod headers;
pub(crate) mod lanes;
mod lists;
pub(crate) mod origin;
mod page;
mod request;
mod speech;
pub(crate) mod stream;
mod voices;

use axum::Extension;
use axum::http::{Method, Uri, header};
use axum::response::{IntoResponse as _, Response};
use axum::routing::{delete, get, post};
use laneway_proto::{ErrorCode, Failure};
use tonic::Status;

use crate::api::Api;
use error::{HttpError, Refused};
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) use request::parse;
use stream::Sockets;

/// Everything that is not gRPC.
pub(crate) fn router(api: Api, sockets: Sockets) -> axum::Router {
    axum::Router::new()
        .route("/", get(page::page))
        .route("/v1/audio/speech", post(speech::speak))
        .route(stream::PATH, get(stream::upgrade).layer(Extension(sockets)))
        .route("/v1/audio/voices", get(lists::voices).post(voices::register))
        .route("/v1/audio/voices/{voice}", delete(voices::forget))
        .route("/v1/lanes", get(lanes::lanes))
        .route("/v1/models", get(lists::models))
        .route("/v1/models/{model}", get(lists::model))
        .method_not_allowed_fallback(wrong_method)
        .fallback(no_route)
        .layer(axum::middleware::from_fn(headers::check))
        .with_state(api)
}

async fn wrong_method(method: Method, uri: Uri) -> HttpError {
    let problem = format!("{} does not take {method}", uri.path());
    HttpError::refused(Failure::new(ErrorCode::MethodNotAllowed, problem))
}

/// A path that nobody serves is told so in the caller's own protocol.
async fn no_route(uri: Uri, headers: axum::http::HeaderMap) -> Response {
    let path: String = uri.path().chars().take(128).collect();
    let failure = Failure::new(ErrorCode::UnknownRoute, format!("there is no {path}"));
    refusal(failure, &headers)
}

/// A refusal in the caller's own protocol.
pub(crate) fn refusal(failure: Failure, headers: &axum::http::HeaderMap) -> Response {
    let is_grpc = headers
        .get(header::CONTENT_TYPE)
        .is_some_and(|value| value.as_bytes().starts_with(b"application/grpc"));
    match is_grpc {
        true => {
            let refused = Refused(failure.code);
            let mut response = Status::from(failure).into_http::<axum::body::Body>();
            response.extensions_mut().insert(refused);
            response
        }
        false => HttpError::refused(failure).into_response(),
    }
}
