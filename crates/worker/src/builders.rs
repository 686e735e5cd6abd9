//! Threads `prompt-0`, `prompt-1`, …: building a prompt takes milliseconds, too long for the async threads.
//!
//! Started when the model is loaded, as many as there are cores and at most [`MAX_THREADS`]; they end with the
//! last handle.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use laneway_proto::{ErrorCode, Failure};
use parking_lot::Mutex;
use tokio::sync::oneshot;

/// More would take cores from the steps and build no prompt sooner.
const MAX_THREADS: usize = 4;

type Job = Box<dyn FnOnce() + Send>;

/// Runs work on the builders' threads.
#[derive(Debug, Clone)]
pub(crate) struct Builders {
    jobs: SyncSender<Job>,
}

impl Builders {
    /// Start the threads; `n_queued` jobs may wait for them.
    pub(crate) fn start(n_queued: usize) -> std::io::Result<Self> {
        let (jobs, queue) = sync_channel(n_queued);
        let queue = Arc::new(Mutex::new(queue));
        let n_threads = std::thread::available_parallelism().map_or(1, usize::from);
        for index in 0..n_threads.min(MAX_THREADS) {
            let queue = queue.clone();
            let thread = std::thread::Builder::new().name(format!("prompt-{index}"));
            thread.spawn(move || build(&queue))?;
        }
        Ok(Builders { jobs })
    }

    /// Do `work` on one of the threads. When the caller goes away first, the work is left out, or its result
    /// dropped.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Failure> {
        let (answer, result) = oneshot::channel();
        let job: Job = Box::new(move || {
            if !answer.is_closed() {
                // The caller may go away meanwhile.
                let _ = answer.send(work());
            }
        });
        self.jobs
            .try_send(job)
            .map_err(|_| Failure::new(ErrorCode::Overloaded, "too many requests wait to be built"))?;
        result.await.map_err(|_| {
            tracing::error!("building a request panicked");
            Failure::internal()
        })
    }
}

fn build(queue: &Mutex<Receiver<Job>>) {
    loop {
        // One thread waits inside the lock, the others for it.
        let job = queue.lock().recv();
        let Ok(job) = job else { return };
        // A panic is one request's failure: its answer is dropped, and this thread goes on.
        let _ = catch_unwind(AssertUnwindSafe(job));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[tokio::test]
    async fn a_panic_fails_its_own_request_only() {
        let builders = Builders::start(8).unwrap();
        for _ in 0..2 * MAX_THREADS {
            let failed: Result<(), _> = builders.run(|| panic!("a prompt that cannot be built")).await;
            assert_eq!(failed.unwrap_err().code, ErrorCode::Internal);
        }
        assert_eq!(builders.run(|| 7).await.unwrap(), 7);
    }

    #[tokio::test]
    async fn work_whose_caller_left_is_left_out_and_a_full_queue_refuses() {
        let builders = Builders::start(1).unwrap();
        // Every thread is held, so what comes next waits.
        let (release, gate) = mpsc::channel::<()>();
        let gate = Arc::new(Mutex::new(gate));
        let (entered, enters) = mpsc::channel();
        let n_threads = std::thread::available_parallelism()
            .map_or(1, usize::from)
            .min(MAX_THREADS);
        let mut held = Vec::new();
        for _ in 0..n_threads {
            let (builders, gate, entered) = (builders.clone(), gate.clone(), entered.clone());
            held.push(tokio::spawn(async move {
                let wait = move || {
                    entered.send(()).unwrap();
                    gate.lock().recv().unwrap();
                };
                builders.run(wait).await
            }));
            tokio::task::yield_now().await;
            enters.recv().unwrap();
        }
        let (ran, runs) = mpsc::channel();
        let mut left = Box::pin(builders.run(move || ran.send(()).unwrap()));
        assert!(futures::poll!(left.as_mut()).is_pending());
        let refused = builders.run(|| ()).await.unwrap_err();
        assert_eq!(refused.code, ErrorCode::Overloaded);
        drop(left);
        for _ in 0..n_threads {
            release.send(()).unwrap();
        }
        for task in held {
            task.await.unwrap().unwrap();
        }
        builders.run(|| ()).await.unwrap();
        assert!(runs.recv().is_err(), "nobody waits for it, so it never runs");
    }
}
