//! Devices for tests, always under the sanitizer; and a stream for measurements of all but the device.

use std::any::Any;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::sanitize::{self, Sanitizer};
use crate::{
    CpuConfig, CpuDevice, Device, Event, EventImpl, Graph, Op, Result, Stream, StreamConfig, Touches,
};

/// A CPU device under the sanitizer, with the machine's available memory.
///
/// # Panics
/// When the machine does not say how much memory it has.
pub fn cpu() -> (Arc<dyn Device>, Sanitizer) {
    let device = CpuDevice::new(CpuConfig { memory_bytes: None }).expect("the machine tells its memory");
    sanitize::wrap(Arc::new(device))
}

/// Runs nothing. An event on it is over a step's time after the one before it.
#[derive(Debug)]
pub struct IdleStream {
    config: StreamConfig,
    step: Duration,
    /// When the newest step is over.
    busy_until: Mutex<Instant>,
}

impl IdleStream {
    /// A stream on which each step takes `step`.
    pub fn new(config: StreamConfig, step: Duration) -> Self {
        Self {
            config,
            step,
            busy_until: Mutex::new(Instant::now()),
        }
    }
}

impl Stream for IdleStream {
    fn config(&self) -> &StreamConfig {
        &self.config
    }

    fn id(&self) -> u64 {
        0
    }

    fn launch(&self, _op: &Op, _touches: &Touches) -> Result<()> {
        Ok(())
    }

    fn record(&self) -> Result<Event> {
        let mut busy_until = self.busy_until.lock();
        *busy_until = Instant::now().max(*busy_until) + self.step;
        Ok(Event {
            id: 0,
            stream: self.config.name.as_str().into(),
            inner: Arc::new(DoneAt(*busy_until)),
        })
    }

    fn wait(&self, _event: &Event) -> Result<()> {
        Ok(())
    }

    fn capture(&self, build: &mut dyn FnMut(&dyn Stream) -> Result<()>) -> Result<Graph> {
        build(self)?;
        Ok(Graph {
            captured_on: 0,
            exec: None,
            ops: Vec::new().into(),
        })
    }

    fn replay(&self, _graph: &Graph, _touches: &Touches) -> Result<()> {
        Ok(())
    }
}

struct DoneAt(Instant);

impl EventImpl for DoneAt {
    fn is_done(&self) -> bool {
        Instant::now() >= self.0
    }

    fn wait(&self, _timeout: Duration) -> Result<()> {
        thread::sleep(self.0.saturating_duration_since(Instant::now()));
        Ok(())
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
