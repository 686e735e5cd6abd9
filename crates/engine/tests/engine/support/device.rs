//! A device around the sanitized CPU device whose streams can be held, made to misbehave, and asked what was
//! called on them.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use laneway_device::sanitize::Sanitizer;
use laneway_device::{
    Buffer, BufferSpec, Device, DeviceError, DeviceFacts, Event, EventImpl, Graph, Matrix, MatrixSpec, Op,
    Result, Stream, StreamConfig, Touches, View,
};
use parking_lot::{Condvar, Mutex};

/// Holds back the host's view of a stream's steps: the work runs, but its events complete only when allowed.
#[derive(Debug)]
pub(crate) struct Gate {
    state: Mutex<GateState>,
    changed: Condvar,
}

#[derive(Debug)]
struct GateState {
    open: bool,
    recorded: u64,
    allowed: u64,
}

impl Gate {
    fn new() -> Self {
        Self {
            state: Mutex::new(GateState {
                open: true,
                recorded: 0,
                allowed: 0,
            }),
            changed: Condvar::new(),
        }
    }

    /// From here on events complete only by [`Self::allow`].
    pub(crate) fn close(&self) {
        let mut state = self.state.lock();
        state.open = false;
        state.allowed = state.recorded;
    }

    /// Let the next `steps` events complete.
    pub(crate) fn allow(&self, steps: u64) {
        self.state.lock().allowed += steps;
        self.changed.notify_all();
    }

    /// Let everything complete.
    pub(crate) fn open(&self) {
        self.state.lock().open = true;
        self.changed.notify_all();
    }

    /// Events recorded since the gate was closed and not allowed yet.
    pub(crate) fn held(&self) -> u64 {
        let state = self.state.lock();
        state.recorded.saturating_sub(state.allowed)
    }

    fn record(&self) -> u64 {
        let mut state = self.state.lock();
        state.recorded += 1;
        state.recorded
    }

    fn is_passed(&self, number: u64) -> bool {
        let state = self.state.lock();
        state.open || number <= state.allowed
    }

    fn pass(&self, number: u64, deadline: Instant) -> bool {
        let mut state = self.state.lock();
        while !state.open && number > state.allowed {
            if self.changed.wait_until(&mut state, deadline).timed_out() {
                return false;
            }
        }
        true
    }
}

struct HeldEvent {
    inner: Event,
    gate: Arc<Gate>,
    number: u64,
}

impl EventImpl for HeldEvent {
    fn is_done(&self) -> bool {
        self.gate.is_passed(self.number) && self.inner.is_done()
    }

    fn wait(&self, timeout: Duration) -> Result<()> {
        if !self.gate.pass(self.number, Instant::now() + timeout) {
            return Err(DeviceError::Deadline {
                stream: self.inner.stream.to_string(),
                waited_ms: timeout.as_millis() as u64,
            });
        }
        self.inner.synchronize(timeout)
    }

    fn as_any(&self) -> &dyn std::any::Any {
        self
    }
}

/// One call on a stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Call {
    pub(crate) thread: String,
    pub(crate) stream: String,
    pub(crate) what: String,
}

/// What to do wrong.
#[derive(Debug, Default)]
pub(crate) struct Faults {
    /// Streams whose `wait` does nothing.
    pub(crate) drop_waits_on: HashSet<String>,
    /// Stream by stream: where its `Zero`s go instead.
    pub(crate) redirect_zeros: HashMap<String, String>,
}

/// The device.
pub(crate) struct FakeDevice {
    inner: Arc<dyn Device>,
    pub(crate) sanitizer: Sanitizer,
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    gates: Mutex<HashMap<String, Arc<Gate>>>,
    faults: Mutex<Faults>,
    calls: Mutex<Vec<Call>>,
    streams: Mutex<HashMap<String, Arc<dyn Stream>>>,
    log: AtomicBool,
    entered: Mutex<HashSet<(u64, ThreadId)>>,
    second_enters: Mutex<Vec<String>>,
}

impl FakeDevice {
    pub(crate) fn new() -> Arc<Self> {
        let (inner, sanitizer) = laneway_device::testing::cpu();
        Arc::new(Self {
            inner,
            sanitizer,
            shared: Arc::default(),
        })
    }

    /// The gate of a stream, `chain` or `lane1`.
    pub(crate) fn gate(&self, stream: &str) -> Arc<Gate> {
        let mut gates = self.shared.gates.lock();
        gates
            .entry(stream.into())
            .or_insert_with(|| Arc::new(Gate::new()))
            .clone()
    }

    pub(crate) fn faults(&self, change: impl FnOnce(&mut Faults)) {
        change(&mut self.shared.faults.lock());
    }

