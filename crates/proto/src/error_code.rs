//! The one table of error codes: what each is on gRPC, on HTTP and in metrics.

use tonic::Code;

/// What went wrong, from a closed set. Everything that a service answers with is one of these.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ErrorCode {
    /// A field's value is not allowed; the violations name it.
    InvalidArgument,
    /// The text has no letter and no digit, or holds a control character.
    InvalidText,
    /// The text is longer than the limit.
    TextTooLong,
    /// The request is larger than the limit.
    RequestTooLarge,
    /// The model has no such voice.
    UnknownVoice,
    /// The model has no such language.
    UnknownLanguage,
    /// No served model has that name.
    UnknownModel,
    /// The audio format is not one that is served.
    UnsupportedFormat,
    /// The sample rate is not one that is served.
    UnsupportedSampleRate,
    /// The field means nothing to this model.
    UnsupportedField,
    /// A running request has the same id.
    DuplicateRequest,
    /// No running request has that id.
    RequestNotFound,
    /// More requests than capacity and queue; try again later.
    Overloaded,
    /// The caller's deadline passed.
    DeadlineExceeded,
    /// The request was cancelled.
    Cancelled,
    /// No worker serves at the moment.
    NoWorker,
    /// The worker died, stalled or could not be reached.
    WorkerLost,
    /// The service is going away and takes nothing new.
    Draining,
    /// A worker asked for a rank that the deployment does not have.
    UnknownRank,
    /// Another live worker holds the rank.
    RankTaken,
    /// The deployment does not fit the devices that a worker reports.
    DeploymentRefused,
    /// A heartbeat of a worker that is not registered: it must register again.
    NotRegistered,
    /// There is no such method or page.
    UnknownRoute,
    /// The page exists, and is asked for with another HTTP method.
    MethodNotAllowed,
    /// The body is of another media type than the page takes.
    UnsupportedMediaType,
    /// The request took too long to arrive.
    RequestTimeout,
    /// The request's headers are larger than the limit.
    HeadersTooLarge,
    /// The call names no API key, or none that is known.
    Unauthenticated,
    /// A browser asks for a page of an origin that may not call.
    OriginNotAllowed,
    /// The caller's API key has calls enough for now.
    RateLimited,
    /// The gateway keeps no registered voices.
    VoicesNotKept,
    /// Another clip is registered under that name.
    VoiceExists,
    /// The voice was registered with another API key.
    VoiceOfAnother,
    /// No more voices are kept: one has to be deleted first.
    VoicesFull,
    /// A fault of ours. The message to the caller never says more.
    Internal,
}

/// One row of [`ERROR_CODES`].
#[derive(Debug, Clone, Copy)]
pub struct ErrorCodeRow {
    /// The code.
    pub code: ErrorCode,
    /// `reason` of `google.rpc.ErrorInfo`.
    pub reason: &'static str,
    /// Code of the gRPC status.
    pub grpc: Code,
    /// Status of the HTTP answer.
    pub http: u16,
    /// Label value in metrics.
    pub label: &'static str,
}

const fn row(
    code: ErrorCode,
    reason: &'static str,
    grpc: Code,
    http: u16,
    label: &'static str,
) -> ErrorCodeRow {
    ErrorCodeRow {
        code,
        reason,
        grpc,
        http,
        label,
    }
}

