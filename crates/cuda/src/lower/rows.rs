//! Row-wise operations: norms, gates, embeddings, gathers, columns.

use laneway_device::op;
use laneway_device::{DType, View};

use super::address;
use crate::launch::{Args, Launch};

/// Threads of a block of every kernel in `rows.cu`.
const THREADS: u32 = 256;
/// Tables that one launch of the embedding kernel takes.
const TABLES: usize = 16;
/// Bytes of four words, which the kernels named `*_4` move at a time.
const FOUR_WORDS: u64 = 16;

pub(super) fn rms_norm(op: &op::RmsNorm, out: &mut Vec<Launch>) {
    let args = Args::new()
        .view(&op.x)
        .int(op.width)
        .view(&op.weight)
        .float(op.eps)
        .view(&op.out);
    row_blocks("rms_norm", op.rows, args, out);
}

pub(super) fn layer_norm(op: &op::LayerNorm, out: &mut Vec<Launch>) {
    let args = Args::new()
        .view(&op.x)
        .int(op.width)
        .view(&op.weight)
        .view(&op.bias)
        .float(op.eps)
        .view(&op.out);
    row_blocks("layer_norm", op.rows, args, out);
}

pub(super) fn silu_mul(op: &op::SiluMul, out: &mut Vec<Launch>) {
    let count = op.rows * op.width;
    let (kernel, vec) = if in_fours(op.width, &[&op.x, &op.out]) {
        ("silu_mul_4", 4)
    } else {
        ("silu_mul", 1)
    };
    let args = Args::new().view(&op.x).int(op.width).long(count).view(&op.out);
    elementwise(kernel, count / vec, args, out);
}

/// Runs of tables of one type, each at most [`TABLES`] long, one launch for each: a later one adds to what the
/// earlier ones left, so that the order of the sum is that of the tables.
pub(super) fn embed(op: &op::Embed, out: &mut Vec<Launch>) {
    let mut first = 0;
    let mut accumulate = op.accumulate;
    while first < op.tables.len() || !accumulate {
        let rest = &op.tables[first..];
        let dtype = rest.first().map_or(DType::F32, |table| table.buffer.dtype());
        let run = rest
            .iter()
            .take(TABLES)
            .take_while(|table| table.buffer.dtype() == dtype)
            .count();
        embed_run(op, &rest[..run], dtype, op.first_id + first, accumulate, out);
        first += run;
        accumulate = true;
    }
}

fn embed_run(
    op: &op::Embed,
    tables: &[View],
    dtype: DType,
    first_id: usize,
    accumulate: bool,
    out: &mut Vec<Launch>,
) {
    let alignment = 4 * dtype.size() as u64;
    let aligned = tables
        .iter()
        .all(|table| address(table).is_multiple_of(alignment));
    let fours = aligned && in_fours(op.width, &[&op.out]);
    let kernel = match (dtype, fours) {
        (DType::Bf16, true) => "embed_bf16_4",
        (DType::Bf16, false) => "embed_bf16",
        (_, true) => "embed_f32_4",
        (_, false) => "embed_f32",
    };
    let mut args = Args::new()
        .view(&op.ids)
        .int(op.ids_stride)
        .int(first_id)
        .int(op.rows)
        .int(op.width)
        .int(accumulate.into())
        .view(&op.out)
        .int(tables.len());
    for g in 0..TABLES {
        args = args.optional(tables.get(g));
    }
    for g in 0..TABLES {
        args = args.int(tables.get(g).map_or(0, |table| table.len / op.width.max(1)));
    }
    let count = op.rows * op.width;
    elementwise(kernel, if fours { count / 4 } else { count }, args, out);
}

pub(super) fn gather(op: &op::GatherRows, out: &mut Vec<Launch>) {
    let (kernel, width) = words("gather", "gather_4", op.width, &[&op.src, &op.out]);
    let args = Args::new()
        .view(&op.src)
        .long(op.src.len / op.width)
        .view(&op.index)
        .int(op.rows)
        .int(width)
        .view(&op.out);
    elementwise(kernel, op.rows * width, args, out);
}

pub(super) fn scatter(op: &op::ScatterRows, out: &mut Vec<Launch>) {
    let (kernel, width) = words("scatter", "scatter_4", op.width, &[&op.src, &op.dst]);
    let args = Args::new()
        .view(&op.src)
        .view(&op.index)
        .int(op.rows)
        .int(width)
        .view(&op.dst)
        .long(op.dst.len / op.width);
    elementwise(kernel, op.rows * width, args, out);
}

pub(super) fn copy_columns(op: &op::CopyColumns, out: &mut Vec<Launch>) {
    let (add, add_stride) = match &op.add {
        Some((add, stride, first)) => (column(add, *first), *stride),
        None => (0, 0),
    };
    let args = Args::new()
        .address(column(&op.src, op.src_first))
        .int(op.src_stride)
        .address(add)
        .int(add_stride)
        .int(op.rows)
        .int(op.columns)
        .address(column(&op.dst, op.dst_first))
        .int(op.dst_stride);
    elementwise("copy_columns", op.rows * op.columns, args, out);
}

/// A copy of columns whose source does not move on with the rows.
pub(super) fn tile_row(op: &op::TileRow, out: &mut Vec<Launch>) {
    let args = Args::new()
        .view(&op.src)
        .int(0)
        .address(0)
        .int(0)
        .int(op.rows)
        .int(op.columns)
        .address(column(&op.dst, op.dst_first))
        .int(op.dst_stride);
    elementwise("copy_columns", op.rows * op.columns, args, out);
}

/// Address of column `first` of a view's first row; elements are words.
fn column(view: &View, first: usize) -> u64 {
    address(view) + 4 * first as u64
}

/// Whether rows of `width` words can be moved four words at a time.
fn in_fours(width: usize, views: &[&View]) -> bool {
    width.is_multiple_of(4) && views.iter().all(|view| address(view).is_multiple_of(FOUR_WORDS))
}

/// The kernel for rows of words, and how many of its words a row has.
fn words(single: &'static str, four: &'static str, width: usize, views: &[&View]) -> (&'static str, usize) {
    if in_fours(width, views) {
        (four, width / 4)
    } else {
        (single, width)
    }
}

/// A block for each row; nothing at all when there are none.
fn row_blocks(kernel: &'static str, rows: usize, args: Args, out: &mut Vec<Launch>) {
    launch(kernel, rows, args, out);
}

/// A thread for each of `count` pieces; nothing at all when there are none.
fn elementwise(kernel: &'static str, count: usize, args: Args, out: &mut Vec<Launch>) {
    launch(kernel, count.div_ceil(THREADS as usize), args, out);
}

fn launch(kernel: &'static str, blocks: usize, args: Args, out: &mut Vec<Launch>) {
    if blocks == 0 {
        return;
    }
    out.push(Launch {
        kernel,
        grid: [
            u32::try_from(blocks).expect("grids are below 2^31: the device checked the buffers"),
            1,
            1,
        ],
        block: THREADS,
        shared: 0,
        cluster: 1,
        args,
    });
}

#[cfg(test)]
mod tests;
