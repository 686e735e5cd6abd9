//! Going away: what a shutdown asks for, and the order in which a gateway obeys.

use std::time::Duration;

use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

use crate::admission::Admission;

/// How long a stream that was told to go away may take to say so.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// The two strengths of a shutdown.
#[derive(Debug, Clone, Default)]
pub struct Shutdown {
    /// Finish what runs, take nothing new.
    pub drain: CancellationToken,
    /// Exit now.
    pub now: CancellationToken,
}

impl Shutdown {
    /// The first SIGTERM or SIGINT drains, the second exits now. A task listens until the process ends.
    ///
    /// # Errors
    /// The handlers cannot be installed.
    pub fn on_signals() -> std::io::Result<Self> {
        let shutdown = Self::default();
        let mut terminate = signal(SignalKind::terminate())?;
        let mut interrupt = signal(SignalKind::interrupt())?;
        let asked = shutdown.clone();
        tokio::spawn(async move {
            for token in [asked.drain, asked.now] {
                tokio::select! {
                    _ = terminate.recv() => {}
                    _ = interrupt.recv() => {}
                }
                token.cancel();
            }
        });
        Ok(shutdown)
    }
}

/// Wait for the drain to be asked for, then until the running streams are done or their time is up.
pub(crate) async fn drained(admission: &Admission, drain: &CancellationToken, bound: Duration) {
    drain.cancelled().await;
    admission.close();
    tracing::info!(bound_seconds = bound.as_secs_f64(), "draining");
    if tokio::time::timeout(bound, admission.empty()).await.is_ok() {
        tracing::info!("every stream has finished");
        return;
    }
    let ended = admission.end_all();
    tracing::warn!(streams = ended, "streams ended at the drain bound");
    // Each relay ends on the signal; the bound is for a runtime that is too busy to run them.
    let _ = tokio::time::timeout(LAST_WORDS, admission.empty()).await;
}
