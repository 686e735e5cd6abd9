//! The bounded queue between the threads that launch on a stream and the stream's executor.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::event::CpuEvent;
use super::spin;
use super::sync::atomic::{AtomicUsize, Ordering};
use super::sync::{Condvar, Mutex};
use crate::{DeviceError, Event, Op, Result};

/// Works that may wait on one stream. A whole graph is one work, so this is many steps ahead.
const CAPACITY: usize = if cfg!(loom) { 1 } else { 1024 };

/// How long a launch waits for room before it gives up.
const FULL_TIMEOUT: Duration = Duration::from_secs(60);

/// One entry of a stream's order.
pub(crate) enum Work {
    /// Run one operation.
    Op(Box<Op>),
    /// Run a captured sequence.
    Graph(Arc<[Op]>),
    /// Complete the event.
    Record(Signal),
    /// Hold the stream until the event, which is of this device, completed.
    Wait(Event),
}

/// Completes its event, also when it is dropped unrun, so that nobody waits for an executor that is gone.
pub(crate) struct Signal {
    event: Arc<CpuEvent>,
    stream: Arc<str>,
}

impl Signal {
    pub(crate) fn new(event: Arc<CpuEvent>, stream: Arc<str>) -> Self {
        Self { event, stream }
    }

    pub(crate) fn complete(self, outcome: Result<()>) {
        self.event.complete(outcome);
    }
}

impl Drop for Signal {
    fn drop(&mut self) {
        // After `complete` this changes nothing.
        self.event.complete(Err(DeviceError::StreamFailed {
            stream: self.stream.to_string(),
            op: "record".to_owned(),
            problem: "the stream's executor ended before it reached the event".to_owned(),
        }));
    }
}

/// The queue. Any thread pushes, the one executor pops.
pub(crate) struct WorkQueue {
    stream: Arc<str>,
    state: Mutex<State>,
    /// Entries in `state.works`, for the executor to poll without the lock.
    len: AtomicUsize,
    filled: Condvar,
    drained: Condvar,
}

#[derive(Default)]
struct State {
    works: VecDeque<Work>,
    closed: bool,
    failure: Option<DeviceError>,
}

impl WorkQueue {
    pub(crate) fn new(stream: Arc<str>) -> Self {
        Self {
            stream,
            state: Mutex::default(),
            len: AtomicUsize::new(0),
            filled: Condvar::new(),
            drained: Condvar::new(),
        }
    }

    /// Name of the stream.
    #[cfg(all(test, loom))]
    pub(crate) fn stream(&self) -> &Arc<str> {
        &self.stream
    }

    /// Queue `work`; waits for room when the executor is far behind.
    pub(crate) fn push(&self, work: Work) -> Result<()> {
        let mut state = self.state.lock();
        let deadline = (state.works.len() >= CAPACITY).then(|| Instant::now() + FULL_TIMEOUT);
        while state.works.len() >= CAPACITY && state.failure.is_none() {
            let deadline = deadline.expect("set when the queue was full");
            if self.drained.wait_until(&mut state, deadline).timed_out() && state.works.len() >= CAPACITY {
                return Err(DeviceError::StreamFailed {
                    stream: self.stream.to_string(),
                    op: "launch".to_owned(),
                    problem: format!(
                        "its queue of {CAPACITY} has been full for {} s: an operation or an event wait ahead \
                         does not end",
                        FULL_TIMEOUT.as_secs()
                    ),
                });
            }
        }
        if let Some(failure) = &state.failure {
            return Err(failure.clone());
        }
        state.works.push_back(work);
        self.len.store(state.works.len(), Ordering::Release);
        drop(state);
        self.filled.notify_one();
        Ok(())
    }

    /// The next work in order; `None` once the queue is closed and empty.
    pub(crate) fn pop(&self) -> Option<Work> {
        spin::until(|| self.len.load(Ordering::Acquire) > 0);
        let mut state = self.state.lock();
        loop {
            if let Some(work) = state.works.pop_front() {
                let was_full = state.works.len() + 1 >= CAPACITY;
                self.len.store(state.works.len(), Ordering::Release);
                drop(state);
                if was_full {
                    self.drained.notify_all();
                }
                return Some(work);
            }
            if state.closed {
                return None;
            }
            self.filled.wait(&mut state);
        }
    }

    /// Refuse every later push with `failure`.
    pub(crate) fn fail(&self, failure: DeviceError) {
        self.state.lock().failure = Some(failure);
        self.drained.notify_all();
    }

    /// Let the executor end once it has run what is queued.
    pub(crate) fn close(&self) {
        self.state.lock().closed = true;
        self.filled.notify_one();
    }
}
