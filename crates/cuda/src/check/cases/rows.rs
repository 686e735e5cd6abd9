//! Row-wise operations: norms, gates, embeddings, gathers, columns, copies.

use laneway_device::DType;
use laneway_device::op::{
    Copy, CopyColumns, Embed, GatherRows, LayerNorm, RmsNorm, ScatterRows, SiluMul, TileRow, Zero,
};

use super::{Case, PARTS, Work, small};
use crate::check::Context;
use crate::check::data::{Data, Measure};
use crate::check::experiment::Experiment;
use crate::check::random::Random;

const BOUND: Measure = Measure::Relative(2e-6);

fn rows_case(e: Experiment) -> Work {
    Work::Rows(e, PARTS.to_vec())
}

pub(super) fn cases(context: &Context, out: &mut Vec<Case>) {
    let widths: &[usize] = if small(context) {
        &[7, 33, 128]
    } else {
        &[1, 7, 33, 128, 512, 1024, 2048, 3072]
    };
    for &width in widths {
        for in_place in [false, true] {
            let name = format!("w{width} r70{}", if in_place { " in place" } else { "" });
            out.push(Case::new("RmsNorm", name.clone(), "f32", move |random| {
                rows_case(norm(width, in_place, false, random))
            }));
            out.push(Case::new("LayerNorm", name, "f32", move |random| {
                rows_case(norm(width, in_place, true, random))
            }));
        }
    }
    let widths: &[usize] = if small(context) {
        &[5, 40]
    } else {
        &[5, 40, 1024, 3072, 6144]
    };
    for &width in widths {
        out.push(Case::new(
            "SiluMul",
            format!("w{width} r70"),
            "f32",
            move |random| rows_case(silu_mul(width, random)),
        ));
    }
    embeds(context, out);
    for width in [1, 2, 3, 16, 40, 2048] {
        for indirect in [false, true] {
            let name = format!("w{width} r70{}", if indirect { " pool" } else { "" });
            out.push(Case::new("GatherRows", name, "f32", move |random| {
                rows_case(gather(width, indirect, random))
            }));
        }
        out.push(Case::new(
            "ScatterRows",
            format!("w{width} r70"),
            "f32",
            move |random| rows_case(scatter(width, random)),
        ));
    }
    for (columns, src, dst, add) in [
        (64, (512, 128), (64, 0), false),
        (64, (64, 0), (512, 192), false),
        (64, (512, 64), (64, 0), true),
        (512, (512, 0), (1536, 1024), false),
        (5, (9, 3), (7, 1), true),
        (1, (1, 0), (3, 2), false),
    ] {
        let name = format!(
            "{columns} of {} to {} r70{}",
            src.0,
            dst.0,
            if add { " add" } else { "" }
        );
        out.push(Case::new("CopyColumns", name, "f32", move |random| {
            rows_case(copy_columns(columns, src, dst, add, random))
        }));
    }
    // One row alone would be two ranges of a buffer, which the operation refuses.
    out.push(Case::new("CopyColumns", "within a buffer", "f32", |random| {
        Work::Whole(copy_within(random))
    }));
    for (columns, stride, first) in [(1536, 4608, 1536), (3, 8, 5), (1, 1, 0)] {
        out.push(Case::new(
            "TileRow",
            format!("{columns} into {stride} r70"),
            "f32",
            move |random| rows_case(tile_row(columns, stride, first, random)),
        ));
    }
    for dtype in [DType::F32, DType::Bf16, DType::I32] {
        for (start, len) in [(0, 4096), (3, 1), (5, 777), (8, 100_000)] {
            let label = if dtype == DType::Bf16 { "bf16" } else { "word" };
            out.push(Case::new(
                "Copy",
                format!("{len} at {start}"),
                label,
                move |random| Work::Whole(copy(dtype, start, len, random)),
            ));
            out.push(Case::new(
                "Zero",
                format!("{len} at {start}"),
                label,
                move |random| Work::Whole(zero(dtype, start, len, random)),
            ));
        }
    }
}

fn norm(width: usize, in_place: bool, layer: bool, random: &mut Random) -> Experiment {
    let rows = 70;
    let mut e = Experiment::new(rows);
    // An offset: a mean that is not subtracted shows.
    let x: Vec<f32> = random.floats(rows * width, 1.0).iter().map(|x| x + 0.3).collect();
    let x = Data::floats(&x);
    let weight = e.shared("weight", Data::floats(&random.floats(width, 1.0)));
    let bias = e.shared("bias", Data::floats(&random.floats(width, 1.0)));
    let measure = || Measure::Relative(if width == 1 { 1e-4 } else { 2e-6 });
    let (x, y) = match in_place {
        true => {
            let x = e.in_out_rows("x", width, x, measure());
            (x, x)
        }
        false => (
            e.input_rows("x", width, x),
            e.output_rows("out", DType::F32, width, measure()),
        ),
    };
    e.ops(move |p, rows| match layer {
        true => vec![
            LayerNorm {
                x: p.view(x),
                rows,
                width,
                weight: p.view(weight),
                bias: p.view(bias),
                eps: 1e-5,
                out: p.view(y),
            }
            .into(),
        ],
        false => vec![
            RmsNorm {
                x: p.view(x),
                rows,
                width,
                weight: p.view(weight),
                eps: 1e-6,
                out: p.view(y),
            }
            .into(),
        ],
    })
}