    /// Keep a list of calls from now on.
    pub(crate) fn log(&self) {
        self.shared.log.store(true, Ordering::Relaxed);
    }

    pub(crate) fn calls(&self) -> Vec<Call> {
        self.shared.calls.lock().clone()
    }

    /// Calls that found their thread inside another call on the same stream.
    pub(crate) fn second_enters(&self) -> Vec<String> {
        self.shared.second_enters.lock().clone()
    }

    /// Let everything pass, so that an engine can end.
    pub(crate) fn open_all(&self) {
        for gate in self.shared.gates.lock().values() {
            gate.open();
        }
    }

    /// Break the cycle between the device and its streams.
    pub(crate) fn forget_streams(&self) {
        self.shared.streams.lock().clear();
    }
}

impl std::fmt::Debug for FakeDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "fake around {:?}", self.inner)
    }
}

impl Device for FakeDevice {
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

    fn create_stream(&self, config: StreamConfig) -> Result<Arc<dyn Stream>> {
        let name = config.name.clone();
        let gate = self.gate(&name);
        let inner = self.inner.create_stream(config)?;
        self.shared.streams.lock().insert(name.clone(), inner.clone());
        Ok(Arc::new(FakeStream {
            name,
            inner,
            gate,
            shared: self.shared.clone(),
        }))
    }

    fn host_write(&self, view: &View, bytes: &[u8]) -> Result<()> {
        self.inner.host_write(view, bytes)
    }

    fn host_read(&self, view: &View, bytes: &mut [u8]) -> Result<()> {
        self.inner.host_read(view, bytes)
    }
}

struct FakeStream {
    name: String,
    inner: Arc<dyn Stream>,
    gate: Arc<Gate>,
    shared: Arc<Shared>,
}

/// Leaves the stream again.
struct Inside<'a>(&'a FakeStream);

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        let key = (self.0.inner.id(), std::thread::current().id());
        self.0.shared.entered.lock().remove(&key);
    }
}

impl FakeStream {
    fn enter(&self, what: impl FnOnce() -> String) -> Inside<'_> {
        let thread = std::thread::current();
        if self.shared.log.load(Ordering::Relaxed) {
            self.shared.calls.lock().push(Call {
                thread: thread.name().unwrap_or_default().into(),
                stream: self.name.clone(),
                what: what(),
            });
        }
        if !self.shared.entered.lock().insert((self.inner.id(), thread.id())) {
            self.shared.second_enters.lock().push(self.name.clone());
        }
        Inside(self)
    }
}

impl std::fmt::Debug for FakeStream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "fake {:?}", self.inner)
    }
}

impl Stream for FakeStream {
    fn config(&self) -> &StreamConfig {
        self.inner.config()
    }

    fn id(&self) -> u64 {
        self.inner.id()
    }

    fn launch(&self, op: &Op, touches: &Touches) -> Result<()> {
        let _inside = self.enter(|| op.name().into());
        if let Op::Zero(_) = op {
            let elsewhere = self.shared.faults.lock().redirect_zeros.get(&self.name).cloned();
            if let Some(name) = elsewhere {
                let other = self.shared.streams.lock()[&name].clone();
                return other.launch(op, touches);
            }
        }
        self.inner.launch(op, touches)
    }

    fn record(&self) -> Result<Event> {
        let inner = self.inner.record()?;
        let _inside = self.enter(|| format!("record {}", inner.id));
        Ok(Event {
            id: inner.id,
            stream: inner.stream.clone(),
            inner: Arc::new(HeldEvent {
                inner,
                gate: self.gate.clone(),
                number: self.gate.record(),
            }),
        })
    }

    fn wait(&self, event: &Event) -> Result<()> {
        let _inside = self.enter(|| {
            let landed = if event.is_done() { "landed" } else { "running" };
            format!("wait for {landed} {} on {}", event.id, event.stream)
        });
        if self.shared.faults.lock().drop_waits_on.contains(&self.name) {
            return Ok(());
        }
        let held: &HeldEvent = event
            .inner
            .as_any()
            .downcast_ref()
            .expect("an event of this device");
        self.inner.wait(&held.inner)
    }

    fn capture(&self, build: &mut dyn FnMut(&dyn Stream) -> Result<()>) -> Result<Graph> {
        let _inside = self.enter(|| "capture".into());
        self.inner.capture(build)
    }

    fn replay(&self, graph: &Graph, touches: &Touches) -> Result<()> {
        let _inside = self.enter(|| format!("replay of a capture on {}", graph.captured_on));
        self.inner.replay(graph, touches)
    }
}
