//! The CPU device: streams are in-order executors on threads, operations their reference implementations.

mod event;
mod exec;
mod kernels;
#[cfg(all(test, loom))]
mod loom_models;
mod queue;
mod spin;
pub(crate) mod storage;
mod stream;
mod sync;
// Two attributes: clippy knows a test module only by a plain `cfg(test)`.
#[cfg(test)]
#[cfg(not(loom))]
mod tests;

use std::sync::Arc;

use storage::CpuStorage;
use stream::CpuStream;

use crate::account::{MemoryAccount, available_memory_bytes};
use crate::{
    Buffer, BufferSpec, Device, DeviceError, DeviceFacts, Matrix, MatrixSpec, Place, Result, Stream,
    StreamConfig, View,
};

const NAME: &str = "cpu";

/// How to make a CPU device.
#[derive(Debug, Clone)]
pub struct CpuConfig {
    /// Bytes that may be allocated in all. `None`: what the machine has available now.
    pub memory_bytes: Option<u64>,
}

/// Open a CPU device, under the stream sanitizer when [`crate::sanitize::SANITIZE_VARIABLE`] is 1.
///
/// # Errors
/// As [`CpuDevice::new`] and [`crate::sanitize::from_env`].
pub fn open_cpu(config: CpuConfig) -> Result<Arc<dyn Device>> {
    crate::sanitize::from_env(Arc::new(CpuDevice::new(config)?))
}

/// The processor as a device. Every stream is a thread; priorities have no effect.
#[derive(Debug)]
pub struct CpuDevice {
    account: Arc<MemoryAccount>,
}

impl CpuDevice {
    /// Make a device with its own memory account.
    ///
    /// # Errors
    /// [`DeviceError::Unsupported`] when no limit is given and the machine does not say what it has.
    pub fn new(config: CpuConfig) -> Result<Self> {
        let limit_bytes = match config.memory_bytes {
            Some(bytes) => bytes,
            None => available_memory_bytes().ok_or_else(|| DeviceError::Unsupported {
                device: NAME.to_owned(),
                what: "reading how much memory the machine has available".to_owned(),
                remedy: "set the memory limit of the CPU device".to_owned(),
            })?,
        };
        Ok(Self {
            account: MemoryAccount::new(NAME.to_owned(), limit_bytes),
        })
    }
}

impl Device for CpuDevice {
    fn facts(&self) -> DeviceFacts {
        DeviceFacts {
            name: NAME.to_owned(),
            memory_bytes: self.account.limit_bytes(),
            used_bytes: self.account.used_bytes(),
            sms: 0,
            partition_granularity: 0,
            exact_buckets: true,
        }
    }

    fn alloc(&self, spec: BufferSpec) -> Result<Buffer> {
        // A size that overflows is refused by the account like any other that is too large.
        let bytes = spec.len.saturating_mul(spec.dtype.size());
        let lease = self.account.take(&spec.name, bytes as u64)?;
        let storage = Box::new(CpuStorage::zeroed(bytes, lease));
        Ok(Buffer::from_storage(Buffer::next_id(), spec, storage))
    }

    fn alloc_with(&self, spec: BufferSpec, data: &[u8]) -> Result<Buffer> {
        let view = self.alloc(spec)?.view();
        check_bytes("alloc_with", &view, data.len())?;
        // SAFETY: nobody else has the buffer yet.
        unsafe { storage::bytes_mut(&view) }.copy_from_slice(data);
        Ok(view.buffer)
    }

    fn pack_matrix(&self, spec: MatrixSpec<'_>) -> Result<Matrix> {
        kernels::pack::pack_matrix(self, spec)
    }

    fn create_stream(&self, config: StreamConfig) -> Result<Arc<dyn Stream>> {
        if let Some(sms) = config.partition_sms {
            return Err(DeviceError::Unsupported {
                device: NAME.to_owned(),
                what: format!("a partition of {sms} SMs for stream {}", config.name),
                remedy: "leave out `sms` on this device".to_owned(),
            });
        }
        Ok(Arc::new(CpuStream::start(config)?))
    }

    fn host_write(&self, view: &View, bytes: &[u8]) -> Result<()> {
        check_host_access("host_write", view, bytes.len())?;
        // SAFETY: the caller has waited for every operation that uses the range, which the sanitizer checks.
        unsafe { storage::bytes_mut(view) }.copy_from_slice(bytes);
        Ok(())
    }

    fn host_read(&self, view: &View, bytes: &mut [u8]) -> Result<()> {
        check_host_access("host_read", view, bytes.len())?;
        // SAFETY: the caller has waited for every operation that writes the range, which the sanitizer checks.
        bytes.copy_from_slice(unsafe { storage::bytes(view) });
        Ok(())
    }
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
