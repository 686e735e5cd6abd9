//! Storage behind a CUDA buffer: plain allocations, their guards, and what the host may touch.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::Arc;

use cudarc::driver::sys;
use laneway_device::{Buffer, DeviceError, MemoryAccount, MemoryLease, Place, Result};
use parking_lot::Mutex;

use crate::context::{Context, Garbage, Handle, host_pointer};

/// Bytes of a guard on either side of a buffer.
const GUARD_BYTES: usize = 4096;

/// Fills a guard. As a number of either width it is NaN, so that reading past a buffer shows in the result.
const GUARD_BYTE: u8 = 0xff;

/// What a buffer's storage is: where it lies, and what frees it.
#[derive(Debug)]
pub(crate) struct CudaStorage {
    /// Device address; for pinned memory the host address, which the device can use too.
    pub(crate) base: u64,
    /// `None` only where tests lower operations without a device.
    _allocation: Option<Allocation>,
}

#[cfg(test)]
impl CudaStorage {
    /// Storage that is an address and nothing else, for lowering without a device.
    pub(crate) fn fake(base: u64) -> Self {
        Self {
            base,
            _allocation: None,
        }
    }
}

/// Gives the memory back on drop.
pub(crate) struct Allocation {
    context: Arc<Context>,
    /// Taken by the drop.
    memory: Option<Garbage>,
    guards: Option<(Arc<Guards>, u64)>,
    _lease: Option<MemoryLease>,
}

impl std::fmt::Debug for Allocation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "allocation on {}", self.context.name)
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        if let Some((guards, base)) = &self.guards {
            guards.live.lock().remove(base);
        }
        if let Some(memory) = self.memory.take() {
            self.context.discard(memory);
        }
    }
}

/// Makes allocations.
#[derive(Debug)]
pub(crate) struct Memory {
    context: Arc<Context>,
    /// Device memory only: pinned memory is the host's.
    account: Arc<MemoryAccount>,
    /// Whether device allocations get guards.
    guards: Option<Arc<Guards>>,
}

impl std::fmt::Debug for Context {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.name)
    }
}

impl Memory {
    pub(crate) fn new(context: Arc<Context>, limit_bytes: u64, guard: bool) -> Self {
        let account = MemoryAccount::new(context.name.clone(), limit_bytes);
        Self {
            context,
            account,
            guards: guard.then(Arc::default),
        }
    }

    pub(crate) fn account(&self) -> &MemoryAccount {
        &self.account
    }

    /// Zeroed memory; `what` names it in errors.
    pub(crate) fn allocate(&self, what: &str, bytes: usize, place: Place) -> Result<CudaStorage> {
        match place {
            Place::Device => self.allocate_device(what, bytes),
            Place::Pinned => self.allocate_pinned(bytes),
        }
    }

    fn allocate_device(&self, what: &str, bytes: usize) -> Result<CudaStorage> {
        let lease = self.account.take(what, bytes as u64)?;
        let margin = if self.guards.is_some() { GUARD_BYTES } else { 0 };
        let whole = allocate_raw(&self.context, what, bytes + 2 * margin)?;
        let base = whole + margin as u64;
        let mut allocation = Allocation {
            context: Arc::clone(&self.context),
            memory: Some(Garbage::Device(whole)),
            guards: None,
            _lease: Some(lease),
        };
        self.context.serve(|stream| {
            let fill = |address: u64, value: u8, bytes: usize| {
                if bytes == 0 {
                    return Ok(());
                }
                // SAFETY: the range lies in the allocation, which nobody else knows yet.
                let result = unsafe { sys::cuMemsetD8Async(address, value, bytes, stream.0) };
                self.context.check("cuMemsetD8Async", result)
            };
            fill(whole, GUARD_BYTE, margin)?;
            fill(base, 0, bytes)?;
            fill(base + bytes as u64, GUARD_BYTE, margin)
        })?;
        if let Some(guards) = &self.guards {
            guards.live.lock().insert(base, (what.to_owned(), bytes));
            allocation.guards = Some((Arc::clone(guards), base));
        }
        Ok(CudaStorage {
            base,
            _allocation: Some(allocation),
        })
    }

    fn allocate_pinned(&self, bytes: usize) -> Result<CudaStorage> {
        let memory = allocate_pinned_raw(&self.context, bytes)?;
        // SAFETY: the memory is ours alone and that long.
        unsafe { memory.0.cast::<u8>().write_bytes(0, bytes) };
        Ok(CudaStorage {
            base: memory.0.expose_provenance() as u64,
            _allocation: Some(Allocation {
                context: Arc::clone(&self.context),
                memory: Some(Garbage::Pinned(memory)),
                guards: None,
                _lease: None,
            }),
        })
    }

    pub(crate) fn is_guarded(&self) -> bool {
        self.guards.is_some()
    }

