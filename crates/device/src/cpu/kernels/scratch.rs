//! Working memory of the kernels: one per executor thread, grown to the largest operation it has run.

use std::cell::RefCell;

use super::attention::Span;
use super::conv::Window;
use super::gemm::RowRef;
use super::sample::Room;

/// Buffers that a kernel may use as it likes; their contents are of any value at its start.
#[derive(Default)]
pub(crate) struct Scratch {
    pub(crate) data: Vec<f32>,
    pub(crate) rows: Vec<RowRef>,
    pub(crate) spans: Vec<Span>,
    pub(crate) windows: Vec<Window>,
    pub(crate) sample: Room,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// Use this thread's scratch; calls do not nest.
pub(crate) fn with_scratch<R>(f: impl FnOnce(&mut Scratch) -> R) -> R {
    SCRATCH.with_borrow_mut(f)
}

/// The first `len` elements, grown as needed.
pub(crate) fn sized(data: &mut Vec<f32>, len: usize) -> &mut [f32] {
    if data.len() < len {
        data.resize(len, 0.0);
    }
    &mut data[..len]
}
