//! A stream of the CUDA device: a driver's stream of its own, with a priority and perhaps a partition.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use cudarc::driver::sys;
use laneway_device::{DeviceError, Event, Graph, Op, Priority, Result, Stream, StreamConfig, Touches, View};
use parking_lot::Mutex;

use crate::context::{self, Context};
use crate::error;
use crate::event::{CudaEvent, FIRST_ID};
use crate::graph::{self, CaptureStream};
use crate::kernels::Kernels;
use crate::lower::{self, Target};
use crate::partition::Partition;

/// What queues an operation: shared by streams and captures.
pub(crate) struct Queue {
    pub(crate) context: Arc<Context>,
    pub(crate) kernels: Arc<Kernels>,
    pub(crate) target: Target,
    /// Kernels may start while the one ahead still runs.
    pub(crate) overlap: bool,
    /// Wait after every operation, to name the one that fails.
    pub(crate) serialize: bool,
    pub(crate) name: Arc<str>,
}

impl Queue {
    /// Queue the launches of a checked operation on `stream`.
    pub(crate) fn enqueue(&self, op: &Op, stream: context::Stream) -> Result<()> {
        self.context.bind()?;
        match op {
            Op::Copy(op) => {
                let (dst, src) = (lower::address(&op.dst), lower::address(&op.src));
                // SAFETY: both ranges lie in their buffers (views are checked when they are made) and are as long as
                // each other (`Op::validate`); one address space holds device and pinned memory.
                let result = unsafe { sys::cuMemcpyAsync(dst, src, bytes(&op.dst), stream.0) };
                error::check_on(&self.name, "Copy", result)
            }
            Op::Zero(op) => {
                let (dst, len) = (lower::address(&op.dst), op.dst.len);
                // SAFETY: the range lies in its buffer.
                let result = unsafe {
                    match op.dst.buffer.dtype().size() {
                        2 => sys::cuMemsetD16Async(dst, 0, len, stream.0),
                        _ => sys::cuMemsetD32Async(dst, 0, len, stream.0),
                    }
                };
                error::check_on(&self.name, "Zero", result)
            }
            op => {
                let mut launches = Vec::new();
                lower::lower(op, self.target, &mut launches);
                launches
                    .iter()
                    .try_for_each(|launch| self.kernels.launch(stream, launch, self.overlap))
                    .map_err(|problem| self.failed(op.name(), problem))
            }
        }
    }

    fn failed(&self, op: &str, problem: String) -> DeviceError {
        DeviceError::StreamFailed {
            stream: self.name.to_string(),
            op: op.to_owned(),
            problem,
        }
    }
}

fn bytes(view: &View) -> usize {
    view.len * view.buffer.dtype().size()
}

/// Handle of a stream; what is queued still runs when it is dropped.
pub(crate) struct CudaStream {
    id: u64,
    config: StreamConfig,
    queue: Queue,
    raw: context::Stream,
    priority: i32,
    /// Keeps the launches of one call together, and those of a graph apart from them.
    order: Mutex<()>,
    partition: Option<Partition>,
}

impl CudaStream {
    pub(crate) fn new(config: StreamConfig, queue: Queue, partition: Option<Partition>) -> Result<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(FIRST_ID);
        let priority = priority(config.priority, queue.context.priorities()?);
        let raw = create(&queue.context, partition.as_ref(), priority)?;
        Ok(Self {
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            config,
            queue,
            raw,
            priority,
            order: Mutex::new(()),
            partition,
        })
    }

    pub(crate) fn raw(&self) -> context::Stream {
        self.raw
    }

    pub(crate) fn name(&self) -> &Arc<str> {
        &self.queue.name
    }

    /// With `serialize`, wait for what was queued and name it when it failed.
    fn settle(&self, what: &str) -> Result<()> {
        if !self.queue.serialize {
            return Ok(());
        }
        // SAFETY: the stream is live.
        let result = unsafe { sys::cuStreamSynchronize(self.raw.0) };
        error::check_on(&self.queue.name, what, result)
    }
}

