//! The HTTP shapes of the public API, on the listener that serves gRPC: OpenAI's speech API and a page to try it.
//!
//! Each handler turns what it was sent into a [`laneway_proto::v1::SynthesizeRequest`] for [`Api::speak`], and its
//! events into a body. A refusal is an [`error::HttpError`], whatever refused it.

mod body;
pub(crate) mod connection;
mod error;
pub(crate) mod headers;
mod lists;
mod page;
mod request;
mod speech;

use axum::http::{Method, Uri, header};
use axum::response::{IntoResponse as _, Response};
use axum::routing::{get, post};
use laneway_proto::{ErrorCode, Failure};
use tonic::Status;

use crate::api::Api;
use error::HttpError;

/// Everything that is not gRPC.
pub(crate) fn router(api: Api) -> axum::Router {
    axum::Router::new()
        .route("/", get(page::page))
        .route("/v1/audio/speech", post(speech::speak))
        .route("/v1/audio/voices", get(lists::voices))
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
    let is_grpc = headers
        .get(header::CONTENT_TYPE)
        .is_some_and(|value| value.as_bytes().starts_with(b"application/grpc"));
    match is_grpc {
        true => Status::from(failure).into_http::<axum::body::Body>(),
        false => HttpError::refused(failure).into_response(),
    }
}
