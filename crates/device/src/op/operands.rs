//! The operands of every operation: which elements of which buffer, of what type, read or written.
//!
//! This is the one table that [`Op::access`] and [`Op::validate`] are made from. It matches every operation by
//! name, so a new one does not compile until its operands are listed.

use super::{KvCache, Op, Pointwise, QkvRope, SampleRow, StateSlice, Windows};
use crate::{Buffer, DType, TouchKind, View};

/// Element types that an operand may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Elements {
    F32,
    I32,
    U32,
    /// `F32`, `Bf16` or `F16`: embedding tables, caches, carried state, and what goes into a product and nowhere
    /// else (see [`crate::Device::activation_dtype`]).
    Floats,
    /// Any 4-byte type: moved, never computed with.
    Words,
    /// Any type at all.
    Any,
}

impl Elements {
    pub(super) fn allows(self, dtype: DType) -> bool {
        match self {
            Elements::F32 => dtype == DType::F32,
            Elements::I32 => dtype == DType::I32,
            Elements::U32 => dtype == DType::U32,
            Elements::Floats => matches!(dtype, DType::F32 | DType::Bf16 | DType::F16),
            Elements::Words => dtype.size() == 4,
            Elements::Any => true,
        }
    }
}

/// One operand: `rows` runs of `columns` elements, `stride` apart, the first at element `first` of the view.
#[derive(Debug, Clone, Copy)]
pub(super) struct Operand<'a> {
    /// Its field in the operation.
    pub(super) role: &'static str,
    pub(super) buffer: &'a Buffer,
    /// First element and length of the view into the buffer.
    pub(super) start: usize,
    pub(super) len: usize,
    pub(super) first: usize,
    pub(super) rows: usize,
    pub(super) columns: usize,
    pub(super) stride: usize,
    pub(super) elements: Elements,
    pub(super) kind: TouchKind,
    /// A pool: the step's touches say which part is reached, the run given here is the whole view.
    pub(super) indirect: bool,
    /// A read operand that may be the very range that the operation writes.
    pub(super) in_place: bool,
}

impl Operand<'_> {
    /// Elements that the view must have at least.
    pub(super) fn needed(&self) -> usize {
        match self.rows {
            0 => 0,
            rows => self.first + (rows - 1) * self.stride + self.columns,
        }
    }

    fn in_place(&mut self) {
        self.in_place = true;
    }

    /// Only `columns` elements of each row of `stride` elements, from column `first` on.
    fn columns(&mut self, rows: usize, first: usize, columns: usize, stride: usize) {
        self.first = first;
        self.rows = rows;
        self.columns = columns;
        self.stride = stride;
    }
}

/// Collects the operands of one operation.
struct List<'a>(Vec<Operand<'a>>);

impl<'a> List<'a> {
    fn add(
        &mut self,
        role: &'static str,
        view: &'a View,
        len: usize,
        elements: Elements,
        kind: TouchKind,
    ) -> &mut Operand<'a> {
        self.0.push(Operand {
            role,
            buffer: &view.buffer,
            start: view.start,
            len: view.len,
            first: 0,
            rows: 1,
            columns: len,
            stride: len,
            elements,
            kind,
            indirect: false,
            in_place: false,
        });
        self.0.last_mut().expect("just pushed")
    }

    /// The first `len` elements are read.
    fn read(
        &mut self,
        role: &'static str,
        view: &'a View,
        len: usize,
        elements: Elements,
    ) -> &mut Operand<'a> {
        self.add(role, view, len, elements, TouchKind::Read)
    }

    /// As `read`, when the operand is there.
    fn optional(&mut self, role: &'static str, view: &'a Option<View>, len: usize) {
        if let Some(view) = view {
            self.read(role, view, len, Elements::F32);
        }
    }

    /// The first `len` elements are written, and read where the operation accumulates.
    fn write(
        &mut self,
        role: &'static str,
        view: &'a View,
        len: usize,
        elements: Elements,
    ) -> &mut Operand<'a> {
        self.add(role, view, len, elements, TouchKind::Write)
    }

    /// A packed weight: all of it, for its order and padding are the device's business.
    fn weight(&mut self, role: &'static str, packed: &'a Buffer) {
        self.0.push(Operand {
            role,
            buffer: packed,
            start: 0,
            len: packed.len(),
            first: 0,
            rows: 1,
            columns: packed.len(),
            stride: packed.len(),
            elements: Elements::Any,
            kind: TouchKind::Read,
            indirect: false,
            in_place: false,
        });
    }

    /// A pool reached through an index buffer.
    fn pool(&mut self, role: &'static str, view: &'a View, elements: Elements, kind: TouchKind) {
        self.add(role, view, view.len, elements, kind).indirect = true;
    }

    fn cache(&mut self, cache: &'a KvCache, kind: TouchKind) {
        self.read("cache.table", &cache.table, cache.table.len, Elements::I32);
        self.pool("cache.pool", &cache.pool, Elements::Floats, kind);
    }

    fn qkv_rope(&mut self, op: &'a QkvRope) {
        let dim = op.cache.head_dim;
        self.read(
            "qkv",
            &op.qkv,
            op.rows * (op.heads + 2 * op.cache.kv_heads) * dim,
            Elements::F32,
        );
        self.optional("q_norm", &op.q_norm, dim);
        self.optional("k_norm", &op.k_norm, dim);
        self.read("cos_sin", &op.cos_sin, op.rows * dim, Elements::F32);
        self.read("sequences", &op.sequences, op.rows, Elements::I32);
        self.read("positions", &op.positions, op.rows, Elements::I32);
        self.cache(&op.cache, TouchKind::Write);
        self.write("q_out", &op.q_out, op.rows * op.heads * dim, Elements::F32);
    }

    fn state(&mut self, state: &'a StateSlice) {
        self.pool("state.pool", &state.pool, Elements::Floats, TouchKind::Write);
    }

    fn pointwise(&mut self, op: &'a Pointwise, channels: usize) {
        let snake = &op.snake;
        self.read("pointwise.snake.alpha", &snake.alpha, channels, Elements::F32);
        self.read(
            "pointwise.snake.inv_beta",
            &snake.inv_beta,
            channels,
            Elements::F32,
        );
        self.weight("pointwise.w", &op.w.packed);
        self.optional("pointwise.bias", &op.bias, op.w.n);
    }

    fn windows(&mut self, windows: &'a Windows) {
        self.read("windows", &windows.windows, windows.count * 3, Elements::I32);
    }
}

