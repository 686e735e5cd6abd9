//! SIGTERM and SIGINT, the same for every binary.

use anyhow::Context as _;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

/// Exit code of a process that was told twice: what a shell says of one that the signal ended.
fn exit_code(signal: SignalKind) -> i32 {
    128 + signal.as_raw_value()
}

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
                _ = terminate.recv() => ("SIGTERM", SignalKind::terminate()),
                _ = interrupt.recv() => ("SIGINT", SignalKind::interrupt()),
            }
        };
        let (first, _) = next().await;
        tracing::info!(signal = first, "draining; a second signal exits now");
        drain.cancel();
        let (second, kind) = next().await;
        tracing::warn!(signal = second, "exiting now");
        std::process::exit(exit_code(kind));
    });
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_signal_has_the_code_of_its_own() {
        assert_eq!(exit_code(SignalKind::terminate()), 143);
        assert_eq!(exit_code(SignalKind::interrupt()), 130);
    }
}