/// Every code, in the order of the enum.
pub const ERROR_CODES: [ErrorCodeRow; 35] = [
    row(
        ErrorCode::InvalidArgument,
        "INVALID_ARGUMENT",
        Code::InvalidArgument,
        400,
        "invalid_argument",
    ),
    row(
        ErrorCode::InvalidText,
        "INVALID_TEXT",
        Code::InvalidArgument,
        400,
        "invalid_text",
    ),
    row(
        ErrorCode::TextTooLong,
        "TEXT_TOO_LONG",
        Code::InvalidArgument,
        400,
        "text_too_long",
    ),
    row(
        ErrorCode::RequestTooLarge,
        "REQUEST_TOO_LARGE",
        Code::ResourceExhausted,
        413,
        "request_too_large",
    ),
    row(
        ErrorCode::UnknownVoice,
        "UNKNOWN_VOICE",
        Code::NotFound,
        404,
        "unknown_voice",
    ),
    row(
        ErrorCode::UnknownLanguage,
        "UNKNOWN_LANGUAGE",
        Code::InvalidArgument,
        400,
        "unknown_language",
    ),
    row(
        ErrorCode::UnknownModel,
        "UNKNOWN_MODEL",
        Code::NotFound,
        404,
        "unknown_model",
    ),
    row(
        ErrorCode::UnsupportedFormat,
        "UNSUPPORTED_FORMAT",
        Code::InvalidArgument,
        400,
        "unsupported_format",
    ),
    row(
        ErrorCode::UnsupportedSampleRate,
        "UNSUPPORTED_SAMPLE_RATE",
        Code::InvalidArgument,
        400,
        "unsupported_sample_rate",
    ),
    row(
        ErrorCode::UnsupportedField,
        "UNSUPPORTED_FIELD",
        Code::InvalidArgument,
        400,
        "unsupported_field",
    ),
    row(
        ErrorCode::DuplicateRequest,
        "DUPLICATE_REQUEST",
        Code::AlreadyExists,
        409,
        "duplicate_request",
    ),
    row(
        ErrorCode::RequestNotFound,
        "REQUEST_NOT_FOUND",
        Code::NotFound,
        404,
        "request_not_found",
    ),
    row(
        ErrorCode::Overloaded,
        "OVERLOADED",
        Code::ResourceExhausted,
        429,
        "overloaded",
    ),
    row(
        ErrorCode::DeadlineExceeded,
        "DEADLINE_EXCEEDED",
        Code::DeadlineExceeded,
        504,
        "deadline_exceeded",
    ),
    row(
        ErrorCode::Cancelled,
        "CANCELLED",
        Code::Cancelled,
        499,
        "cancelled",
    ),
    row(
        ErrorCode::NoWorker,
        "NO_WORKER",
        Code::Unavailable,
        503,
        "no_worker",
    ),
    row(
        ErrorCode::WorkerLost,
        "WORKER_LOST",
        Code::Unavailable,
        503,
        "worker_lost",
    ),
    row(
        ErrorCode::Draining,
        "DRAINING",
        Code::Unavailable,
        503,
        "draining",
    ),
    row(
        ErrorCode::UnknownRank,
        "UNKNOWN_RANK",
        Code::NotFound,
        404,
        "unknown_rank",
    ),
    row(
        ErrorCode::RankTaken,
        "RANK_TAKEN",
        Code::AlreadyExists,
        409,
        "rank_taken",
    ),
    row(
        ErrorCode::DeploymentRefused,
        "DEPLOYMENT_REFUSED",
        Code::FailedPrecondition,
        400,
        "deployment_refused",
    ),
    row(
        ErrorCode::NotRegistered,
        "NOT_REGISTERED",
        Code::NotFound,
        404,
        "not_registered",
    ),
    row(
        ErrorCode::UnknownRoute,
        "UNKNOWN_ROUTE",
        Code::Unimplemented,
        404,
        "unknown_route",
    ),
    row(
        ErrorCode::MethodNotAllowed,
        "METHOD_NOT_ALLOWED",
        Code::Unimplemented,
        405,
        "method_not_allowed",
    ),
    row(
        ErrorCode::UnsupportedMediaType,
        "UNSUPPORTED_MEDIA_TYPE",
        Code::InvalidArgument,
        415,
        "unsupported_media_type",
    ),
    row(
        ErrorCode::RequestTimeout,
        "REQUEST_TIMEOUT",
        Code::DeadlineExceeded,
        408,
        "request_timeout",
    ),
    row(
        ErrorCode::HeadersTooLarge,
        "HEADERS_TOO_LARGE",
        Code::ResourceExhausted,
        431,
        "headers_too_large",
    ),
    row(
        ErrorCode::Unauthenticated,
        "UNAUTHENTICATED",
        Code::Unauthenticated,
        401,
        "unauthenticated",
    ),
    row(
        ErrorCode::OriginNotAllowed,
        "ORIGIN_NOT_ALLOWED",
        Code::PermissionDenied,
        403,
        "origin_not_allowed",
    ),
    row(
        ErrorCode::RateLimited,
        "RATE_LIMITED",
        Code::ResourceExhausted,
        429,
        "rate_limited",
    ),
    row(
        ErrorCode::VoicesNotKept,
        "VOICES_NOT_KEPT",
        Code::FailedPrecondition,
        501,
        "voices_not_kept",
    ),
    row(
        ErrorCode::VoiceExists,
        "VOICE_EXISTS",
        Code::AlreadyExists,
        409,
        "voice_exists",
    ),
    row(
        ErrorCode::VoiceOfAnother,
        "VOICE_OF_ANOTHER",
        Code::PermissionDenied,
        403,
        "voice_of_another",
    ),
    row(
        ErrorCode::VoicesFull,
        "VOICES_FULL",
        Code::ResourceExhausted,
        507,
        "voices_full",
    ),
    row(ErrorCode::Internal, "INTERNAL", Code::Internal, 500, "internal"),
];

impl ErrorCode {
    /// Its row of the table.
    pub fn row(self) -> &'static ErrorCodeRow {
        &ERROR_CODES[self as usize]
    }

    /// `reason` of `google.rpc.ErrorInfo`.
    pub fn reason(self) -> &'static str {
        self.row().reason
    }

    /// Code of the gRPC status.
    pub fn grpc(self) -> Code {
        self.row().grpc
    }

    /// Status of the HTTP answer.
    pub fn http(self) -> u16 {
        self.row().http
    }

    /// Label value in metrics.
    pub fn label(self) -> &'static str {
        self.row().label
    }

    /// The code with that `reason`.
    pub fn from_reason(reason: &str) -> Option<ErrorCode> {
        ERROR_CODES
            .iter()
            .find(|row| row.reason == reason)
            .map(|row| row.code)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn every_code_finds_its_own_row() {
        for (index, row) in ERROR_CODES.iter().enumerate() {
            assert_eq!(row.code as usize, index, "{:?} is out of order", row.code);
            assert_eq!(ErrorCode::from_reason(row.reason), Some(row.code));
            assert_eq!(row.label, row.reason.to_lowercase());
            assert!((400..600).contains(&row.http));
            assert_ne!(row.grpc, Code::Ok);
        }
        assert_eq!(
            ErrorCode::Internal as usize + 1,
            ERROR_CODES.len(),
            "the last code closes the table"
        );
        let reasons: HashSet<_> = ERROR_CODES.iter().map(|row| row.reason).collect();
        assert_eq!(reasons.len(), ERROR_CODES.len());
    }
}
