//! What files say now, and the task that looks at them.

use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use laneway_telemetry::metric;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;

use crate::files::{TlsError, fingerprint};
use crate::term::Term;

/// Between looks at the files.
const POLL: Duration = Duration::from_secs(1);

/// Between warnings of a certificate that expires soon, or has.
const WARN_AGAIN: Duration = Duration::from_secs(24 * 3600);

/// Ends the looking when it is dropped.
#[derive(Debug)]
pub struct Watch(#[expect(dead_code, reason = "held for its end")] AbortOnDropHandle<()>);

/// Something that is made from files.
pub(crate) trait FromFiles: fmt::Debug + Clone + Send + Sync + 'static {
    type Made: Send + Sync + 'static;

    fn paths(&self) -> Vec<&Path>;

    fn read(&self) -> Result<Read<Self::Made>, TlsError>;
}

/// What came of reading files.
#[derive(Debug)]
pub(crate) struct Read<M> {
    pub(crate) made: M,
    /// Of the certificate among them. None where somebody else tells of the same one.
    pub(crate) term: Option<Term>,
}

impl<M> Read<M> {
    fn tell(&self) {
        if let Some(term) = &self.term {
            term.tell();
        }
    }
}

/// What was read last. Cheap to clone.
pub(crate) struct Current<F: FromFiles> {
    files: F,
    read: Arc<watch::Sender<Arc<Read<F::Made>>>>,
    /// Of the files as they were read first.
    first: u64,
}

impl<F: FromFiles> Clone for Current<F> {
    fn clone(&self) -> Self {
        Self {
            files: self.files.clone(),
            read: self.read.clone(),
            first: self.first,
        }
    }
}

impl<F: FromFiles> fmt::Debug for Current<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Keys are in no log.
        self.files.fmt(f)
    }
}

impl<F: FromFiles> Current<F> {
    pub(crate) fn read(files: F) -> Result<Self, TlsError> {
        // Before the reading: what changes meanwhile is read again.
        let first = fingerprint(files.paths().into_iter());
        let read = Arc::new(files.read()?);
        Ok(Self {
            files,
            read: Arc::new(watch::Sender::new(read)),
            first,
        })
    }

    pub(crate) fn files(&self) -> &F {
        &self.files
    }

    pub(crate) fn now(&self) -> Arc<Read<F::Made>> {
        self.read.borrow().clone()
    }

    pub(crate) fn watch(&self) -> Watch {
        let current = self.clone();
        Watch(AbortOnDropHandle::new(tokio::spawn(async move {
            // Not where they were read: nobody may have listened yet.
            current.now().tell();
            let mut warned = Instant::now();
            let mut seen = current.first;
            // What could not be read, and was told.
            let mut told = None;
            loop {
                tokio::time::sleep(POLL).await;
                let files = current.files.clone();
                let read = tokio::task::spawn_blocking(move || {
                    let now = fingerprint(files.paths().into_iter());
                    (now, (now != seen).then(|| files.read()))
                });
                let (now, read) = match read.await {
                    Ok(read) => read,
                    Err(error) => {
                        count("kept");
                        tracing::error!(%error, "certificates not read: the last ones stay");
                        continue;
                    }
                };
                match read {
                    None if warned.elapsed() >= WARN_AGAIN => {
                        current.now().tell();
                        warned = Instant::now();
                    }
                    None => {}
                    Some(Ok(read)) => {
                        current.read.send_replace(Arc::new(read));
                        (seen, told) = (now, None);
                        count("taken");
                        tracing::info!(files = ?current.files, "certificates read again");
                        current.now().tell();
                        warned = Instant::now();
                    }
                    Some(Err(error)) => {
                        // A file that cannot be read for the moment, as when descriptors run out, is tried again.
                        if !matches!(error, TlsError::Unreadable { .. }) {
                            seen = now;
                        }
                        if told.replace(now) != Some(now) {
                            count("kept");
                            let error = laneway_telemetry::causes_of(&error);
                            tracing::error!(error, "certificates not read: the last ones stay");
                        }
                    }
                }
            }
        })))
    }
}

fn count(outcome: &'static str) {
    metrics::counter!(metric::TLS_RELOADS, "outcome" => outcome).increment(1);
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    /// What a file says; cannot be read the second time, whatever it says.
    #[derive(Debug, Clone)]
    struct Text(PathBuf, Arc<AtomicU32>);

    impl FromFiles for Text {
        type Made = String;

        fn paths(&self) -> Vec<&Path> {
            vec![&self.0]
        }

        fn read(&self) -> Result<Read<String>, TlsError> {
            let unreadable = |source| TlsError::Unreadable {
                path: self.0.clone(),
                source,
            };
            match self.1.fetch_add(1, Ordering::Relaxed) {
                1 => Err(unreadable(std::io::Error::other("too many open files"))),
                _ => std::fs::read_to_string(&self.0)
                    .map(|made| Read { made, term: None })
                    .map_err(unreadable),
            }
        }
    }

    #[tokio::test]
    async fn what_cannot_be_read_for_the_moment_is_read_later() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("text");
        std::fs::write(&path, "first").expect("the directory is there");
        let current = Current::read(Text(path.clone(), Arc::default())).expect("it is there");
        let mut read = current.read.subscribe();
        let _watch = current.watch();
        std::fs::write(&path, "second").expect("the directory is there");
        let taken = read.wait_for(|read| read.made == "second");
        tokio::time::timeout(Duration::from_secs(30), taken)
            .await
            .expect("it is tried again")
            .expect("the watch lives");
    }
}