    /// Write a zero byte at `offset_bytes` from the start of a guarded buffer, inside one of its guards.
    pub(crate) fn damage(&self, base: u64, offset_bytes: i64) -> Result<()> {
        let Some((_, bytes)) = self
            .guards
            .as_ref()
            .and_then(|guards| guards.live.lock().get(&base).cloned())
        else {
            return Err(self.unguarded());
        };
        let (guard, end) = (GUARD_BYTES as i64, bytes as i64);
        assert!((-guard..0).contains(&offset_bytes) || (end..end + guard).contains(&offset_bytes));
        self.context.serve(|stream| {
            // SAFETY: the byte lies in a guard of a live allocation.
            let result =
                unsafe { sys::cuMemsetD8Async(base.wrapping_add_signed(offset_bytes), 0, 1, stream.0) };
            self.context.check("cuMemsetD8Async", result)
        })
    }

    fn unguarded(&self) -> DeviceError {
        DeviceError::Unsupported {
            device: self.context.name.clone(),
            what: "checking guards of a device that was opened without them".to_owned(),
            remedy: "open it with `guard: true`".to_owned(),
        }
    }

    /// Look at the guards of all live buffers, once the device has finished what was queued.
    pub(crate) fn check_guards(&self) -> Result<Vec<GuardDamage>> {
        let Some(guards) = &self.guards else {
            return Err(self.unguarded());
        };
        self.context.synchronize()?;
        let mut damage = Vec::new();
        let mut found = vec![0u8; GUARD_BYTES];
        for (&base, (buffer, bytes)) in &*guards.live.lock() {
            for (side, offset) in [
                (GuardSide::Before, -(GUARD_BYTES as i64)),
                (GuardSide::Behind, *bytes as i64),
            ] {
                let address = base.wrapping_add_signed(offset);
                // SAFETY: the guard is part of a live allocation (the lock holds its drop off), `found` is as long.
                let read = unsafe { sys::cuMemcpyDtoH_v2(found.as_mut_ptr().cast(), address, GUARD_BYTES) };
                self.context.check("cuMemcpyDtoH", read)?;
                if let Some(at) = found.iter().position(|&byte| byte != GUARD_BYTE) {
                    damage.push(GuardDamage {
                        buffer: buffer.clone(),
                        side,
                        offset_bytes: offset + at as i64,
                        changed_bytes: found.iter().filter(|&&byte| byte != GUARD_BYTE).count(),
                    });
                }
            }
        }
        Ok(damage)
    }
}

/// Live guarded buffers: name and length in bytes by base address.
#[derive(Debug, Default)]
pub(crate) struct Guards {
    live: Mutex<BTreeMap<u64, (String, usize)>>,
}

/// Which guard of a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GuardSide {
    /// In front of the first element.
    Before,
    /// Behind the last element.
    Behind,
}

/// Something wrote outside a buffer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GuardDamage {
    /// Name of the buffer.
    pub buffer: String,
    /// Where.
    pub side: GuardSide,
    /// First changed byte, counted from the start of the buffer (negative before it).
    pub offset_bytes: i64,
    /// Changed bytes in this guard.
    pub changed_bytes: usize,
}

/// Device memory; the caller gives it back as [`Garbage::Device`].
pub(crate) fn allocate_raw(context: &Context, what: &str, bytes: usize) -> Result<u64> {
    context.bind()?;
    let mut address = 0;
    // The driver has no empty allocation.
    let bytes = bytes.max(16);
    // SAFETY: a context is bound; the address is valid for a write.
    match unsafe { sys::cuMemAlloc_v2(&mut address, bytes) } {
        sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => Err(DeviceError::OutOfMemory {
            what: what.to_owned(),
            needed_bytes: bytes as u64,
            free_bytes: context.memory()?.0,
            device: context.name.clone(),
        }),
        result => {
            context.check("cuMemAlloc", result)?;
            Ok(address)
        }
    }
}

/// Page-locked memory; the caller gives it back as [`Garbage::Pinned`].
pub(crate) fn allocate_pinned_raw(context: &Context, bytes: usize) -> Result<Handle<c_void>> {
    context.bind()?;
    let mut memory = null_mut();
    // SAFETY: a context is bound; the address is valid for a write.
    let result = unsafe { sys::cuMemHostAlloc(&mut memory, bytes.max(16), sys::CU_MEMHOSTALLOC_PORTABLE) };
    context.check("cuMemHostAlloc", result)?;
    Ok(Handle(memory))
}

/// Copy into pinned memory.
///
/// # Safety
/// `address .. address + bytes.len()` lies in a live pinned buffer and nothing else uses that range now.
pub(crate) unsafe fn write_pinned(address: u64, bytes: &[u8]) {
    // SAFETY: the caller's contract.
    unsafe { host_pointer(address).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
}

/// Copy out of pinned memory.
///
/// # Safety
/// `address .. address + bytes.len()` lies in a live pinned buffer and nothing writes that range now.
pub(crate) unsafe fn read_pinned(address: u64, bytes: &mut [u8]) {
    // SAFETY: the caller's contract.
    unsafe { host_pointer(address).copy_to_nonoverlapping(bytes.as_mut_ptr(), bytes.len()) };
}

/// Device address of a buffer's first byte.
pub(crate) fn base(buffer: &Buffer) -> u64 {
    buffer
        .storage()
        .downcast_ref::<CudaStorage>()
        .expect("a CUDA operation only meets CUDA buffers")
        .base
}