fn silu_mul(width: usize, random: &mut Random) -> Experiment {
    let rows = 70;
    let mut e = Experiment::new(rows);
    let x = e.input_rows(
        "x",
        2 * width,
        Data::floats(&random.floats(rows * 2 * width, 6.0)),
    );
    let y = e.output_rows("out", DType::F32, width, BOUND);
    e.ops(move |p, rows| {
        vec![
            SiluMul {
                x: p.view(x),
                rows,
                width,
                out: p.view(y),
            }
            .into(),
        ]
    })
}

#[derive(Debug, Clone)]
struct EmbedShape {
    entries: Vec<usize>,
    width: usize,
    /// Ids in a row before the first and behind the last.
    around: usize,
    accumulate: bool,
    dtype: DType,
}

fn embeds(context: &Context, out: &mut Vec<Case>) {
    let frame = |width| {
        let mut entries = vec![3072];
        entries.extend([2048; 15]);
        (entries, width, 0, true)
    };
    let mut shapes = vec![
        (vec![7], 5, 0, false),
        (vec![9, 4, 6], 33, 2, true),
        (vec![50, 20], 64, 1, false),
    ];
    if !small(context) {
        shapes.extend([
            (vec![3000], 2048, 0, false),
            (vec![2048], 1024, 7, false),
            (vec![4], 2048, 0, true),
            frame(1024),
            frame(2048),
            (vec![2048], 256, 0, false),
            (vec![2048; 15], 256, 1, false),
        ]);
    }
    for (entries, width, around, accumulate) in shapes {
        for dtype in [DType::Bf16, DType::F32] {
            let shape = EmbedShape {
                entries: entries.clone(),
                width,
                around,
                accumulate,
                dtype,
            };
            let name = format!(
                "{} tables w{width} r70{}",
                entries.len(),
                if accumulate { " acc" } else { "" }
            );
            let label = if dtype == DType::Bf16 { "bf16" } else { "f32" };
            out.push(Case::new("Embed", name, label, move |random| {
                rows_case(embed(&shape, random))
            }));
        }
    }
}

fn embed(shape: &EmbedShape, random: &mut Random) -> Experiment {
    let (rows, width, around) = (70, shape.width, shape.around);
    let mut e = Experiment::new(rows);
    let tables: Vec<_> = shape
        .entries
        .iter()
        .map(|entries| {
            let table = Data::real(&random.floats(entries * width, 1.0), shape.dtype);
            e.shared("tables", table)
        })
        .collect();
    let stride = tables.len() + 2 * around;
    let mut ids = Vec::new();
    for _ in 0..rows {
        // What lies around a row's ids is nobody's.
        ids.extend(vec![i32::MAX; around]);
        for (i, entries) in shape.entries.iter().enumerate() {
            // Both ends of a table are met, and some rows take nothing from it.
            let id = match random.below(8) {
                0 => -1,
                1 => 0,
                2 => *entries as i32 - 1,
                _ => random.below(*entries) as i32,
            };
            ids.push(if i == 0 && shape.entries.len() == 1 && id < 0 {
                -7
            } else {
                id
            });
        }
        ids.extend(vec![i32::MAX; around]);
    }
    let ids = e.input_rows("ids", stride, Data::ints(&ids));
    let out = match shape.accumulate {
        true => e.in_out_rows(
            "out",
            width,
            Data::floats(&random.floats(rows * width, 1.0)),
            BOUND,
        ),
        false => e.output_rows("out", DType::F32, width, BOUND),
    };
    let accumulate = shape.accumulate;
    e.ops(move |p, rows| {
        vec![
            Embed {
                tables: tables.iter().map(|table| p.view(*table)).collect(),
                ids: p.view(ids),
                ids_stride: stride,
                first_id: around,
                rows,
                width,
                accumulate,
                out: p.view(out),
            }
            .into(),
        ]
    })
}

/// `rows` different indices below `of`, some of them negative.
fn indices(rows: usize, of: usize, random: &mut Random) -> Data {
    let index: Vec<i32> = random
        .choose(rows, of)
        .into_iter()
        .map(|i| if i % 9 == 4 { -1 } else { i as i32 })
        .collect();
    Data::ints(&index)
}

