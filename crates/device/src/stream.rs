//! The device traits: what the engine and the models call, and what a device implements.

use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::{Buffer, BufferSpec, DType, Matrix, MatrixSpec, Op, Result, View};

/// Scheduling priority of a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Priority {
    /// Runs before others where the hardware allows.
    High,
    /// The default.
    #[default]
    Normal,
    /// Gives way to others.
    Low,
}

/// How to make a stream.
#[derive(Debug, Clone)]
pub struct StreamConfig {
    /// Name in errors, reports and the thread list, e.g. `chain`, `lane1`.
    pub name: String,
    /// Priority.
    pub priority: Priority,
    /// Confine the stream to this many SMs. `None`: the whole device. Refused by the CPU device.
    pub partition_sms: Option<u32>,
}

/// What a device says about itself.
#[derive(Debug, Clone)]
pub struct DeviceFacts {
    /// `cpu`, `cuda:0`.
    pub name: String,
    /// Bytes that may be allocated in all.
    pub memory_bytes: u64,
    /// Bytes allocated now.
    pub used_bytes: u64,
    /// Streaming multiprocessors; 0 on a CPU.
    pub sms: u32,
    /// Partition granularity in SMs; 0 where partitions are not supported.
    pub partition_granularity: u32,
    /// Largest useful batch bucket spacing: when true the device wants captures for every exact row count
    /// (padding rows would cost real time), else for the plan's buckets.
    pub exact_buckets: bool,
}

/// One device.
pub trait Device: Send + Sync + fmt::Debug {
    /// Facts, with the memory account as of now.
    fn facts(&self) -> DeviceFacts;

    /// Allocate zeroed memory. The account goes back when the last clone is dropped.
    ///
    /// # Errors
    /// [`crate::DeviceError::OutOfMemory`].
    fn alloc(&self, spec: BufferSpec) -> Result<Buffer>;

    /// Allocate device memory and fill it before any stream sees it (weights, tables).
    fn alloc_with(&self, spec: BufferSpec, data: &[u8]) -> Result<Buffer>;

    /// Pack a weight matrix for [`crate::op::Gemm`] and [`crate::op::Conv`].
    fn pack_matrix(&self, spec: MatrixSpec<'_>) -> Result<Matrix>;

    /// How to keep what goes into a product with `weights` and nowhere else: the output of an attention, of a gated
    /// product. F32, unless the device rounds the inputs of its products anyway: then rounding them a step
    /// earlier changes no bit and moves half the bytes. In what order the elements of `[rows, width]` of 16 bits lie is
    /// then the device's own business: who writes such a view and who reads it have the same rows and width.
    fn activation_dtype(&self, weights: &Matrix) -> DType {
        let _ = weights;
        DType::F32
    }

    /// Make a stream. Its thread or queue ends when the last handle is dropped.
    fn create_stream(&self, config: StreamConfig) -> Result<Arc<dyn Stream>>;

    /// Write to pinned memory from the host, now. The caller must know (through an event it waited for) that
    /// no operation in flight still reads the range; the sanitizer checks that.
    fn host_write(&self, view: &View, bytes: &[u8]) -> Result<()>;

    /// Read pinned memory on the host, now. The caller must have waited for the event behind the writing
    /// operation; the sanitizer checks that.
    fn host_read(&self, view: &View, bytes: &mut [u8]) -> Result<()>;
}

/// An in-order queue of operations. Every call names its stream: there is no entered or current stream, so
/// any thread may enqueue at any time. Calls return once the work is queued, never when it is done.
pub trait Stream: Send + Sync + fmt::Debug {
    /// How it was made.
    fn config(&self) -> &StreamConfig;

    /// Process-wide id.
    fn id(&self) -> u64;

    /// Queue one operation. `touches` names the parts of pooled buffers that indirect operations of this
    /// step reach through index buffers (see [`Touches`]).
    fn launch(&self, op: &Op, touches: &Touches) -> Result<()>;

    /// An event that completes when everything queued so far has run.
    fn record(&self) -> Result<Event>;

    /// As [`Stream::record`], for [`Event::since`]: a device for which telling the time costs something does so only
    /// here.
    fn record_timed(&self) -> Result<Event> {
        self.record()
    }

    /// A point to take the time from, which nobody waits for. `None` on a device without a clock, and where the stream
    /// takes nothing more: whatever is queued next says so.
    fn mark(&self) -> Option<Event> {
        None
    }

    /// Everything queued after this call runs after `event`, whichever stream it came from.
    fn wait(&self, event: &Event) -> Result<()>;

