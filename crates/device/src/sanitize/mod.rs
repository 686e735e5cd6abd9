//! The stream sanitizer: finds uses of memory that no order holds apart, without needing them to collide.
//!
//! [`wrap`] puts it around any device; it works from the host's calls alone, so it serves a GPU as well as
//! the CPU device. Vector clocks follow stream order and event edges, and a shadow of every buffer keeps the
//! last write of each range and the reads since. Two rules:
//!
//! * **Operation against operation**: two operations that use a range, one of them writing, must be ordered by
//!   their stream or by events ([`crate::Stream::record`], [`crate::Stream::wait`]). That the host synchronised
//!   in between does *not* count. Strict on purpose: such a program is right only as long as the host keeps
//!   waiting there, and the wait is what gets optimised away. Only a stream that was dropped and whose past
//!   the host has waited for counts as ordered before everything later.
//! * **Host against operation**: [`crate::Device::host_read`] and [`crate::Device::host_write`] need an event
//!   behind the operation that the host has synchronised, or seen done. Whatever is launched after a host
//!   access is ordered behind it. All threads of the process count as one host.
//!
//! Operands in pools are held against the step's [`Touches`]: an operation that reaches a pool for which the
//! step names nothing is refused as well. A call that breaks a rule is not carried out: it returns
//! [`DeviceError::Race`] (or `BadOperation` for touches), and the [`Report`] is logged and kept.

mod clock;
mod report;
mod shadow;
mod state;
#[cfg(test)]
mod tests;

use std::any::Any;
use std::ffi::OsStr;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

pub use report::{Party, Report, Rule};

use clock::Clock;
use state::State;

use crate::{
    Buffer, BufferSpec, DType, Device, DeviceError, DeviceFacts, Event, EventImpl, Graph, Matrix, MatrixSpec,
    Op, Result, Stream, StreamConfig, TouchKind, Touches, View,
};

/// Environment variable that turns the sanitizer on: `1`.
pub const SANITIZE_VARIABLE: &str = "LANEWAY_SANITIZE";

/// Wrap `device`. Streams, events and buffers of the wrapped device belong to it and not to `device`.
pub fn wrap(device: Arc<dyn Device>) -> (Arc<dyn Device>, Sanitizer) {
    let sanitizer = Sanitizer {
        state: Arc::default(),
    };
    let wrapped = SanitizedDevice {
        inner: device,
        state: Arc::clone(&sanitizer.state),
    };
    (Arc::new(wrapped), sanitizer)
}

/// Wrap `device` when [`SANITIZE_VARIABLE`] asks for it.
///
/// # Errors
/// [`DeviceError::Unsupported`] when the variable holds anything but 0 or 1.
pub fn from_env(device: Arc<dyn Device>) -> Result<Arc<dyn Device>> {
    wrap_if(&std::env::var_os(SANITIZE_VARIABLE).unwrap_or_default(), device)
}

fn wrap_if(value: &OsStr, device: Arc<dyn Device>) -> Result<Arc<dyn Device>> {
    match value.to_str() {
        Some("" | "0") => Ok(device),
        Some("1") => Ok(wrap(device).0),
        _ => Err(DeviceError::Unsupported {
            device: device.facts().name,
            what: format!("{SANITIZE_VARIABLE}={}", value.display()),
            remedy: "set it to 1 to check every call, or to 0".to_owned(),
        }),
    }
}

/// What the sanitizer of one device found.
#[derive(Clone)]
pub struct Sanitizer {
    state: Arc<Mutex<State>>,
}

impl Sanitizer {
    /// The findings so far, oldest first (the first 256).
    pub fn reports(&self) -> Vec<Report> {
        self.state.lock().reports.clone()
    }

    /// For tests.
    ///
    /// # Panics
    /// When there is a finding, with all of them.
    pub fn assert_clean(&self) {
        let reports = self.reports();
        let text: Vec<String> = reports.iter().map(Report::to_string).collect();
        assert!(
            text.is_empty(),
            "the stream sanitizer refused {} calls:\n{}",
            text.len(),
            text.join("\n")
        );
    }

    /// Entries in the sanitizer's books: bounded by the streams, buffers and ranges in use, however long the
    /// run.
    pub fn size(&self) -> usize {
        self.state.lock().size()
    }
}

impl fmt::Debug for Sanitizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.state.lock();
        write!(f, "sanitizer with {} reports", state.reports.len())
    }
}

struct SanitizedDevice {
    inner: Arc<dyn Device>,
    state: Arc<Mutex<State>>,
}

impl fmt::Debug for SanitizedDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sanitized {:?}", self.inner)
    }
}

impl Device for SanitizedDevice {
    fn facts(&self) -> DeviceFacts {
        self.inner.facts()
    }

    fn alloc(&self, spec: BufferSpec) -> Result<Buffer> {
        self.inner.alloc(spec)
    }

    fn alloc_with(&self, spec: BufferSpec, data: &[u8]) -> Result<Buffer> {
        self.inner.alloc_with(spec, data)
    }

    fn pack_matrix(&self, spec: MatrixSpec<'_>) -> Result<Matrix> {
        self.inner.pack_matrix(spec)
    }

