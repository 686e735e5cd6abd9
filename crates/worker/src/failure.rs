//! How the engine's refusals and failures look on the wire. Diagnostics stay in the log.

use laneway_engine::{Failure as EngineFailure, FailureKind, PushError, SubmitError};
use laneway_proto::{ErrorCode, Failure};

/// A submission that was not taken.
pub(crate) fn of_submit(error: SubmitError) -> Failure {
    match error {
        SubmitError::QueueFull { retry_after, .. } => {
            Failure::new(ErrorCode::Overloaded, error.to_string()).retry_after(retry_after)
        }
        SubmitError::DuplicateId(_) => {
            Failure::of_field(ErrorCode::DuplicateRequest, "request_id", error.to_string())
        }
        SubmitError::Draining => Failure::new(ErrorCode::Draining, "the worker is draining"),
        SubmitError::Stopped(why) => {
            tracing::warn!(why, "refused a request: the engine does not run");
            Failure::new(ErrorCode::WorkerLost, "the worker's engine does not run")
        }
        SubmitError::Invalid(row) => of_engine(row.into()),
    }
}

/// A request that ended other than in order.
pub(crate) fn of_engine(failure: EngineFailure) -> Failure {
    let EngineFailure { kind, field, message } = failure;
    match (kind, field) {
        (FailureKind::InvalidArgument, Some(field)) => {
            Failure::of_field(ErrorCode::InvalidArgument, field, message)
        }
        (FailureKind::InvalidArgument, None) => Failure::new(ErrorCode::InvalidArgument, message),
        (FailureKind::Cancelled, _) => Failure::new(ErrorCode::Cancelled, "the request was cancelled"),
        (FailureKind::DeadlineExceeded, _) => Failure::new(
            ErrorCode::DeadlineExceeded,
            "the deadline passed before the end of the audio",
        ),
        (FailureKind::ListenerStalled, _) => Failure::new(
            ErrorCode::Cancelled,
            "no audio was taken for too long, so the request was ended",
        ),
        (FailureKind::Unavailable, _) => {
            tracing::warn!(message, "a request ended unavailable");
            Failure::new(
                ErrorCode::WorkerLost,
                "the worker cannot finish this request; try again",
            )
        }
        (FailureKind::Internal, _) => {
            tracing::error!(message, "a request failed");
            Failure::internal()
        }
    }
}

/// Frames that were not taken. `Full` is backpressure and never gets here.
pub(crate) fn of_push(error: PushError) -> Failure {
    Failure::of_field(ErrorCode::InvalidArgument, "frames", error.to_string())
}
