//! The device itself.

use std::collections::HashMap;
use std::env;
use std::fmt;
use std::path::PathBuf;
use std::sync::{Arc, Weak};

use laneway_device::{
    Buffer, BufferSpec, DType, Device, DeviceError, DeviceFacts, Matrix, MatrixSpec, Place, Result, Stream,
    StreamConfig, View, sanitize,
};
use parking_lot::Mutex;

use crate::cache::KernelCache;
use crate::context::Context;
use crate::event::TimedEvent;
use crate::kernels::Kernels;
use crate::lower::{self, Target};
use crate::memory::{self, CudaStorage, GuardDamage, Memory};
use crate::partition::Partitions;
use crate::stream::{CudaStream, Queue};
use crate::upload::{Packing, Uploader, packed_len};

/// `0`: no kernel starts before the one ahead of it on its stream has ended.
pub const OVERLAP_VARIABLE: &str = "LANEWAY_CUDA_PDL";

/// `1`: every launch outside a capture waits for its end, so that the operation that fails is named.
pub const SERIALIZE_VARIABLE: &str = "LANEWAY_CUDA_SERIALIZE";

/// What weights are, and products are taken of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Precision {
    /// bf16 weights, inputs of products rounded to bf16, f32 sums.
    #[default]
    Bf16,
    /// f32 throughout (no TF32): for verification.
    F32,
}

/// What f32 weights become at reduced precision: f16 has three more bits than bf16 and range enough for them.
pub(crate) const F32_WEIGHTS: DType = DType::F16;

/// How to open a CUDA device.
#[derive(Debug, Clone, Default)]
pub struct CudaConfig {
    /// Which device, counted from 0 among those that CUDA_VISIBLE_DEVICES shows.
    pub ordinal: usize,
    /// What matrices are packed as.
    pub precision: Precision,
    /// Bytes of device memory that may be allocated in all. `None`: what is free now.
    pub memory_bytes: Option<u64>,
    /// Directory of compiled kernels. `None`: `laneway/kernels` where this user's caches are.
    pub kernel_cache: Option<PathBuf>,
    /// Number the blocks of every grid in another order: results must not change. For checks.
    pub shuffle_blocks: bool,
    /// Put poisoned memory round every device buffer, for [`CudaDevice::check_guards`]. For checks.
    pub guard: bool,
}

/// Open a CUDA device, under the stream sanitizer when [`sanitize::SANITIZE_VARIABLE`] is 1.
///
/// # Errors
/// As [`CudaDevice::open`] and [`sanitize::from_env`].
pub fn open_cuda(config: CudaConfig) -> Result<Arc<dyn Device>> {
    sanitize::from_env(Arc::new(CudaDevice::open(config)?))
}

/// One NVIDIA GPU.
pub struct CudaDevice {
    precision: Precision,
    overlap: bool,
    serialize: bool,
    context: Arc<Context>,
    kernels: Arc<Kernels>,
    memory: Memory,
    partitions: Arc<Partitions>,
    uploader: Uploader,
    /// For [`CudaDevice::record_timed`], which is given a stream by its trait.
    streams: Mutex<HashMap<u64, Weak<CudaStream>>>,
}

impl CudaDevice {
    /// Open a device: load the driver, compile the kernels that the cache lacks, load them.
    ///
    /// # Errors
    /// [`DeviceError::Unavailable`] without a driver, without such a device, or without the compiler when
    /// it is needed; [`DeviceError::Driver`]; [`DeviceError::Unsupported`] for a bad environment variable.
    pub fn open(config: CudaConfig) -> Result<Self> {
        let context = Context::open(config.ordinal)?;
        let overlap = switch(&context, OVERLAP_VARIABLE, true)? && context.properties.major >= 9;
        let serialize = switch(&context, SERIALIZE_VARIABLE, false)?;
        let cache = KernelCache::new(config.kernel_cache);
        if cache.is_none() {
            tracing::warn!("neither XDG_CACHE_HOME nor HOME is set: kernels are compiled at every start");
        }
        let kernels = Kernels::load(&context, cache.as_ref(), config.shuffle_blocks)?;
        let limit_bytes = match config.memory_bytes {
            Some(bytes) => bytes,
            None => context.memory()?.0,
        };
        Ok(Self {
            precision: config.precision,
            overlap,
            serialize,
            kernels: Arc::new(kernels),
            memory: Memory::new(Arc::clone(&context), limit_bytes, config.guard),
            partitions: Arc::new(Partitions::new(&context)),
            uploader: Uploader::new(&context),
            streams: Mutex::default(),
            context,
        })
    }