    fn activation_dtype(&self, weights: &Matrix) -> DType {
        self.inner.activation_dtype(weights)
    }

    fn create_stream(&self, config: StreamConfig) -> Result<Arc<dyn Stream>> {
        let inner = self.inner.create_stream(config)?;
        self.state.lock().add_stream(inner.id(), &inner.config().name);
        Ok(Arc::new(SanitizedStream {
            inner,
            state: Arc::clone(&self.state),
            order: Mutex::new(()),
        }))
    }

    fn host_write(&self, view: &View, bytes: &[u8]) -> Result<()> {
        self.state
            .lock()
            .host_access("host_write", view, TouchKind::Write)?;
        self.inner.host_write(view, bytes)
    }

    fn host_read(&self, view: &View, bytes: &mut [u8]) -> Result<()> {
        self.state
            .lock()
            .host_access("host_read", view, TouchKind::Read)?;
        self.inner.host_read(view, bytes)
    }
}

struct SanitizedStream {
    inner: Arc<dyn Stream>,
    state: Arc<Mutex<State>>,
    /// Held from the books to the device's queue, so that both see this stream's calls in one order. Apart
    /// from `state`, because a full queue may block.
    order: Mutex<()>,
}

impl SanitizedStream {
    fn check(&self, ops: &[Op], touches: &Touches, graph: bool) -> Result<()> {
        self.state.lock().launch(self.inner.id(), ops, touches, graph)
    }

    /// The event that was just recorded on the device's stream.
    fn wrap(&self, event: Event) -> Event {
        let clock = self.state.lock().snapshot(self.inner.id());
        Event {
            id: event.id,
            stream: Arc::clone(&event.stream),
            inner: Arc::new(SanitizedEvent {
                event,
                clock,
                observed: AtomicBool::new(false),
                state: Arc::clone(&self.state),
            }),
        }
    }
}

impl fmt::Debug for SanitizedStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sanitized {:?}", self.inner)
    }
}

impl Stream for SanitizedStream {
    fn config(&self) -> &StreamConfig {
        self.inner.config()
    }

    fn id(&self) -> u64 {
        self.inner.id()
    }

    fn launch(&self, op: &Op, touches: &Touches) -> Result<()> {
        op.validate()?;
        let _order = self.order.lock();
        self.check(std::slice::from_ref(op), touches, false)?;
        self.inner.launch(op, touches)
    }

    fn record(&self) -> Result<Event> {
        let _order = self.order.lock();
        Ok(self.wrap(self.inner.record()?))
    }

    fn record_timed(&self) -> Result<Event> {
        let _order = self.order.lock();
        Ok(self.wrap(self.inner.record_timed()?))
    }

    fn mark(&self) -> Option<Event> {
        let _order = self.order.lock();
        self.inner.mark().map(|event| self.wrap(event))
    }

    fn wait(&self, event: &Event) -> Result<()> {
        let Some(sanitized) = event.inner.as_any().downcast_ref::<SanitizedEvent>() else {
            return Err(DeviceError::BadOperation {
                op: "wait",
                problem: format!("{event:?} was not recorded on a stream of this sanitized device"),
            });
        };
        let _order = self.order.lock();
        self.inner.wait(&sanitized.event)?;
        self.state.lock().wait(self.inner.id(), &sanitized.clock);
        Ok(())
    }

    /// The operations are checked when the graph is replayed: what they conflict with then is what counts.
    fn capture(&self, build: &mut dyn FnMut(&dyn Stream) -> Result<()>) -> Result<Graph> {
        self.inner.capture(build)
    }

    fn replay(&self, graph: &Graph, touches: &Touches) -> Result<()> {
        let _order = self.order.lock();
        self.check(&graph.ops, touches, true)?;
        self.inner.replay(graph, touches)
    }
}

impl Drop for SanitizedStream {
    fn drop(&mut self) {
        self.state.lock().drop_stream(self.inner.id());
    }
}

struct SanitizedEvent {
    event: Event,
    /// What was ordered before it on its stream.
    clock: Clock,
    /// The host has seen it complete.
    observed: AtomicBool,
    state: Arc<Mutex<State>>,
}

impl SanitizedEvent {
    fn observe(&self) {
        if !self.observed.load(Ordering::Acquire) {
            self.state.lock().observe(&self.clock);
            // Only now may other threads rely on it.
            self.observed.store(true, Ordering::Release);
        }
    }
}

impl EventImpl for SanitizedEvent {
    fn is_done(&self) -> bool {
        let done = self.event.is_done();
        if done {
            self.observe();
        }
        done
    }

    fn wait(&self, timeout: Duration) -> Result<()> {
        let outcome = self.event.synchronize(timeout);
        // A failed stream has stopped before the event: nothing in front of it runs any more either.
        if self.event.is_done() {
            self.observe();
        }
        outcome
    }

    fn since(&self, earlier: &dyn EventImpl) -> Option<Duration> {
        let earlier: &Self = earlier.as_any().downcast_ref()?;
        self.event.since(&earlier.event)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
