//! Working memory of the kernels: one per executor thread, grown to the largest operation it has run, up to a
//! limit.

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

/// Floats that a thread keeps from one operation to the next (64 MB). A long clip in a reference encoder needs
/// several times that, once.
const KEPT: usize = 16 << 20;

/// Use this thread's scratch; calls do not nest.
pub(crate) fn with_scratch<R>(f: impl FnOnce(&mut Scratch) -> R) -> R {
    SCRATCH.with_borrow_mut(|scratch| {
        let result = f(scratch);
        if scratch.data.capacity() > KEPT {
            scratch.data = Vec::new();
        }
        result
    })
}

/// The first `len` elements, grown as needed.
pub(crate) fn sized(data: &mut Vec<f32>, len: usize) -> &mut [f32] {
    if data.len() < len {
        data.resize(len, 0.0);
    }
    &mut data[..len]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_long_clip_needed_is_given_back() {
        let capacity = || with_scratch(|scratch| scratch.data.capacity());
        with_scratch(|scratch| sized(&mut scratch.data, 1000)[999] = 1.0);
        assert!(capacity() >= 1000);
        with_scratch(|scratch| sized(&mut scratch.data, KEPT + 1)[KEPT] = 1.0);
        assert_eq!(capacity(), 0);
    }
}
