//! A stream of the CPU device: a queue and one executor thread that runs it in order.
//!
//! `CpuDevice::create_stream` starts the thread, which carries the stream's name. It ends when the last handle
//! is dropped, after it has run what was queued; that drop waits for it.

use std::cell::Cell;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::{self, JoinHandle};

use parking_lot::Mutex;

use super::event::CpuEvent;
use super::exec::execute;
use super::queue::{Signal, Work, WorkQueue};
use crate::{DeviceError, Event, Graph, Op, Result, Stream, StreamConfig, Touches};

thread_local! {
    /// Whether this thread is the executor of some stream.
    static ON_EXECUTOR: Cell<bool> = const { Cell::new(false) };
}

/// Handle of a stream; dropping it ends the executor.
pub(crate) struct CpuStream {
    id: u64,
    config: StreamConfig,
    name: Arc<str>,
    pub(super) queue: Arc<WorkQueue>,
    executor: Option<JoinHandle<()>>,
}

impl CpuStream {
    pub(crate) fn start(config: StreamConfig) -> Result<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let name: Arc<str> = Arc::from(config.name.as_str());
        let queue = Arc::new(WorkQueue::new(Arc::clone(&name)));
        let executor = thread::Builder::new()
            .name(config.name.clone())
            .spawn({
                let mut executor = Executor {
                    stream: Arc::clone(&name),
                    queue: Arc::clone(&queue),
                    failure: None,
                };
                move || executor.run()
            })
            .map_err(|error| DeviceError::StreamFailed {
                stream: config.name.clone(),
                op: "create_stream".to_owned(),
                problem: format!("its executor thread does not start: {error}"),
            })?;
        Ok(Self {
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            config,
            name,
            queue,
            executor: Some(executor),
        })
    }
}

impl Stream for CpuStream {
    fn config(&self) -> &StreamConfig {
        &self.config
    }

    fn id(&self) -> u64 {
        self.id
    }

    fn launch(&self, op: &Op, _touches: &Touches) -> Result<()> {
        op.validate()?;
        self.queue.push(Work::Op(Box::new(op.clone())))
    }

    fn record(&self) -> Result<Event> {
        let inner = Arc::new(CpuEvent::pending(Arc::clone(&self.name)));
        self.queue.push(Work::Record(Signal::new(
            Arc::clone(&inner),
            Arc::clone(&self.name),
        )))?;
        Ok(Event {
            id: CpuEvent::next_id(),
            stream: Arc::clone(&self.name),
            inner,
        })
    }

    fn mark(&self) -> Option<Event> {
        self.record().ok()
    }

    fn wait(&self, event: &Event) -> Result<()> {
        let Some(inner) = CpuEvent::of(event) else {
            return Err(DeviceError::BadOperation {
                op: "wait",
                problem: format!("{event:?} was not recorded on a stream of the CPU device"),
            });
        };
        if matches!(inner.outcome(), Some(Ok(()))) {
            return Ok(());
        }
        self.queue.push(Work::Wait(event.clone()))
    }

    fn capture(&self, build: &mut dyn FnMut(&dyn Stream) -> Result<()>) -> Result<Graph> {
        let capture = CaptureStream {
            stream: self,
            ops: Mutex::default(),
        };
        build(&capture)?;
        Ok(Graph {
            captured_on: self.id,
            ops: capture.ops.into_inner().into(),
            exec: None,
        })
    }

    fn replay(&self, graph: &Graph, _touches: &Touches) -> Result<()> {
        self.queue.push(Work::Graph(Arc::clone(&graph.ops)))
    }
}

impl Drop for CpuStream {
    fn drop(&mut self) {
        self.queue.close();
        let Some(executor) = self.executor.take() else {
            return;
        };
        // The last handle may go away with a queued operation, on this executor or on another one, which this
        // one may be waiting for: there the thread ends on its own.
        if !ON_EXECUTOR.get() && executor.join().is_err() {
            tracing::error!(stream = &*self.name, "stream executor panicked");
        }
    }
}

