//! Runs one operation on the calling thread: the table from operation to kernel.

use super::storage::{bytes, bytes_mut, slice};
use crate::Op;
use crate::op::{Copy, GatherRows, ScatterRows, Zero};

/// Run `op` now. Called by a stream's executor, in stream order.
///
/// # Errors
/// What is wrong with the operands' contents (an index out of range, say): the stream fails with it.
pub(crate) fn execute(op: &Op) -> Result<(), String> {
    match op {
        Op::Copy(op) => copy(op),
        Op::Zero(op) => zero(op),
        Op::GatherRows(op) => gather_rows(op),
        Op::ScatterRows(op) => scatter_rows(op),
        other => Err(format!("the CPU device has no kernel for {}", other.name())),
    }
}

fn copy(op: &Copy) -> Result<(), String> {
    // SAFETY: the executor runs in stream order behind every writer of these ranges, and validation refuses
    // overlapping ranges.
    let (src, dst) = unsafe { (bytes(&op.src), bytes_mut(&op.dst)) };
    dst.copy_from_slice(src);
    Ok(())
}

fn zero(op: &Zero) -> Result<(), String> {
    // SAFETY: the executor runs in stream order behind everything that uses the range.
    unsafe { bytes_mut(&op.dst) }.fill(0);
    Ok(())
}

fn gather_rows(op: &GatherRows) -> Result<(), String> {
    // SAFETY: the executor runs in stream order behind every writer, and `out` is not `src` or `index`.
    let (src, index, out) = unsafe {
        (
            words(&op.src),
            slice::<i32>(&op.index),
            bytemuck::cast_slice_mut::<u8, u32>(bytes_mut(&op.out)),
        )
    };
    let width = op.width;
    let available = src.len() / width;
    for (row, &from) in index[..op.rows].iter().enumerate() {
        let to = &mut out[row * width..(row + 1) * width];
        match usize::try_from(from) {
            Err(_) => to.fill(0),
            Ok(from) if from < available => to.copy_from_slice(&src[from * width..(from + 1) * width]),
            Ok(from) => {
                return Err(format!(
                    "row {row}: index {from} is past the {available} rows of {:?}",
                    op.src
                ));
            }
        }
    }
    Ok(())
}

fn scatter_rows(op: &ScatterRows) -> Result<(), String> {
    // SAFETY: as in `gather_rows`; `dst` is not `src` or `index`.
    let (src, index, dst) = unsafe {
        (
            words(&op.src),
            slice::<i32>(&op.index),
            bytemuck::cast_slice_mut::<u8, u32>(bytes_mut(&op.dst)),
        )
    };
    let width = op.width;
    let available = dst.len() / width;
    for (row, &to) in index[..op.rows].iter().enumerate() {
        let Ok(to) = usize::try_from(to) else { continue };
        if to >= available {
            return Err(format!(
                "row {row}: index {to} is past the {available} rows of {:?}",
                op.dst
            ));
        }
        dst[to * width..(to + 1) * width].copy_from_slice(&src[row * width..(row + 1) * width]);
    }
    Ok(())
}

/// A 4-byte view as words, whatever the element type.
///
/// # Safety
/// As [`slice`].
unsafe fn words(view: &crate::View) -> &[u32] {
    // SAFETY: the caller's contract.
    bytemuck::cast_slice(unsafe { bytes(view) })
}
