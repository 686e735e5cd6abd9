//! SIGTERM and SIGINT, the same for every binary.

use anyhow::Context as _;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

/// Exit code of a process that was told twice.
const EXIT_NOW: i32 = 130;

/// The first signal cancels `drain`; the second ends the process now. A task listens until then.
///
/// # Errors
/// The handlers cannot be installed.
pub fn drain_on_signal(drain: CancellationToken) -> anyhow::Result<()> {
    let mut terminate = signal(SignalKind::terminate()).context("handle SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("handle SIGINT")?;
    tokio::spawn(async move {
        let mut next = async || {
            tokio::select! {
                _ = terminate.recv() => "SIGTERM",
                _ = interrupt.recv() => "SIGINT",
            }
        };
        let first = next().await;
        tracing::info!(signal = first, "draining; a second signal exits now");
        drain.cancel();
        let second = next().await;
        tracing::warn!(signal = second, "exiting now");
        std::process::exit(EXIT_NOW);
    });
    Ok(())
}
