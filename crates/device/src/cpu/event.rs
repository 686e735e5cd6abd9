//! Events of the CPU device: made by `CpuStream::record`, completed once by the stream's executor.

use std::any::Any;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use super::spin;
use super::sync::atomic::{AtomicU8, Ordering};
use super::sync::{Condvar, Mutex};
use crate::stream::EventImpl;
use crate::{DeviceError, Event, Result};

const PENDING: u8 = 0;
const DONE: u8 = 1;
const FAILED: u8 = 2;

/// The state of one event. It completes exactly once.
#[derive(Debug)]
pub(crate) struct CpuEvent {
    stream: Arc<str>,
    /// Read without the lock; written only with the lock held, so that no waiter misses the change.
    state: AtomicU8,
    failure: Mutex<Option<DeviceError>>,
    completed: Condvar,
    completed_at: OnceLock<Instant>,
}

impl CpuEvent {
    /// A fresh process-wide event id.
    pub(crate) fn next_id() -> u64 {
        use std::sync::atomic::AtomicU64;
        static NEXT: AtomicU64 = AtomicU64::new(1);
        NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed)
    }

    /// The event of this device inside `event`, if it is one.
    pub(crate) fn of(event: &Event) -> Option<&Self> {
        event.inner.as_any().downcast_ref()
    }

    pub(crate) fn pending(stream: Arc<str>) -> Self {
        Self {
            stream,
            state: AtomicU8::new(PENDING),
            failure: Mutex::new(None),
            completed: Condvar::new(),
            completed_at: OnceLock::new(),
        }
    }

    /// Complete it; the first completion counts.
    pub(crate) fn complete(&self, outcome: Result<()>) {
        let mut failure = self.failure.lock();
        if self.state.load(Ordering::Relaxed) != PENDING {
            return;
        }
        // The first to set it is this one: the state is looked at under the lock.
        let _ = self.completed_at.set(Instant::now());
        let state = match outcome {
            Ok(()) => DONE,
            Err(error) => {
                *failure = Some(error);
                FAILED
            }
        };
        self.state.store(state, Ordering::Release);
        drop(failure);
        self.completed.notify_all();
    }

    /// `None` while pending.
    pub(crate) fn outcome(&self) -> Option<Result<()>> {
        match self.state.load(Ordering::Acquire) {
            PENDING => None,
            DONE => Some(Ok(())),
            _ => Some(Err(self
                .failure
                .lock()
                .clone()
                .expect("a failed event holds its error"))),
        }
    }

    /// Wait as long as it takes, on an executor. It may wait like that because every event completes: its
    /// stream runs to it, fails, or runs to its end when it is dropped, and no stream can wait for an event
    /// that is not queued yet.
    pub(crate) fn wait_for_ever(&self) -> Result<()> {
        loop {
            if let Some(outcome) = self.wait_at_most(Duration::from_secs(3600)) {
                return outcome;
            }
        }
    }

    /// `None` when the time ran out.
    fn wait_at_most(&self, timeout: Duration) -> Option<Result<()>> {
        spin::until(|| self.is_done());
        // A timeout past the end of the clock has no deadline that could pass.
        let deadline = Instant::now().checked_add(timeout);
        let mut failure = self.failure.lock();
        while !self.is_done() {
            match deadline {
                None => self.completed.wait(&mut failure),
                Some(deadline) => {
                    if self.completed.wait_until(&mut failure, deadline).timed_out() {
                        break;
                    }
                }
            }
        }
        drop(failure);
        self.outcome()
    }
}

impl EventImpl for CpuEvent {
    fn is_done(&self) -> bool {
        self.state.load(Ordering::Acquire) != PENDING
    }

    fn wait(&self, timeout: Duration) -> Result<()> {
        self.wait_at_most(timeout).unwrap_or_else(|| {
            Err(DeviceError::Deadline {
                stream: self.stream.to_string(),
                waited_ms: u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX),
            })
        })
    }

    fn since(&self, earlier: &dyn EventImpl) -> Option<Duration> {
        let earlier: &Self = earlier.as_any().downcast_ref()?;
        self.completed_at
            .get()?
            .checked_duration_since(*earlier.completed_at.get()?)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
