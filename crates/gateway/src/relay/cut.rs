//! What ends a stream early.

use laneway_proto::{ErrorCode, Failure};
use laneway_telemetry::metric;
use tokio::time::Instant;

use super::Interrupt;
use crate::admission::Signal;

/// The same as its caller is told. Counts it.
pub(crate) fn cut(interrupt: Interrupt) -> Failure {
    let (by, code, message) = match interrupt {
        Interrupt::Gone => ("client", ErrorCode::Cancelled, "the caller left"),
        Interrupt::Patience => (
            "client",
            ErrorCode::Cancelled,
            "the caller took no audio for too long",
        ),
        Interrupt::Deadline => ("deadline", ErrorCode::DeadlineExceeded, "the deadline passed"),
        Interrupt::Signal(Signal::GoAway) => (
            "drain",
            ErrorCode::Draining,
            "the gateway shut down before the end",
        ),
        Interrupt::Signal(_) => ("kill", ErrorCode::Cancelled, "the request was cancelled"),
    };
    metrics::counter!(metric::GATEWAY_CANCELS, "by" => by).increment(1);
    Failure::new(code, message)
}

/// Never without a deadline.
pub(crate) async fn sleep_until(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => tokio::time::sleep_until(deadline).await,
        None => std::future::pending().await,
    }
}