    /// Every write outside a live buffer that its guards show, once the device has finished what was queued.
    ///
    /// # Errors
    /// [`DeviceError::Unsupported`] when the device was opened without guards; [`DeviceError::Driver`] when
    /// something on the device failed.
    pub fn check_guards(&self) -> Result<Vec<GuardDamage>> {
        self.memory.check_guards()
    }

    /// Record a point in the order of `stream` together with its time. Not for use inside a capture.
    ///
    /// # Errors
    /// [`DeviceError::BadOperation`] when the stream is of another device; [`DeviceError::StreamFailed`].
    pub fn record_timed(&self, stream: &dyn Stream) -> Result<TimedEvent> {
        let known = self.streams.lock().get(&stream.id()).and_then(Weak::upgrade);
        let known = known.ok_or_else(|| DeviceError::BadOperation {
            op: "record_timed",
            problem: format!("{stream:?} is no stream of {}", self.context.name),
        })?;
        TimedEvent::record(&self.context, known.raw(), known.name())
    }

    /// Compute capability as one number, e.g. 90.
    pub fn arch(&self) -> u32 {
        self.context.properties.arch()
    }

    pub(crate) fn is_guarded(&self) -> bool {
        self.memory.is_guarded()
    }

    /// Change one byte of a guard of `buffer`, to see whether it is found.
    pub(crate) fn damage(&self, buffer: &Buffer, offset_bytes: i64) -> Result<()> {
        self.memory.damage(memory::base(buffer), offset_bytes)
    }

    fn allocate(&self, spec: &BufferSpec) -> Result<CudaStorage> {
        // A size that overflows is refused by the account like any other that is too large.
        let bytes = spec.len.saturating_mul(spec.dtype.size());
        self.memory.allocate(&spec.name, bytes, spec.place)
    }
}

/// What a variable of 0 or 1 says; `default` when it is not set.
fn switch(context: &Context, name: &str, default: bool) -> Result<bool> {
    match env::var(name).as_deref() {
        Err(env::VarError::NotPresent) | Ok("") => Ok(default),
        Ok("0") => Ok(false),
        Ok("1") => Ok(true),
        _ => Err(DeviceError::Unsupported {
            device: context.name.clone(),
            what: format!("{name}={}", env::var_os(name).unwrap_or_default().display()),
            remedy: "set it to 0 or 1".to_owned(),
        }),
    }
}

impl Device for CudaDevice {
    fn facts(&self) -> DeviceFacts {
        let account = self.memory.account();
        DeviceFacts {
            name: self.context.name.clone(),
            memory_bytes: account.limit_bytes(),
            used_bytes: account.used_bytes(),
            sms: self.context.properties.sms,
            partition_granularity: self.partitions.granularity(),
            exact_buckets: false,
        }
    }

    fn alloc(&self, spec: BufferSpec) -> Result<Buffer> {
        let storage = self.allocate(&spec)?;
        Ok(Buffer::from_storage(Buffer::next_id(), spec, Box::new(storage)))
    }

    fn alloc_with(&self, spec: BufferSpec, data: &[u8]) -> Result<Buffer> {
        let view = self.alloc(spec)?.view();
        check_bytes("alloc_with", &view, data.len())?;
        match view.buffer.place() {
            Place::Device => self.uploader.upload(lower::address(&view), data)?,
            // SAFETY: nobody else has the buffer yet, which is as long as the data.
            Place::Pinned => unsafe { memory::write_pinned(lower::address(&view), data) },
        }
        Ok(view.buffer)
    }

    fn activation_dtype(&self, weights: &Matrix) -> DType {
        weights.packed.dtype()
    }

