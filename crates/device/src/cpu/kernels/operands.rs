//! The operands of one operation as slices, with their aliasing checked.

use bytemuck::Pod;

use crate::View;
use crate::cpu::storage;

/// Hands out an operation's views as slices and refuses a written range that overlaps any other, so that no
/// two slices of one operation alias. Operands that may be the same view (in place) are told apart with
/// [`Operands::same`] first and taken once.
#[derive(Default)]
pub(crate) struct Operands {
    taken: Vec<Taken>,
}

struct Taken {
    start: usize,
    end: usize,
    written: bool,
}

impl Operands {
    /// The first `len` elements of `view`, to read.
    ///
    /// # Errors
    /// When it is shorter or overlaps an operand that is written.
    pub(crate) fn read<'a, T: Pod>(&mut self, view: &'a View, len: usize) -> Result<&'a [T], String> {
        sized::<T>(view)?;
        // SAFETY: the executor runs operations in stream order behind every writer and ahead of every later
        // one, and `take` refuses ranges that this operation writes.
        let slice = unsafe { storage::slice::<T>(view) };
        let slice = slice.get(..len).ok_or_else(|| too_short(view, len))?;
        self.take(view, slice.as_ptr_range(), false)?;
        Ok(slice)
    }

    /// The first `len` elements of `view`, to write.
    ///
    /// # Errors
    /// When it is shorter or overlaps any other operand.
    #[allow(clippy::mut_from_ref)] // The buffer is shared by design; `take` keeps the slice the only one.
    pub(crate) fn write<'a, T: Pod>(&mut self, view: &'a View, len: usize) -> Result<&'a mut [T], String> {
        if view.len < len {
            return Err(too_short(view, len));
        }
        sized::<T>(view)?;
        // SAFETY: as in `read`; this is the only slice of the range, because `take` refuses a range that
        // overlaps one taken before, and every later one that overlaps this.
        let slice = unsafe { storage::slice_mut::<T>(view) };
        let slice = &mut slice[..len];
        self.take(view, slice.as_ptr_range(), true)?;
        Ok(slice)
    }

    fn take<T>(
        &mut self,
        view: &View,
        range: std::ops::Range<*const T>,
        written: bool,
    ) -> Result<(), String> {
        let (start, end) = (range.start.addr(), range.end.addr());
        let clash = |other: &Taken| (written || other.written) && start < other.end && other.start < end;
        if self.taken.iter().any(clash) {
            return Err(format!("operand {view:?} overlaps another that is written"));
        }
        self.taken.push(Taken { start, end, written });
        Ok(())
    }

    /// Whether two operands are the same range.
    pub(crate) fn same(a: &View, b: &View) -> bool {
        a.buffer.id() == b.buffer.id() && a.start == b.start
    }
}

/// Elements are what the kernel computes with: the CPU device keeps activations as f32.
fn sized<T>(view: &View) -> Result<(), String> {
    let dtype = view.buffer.dtype();
    if dtype.size() == size_of::<T>() {
        return Ok(());
    }
    Err(format!(
        "operand {view:?} is {dtype:?}; this device takes elements of {} bytes there",
        size_of::<T>()
    ))
}

fn too_short(view: &View, len: usize) -> String {
    format!(
        "operand {view:?} has {} elements, the operation needs {len}",
        view.len
    )
}
