//! Events: recorded on a stream, waited for by streams and by the host.

use std::any::Any;
use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use cudarc::driver::sys;
use laneway_device::{DeviceError, Event, EventImpl, Result};

use crate::context::{Context, RawEvent, Stream};
use crate::error;

/// How long a waiting thread polls before it sleeps: a short step ends within this.
const SPIN: Duration = Duration::from_micros(20);

/// First and longest sleep between two polls.
const NAPS: (Duration, Duration) = (Duration::from_micros(5), Duration::from_micros(50));

/// Ids of streams and events count from here, so that they stay apart from the CPU device's.
pub(crate) const FIRST_ID: u64 = 1 << 32;

/// One recording of one event.
pub(crate) struct CudaEvent {
    context: Arc<Context>,
    raw: RawEvent,
    /// It tells the time.
    timed: bool,
    stream: Arc<str>,
    /// How it ended, once it is known.
    outcome: OnceLock<Result<()>>,
}

impl CudaEvent {
    /// Record an event behind what is queued on `stream`.
    pub(crate) fn record(
        context: &Arc<Context>,
        stream: Stream,
        name: &Arc<str>,
        timed: bool,
    ) -> Result<Event> {
        static NEXT: AtomicU64 = AtomicU64::new(FIRST_ID);
        context.bind()?;
        let event = Self {
            raw: context.take_event(timed)?,
            timed,
            context: Arc::clone(context),
            stream: Arc::clone(name),
            outcome: OnceLock::new(),
        };
        // SAFETY: event and stream are live and of this context.
        let recorded = unsafe { sys::cuEventRecord(event.raw.0, stream.0) };
        error::check_on(name, "record", recorded)?;
        Ok(Event {
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            stream: Arc::clone(name),
            inner: Arc::new(event),
        })
    }

    /// The event of this device inside `event`, if it is one.
    pub(crate) fn of(event: &Event) -> Option<&Self> {
        event.inner.as_any().downcast_ref()
    }

    /// The driver's event.
    pub(crate) fn raw(&self) -> RawEvent {
        self.raw
    }

    /// The device that it belongs to.
    pub(crate) fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Whether somebody has seen it complete already.
    pub(crate) fn is_known_done(&self) -> bool {
        matches!(self.outcome.get(), Some(Ok(())))
    }

    /// `None` while what it was recorded behind still runs.
    fn poll(&self) -> Option<&Result<()>> {
        if self.outcome.get().is_none() {
            let outcome = match query(&self.context, self.raw) {
                Ok(false) => return None,
                Ok(true) => Ok(()),
                Err(problem) => Err(DeviceError::StreamFailed {
                    stream: self.stream.to_string(),
                    op: "an operation before this event, on this or another stream,".to_owned(),
                    problem,
                }),
            };
            // Two threads that poll at once learn the same.
            let _ = self.outcome.set(outcome);
        }
        self.outcome.get()
    }
}

impl Drop for CudaEvent {
    fn drop(&mut self) {
        self.context.recycle_event(self.raw, self.timed);
    }
}

impl EventImpl for CudaEvent {
    fn is_done(&self) -> bool {
        self.poll().is_some()
    }