    fn pack_matrix(&self, spec: MatrixSpec<'_>) -> Result<Matrix> {
        if let Some(problem) = matrix_problem(&spec) {
            return Err(DeviceError::BadOperation {
                op: "pack_matrix",
                problem: format!("{}: {problem}", spec.name),
            });
        }
        let to = match (self.precision, spec.dtype) {
            (Precision::F32, _) => DType::F32,
            (Precision::Bf16, DType::F32) => F32_WEIGHTS,
            (Precision::Bf16, _) => DType::Bf16,
        };
        let packed = self.alloc(BufferSpec {
            name: spec.name.to_owned(),
            dtype: to,
            len: packed_len(spec.n, spec.k, to),
            place: Place::Device,
        })?;
        let address = memory::base(&packed);
        if (spec.dtype, to) == (DType::F32, DType::F32) {
            self.uploader.upload(address, spec.data)?;
        } else {
            let packing = Packing {
                k: spec.k,
                from: spec.dtype,
                to,
                data: spec.data,
            };
            self.uploader.pack(&packing, &self.kernels, address)?;
        }
        Ok(Matrix {
            packed,
            n: spec.n,
            k: spec.k,
        })
    }

    fn create_stream(&self, config: StreamConfig) -> Result<Arc<dyn Stream>> {
        let partition = config
            .partition_sms
            .map(|sms| self.partitions.take(sms, &config.name))
            .transpose()?;
        let properties = &self.context.properties;
        let queue = Queue {
            context: Arc::clone(&self.context),
            kernels: Arc::clone(&self.kernels),
            target: Target {
                sms: partition
                    .as_ref()
                    .map_or(properties.sms, |partition| partition.sms()),
                arch: properties.arch(),
            },
            overlap: self.overlap,
            serialize: self.serialize,
            name: Arc::from(config.name.as_str()),
        };
        let stream = Arc::new(CudaStream::new(config, queue, partition)?);
        let mut streams = self.streams.lock();
        streams.retain(|_, stream| stream.strong_count() > 0);
        streams.insert(stream.id(), Arc::downgrade(&stream));
        Ok(stream)
    }

    fn host_write(&self, view: &View, bytes: &[u8]) -> Result<()> {
        check_host_access("host_write", view, bytes.len())?;
        // SAFETY: the range lies in a pinned buffer; the caller has waited for every operation that uses it, which
        // the sanitizer checks.
        unsafe { memory::write_pinned(lower::address(view), bytes) };
        Ok(())
    }

    fn host_read(&self, view: &View, bytes: &mut [u8]) -> Result<()> {
        check_host_access("host_read", view, bytes.len())?;
        // SAFETY: as in `host_write`, for every operation that writes it.
        unsafe { memory::read_pinned(lower::address(view), bytes) };
        Ok(())
    }
}

fn matrix_problem(spec: &MatrixSpec<'_>) -> Option<String> {
    let (n, k) = (spec.n, spec.k);
    if !matches!(spec.dtype, DType::F32 | DType::Bf16) {
        return Some(format!("weights are F32 or Bf16, not {:?}", spec.dtype));
    }
    let bytes = n * k * spec.dtype.size();
    (spec.data.len() != bytes).then(|| {
        format!(
            "[{n}, {k}] {:?} takes {bytes} bytes, {} given",
            spec.dtype,
            spec.data.len()
        )
    })
}

fn check_host_access(op: &'static str, view: &View, bytes: usize) -> Result<()> {
    if view.buffer.place() != Place::Pinned {
        return Err(DeviceError::BadOperation {
            op,
            problem: format!("{view:?} is device memory: copy it to a pinned buffer and access that"),
        });
    }
    check_bytes(op, view, bytes)
}

fn check_bytes(op: &'static str, view: &View, bytes: usize) -> Result<()> {
    let size = view.buffer.dtype().size();
    if view.len * size != bytes {
        return Err(DeviceError::BadOperation {
            op,
            problem: format!(
                "{view:?} holds {} elements of {size} bytes = {} bytes, {bytes} bytes given",
                view.len,
                view.len * size
            ),
        });
    }
    Ok(())
}

impl fmt::Debug for CudaDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudaDevice")
            .field("name", &self.context.name)
            .field("precision", &self.precision)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_that_is_not_there_is_an_error_with_a_remedy() {
        let config = CudaConfig {
            ordinal: 9999,
            ..CudaConfig::default()
        };
        // On a machine without a driver for that reason, on any other for the number.
        let error = open_cuda(config).unwrap_err();
        assert!(matches!(error, DeviceError::Unavailable { .. }), "{error:?}");
        let text = error.to_string();
        assert!(text.starts_with("cuda:9999: "), "{text}");
        assert!(
            text.contains("CPU device") || text.contains("CUDA_VISIBLE_DEVICES"),
            "{text}"
        );
    }
}
