//! The process that started this one, as far as this one has to know.

use std::io::Read as _;

/// Resolves when the parent is gone or wants this process to end: standard input, a pipe of the parent's, is closed.
/// It needs nobody's help, so that it also holds for a parent that was killed.
pub(crate) async fn ended() {
    let (told, heard) = tokio::sync::oneshot::channel::<()>();
    // A thread of its own: a blocking read on the runtime's threads would keep the runtime from ending.
    let reader = std::thread::Builder::new().name("parent".into()).spawn(move || {
        let mut stdin = std::io::stdin().lock();
        let mut buffer = [0; 64];
        while matches!(stdin.read(&mut buffer), Ok(1..)) {}
        drop(told);
    });
    match reader {
        // The sender is dropped, never used.
        Ok(_) => drop(heard.await),
        Err(error) => tracing::error!(%error, "cannot watch the parent process; ending"),
    }
}