impl fmt::Debug for CpuStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "stream {} ({})", self.name, self.id)
    }
}

/// What a capture launches on: keeps the operations instead of running them.
#[derive(Debug)]
struct CaptureStream<'a> {
    stream: &'a CpuStream,
    ops: Mutex<Vec<Op>>,
}

impl CaptureStream<'_> {
    fn refuse(&self, what: &str, remedy: &str) -> DeviceError {
        DeviceError::Unsupported {
            device: "cpu".to_owned(),
            what: format!("{what} inside a capture on stream {}", self.stream.name),
            remedy: remedy.to_owned(),
        }
    }
}

impl Stream for CaptureStream<'_> {
    fn config(&self) -> &StreamConfig {
        self.stream.config()
    }

    fn id(&self) -> u64 {
        self.stream.id()
    }

    fn launch(&self, op: &Op, _touches: &Touches) -> Result<()> {
        op.validate()?;
        self.ops.lock().push(op.clone());
        Ok(())
    }

    fn record(&self) -> Result<Event> {
        Err(self.refuse("record", "record the event behind the replay of the graph"))
    }

    fn wait(&self, _event: &Event) -> Result<()> {
        Err(self.refuse("wait", "wait for the event ahead of the replay of the graph"))
    }

    fn capture(&self, _build: &mut dyn FnMut(&dyn Stream) -> Result<()>) -> Result<Graph> {
        Err(self.refuse("capture", "capture one graph behind the other"))
    }

    fn replay(&self, _graph: &Graph, _touches: &Touches) -> Result<()> {
        Err(self.refuse("replay", "launch the operations themselves"))
    }
}

/// The thread side: runs the queue until it is closed and empty.
struct Executor {
    stream: Arc<str>,
    queue: Arc<WorkQueue>,
    failure: Option<DeviceError>,
}

impl Executor {
    fn run(&mut self) {
        ON_EXECUTOR.set(true);
        while let Some(work) = self.queue.pop() {
            self.step(work);
        }
    }

    fn step(&mut self, work: Work) {
        match work {
            Work::Record(signal) => signal.complete(self.failure.clone().map_or(Ok(()), Err)),
            // A failed stream runs nothing more, it only fails the events behind.
            _ if self.failure.is_some() => {}
            Work::Op(op) => self.run_ops(std::slice::from_ref(&*op)),
            Work::Graph(ops) => self.run_ops(&ops),
            Work::Wait(event) => {
                let event = CpuEvent::of(&event).expect("checked when the wait was queued");
                if let Err(error) = event.wait_for_ever() {
                    self.fail("wait".to_owned(), format!("the awaited event failed: {error}"));
                }
            }
        }
    }

    fn run_ops(&mut self, ops: &[Op]) {
        for (i, op) in ops.iter().enumerate() {
            let outcome = catch_unwind(AssertUnwindSafe(|| execute(op)));
            let problem = match outcome {
                Ok(Ok(())) => continue,
                Ok(Err(problem)) => problem,
                Err(panic) => format!("panicked: {}", panic_message(&*panic)),
            };
            let place = match ops.len() {
                1 => op.name().to_owned(),
                n => format!("{} (operation {} of {n})", op.name(), i + 1),
            };
            return self.fail(place, problem);
        }
    }

    fn fail(&mut self, op: String, problem: String) {
        let failure = DeviceError::StreamFailed {
            stream: self.stream.to_string(),
            op,
            problem,
        };
        self.queue.fail(failure.clone());
        self.failure = Some(failure);
    }
}

fn panic_message(panic: &(dyn std::any::Any + Send)) -> &str {
    panic
        .downcast_ref::<String>()
        .map(String::as_str)
        .or_else(|| panic.downcast_ref::<&str>().copied())
        .unwrap_or("with a value that is no text")
}