impl Op {
    /// Every operand, each once.
    pub(super) fn operands(&self) -> Vec<Operand<'_>> {
        use Elements::{Any, F32, Floats, I32, U32, Words};
        use TouchKind::{Read, Write};
        let mut all = List(Vec::with_capacity(16));
        match self {
            Op::Gemm(op) => {
                all.read("x", &op.x, op.rows * op.w.k, Floats);
                all.weight("w", &op.w.packed);
                all.optional("bias", &op.bias, op.w.n);
                all.optional("scale", &op.scale, op.w.n);
                if let Some(norm) = &op.norm {
                    all.read("norm.weight", &norm.weight, op.w.k, F32);
                    all.write("norm.scratch", &norm.scratch, op.rows * op.w.k, F32);
                }
                if let Some(scratch) = &op.gated {
                    all.write("gated", scratch, op.rows * op.w.n, F32);
                }
                all.write("out", &op.out, op.rows * op.out_width(), Floats);
                if let Some(next) = &op.next {
                    all.read("next.weight", &next.weight, op.w.n, F32);
                    all.write("next.scratch", &next.scratch, op.rows * op.w.n, F32);
                }
            }
            Op::RmsNorm(op) => {
                all.read("x", &op.x, op.rows * op.width, F32).in_place();
                all.read("weight", &op.weight, op.width, F32);
                all.write("out", &op.out, op.rows * op.width, F32);
            }
            Op::LayerNorm(op) => {
                all.read("x", &op.x, op.rows * op.width, F32).in_place();
                all.read("weight", &op.weight, op.width, F32);
                all.read("bias", &op.bias, op.width, F32);
                all.write("out", &op.out, op.rows * op.width, F32);
            }
            Op::SiluMul(op) => {
                all.read("x", &op.x, op.rows * 2 * op.width, F32);
                all.write("out", &op.out, op.rows * op.width, F32);
            }
            Op::Embed(op) => {
                for table in &op.tables {
                    all.read("tables", table, table.len, Floats);
                }
                all.read("ids", &op.ids, 0, I32).columns(
                    op.rows,
                    op.first_id,
                    op.tables.len(),
                    op.ids_stride,
                );
                all.write("out", &op.out, op.rows * op.width, F32);
            }
            Op::RopeTable(op) => {
                all.read("positions", &op.positions, op.rows, I32);
                all.read("inv_freq", &op.inv_freq, op.head_dim / 2, F32);
                all.write("out", &op.out, op.rows * op.head_dim, F32);
            }
            Op::QkvRope(op) => all.qkv_rope(op),
            Op::Attention(op) => {
                let len = op.rows * op.heads * op.cache.head_dim;
                all.read("q", &op.q, len, F32);
                all.read("sequences", &op.sequences, op.rows, I32);
                all.read("positions", &op.positions, op.rows, I32);
                all.cache(&op.cache, Read);
                all.write("out", &op.out, len, Floats);
            }
            Op::DecodeAttention(op) => {
                let len = op.qkv.rows * op.qkv.heads * op.qkv.cache.head_dim;
                all.qkv_rope(&op.qkv);
                all.write("out", &op.out, len, Floats);
            }
            Op::Sample(op) => {
                all.read("logits", &op.logits, op.rows * op.vocab, F32);
                all.read("params", &op.params, op.rows * SampleRow::WORDS, U32);
                if let Some(seen) = &op.seen {
                    all.pool("seen.pool", &seen.pool, Words, Write);
                }
                all.write("tokens", &op.tokens, 0, I32)
                    .columns(op.rows, op.token_offset, 1, op.token_stride);
                if let Some(scores) = &op.scores {
                    all.write("scores", scores, op.rows * op.vocab, F32);
                }
            }
            Op::GatherRows(op) => {
                match op.indirect {
                    true => all.pool("src", &op.src, Words, Read),
                    false => drop(all.read("src", &op.src, op.src.len, Words)),
                }
                all.read("index", &op.index, op.rows, I32);
                all.write("out", &op.out, op.rows * op.width, Words);
            }
            Op::ScatterRows(op) => {
                all.read("src", &op.src, op.rows * op.width, Words);
                all.read("index", &op.index, op.rows, I32);
                all.pool("dst", &op.dst, Words, Write);
            }
            Op::Conv(op) => {
                all.read("x", &op.x, op.rows * op.c_in, F32);
                all.weight("w", &op.w.packed);
                all.optional("bias", &op.bias, op.w.n);
                if let Some(snake) = &op.snake {
                    all.read("snake.alpha", &snake.alpha, op.c_in, F32);
                    all.read("snake.inv_beta", &snake.inv_beta, op.c_in, F32);
                }
                if let Some(state) = &op.state {
                    all.state(state);
                }
                all.windows(&op.windows);
                if let Some(pointwise) = &op.pointwise {
                    all.pointwise(pointwise, op.w.n);
                }
                if let Some(scratch) = &op.scratch {
                    all.write("scratch", scratch, op.scratch_len(), F32);
                }
                let len = op.rows * op.outputs();
                if let Some(residual) = &op.residual {
                    all.read("residual", residual, len, F32).in_place();
                }
                all.write("out", &op.out, len, F32);
            }
            Op::DepthwiseConv(op) => {
                all.read("x", &op.x, op.rows * op.channels, F32);
                all.read("w", &op.w, op.taps * op.channels, F32);
                all.read("bias", &op.bias, op.channels, F32);
                all.state(&op.state);
                all.windows(&op.windows);
                all.write("out", &op.out, op.rows * op.channels, F32);
            }
            Op::Conv1d(op) => {
                all.read("x", &op.x, op.rows_in * op.c_in, F32);
                all.weight("w", &op.w.packed);
                all.optional("bias", &op.bias, op.w.n);
                if let Some(residual) = &op.residual {
                    all.read("residual", residual, op.rows_out * op.w.n, F32)
                        .in_place();
                }
                all.write("out", &op.out, op.rows_out * op.w.n, F32);
            }
            Op::CopyColumns(op) => {
                let elements = if op.add.is_some() { F32 } else { Words };
                all.read("src", &op.src, 0, elements).columns(
                    op.rows,
                    op.src_first,
                    op.columns,
                    op.src_stride,
                );
                if let Some((add, stride, first)) = &op.add {
                    all.read("add", add, 0, F32)
                        .columns(op.rows, *first, op.columns, *stride);
                }
                all.write("dst", &op.dst, 0, elements).columns(
                    op.rows,
                    op.dst_first,
                    op.columns,
                    op.dst_stride,
                );
            }
            Op::TimeStats(op) => {
                all.read("x", &op.x, op.rows * op.channels, F32);
                all.optional("weights", &op.weights, op.rows * op.channels);
                all.write("mean", &op.mean, op.channels, F32);
                if let Some(std) = &op.std {
                    all.write("std", std, op.channels, F32);
                }
            }
            Op::TimeSoftmax(op) => {
                all.write("x", &op.x, op.rows * op.channels, F32);
            }
            Op::ChannelScale(op) => {
                let len = op.rows * op.channels;
                all.read("x", &op.x, len, F32).in_place();
                all.read("scale", &op.scale, op.channels, F32);
                if let Some(add) = &op.add {
                    all.read("add", add, len, F32).in_place();
                }
                all.write("out", &op.out, len, F32);
            }
            Op::TileRow(op) => {
                all.read("src", &op.src, op.columns, Words);
                all.write("dst", &op.dst, 0, Words)
                    .columns(op.rows, op.dst_first, op.columns, op.dst_stride);
            }
            Op::NearestCode(op) => {
                all.write("x", &op.x, op.rows * op.width, F32);
                all.read("book", &op.book, op.entries * op.width, F32);
                all.write("codes", &op.codes, 0, I32)
                    .columns(op.rows, op.code_offset, 1, op.code_stride);
            }
            Op::Copy(op) => {
                all.read("src", &op.src, op.src.len, Any);
                all.write("dst", &op.dst, op.src.len, Any);
            }
            Op::Zero(op) => {
                all.write("dst", &op.dst, op.dst.len, Any);
            }
        }
        all.0
    }
}
