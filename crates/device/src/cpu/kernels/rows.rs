//! Moving rows: gather, scatter, strided copies. Elements are 4-byte words of any meaning.
//!
//! Pools may be shared with another stream that works on other rows at the same time, so slices are made of
//! single rows only.

use super::operands::Operands;
use crate::View;
use crate::op::{CopyColumns, GatherRows, ScatterRows, TileRow};

/// Elements `start .. start + len` of a view.
fn part(view: &View, start: usize, len: usize) -> Result<View, String> {
    if start + len > view.len {
        return Err(format!("row at element {start} of {len} leaves {view:?}"));
    }
    Ok(view.slice(start, len))
}

/// See [`GatherRows`].
pub(crate) fn gather(op: &GatherRows) -> Result<(), String> {
    let width = op.width;
    let index: &[i32] = Operands::default().read(&op.index, op.rows)?;
    for (row, &from) in index.iter().enumerate() {
        let to = part(&op.out, row * width, width)?;
        let mut o = Operands::default();
        let to: &mut [u32] = o.write(&to, width)?;
        match usize::try_from(from) {
            Ok(from) => to.copy_from_slice(o.read(&part(&op.src, from * width, width)?, width)?),
            Err(_) => to.fill(0),
        }
    }
    Ok(())
}

/// See [`ScatterRows`].
pub(crate) fn scatter(op: &ScatterRows) -> Result<(), String> {
    let width = op.width;
    let index: &[i32] = Operands::default().read(&op.index, op.rows)?;
    for (row, &to) in index.iter().enumerate() {
        let Ok(to) = usize::try_from(to) else { continue };
        let from = part(&op.src, row * width, width)?;
        let to = part(&op.dst, to * width, width)?;
        let mut o = Operands::default();
        o.write::<u32>(&to, width)?.copy_from_slice(o.read(&from, width)?);
    }
    Ok(())
}

/// See [`CopyColumns`].
pub(crate) fn copy_columns(op: &CopyColumns) -> Result<(), String> {
    for r in 0..op.rows {
        let src = part(&op.src, r * op.src_stride + op.src_first, op.columns)?;
        let dst = part(&op.dst, r * op.dst_stride + op.dst_first, op.columns)?;
        let mut o = Operands::default();
        let Some((add, add_stride, add_first)) = &op.add else {
            o.write::<u32>(&dst, op.columns)?
                .copy_from_slice(o.read(&src, op.columns)?);
            continue;
        };
        let add = part(add, r * add_stride + add_first, op.columns)?;
        let in_place = Operands::same(&src, &dst);
        let out: &mut [f32] = o.write(&dst, op.columns)?;
        if !in_place {
            out.copy_from_slice(o.read(&src, op.columns)?);
        }
        if Operands::same(&add, &dst) {
            return Err(format!(
                "the addend {add:?} is the destination: make it the source"
            ));
        }
        for (out, &add) in out.iter_mut().zip(o.read::<f32>(&add, op.columns)?) {
            *out += add;
        }
    }
    Ok(())
}

/// See [`TileRow`].
pub(crate) fn tile_row(op: &TileRow) -> Result<(), String> {
    for r in 0..op.rows {
        let dst = part(&op.dst, r * op.dst_stride + op.dst_first, op.columns)?;
        let mut o = Operands::default();
        o.write::<u32>(&dst, op.columns)?
            .copy_from_slice(o.read(&op.src, op.columns)?);
    }
    Ok(())
}
