//! A failure as it crosses a process boundary: a `Status` with google.rpc details, built and read back here only.

use std::fmt;
use std::time::Duration;

use tonic::Status;
use tonic_types::{ErrorDetails, StatusExt};

use crate::ErrorCode;

/// `domain` of every `google.rpc.ErrorInfo` that Laneway sends.
pub const ERROR_DOMAIN: &str = "laneway";

/// Most violations that one answer lists: details travel in a header of limited size.
const MAX_VIOLATIONS: usize = 16;

/// Longest description of one violation, in bytes.
const MAX_DESCRIPTION_BYTES: usize = 400;

/// A field and what is wrong with it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Violation {
    /// Path of the field, `sampling.temperature`.
    pub field: String,
    /// What is wrong and what to send instead.
    pub description: String,
}

/// A failure with everything that its receiver may know. What only an operator may know is logged where the
/// failure is made, and never put in here.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// What went wrong.
    pub code: ErrorCode,
    /// For people.
    pub message: String,
    /// Fields at fault.
    pub violations: Vec<Violation>,
    /// When trying again makes sense.
    pub retry_after: Option<Duration>,
}

impl Failure {
    /// A failure with a message and nothing else.
    pub fn new(code: ErrorCode, message: impl Into<String>) -> Self {
        Self {
            code,
            message: message.into(),
            violations: Vec::new(),
            retry_after: None,
        }
    }

    /// A failure of one field.
    pub fn of_field(code: ErrorCode, field: impl Into<String>, description: impl Into<String>) -> Self {
        let violation = Violation {
            field: field.into(),
            description: description.into(),
        };
        let message = format!("{}: {}", violation.field, violation.description);
        Self {
            code,
            message,
            violations: vec![violation],
            retry_after: None,
        }
    }

    /// A fault of ours, saying nothing of what it was.
    pub fn internal() -> Self {
        Self::new(ErrorCode::Internal, "internal error")
    }

    /// The same, to be tried again after `delay`.
    pub fn retry_after(mut self, delay: Duration) -> Self {
        self.retry_after = Some(delay);
        self
    }

    /// Read a failure back from a status. `None` when the status was not made by Laneway, or by a version
    /// with codes that this one does not know: the caller then goes by the gRPC code alone.
    pub fn from_status(status: &Status) -> Option<Self> {
        let details = status.check_error_details().ok()?;
        let info = details.error_info()?;
        if info.domain != ERROR_DOMAIN {
            return None;
        }
        let violations = details.bad_request().map_or_else(Vec::new, |bad_request| {
            bad_request
                .field_violations
                .iter()
                .map(|each| Violation {
                    field: each.field.clone(),
                    description: each.description.clone(),
                })
                .collect()
        });
        Some(Self {
            code: ErrorCode::from_reason(&info.reason)?,
            message: status.message().to_string(),
            violations,
            retry_after: details.retry_info().and_then(|info| info.retry_delay),
        })
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.code.reason(), self.message)
    }
}

impl std::error::Error for Failure {}

impl From<Failure> for Status {
    fn from(failure: Failure) -> Self {
        let mut details = ErrorDetails::new();
        details.set_error_info(failure.code.reason(), ERROR_DOMAIN, []);
        for violation in failure.violations.iter().take(MAX_VIOLATIONS) {
            details.add_bad_request_violation(
                violation.field.as_str(),
                truncated(&violation.description, MAX_DESCRIPTION_BYTES),
            );
        }
        if let Some(delay) = failure.retry_after {
            details.set_retry_info(Some(delay));
        }
        let message = truncated(&failure.message, 2 * MAX_DESCRIPTION_BYTES);
        Status::with_error_details(failure.code.grpc(), message, details)
    }
}

fn truncated(text: &str, max_bytes: usize) -> String {
    if text.len() <= max_bytes {
        return text.to_string();
    }
    let mut end = max_bytes;
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    format!("{}…", &text[..end])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ERROR_CODES;

    #[test]
    fn every_code_survives_the_wire() {
        for row in &ERROR_CODES {
            let sent = Failure {
                code: row.code,
                message: format!("what {} means", row.reason),
                violations: vec![
                    Violation {
                        field: "voice".into(),
                        description: "no voice \"bob\"; there are: ryan".into(),
                    },
                    Violation {
                        field: "sampling.top_p".into(),
                        description: "2 is not in (0, 1]".into(),
                    },
                ],
                retry_after: Some(Duration::from_millis(250)),
            };
            let status = Status::from(sent.clone());
            assert_eq!(status.code(), row.grpc);
            assert_eq!(Failure::from_status(&status), Some(sent));
        }
    }

    #[test]
    fn foreign_statuses_are_not_ours() {
        assert_eq!(
            Failure::from_status(&Status::unavailable("connection refused")),
            None
        );
        let mut details = ErrorDetails::new();
        details.set_error_info("OVERLOADED", "elsewhere", []);
        let foreign = Status::with_error_details(tonic::Code::ResourceExhausted, "busy", details);
        assert_eq!(Failure::from_status(&foreign), None);
        let mut details = ErrorDetails::new();
        details.set_error_info("OF_A_LATER_VERSION", ERROR_DOMAIN, []);
        let newer = Status::with_error_details(tonic::Code::Internal, "new", details);
        assert_eq!(Failure::from_status(&newer), None);
    }

    #[test]
    fn details_stay_small_enough_for_a_header() {
        let violation = Violation {
            field: "text".into(),
            description: "ä".repeat(10_000),
        };
        let failure = Failure {
            code: ErrorCode::InvalidArgument,
            message: "ä".repeat(10_000),
            violations: vec![violation; 100],
            retry_after: None,
        };
        let status = Status::from(failure);
        assert!(
            status.details().len() + status.message().len() < 9_000,
            "{}",
            status.details().len()
        );
        assert_eq!(
            Failure::from_status(&status).unwrap().violations.len(),
            MAX_VIOLATIONS
        );
    }
}