    fn wait(&self, timeout: Duration) -> Result<()> {
        match wait_until(timeout, || self.poll()) {
            Some(outcome) => outcome.clone(),
            None => Err(DeviceError::Deadline {
                stream: self.stream.to_string(),
                waited_ms: u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX),
            }),
        }
    }

    fn since(&self, earlier: &dyn EventImpl) -> Option<Duration> {
        let earlier: &Self = earlier.as_any().downcast_ref()?;
        if !(self.timed && earlier.timed && self.is_known_done() && earlier.is_known_done()) {
            return None;
        }
        self.context.bind().ok()?;
        let mut milliseconds = 0.0;
        // SAFETY: both events are live and were recorded; the address is valid for a write.
        let result = unsafe { sys::cuEventElapsedTime_v2(&mut milliseconds, earlier.raw.0, self.raw.0) };
        self.context.check("cuEventElapsedTime", result).ok()?;
        // Below zero: the other one was the earlier.
        Duration::try_from_secs_f32(milliseconds / 1e3).ok()
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// Whether the work before the event has run.
fn query(context: &Context, event: RawEvent) -> Result<bool, String> {
    context.bind().map_err(|error| error.to_string())?;
    // SAFETY: the event is live.
    match unsafe { sys::cuEventQuery(event.0) } {
        sys::CUresult::CUDA_SUCCESS => Ok(true),
        sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
        failure => Err(error::text(failure)),
    }
}

/// Poll until there is an answer; `None` when the time ran out.
fn wait_until<T>(timeout: Duration, mut poll: impl FnMut() -> Option<T>) -> Option<T> {
    let start = Instant::now();
    let (mut nap, longest) = NAPS;
    loop {
        if let Some(answer) = poll() {
            return Some(answer);
        }
        let waited = start.elapsed();
        if waited >= timeout {
            return None;
        }
        if waited < SPIN {
            thread::yield_now();
        } else {
            thread::sleep(nap.min(timeout - waited));
            nap = (nap * 2).min(longest);
        }
    }
}

/// A point in a stream's order with its time, for profiling (see [`crate::CudaDevice::record_timed`]).
pub struct TimedEvent {
    context: Arc<Context>,
    raw: RawEvent,
    stream: String,
}

impl TimedEvent {
    pub(crate) fn record(context: &Arc<Context>, stream: Stream, name: &str) -> Result<Self> {
        context.bind()?;
        let event = Self {
            raw: context.create_event(sys::CUevent_flags_enum::CU_EVENT_DEFAULT)?,
            context: Arc::clone(context),
            stream: name.to_owned(),
        };
        // SAFETY: event and stream are live and of this context.
        let recorded = unsafe { sys::cuEventRecord(event.raw.0, stream.0) };
        error::check_on(name, "record_timed", recorded)?;
        Ok(event)
    }

    /// Device time from `earlier` to this event in milliseconds, once both have run (resolution: half a microsecond).
    ///
    /// # Errors
    /// [`DeviceError::Deadline`] when this event does not complete within `timeout`;
    /// [`DeviceError::StreamFailed`].
    pub fn since(&self, earlier: &TimedEvent, timeout: Duration) -> Result<f32> {
        let polled = wait_until(timeout, || match query(&self.context, self.raw) {
            Ok(false) => None,
            Ok(true) => Some(Ok(())),
            Err(problem) => Some(Err(problem)),
        });
        match polled {
            Some(Ok(())) => {}
            Some(Err(problem)) => {
                return Err(DeviceError::StreamFailed {
                    stream: self.stream.clone(),
                    op: "an operation before a timed event".to_owned(),
                    problem,
                });
            }
            None => {
                return Err(DeviceError::Deadline {
                    stream: self.stream.clone(),
                    waited_ms: u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX),
                });
            }
        }
        let mut milliseconds = 0.0;
        // SAFETY: both events are live; the address is valid for a write.
        let result = unsafe { sys::cuEventElapsedTime_v2(&mut milliseconds, earlier.raw.0, self.raw.0) };
        self.context.check("cuEventElapsedTime", result)?;
        Ok(milliseconds)
    }
}

impl Drop for TimedEvent {
    fn drop(&mut self) {
        self.context.destroy_event(self.raw);
    }
}

impl std::fmt::Debug for TimedEvent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "timed event on {}", self.stream)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waiting_ends_with_the_answer_or_with_the_time() {
        let mut polls = 0;
        let answer = wait_until(Duration::from_secs(60), || {
            polls += 1;
            (polls == 40).then_some(polls)
        });
        assert_eq!(answer, Some(40));
        let start = Instant::now();
        assert_eq!(wait_until(Duration::from_millis(3), || None::<()>), None);
        assert!(start.elapsed() >= Duration::from_millis(3));
    }

    #[test]
    fn a_wait_without_time_still_polls_once() {
        assert_eq!(wait_until(Duration::ZERO, || Some(7)), Some(7));
    }
}
