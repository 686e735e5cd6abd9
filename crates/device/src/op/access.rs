//! What an operation reads and writes, for the sanitizer and for a device's own hazard checks.

use std::ops::Range;

use super::Op;
use crate::{Buffer, TouchKind};

/// Everything that one operation reaches.
#[derive(Debug, Clone)]
pub struct Accesses<'a> {
    /// Ranges that the operation itself names.
    pub direct: Vec<Access<'a>>,
    /// Pools that it reaches through an index buffer: the step's [`crate::Touches`] name the ranges.
    pub indirect: Vec<PoolAccess<'a>>,
}

/// Elements of a buffer that an operation reaches: `rows` runs of `columns` elements, `stride` apart.
#[derive(Debug, Clone, Copy)]
pub struct Access<'a> {
    /// The operand's field in the operation, e.g. `x`, `cache.table`.
    pub role: &'static str,
    /// The buffer.
    pub buffer: &'a Buffer,
    /// First element of the first run, counted from the start of the buffer.
    pub start: usize,
    /// Runs.
    pub rows: usize,
    /// Elements of a run.
    pub columns: usize,
    /// Elements from one run to the next.
    pub stride: usize,
    /// Read, or written (also when it is read too).
    pub kind: TouchKind,
}

impl Access<'_> {
    /// The runs as ranges of the buffer's elements; empty ones left out, adjoining ones as one.
    pub fn ranges(&self) -> impl Iterator<Item = Range<usize>> {
        let Access {
            start,
            rows,
            columns,
            stride,
            ..
        } = *self;
        let (rows, columns) = if columns == stride {
            (rows.min(1), rows * columns)
        } else {
            (rows, columns)
        };
        (0..rows)
            .map(move |row| start + row * stride..start + row * stride + columns)
            .filter(|range| !range.is_empty())
    }
}

/// A pool that an operation reaches through an index buffer.
#[derive(Debug, Clone)]
pub struct PoolAccess<'a> {
    /// The operand's field in the operation.
    pub role: &'static str,
    /// The pool.
    pub buffer: &'a Buffer,
    /// The part of the buffer that the operation knows as its pool.
    pub range: Range<usize>,
    /// Read, or written (also when it is read too).
    pub kind: TouchKind,
}

impl Op {
    /// Every range that the operation reads or writes, and every pool that it reaches through an index.
    ///
    /// Ranges are exact where the operation names its rows; an operand that is looked up by an index inside
    /// the operation (an embedding table, a block table) counts as read as a whole.
    pub fn access(&self) -> Accesses<'_> {
        let mut all = Accesses {
            direct: Vec::new(),
            indirect: Vec::new(),
        };
        for operand in self.operands() {
            match operand.indirect {
                true => all.indirect.push(PoolAccess {
                    role: operand.role,
                    buffer: operand.buffer,
                    range: operand.start..operand.start + operand.len,
                    kind: operand.kind,
                }),
                false => all.direct.push(Access {
                    role: operand.role,
                    buffer: operand.buffer,
                    start: operand.start + operand.first,
                    rows: operand.rows,
                    columns: operand.columns,
                    stride: operand.stride,
                    kind: operand.kind,
                }),
            }
        }
        all
    }
}