fn create(context: &Context, partition: Option<&Partition>, priority: i32) -> Result<context::Stream> {
    match partition {
        Some(partition) => partition.create_stream(priority),
        None => context.create_stream(priority),
    }
}

/// The driver's number for a priority in its range of (lowest, highest), of which the highest is the smaller.
fn priority(priority: Priority, (lowest, highest): (i32, i32)) -> i32 {
    match priority {
        Priority::High => highest,
        Priority::Normal => (lowest + highest).div_euclid(2),
        Priority::Low => lowest,
    }
}

impl Stream for CudaStream {
    fn config(&self) -> &StreamConfig {
        &self.config
    }

    fn id(&self) -> u64 {
        self.id
    }

    fn launch(&self, op: &Op, _touches: &Touches) -> Result<()> {
        op.validate()?;
        let _order = self.order.lock();
        self.queue.enqueue(op, self.raw)?;
        self.settle(op.name())
    }

    fn record(&self) -> Result<Event> {
        let _order = self.order.lock();
        CudaEvent::record(&self.queue.context, self.raw, &self.queue.name, false)
    }

    fn record_timed(&self) -> Result<Event> {
        let _order = self.order.lock();
        CudaEvent::record(&self.queue.context, self.raw, &self.queue.name, true)
    }

    fn mark(&self) -> Option<Event> {
        self.record_timed().ok()
    }

    fn wait(&self, event: &Event) -> Result<()> {
        let context = &self.queue.context;
        let Some(event) = CudaEvent::of(event).filter(|event| Arc::ptr_eq(event.context(), context)) else {
            return Err(DeviceError::BadOperation {
                op: "wait",
                problem: format!("{event:?} was not recorded on a stream of {}", context.name),
            });
        };
        if event.is_known_done() {
            return Ok(());
        }
        context.bind()?;
        let _order = self.order.lock();
        // SAFETY: stream and event are live; the flags must be 0.
        let result = unsafe { sys::cuStreamWaitEvent(self.raw.0, event.raw().0, 0) };
        error::check_on(&self.queue.name, "wait", result)
    }

    /// Captures on a stream of its own that has this one's priority and partition, so that what other threads
    /// launch on this stream meanwhile runs, and is no part of the graph.
    fn capture(&self, build: &mut dyn FnMut(&dyn Stream) -> Result<()>) -> Result<Graph> {
        let context = &self.queue.context;
        let raw = create(context, self.partition.as_ref(), self.priority)?;
        let stand_in = CaptureStream::new(self, &self.queue, raw);
        let graph = graph::capture(context, raw, self.raw, || build(&stand_in));
        context.destroy_stream(raw);
        Ok(Graph {
            captured_on: self.id,
            exec: Some(Arc::new(graph?)),
            ops: stand_in.into_ops().into(),
        })
    }

    fn replay(&self, graph: &Graph, _touches: &Touches) -> Result<()> {
        let refuse = |problem: String| DeviceError::BadOperation {
            op: "replay",
            problem,
        };
        if graph.captured_on != self.id {
            return Err(refuse(format!(
                "{graph:?} is replayed on stream {} ({}): capture it on that stream",
                self.queue.name, self.id
            )));
        }
        let exec = graph
            .exec
            .as_ref()
            .and_then(|exec| exec.downcast_ref::<graph::CudaGraph>());
        let exec = exec.ok_or_else(|| refuse(format!("{graph:?} was not captured on a CUDA device")))?;
        let _order = self.order.lock();
        exec.launch(self.raw, &self.queue.name)?;
        self.settle("replay")
    }
}

impl Drop for CudaStream {
    fn drop(&mut self) {
        self.queue.context.destroy_stream(self.raw);
    }
}

impl fmt::Debug for CudaStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "stream {} ({})", self.queue.name, self.id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn priorities_span_the_drivers_range() {
        let all = |range| [Priority::High, Priority::Normal, Priority::Low].map(|p| priority(p, range));
        assert_eq!(all((0, -5)), [-5, -3, 0]);
        assert_eq!(all((0, -1)), [-1, -1, 0]);
        assert_eq!(all((0, 0)), [0, 0, 0]);
    }
}
