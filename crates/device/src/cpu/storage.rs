//! Raw storage behind a CPU buffer, and the one place where views become slices.

use std::cell::UnsafeCell;

use crate::account::MemoryLease;
use crate::{Buffer, View};

/// Zeroed memory, 64-byte aligned, paid for by its lease.
pub(crate) struct CpuStorage {
    lines: UnsafeCell<Box<[Line]>>,
    _lease: MemoryLease,
}

/// One cache line: the allocation unit, so that every buffer starts on a line.
#[repr(C, align(64))]
struct Line([u8; 64]);

// SAFETY: the storage is plain bytes. Who may touch which range when is decided by stream order and event
// edges, which the sanitizer checks; the storage itself has no state that a race could corrupt.
unsafe impl Sync for CpuStorage {}

impl CpuStorage {
    pub(crate) fn zeroed(bytes: usize, lease: MemoryLease) -> Self {
        // The allocator hands out pages that are already zero, so a large pool costs nothing until it is used.
        let lines = Box::<[Line]>::new_zeroed_slice(bytes.div_ceil(64));
        Self {
            // SAFETY: a line is an array of bytes, for which zero is a value.
            lines: UnsafeCell::new(unsafe { lines.assume_init() }),
            _lease: lease,
        }
    }

    fn ptr(&self) -> *mut u8 {
        // SAFETY: only the address is taken; the box is never replaced.
        unsafe { (*self.lines.get()).as_mut_ptr().cast::<u8>() }
    }
}

fn base(buffer: &Buffer) -> *mut u8 {
    buffer
        .storage()
        .downcast_ref::<CpuStorage>()
        .expect("a CPU operation only meets CPU buffers")
        .ptr()
}

/// The view's elements, reinterpreted as `T`.
///
/// # Safety
/// No operation or host access may write the range while the slice lives: the caller runs in stream order
/// behind every writer and ahead of every later one.
pub(crate) unsafe fn slice<T: bytemuck::Pod>(view: &View) -> &[T] {
    assert_eq!(
        size_of::<T>(),
        view.buffer.dtype().size(),
        "element size of {view:?}"
    );
    // SAFETY: in bounds (View is checked at construction), aligned (lines of 64 bytes, element-sized steps),
    // any bit pattern is a T (Pod); aliasing is the caller's contract.
    unsafe { std::slice::from_raw_parts(base(&view.buffer).cast::<T>().add(view.start), view.len) }
}

/// The view's elements, reinterpreted as `T`, to write.
///
/// # Safety
/// As [`slice`], and nobody else may read or write the range while the slice lives. Two operands of one
/// operation that may be the same view (in place) must not both be turned into slices.
#[allow(clippy::mut_from_ref)] // The storage is shared by design; exclusivity is the caller's contract.
pub(crate) unsafe fn slice_mut<T: bytemuck::Pod>(view: &View) -> &mut [T] {
    assert_eq!(
        size_of::<T>(),
        view.buffer.dtype().size(),
        "element size of {view:?}"
    );
    // SAFETY: as in `slice`.
    unsafe { std::slice::from_raw_parts_mut(base(&view.buffer).cast::<T>().add(view.start), view.len) }
}

/// The view's bytes, whatever its element type.
///
/// # Safety
/// As [`slice`].
pub(crate) unsafe fn bytes(view: &View) -> &[u8] {
    let size = view.buffer.dtype().size();
    // SAFETY: in bounds, because View is checked at construction; aliasing is the caller's contract.
    unsafe { std::slice::from_raw_parts(base(&view.buffer).add(view.start * size), view.len * size) }
}

/// The view's bytes, to write.
///
/// # Safety
/// As [`slice_mut`].
#[allow(clippy::mut_from_ref)] // The storage is shared by design; exclusivity is the caller's contract.
pub(crate) unsafe fn bytes_mut(view: &View) -> &mut [u8] {
    let size = view.buffer.dtype().size();
    // SAFETY: as in `bytes`.
    unsafe { std::slice::from_raw_parts_mut(base(&view.buffer).add(view.start * size), view.len * size) }
}
