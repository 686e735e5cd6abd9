//! Raw storage behind a CPU buffer, and the one place where views become slices.

use std::cell::UnsafeCell;

use crate::{Buffer, View};

/// Zeroed memory, 64-byte aligned.
pub(crate) struct CpuStorage {
    words: UnsafeCell<Box<[Line]>>,
}

/// One cache line: the allocation unit, so that every buffer starts on a line.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([u8; 64]);

// SAFETY: the storage is plain bytes. Who may touch which range when is decided by stream order and event
// edges, which the sanitizer checks; the storage itself has no state that a race could corrupt.
unsafe impl Sync for CpuStorage {}

impl CpuStorage {
    pub(crate) fn zeroed(bytes: usize) -> Self {
        Self {
            words: UnsafeCell::new(vec![Line([0; 64]); bytes.div_ceil(64)].into_boxed_slice()),
        }
    }

    fn ptr(&self) -> *mut u8 {
        // SAFETY: only the address is taken; the box is never replaced.
        unsafe { (*self.words.get()).as_mut_ptr().cast::<u8>() }
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
#[allow(clippy::mut_from_ref)]
pub(crate) unsafe fn slice_mut<T: bytemuck::Pod>(view: &View) -> &mut [T] {
    assert_eq!(
        size_of::<T>(),
        view.buffer.dtype().size(),
        "element size of {view:?}"
    );
    // SAFETY: as in `slice`.
    unsafe { std::slice::from_raw_parts_mut(base(&view.buffer).cast::<T>().add(view.start), view.len) }
}