fn gather(width: usize, indirect: bool, random: &mut Random) -> Experiment {
    let (rows, entries) = (70, 90);
    let mut e = Experiment::new(rows);
    let src = Data::floats(&random.floats(entries * width, 1.0));
    let src = if indirect {
        e.input_pool("src", src)
    } else {
        e.shared("src", src)
    };
    let index = e.input_rows("index", 1, indices(rows, entries, random));
    let y = e.output_rows("out", DType::F32, width, Measure::Exact);
    e.ops(move |p, rows| {
        vec![
            GatherRows {
                src: p.view(src),
                indirect,
                index: p.view(index),
                rows,
                width,
                out: p.view(y),
            }
            .into(),
        ]
    })
}

fn scatter(width: usize, random: &mut Random) -> Experiment {
    let (rows, entries) = (70, 90);
    let mut e = Experiment::new(rows);
    let src = e.input_rows("src", width, Data::floats(&random.floats(rows * width, 1.0)));
    let index = e.input_rows("index", 1, indices(rows, entries, random));
    let dst = Data::floats(&random.floats(entries * width, 1.0));
    let dst = e.pool("dst", dst, Measure::Exact);
    e.ops(move |p, rows| {
        vec![
            ScatterRows {
                src: p.view(src),
                index: p.view(index),
                rows,
                width,
                dst: p.view(dst),
            }
            .into(),
        ]
    })
}

fn copy_columns(
    columns: usize,
    (src_stride, src_first): (usize, usize),
    (dst_stride, dst_first): (usize, usize),
    add: bool,
    random: &mut Random,
) -> Experiment {
    let rows = 70;
    let mut e = Experiment::new(rows);
    let src = e.input_rows(
        "src",
        src_stride,
        Data::floats(&random.floats(rows * src_stride, 1.0)),
    );
    let add_stride = columns + 3;
    let addend = Data::floats(&random.floats(rows * add_stride, 1.0));
    let addend = add.then(|| e.input_rows("add", add_stride, addend));
    let dst = e.output_rows("dst", DType::F32, dst_stride, Measure::Exact);
    e.ops(move |p, rows| {
        vec![
            CopyColumns {
                src: p.view(src),
                src_stride,
                src_first,
                add: addend.map(|add| (p.view(add), add_stride, 2)),
                rows,
                columns,
                dst: p.view(dst),
                dst_stride,
                dst_first,
            }
            .into(),
        ]
    })
}

/// Columns of a buffer to other columns of the same.
fn copy_within(random: &mut Random) -> Experiment {
    let (rows, stride, columns) = (70, 512, 64);
    let mut e = Experiment::new(rows);
    let x = Data::floats(&random.floats(rows * stride, 1.0));
    let x = e.in_out_rows("x", stride, x, Measure::Exact);
    e.ops(move |p, rows| {
        vec![
            CopyColumns {
                src: p.view(x),
                src_stride: stride,
                src_first: 64,
                add: None,
                rows,
                columns,
                dst: p.view(x),
                dst_stride: stride,
                dst_first: 256,
            }
            .into(),
        ]
    })
}

fn tile_row(columns: usize, dst_stride: usize, dst_first: usize, random: &mut Random) -> Experiment {
    let mut e = Experiment::new(70);
    let src = e.shared("src", Data::floats(&random.floats(columns, 1.0)));
    let dst = e.output_rows("dst", DType::F32, dst_stride, Measure::Exact);
    e.ops(move |p, rows| {
        vec![
            TileRow {
                src: p.view(src),
                rows,
                columns,
                dst: p.view(dst),
                dst_stride,
                dst_first,
            }
            .into(),
        ]
    })
}

fn noise(dtype: DType, len: usize, random: &mut Random) -> Data {
    match dtype {
        DType::I32 => {
            let values: Vec<i32> = (0..len).map(|_| random.word() as i32).collect();
            Data::ints(&values)
        }
        _ => Data::real(&random.floats(len, 1.0), dtype),
    }
}

fn copy(dtype: DType, start: usize, len: usize, random: &mut Random) -> Experiment {
    let mut e = Experiment::new(1);
    let src = e.input("src", noise(dtype, len + 9, random));
    let dst = e.output("dst", dtype, start + len + 2, Measure::Exact);
    e.ops(move |p, _| {
        vec![
            Copy {
                src: p.view(src).slice(7, len),
                dst: p.view(dst).slice(start, len),
            }
            .into(),
        ]
    })
}

fn zero(dtype: DType, start: usize, len: usize, random: &mut Random) -> Experiment {
    let mut e = Experiment::new(1);
    let dst = e.in_out("dst", noise(dtype, start + len + 2, random), Measure::Exact);
    e.ops(move |p, _| {
        vec![
            Zero {
                dst: p.view(dst).slice(start, len),
            }
            .into(),
        ]
    })
}
