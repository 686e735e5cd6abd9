//! What a caller is told of a request that could not be read.
//!
//! The transport takes a message apart before a handler sees it, and words its own refusals: bytes that are not the
//! message are INTERNAL there, and too many of them OUT_OF_RANGE. Both are the caller's doing.

use std::convert::Infallible;
use std::task::{Context, Poll};

use laneway_proto::{ErrorCode, Failure};
use tonic::body::Body;
use tonic::codegen::{BoxFuture, Service, http};
use tonic::server::NamedService;
use tonic::{Code, Status};

/// A service whose refusals of unreadable requests are in our words.
#[derive(Debug, Clone)]
pub(crate) struct Readable<S>(pub(crate) S);

impl<S: NamedService> NamedService for Readable<S> {
    const NAME: &'static str = S::NAME;
}

impl<S> Service<http::Request<Body>> for Readable<S>
where
    S: Service<http::Request<Body>, Response = http::Response<Body>, Error = Infallible>,
    S::Future: Send + 'static,
{
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<Self::Response, Infallible>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.0.poll_ready(context)
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let answer = self.0.call(request);
        Box::pin(async move {
            let answer = answer.await?;
            let refusal = Status::from_header_map(answer.headers()).and_then(|status| unreadable(&status));
            Ok(match refusal {
                Some(failure) => Status::from(failure).into_http(),
                None => answer,
            })
        })
    }
}

/// What the transport's refusal means. Failures of ours carry details, which tells them apart.
fn unreadable(status: &Status) -> Option<Failure> {
    if !status.details().is_empty() {
        return None;
    }
    let code = match status.code() {
        Code::Internal => ErrorCode::InvalidArgument,
        Code::OutOfRange => ErrorCode::RequestTooLarge,
        _ => return None,
    };
    Some(Failure::new(
        code,
        format!("the request cannot be read: {}", status.message()),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(status: Status, wanted: Option<ErrorCode>) {
        assert_eq!(unreadable(&status).map(|failure| failure.code), wanted);
    }

    #[test]
    fn only_the_transports_own_words_are_changed() {
        check(
            Status::internal("failed to decode"),
            Some(ErrorCode::InvalidArgument),
        );
        check(
            Status::out_of_range("too large"),
            Some(ErrorCode::RequestTooLarge),
        );
        check(Failure::internal().into(), None);
        check(Status::unimplemented("no such method"), None);
    }
}
