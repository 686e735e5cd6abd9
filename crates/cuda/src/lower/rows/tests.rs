use laneway_device::DType;
use laneway_device::op::{CopyColumns, Embed, GatherRows, RmsNorm, SiluMul, TileRow};

use super::*;
use crate::lower::testing::view;

fn embedding(tables: Vec<View>, width: usize, accumulate: bool) -> Vec<Launch> {
    let mut out = Vec::new();
    embed(
        &Embed {
            ids: view(DType::I32, 5 * 40),
            ids_stride: 40,
            first_id: 2,
            rows: 5,
            width,
            accumulate,
            out: view(DType::F32, 5 * width),
            tables,
        },
        &mut out,
    );
    out
}

fn tables(dtype: DType, count: usize, width: usize) -> Vec<View> {
    (0..count).map(|_| view(dtype, 7 * width)).collect()
}

/// The `int` argument at `place`.
fn int(launch: &Launch, place: usize) -> i32 {
    let (offset, size) = launch.args.fields()[place];
    let bytes = launch.args.bytes()[offset..][..size].try_into();
    i32::from_ne_bytes(bytes.expect("an int"))
}

/// First id, whether it accumulates, tables.
fn run(launch: &Launch) -> (&'static str, i32, i32, i32) {
    (launch.kernel, int(launch, 2), int(launch, 5), int(launch, 7))
}

#[test]
fn a_long_sum_of_tables_keeps_its_order() {
    let mut all = tables(DType::Bf16, 18, 8);
    all.extend(tables(DType::F32, 1, 8));
    let launches = embedding(all, 8, false);
    let runs: Vec<_> = launches.iter().map(run).collect();
    assert_eq!(
        runs,
        [
            ("embed_bf16_4", 2, 0, 16),
            ("embed_bf16_4", 18, 1, 2),
            ("embed_f32_4", 20, 1, 1)
        ]
    );
    assert_eq!(launches[0].args.fields().len(), 8 + 2 * TABLES);
    assert_eq!(int(&launches[2], 8 + TABLES), 7, "entries of the first table");
    assert_eq!(int(&launches[2], 8 + TABLES + 1), 0, "there is no second");
}

#[test]
fn a_sum_of_no_tables_is_zeros_or_what_was_there() {
    assert_eq!(
        embedding(Vec::new(), 8, false)
            .iter()
            .map(run)
            .collect::<Vec<_>>(),
        [("embed_f32_4", 2, 0, 0)]
    );
    assert!(embedding(Vec::new(), 8, true).is_empty());
}

#[test]
fn four_words_at_a_time_only_where_they_are_aligned() {
    assert_eq!(
        embedding(tables(DType::F32, 2, 6), 6, false)[0].kernel,
        "embed_f32"
    );
    let wide = view(DType::Bf16, 65);
    let shifted = vec![wide.slice(1, 64)];
    assert_eq!(embedding(shifted, 8, false)[0].kernel, "embed_bf16");
    assert_eq!(
        embedding(vec![wide.slice(0, 64)], 8, false)[0].kernel,
        "embed_bf16_4"
    );

    let (x, y) = (view(DType::F32, 65), view(DType::F32, 65));
    for (start, width, kernel) in [(0, 8, "silu_mul_4"), (1, 8, "silu_mul"), (0, 6, "silu_mul")] {
        let mut out = Vec::new();
        silu_mul(
            &SiluMul {
                x: x.slice(start, 64),
                rows: 4,
                width,
                out: y.slice(start, 65 - start),
            },
            &mut out,
        );
        assert_eq!(out[0].kernel, kernel, "from {start}, width {width}");
    }
}

#[test]
fn a_gather_knows_how_many_rows_it_may_read() {
    for (width, kernel, words) in [(16, "gather_4", 4), (6, "gather", 6)] {
        let mut out = Vec::new();
        gather(
            &GatherRows {
                src: view(DType::I32, 9 * width),
                indirect: true,
                index: view(DType::I32, 3),
                rows: 3,
                width,
                out: view(DType::I32, 3 * width),
            },
            &mut out,
        );
        assert_eq!((out[0].kernel, int(&out[0], 4)), (kernel, words));
        let (offset, size) = out[0].args.fields()[1];
        assert_eq!(out[0].args.bytes()[offset..][..size], 9i64.to_ne_bytes());
    }
}

#[test]
fn a_tiled_row_is_a_copy_that_stays_on_its_source() {
    let (src, dst) = (view(DType::F32, 8), view(DType::F32, 5 * 20));
    let (mut tiled, mut copied) = (Vec::new(), Vec::new());
    tile_row(
        &TileRow {
            src: src.clone(),
            rows: 5,
            columns: 8,
            dst: dst.clone(),
            dst_stride: 20,
            dst_first: 12,
        },
        &mut tiled,
    );
    copy_columns(
        &CopyColumns {
            src,
            src_stride: 0,
            src_first: 0,
            add: None,
            rows: 5,
            columns: 8,
            dst,
            dst_stride: 20,
            dst_first: 12,
        },
        &mut copied,
    );
    assert_eq!(tiled, copied);
}

#[test]
fn a_block_for_each_row_and_none_for_no_rows() {
    let norm = |rows| {
        let mut out = Vec::new();
        rms_norm(
            &RmsNorm {
                x: view(DType::F32, 8 * rows),
                rows,
                width: 8,
                weight: view(DType::F32, 8),
                eps: 1e-6,
                out: view(DType::F32, 8 * rows),
            },
            &mut out,
        );
        out
    };
    assert_eq!(norm(70_000)[0].grid, [70_000, 1, 1]);
    assert!(norm(0).is_empty());
}
