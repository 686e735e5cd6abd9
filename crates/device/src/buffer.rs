//! Device memory: typed buffers, views into them, and matrices in the device's own packing.

use std::any::Any;
use std::fmt;
use std::sync::{Arc, Weak};

/// Element type of a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DType {
    /// 32-bit float.
    F32,
    /// bfloat16: weights only on the CPU device.
    Bf16,
    /// IEEE half precision: what a device of reduced precision makes of f32 weights, and what goes into their
    /// products. The CPU device has no use for it.
    F16,
    /// 32-bit signed integer: ids, positions, slots.
    I32,
    /// 32-bit word with no arithmetic meaning: bit sets, [`crate::op::SampleRow`] records.
    U32,
}

impl DType {
    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            DType::F32 | DType::I32 | DType::U32 => 4,
            DType::Bf16 | DType::F16 => 2,
        }
    }
}

/// Where a buffer lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Place {
    /// Device memory: only operations touch it.
    Device,
    /// Page-locked host memory: the host reads and writes it through [`crate::Device::host_write`] and
    /// [`crate::Device::host_read`], operations copy to and from it.
    Pinned,
}

/// What to allocate.
#[derive(Debug, Clone)]
pub struct BufferSpec {
    /// Name used in errors, sanitizer reports and memory accounts, e.g. `codec_state`.
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// Number of elements.
    pub len: usize,
    /// Device or pinned host memory.
    pub place: Place,
}

/// A device allocation; cloning shares it, the last clone frees it. Operations in flight hold clones, so
/// memory is never freed under a running operation. New buffers are zeroed.
#[derive(Clone)]
pub struct Buffer(Arc<BufferInner>);

struct BufferInner {
    id: u64,
    spec: BufferSpec,
    storage: Box<dyn Any + Send + Sync>,
}

impl Buffer {
    /// Wrap a device's own storage. For implementors of [`crate::Device`]; `id` is unique in the process
    /// (see [`Buffer::next_id`]).
    pub fn from_storage(id: u64, spec: BufferSpec, storage: Box<dyn Any + Send + Sync>) -> Self {
        Self(Arc::new(BufferInner { id, spec, storage }))
    }

    /// A fresh process-wide buffer id.
    pub fn next_id() -> u64 {
        use std::sync::atomic::{AtomicU64, Ordering};
        static NEXT: AtomicU64 = AtomicU64::new(1);
        NEXT.fetch_add(1, Ordering::Relaxed)
    }

    /// Process-wide id: never reused.
    pub fn id(&self) -> u64 {
        self.0.id
    }

    /// Name given at allocation.
    pub fn name(&self) -> &str {
        &self.0.spec.name
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.0.spec.dtype
    }

    /// Number of elements.
    #[allow(clippy::len_without_is_empty)] // An empty buffer is of no use to anybody.
    pub fn len(&self) -> usize {
        self.0.spec.len
    }

    /// Device or pinned.
    pub fn place(&self) -> Place {
        self.0.spec.place
    }

    /// The device's own storage, for the device that made it.
    pub fn storage(&self) -> &(dyn Any + Send + Sync) {
        &*self.0.storage
    }

    /// Tells whether the buffer still exists, without keeping it.
    pub(crate) fn watch(&self) -> BufferWatch {
        BufferWatch(Arc::downgrade(&self.0))
    }

    /// The whole buffer as a view.
    pub fn view(&self) -> View {
        View {
            buffer: self.clone(),
            start: 0,
            len: self.len(),
        }
    }

    /// Elements `start .. start + len`.
    ///
    /// # Panics
    /// When the range leaves the buffer: a programming error in the model, found at capture.
    pub fn slice(&self, start: usize, len: usize) -> View {
        assert!(
            start + len <= self.len(),
            "slice {start}+{len} leaves buffer {} of {} elements",
            self.name(),
            self.len()
        );
        View {
            buffer: self.clone(),
            start,
            len,
        }
    }
}

/// See [`Buffer::watch`].
pub(crate) struct BufferWatch(Weak<BufferInner>);

impl BufferWatch {
    pub(crate) fn is_alive(&self) -> bool {
        self.0.strong_count() > 0
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}#{}[{:?}; {}]",
            self.name(),
            self.id(),
            self.dtype(),
            self.len()
        )
    }
}

/// A contiguous range of elements of a buffer. Operations give it its shape.
#[derive(Clone)]
pub struct View {
    /// The buffer.
    pub buffer: Buffer,
    /// First element.
    pub start: usize,
    /// Number of elements.
    pub len: usize,
}

impl View {
    /// A sub-range, relative to this view.
    ///
    /// # Panics
    /// When the range leaves the view.
    pub fn slice(&self, start: usize, len: usize) -> View {
        assert!(
            start + len <= self.len,
            "slice {start}+{len} leaves view {self:?}"
        );
        View {
            buffer: self.buffer.clone(),
            start: self.start + start,
            len,
        }
    }
}

impl fmt::Debug for View {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}[{}..{}]",
            self.buffer.name(),
            self.start,
            self.start + self.len
        )
    }
}

/// A weight matrix `[n, k]` (out, in) as the checkpoint has it, to be packed by the device.
#[derive(Debug, Clone, Copy)]
pub struct MatrixSpec<'a> {
    /// Tensor name.
    pub name: &'a str,
    /// Output features.
    pub n: usize,
    /// Input features.
    pub k: usize,
    /// `F32` or `Bf16`. The CPU device keeps it. A device of reduced precision keeps bf16 and
    /// narrows f32 to f16, to nearest even, unless it was opened in its f32 mode, which widens bf16 and keeps f32.
    pub dtype: DType,
    /// Row-major little-endian `[n, k]`.
    pub data: &'a [u8],
}

/// A weight matrix `[n, k]` in the device's own packing. Read-only after it was made.
#[derive(Debug, Clone)]
pub struct Matrix {
    /// Packed storage; its element order is the device's business.
    pub packed: Buffer,
    /// Output features.
    pub n: usize,
    /// Input features.
    pub k: usize,
}