    /// Record the operations that `build` launches on the given stand-in, without running them. The graph
    /// keeps this stream's priority and partition.
    fn capture(&self, build: &mut dyn FnMut(&dyn Stream) -> Result<()>) -> Result<Graph>;

    /// Queue a captured graph as one unit, with this step's touches.
    fn replay(&self, graph: &Graph, touches: &Touches) -> Result<()>;
}

/// What an [`Event`] is made of, per device.
pub trait EventImpl: Send + Sync {
    /// True once it completed, also when the stream failed.
    fn is_done(&self) -> bool;
    /// Wait at most `timeout`. `Err` when the stream failed before the event or the time ran out.
    fn wait(&self, timeout: Duration) -> Result<()>;
    /// Time from `earlier` to this event by the device's clock, once both have completed; `None` where it has none.
    fn since(&self, earlier: &dyn EventImpl) -> Option<Duration> {
        let _ = earlier;
        None
    }
    /// The device's own type.
    fn as_any(&self) -> &dyn Any;
}

/// A point in a stream's order. Cloning shares it. Every long wait has a deadline.
#[derive(Clone)]
pub struct Event {
    /// Process-wide id.
    pub id: u64,
    /// Name of the stream it was recorded on.
    pub stream: Arc<str>,
    /// Device part.
    pub inner: Arc<dyn EventImpl>,
}

impl Event {
    /// True once everything before it on its stream has run (or failed).
    pub fn is_done(&self) -> bool {
        self.inner.is_done()
    }

    /// Block the calling thread until it completes.
    ///
    /// # Errors
    /// [`crate::DeviceError::Deadline`] after `timeout`; [`crate::DeviceError::StreamFailed`] when an
    /// operation before it failed.
    pub fn synchronize(&self, timeout: Duration) -> Result<()> {
        self.inner.wait(timeout)
    }

    /// Time from `earlier` to this event by the device's clock. `None` before both have completed, when one was
    /// recorded by [`Stream::record`], when `earlier` was not the earlier one, and on a device without a clock.
    pub fn since(&self, earlier: &Event) -> Option<Duration> {
        self.inner.since(&*earlier.inner)
    }
}

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "event {} on {}", self.id, self.stream)
    }
}

/// A captured sequence of operations. It remembers the stream it was captured on.
#[derive(Clone)]
pub struct Graph {
    /// Id of the stream it was captured on.
    pub captured_on: u64,
    /// The operations, for the sanitizer and for the CPU device.
    pub ops: Arc<[Op]>,
    /// The device's own executable, if it has one.
    pub exec: Option<Arc<dyn Any + Send + Sync>>,
}

impl fmt::Debug for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "graph of {} operations captured on stream {}",
            self.ops.len(),
            self.captured_on
        )
    }
}

/// Whether a touch reads or writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TouchKind {
    /// Only reads.
    Read,
    /// Writes, or reads and writes.
    Write,
}

/// One range of a pooled buffer that a step reaches through an index buffer.
#[derive(Debug, Clone)]
pub struct Touch {
    /// The range.
    pub view: View,
    /// Read or write.
    pub kind: TouchKind,
}

/// The ranges of pooled buffers (pages, state slots, edge rings) that one step reaches.
///
/// A captured graph names a pool, not the slots: those change with every replay. So the step that launches
/// it lists them, and the sanitizer holds the two together: an operation with an indirect operand in a pool
/// for which the step lists nothing is an error too.
#[derive(Debug, Clone, Default)]
pub struct Touches(pub Vec<Touch>);

impl Touches {
    /// No pooled buffer is reached.
    pub fn none() -> Self {
        Self::default()
    }

    /// Add a range that is only read.
    pub fn read(&mut self, view: View) {
        self.0.push(Touch {
            view,
            kind: TouchKind::Read,
        });
    }

    /// Add a range that is written.
    pub fn write(&mut self, view: View) {
        self.0.push(Touch {
            view,
            kind: TouchKind::Write,
        });
    }
}

/// A stream and the touches of the step being launched: what a model's forward function is given.
#[derive(Debug, Clone, Copy)]
pub struct Launcher<'a> {
    /// Where to launch (the stand-in while capturing).
    pub stream: &'a dyn Stream,
    /// This step's touches (empty while capturing).
    pub touches: &'a Touches,
}

impl Launcher<'_> {
    /// Queue one operation.
    pub fn run(&self, op: impl Into<Op>) -> Result<()> {
        self.stream.launch(&op.into(), self.touches)
    }
}
