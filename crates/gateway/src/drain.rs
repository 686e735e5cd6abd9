//! Going away: what a shutdown asks for, and the order in which a gateway obeys.

use std::time::Duration;

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::admission::Admission;

/// How long a stream that was told to go away may take to say so, and its caller to hear it.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// The two strengths of a shutdown. Cancelling a token asks for it.
#[derive(Debug, Clone, Default)]
pub struct Shutdown {
    /// Finish what runs, take nothing new.
    pub drain: CancellationToken,
    /// End serving now, whatever runs.
    pub now: CancellationToken,
}

/// Wait for the drain to be asked for, then until the running streams are done or their time is up. Returns when
/// the last connection has to be closed: the transport may still hold what a slow caller has yet to read.
pub(crate) async fn drained(admission: &Admission, drain: &CancellationToken, bound: Duration) -> Instant {
    drain.cancelled().await;
    let ends = Instant::now() + bound;
    admission.close();
    tracing::info!(bound_seconds = bound.as_secs_f64(), "draining");
    if tokio::time::timeout_at(ends, admission.empty()).await.is_ok() {
        tracing::info!("every stream has finished");
        return ends.max(Instant::now() + LAST_WORDS);
    }
    let ended = admission.end_all();
    tracing::warn!(streams = ended, "streams ended at the drain bound");
    // Each relay ends on the signal; the bound is for a runtime that is too busy to run them.
    let last_words = Instant::now() + LAST_WORDS;
    let _ = tokio::time::timeout_at(last_words, admission.empty()).await;
    last_words
}
