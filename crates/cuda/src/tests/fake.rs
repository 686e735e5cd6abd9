//! A device that lowers what is launched and holds it against the compiled kernels, in place of running it.

use std::any::Any;
use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use laneway_device::{
    Buffer, BufferSpec, DType, Device, DeviceFacts, Event, EventImpl, Graph, Matrix, MatrixSpec, Op, Place,
    Result, Stream, StreamConfig, Touches, View,
};
use parking_lot::Mutex;

use super::compiled::Kernels;
use crate::device::F32_WEIGHTS;
use crate::kernels::launch_problem;
use crate::launch::Launch;
use crate::lower::{self, Target};
use crate::memory::CudaStorage;
use crate::upload::{Packing, packed_len};

/// What was launched.
#[derive(Debug, Default)]
pub(super) struct Seen {
    pub(super) ops: BTreeSet<&'static str>,
    pub(super) kernels: BTreeSet<&'static str>,
    pub(super) problems: BTreeSet<String>,
}

#[derive(Debug)]
struct Shared {
    kernels: Kernels,
    target: Target,
    /// Shared memory of a block at most, in bytes.
    shared_bytes: usize,
    seen: Mutex<Seen>,
}

/// See the module.
#[derive(Debug)]
pub(super) struct FakeDevice {
    shared: Arc<Shared>,
    weights: DType,
    next: AtomicU64,
}

impl FakeDevice {
    pub(super) fn new(kernels: Kernels, target: Target, shared_bytes: usize, weights: DType) -> Self {
        Self {
            shared: Arc::new(Shared {
                kernels,
                target,
                shared_bytes,
                seen: Mutex::default(),
            }),
            weights,
            // Where the driver's addresses begin, more or less.
            next: AtomicU64::new(0x7f00_0000_0000),
        }
    }

    pub(super) fn take(&self) -> Seen {
        std::mem::take(&mut *self.shared.seen.lock())
    }
}

impl Shared {
    fn launch(&self, op: &Op) {
        if matches!(op, Op::Copy(_) | Op::Zero(_)) {
            return;
        }
        let mut launches = Vec::new();
        let lowered = catch_unwind(AssertUnwindSafe(|| lower::lower(op, self.target, &mut launches)));
        let mut seen = self.seen.lock();
        seen.ops.insert(op.name());
        if lowered.is_err() {
            seen.problems.insert(format!("{}: lowering panics", op.name()));
        }
        for launch in &launches {
            self.hold(op.name(), launch, &mut seen);
        }
    }

    fn hold(&self, what: &str, launch: &Launch, seen: &mut Seen) {
        seen.kernels.insert(launch.kernel);
        if let Some(problem) = self.problem(launch) {
            seen.problems
                .insert(format!("{what}: {}: {problem}", launch.kernel));
        }
    }

    /// Why the driver would refuse the launch.
    fn problem(&self, launch: &Launch) -> Option<String> {
        let Some(built) = self.kernels.get(launch.kernel) else {
            return Some("there is no such kernel".to_owned());
        };
        let max_shared = self.shared_bytes.saturating_sub(built.usage.shared_bytes);
        if let Some(problem) = launch_problem(launch, &built.kernel, max_shared as u32) {
            return Some(problem);
        }
        // A warp gets registers in steps of 8 for each thread.
        let registers = built.usage.registers.next_multiple_of(8) * launch.block as usize;
        if registers > 65_536 {
            return Some(format!("{registers} registers for a block of {}", launch.block));
        }
        let [x, y, z] = launch.grid;
        if x == 0 || y == 0 || z == 0 || x > i32::MAX as u32 || y > 65_535 || z > 65_535 || launch.block == 0
        {
            return Some(format!("grid {:?} of blocks of {}", launch.grid, launch.block));
        }
        let clusters = self.target.arch >= 90 || launch.cluster == 1;
        if !clusters || launch.cluster > 8 || !x.is_multiple_of(launch.cluster) {
            return Some(format!("clusters of {} in a grid of {x}", launch.cluster));
        }
        None
    }
}

impl Device for FakeDevice {
    fn facts(&self) -> DeviceFacts {
        DeviceFacts {
            name: "fake".to_owned(),
            memory_bytes: u64::MAX,
            used_bytes: 0,
            sms: self.shared.target.sms,
            partition_granularity: 0,
            exact_buckets: false,
        }
    }

    fn alloc(&self, spec: BufferSpec) -> Result<Buffer> {
        // The driver aligns every allocation to 512 bytes.
        let bytes = (spec.len * spec.dtype.size()).next_multiple_of(512) as u64;
        let storage = CudaStorage::fake(self.next.fetch_add(bytes, Ordering::Relaxed));
        Ok(Buffer::from_storage(Buffer::next_id(), spec, Box::new(storage)))
    }

    fn alloc_with(&self, spec: BufferSpec, _data: &[u8]) -> Result<Buffer> {
        self.alloc(spec)
    }

    fn pack_matrix(&self, spec: MatrixSpec<'_>) -> Result<Matrix> {
        let to = match (self.weights, spec.dtype) {
            (DType::Bf16, DType::F32) => F32_WEIGHTS,
            (weights, _) => weights,
        };
        let packed = self.alloc(BufferSpec {
            name: spec.name.to_owned(),
            dtype: to,
            len: packed_len(spec.n, spec.k, to),
            place: Place::Device,
        })?;
        if (spec.dtype, to) != (DType::F32, DType::F32) {
            let packing = Packing {
                k: spec.k,
                from: spec.dtype,
                to,
                data: spec.data,
            };
            let launch = packing.launch(spec.n, 0, crate::memory::base(&packed));
            self.shared
                .hold("pack_matrix", &launch, &mut self.shared.seen.lock());
        }
        Ok(Matrix {
            packed,
            n: spec.n,
            k: spec.k,
        })
    }

    fn create_stream(&self, config: StreamConfig) -> Result<Arc<dyn Stream>> {
        Ok(Arc::new(FakeStream {
            config,
            shared: Arc::clone(&self.shared),
        }))
    }

    fn host_write(&self, _view: &View, _bytes: &[u8]) -> Result<()> {
        Ok(())
    }

    fn host_read(&self, _view: &View, _bytes: &mut [u8]) -> Result<()> {
        Ok(())
    }
}

#[derive(Debug)]
struct FakeStream {
    config: StreamConfig,
    shared: Arc<Shared>,
}

impl Stream for FakeStream {
    fn config(&self) -> &StreamConfig {
        &self.config
    }

    fn id(&self) -> u64 {
        1
    }

    fn launch(&self, op: &Op, _touches: &Touches) -> Result<()> {
        op.validate()?;
        self.shared.launch(op);
        Ok(())
    }

    fn record(&self) -> Result<Event> {
        Ok(Event {
            id: 1,
            stream: Arc::from(self.config.name.as_str()),
            inner: Arc::new(Done),
        })
    }

    fn wait(&self, _event: &Event) -> Result<()> {
        Ok(())
    }

    fn capture(&self, build: &mut dyn FnMut(&dyn Stream) -> Result<()>) -> Result<Graph> {
        build(self)?;
        Ok(Graph {
            captured_on: self.id(),
            ops: Arc::from([]),
            exec: None,
        })
    }

    fn replay(&self, _graph: &Graph, _touches: &Touches) -> Result<()> {
        Ok(())
    }
}

struct Done;

impl EventImpl for Done {
    fn is_done(&self) -> bool {
        true
    }

    fn wait(&self, _timeout: Duration) -> Result<()> {
        Ok(())
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
