//! The access log: one line for each request to speak, whatever became of it, under a target of its own.

use std::time::Duration;

use laneway_proto::ErrorCode;
use laneway_telemetry::stage;
use tracing::Span;

use crate::caller::KeyName;

/// Of these lines and no others, for filters.
const TARGET: &str = "laneway_gateway::access";

/// How a request that was admitted ended. The line has its id and model from the span around it.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) outcome: Result<(), ErrorCode>,
    pub(crate) key: KeyName,
    /// Delivered, at the rate asked for.
    pub(crate) samples: u64,
    /// Until its first audio.
    pub(crate) first_audio: Option<Duration>,
    /// Until its end.
    pub(crate) total: Duration,
}

impl Ended {
    pub(crate) fn log(&self) {
        let trace_id = stage::trace_id(&Span::current());
        tracing::info!(
            target: TARGET,
            outcome = self.outcome.map_or_else(ErrorCode::label, |()| "ok"),
            key = self.key.as_str(),
            samples = self.samples,
            first_audio_seconds = self.first_audio.map(|first| first.as_secs_f64()),
            seconds = self.total.as_secs_f64(),
            trace_id,
            "request"
        );
    }
}

/// A request that was turned away.
pub(crate) fn refused(code: ErrorCode, key: &KeyName) {
    tracing::info!(target: TARGET, outcome = code.label(), key = key.as_str(), "request");
}
