//! The layer that asks every call for its key, before anything else of it is looked at.

use std::pin::Pin;
use std::task::{Context, Poll};

use axum::body::{Body, Bytes, HttpBody};
use axum::extract::{Request, State};
use axum::http::{HeaderMap, Method, header};
use axum::middleware::Next;
use axum::response::Response;
use http_body::{Frame, SizeHint};

use super::error::Refused;
use super::stream;
use crate::http::refusal;
use crate::keys::{ApiKeys, Pass, TurnedAway};

/// Health is asked for by those who run the gateway, and holds nothing.
const HEALTH: &str = "/grpc.health.v1.Health/";

/// Let a call through whose key may make it. It counts as running until its answer has been read or dropped.
pub(crate) async fn guard(State(keys): State<ApiKeys>, mut request: Request, next: Next) -> Response {
    let path = request.uri().path();
    let is_page = path == "/" && [Method::GET, Method::HEAD].contains(request.method());
    // A browser asks so whether it may ask, and says no key with it.
    let is_preflight = request.method() == Method::OPTIONS;
    if is_page || is_preflight || path.starts_with(HEALTH) {
        return next.run(request).await;
    }
    if path == stream::PATH {
        // Each utterance is a call of its own, and a browser says its key where a header cannot.
        request.extensions_mut().insert(keys);
        return next.run(request).await;
    }
    let authorization = request.headers().get(header::AUTHORIZATION);
    match keys.enter(authorization.map(header::HeaderValue::as_bytes)) {
        Ok(pass) => {
            request.extensions_mut().insert(pass.key.clone());
            let held = |body| Body::new(Held { body, _pass: pass });
            next.run(request).await.map(held)
        }
        Err(turned_away) => refused(turned_away, request.headers()),
    }
}

fn refused(TurnedAway { failure, key }: TurnedAway, headers: &HeaderMap) -> Response {
    let mut response = refusal(failure, headers);
    Refused::count(&mut response, &key);
    response
}

/// An answer with the pass of its call.
struct Held {
    body: Body,
    _pass: Pass,
}

impl HttpBody for Held {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
