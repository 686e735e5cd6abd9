use laneway_device::op::{Activation, Gemm, InputNorm};
use laneway_device::{DType, Matrix};

use super::*;
use crate::lower::address;
use crate::lower::testing::view;

const HOPPER: Target = Target { sms: 132, arch: 90 };
const ADA: Target = Target { sms: 142, arch: 89 };

/// `[rows, k]` of `x` times a bf16 `[n, k]`, to `out`.
fn product(rows: usize, n: usize, k: usize, x: DType, out: DType) -> Gemm {
    Gemm {
        x: view(x, rows * k),
        norm: None,
        rows,
        w: Matrix {
            packed: view(DType::Bf16, n.next_multiple_of(16) * k.next_multiple_of(16)).buffer,
            n,
            k,
        },
        bias: None,
        activation: Activation::None,
        scale: None,
        accumulate: false,
        gated: None,
        out: view(out, rows * n),
        next: None,
    }
}

fn gated(op: Gemm) -> Gemm {
    Gemm {
        gated: Some(view(DType::F32, op.rows * op.w.n)),
        ..op
    }
}

fn normed(op: Gemm) -> Gemm {
    Gemm {
        norm: Some(InputNorm {
            weight: view(DType::F32, op.w.k),
            eps: 1e-6,
            scratch: view(DType::F32, op.rows * op.w.k),
            prepared: false,
        }),
        ..op
    }
}

fn lowered(op: &Gemm, target: Target) -> Vec<Launch> {
    let mut out = Vec::new();
    gemm(op, target, &mut out);
    out
}

/// Argument `i` of a launch.
fn arg(launch: &Launch, i: usize) -> u64 {
    let (offset, size) = launch.args.fields()[i];
    let mut bytes = [0; 8];
    bytes[..size].copy_from_slice(&launch.args.bytes()[offset..][..size]);
    u64::from_le_bytes(bytes)
}

/// How the last argument of a launch says that its output is kept.
fn out_kept(launch: &Launch) -> u64 {
    arg(launch, launch.args.fields().len() - 1)
}

const F32: u64 = Kept::F32 as u64;
const ROWS: u64 = Kept::Rows as u64;
const BLOCKED: u64 = Kept::Blocked as u64;

#[test]
fn products_go_by_warpgroups_where_their_inputs_lie_in_blocks() {
    use DType::{Bf16, F32 as Wide};
    // Rows, n, k, input, output, architecture; the kernel, how it reads (if it asks) and writes.
    type Case = (
        (usize, usize, usize),
        (DType, DType),
        Target,
        (&'static str, Option<u64>, u64),
    );
    let cases: &[Case] = &[
        (
            (9, 1024, 2048),
            (Bf16, Wide),
            HOPPER,
            ("gemm_warpgroup_64_16_4_bf16", None, F32),
        ),
        (
            (9, 1024, 2048),
            (Bf16, Bf16),
            HOPPER,
            ("gemm_warpgroup_64_16_4_bf16", None, BLOCKED),
        ),
        (
            (40, 640, 1024),
            (Bf16, Bf16),
            HOPPER,
            ("gemm_warpgroup_64_64_4_bf16", None, ROWS),
        ),
        (
            (9, 1024, 2048),
            (Bf16, Bf16),
            ADA,
            ("gemm_many_16_1_bf16", Some(ROWS), ROWS),
        ),
        (
            (1, 1024, 2048),
            (Bf16, Bf16),
            HOPPER,
            ("gemm_warpgroup_64_16_4_bf16", None, BLOCKED),
        ),
        (
            (8, 1024, 2048),
            (Wide, Bf16),
            HOPPER,
            ("gemm_few_bf16", Some(F32), BLOCKED),
        ),
        (
            (9, 1024, 2048),
            (Wide, Bf16),
            HOPPER,
            ("gemm_many_16_8_bf16", Some(F32), BLOCKED),
        ),
        (
            (9, 1024, 1536),
            (Bf16, Bf16),
            HOPPER,
            ("gemm_many_16_8_bf16", Some(ROWS), BLOCKED),
        ),
        // Outputs that do not leave in fours.
        (
            (9, 130, 1024),
            (Bf16, Bf16),
            HOPPER,
            ("gemm_many_16_8_bf16", Some(BLOCKED), ROWS),
        ),
        (
            (9, 1024, 40),
            (Bf16, Bf16),
            HOPPER,
            ("gemm_any", Some(ROWS), BLOCKED),
        ),
    ];
    for &((rows, n, k), (x, out), target, (kernel, reads, writes)) in cases {
        let launches = lowered(&product(rows, n, k, x, out), target);
        let what = format!("{rows} rows {n}x{k} {x:?} to {out:?} on {}", target.arch);
        assert_eq!(launches.len(), 1, "{what}");
        assert_eq!(launches[0].kernel, kernel, "{what}");
        if let Some(reads) = reads {
            assert_eq!(arg(&launches[0], 1), reads, "{what}");
        }
        assert_eq!(out_kept(&launches[0]), writes, "{what}");
    }
}

#[test]
fn a_norm_writes_what_its_product_reads() {
    for (rows, k, target, kept, kernel) in [
        // Too wide to be split.
        (9, 3072, HOPPER, BLOCKED, "gemm_warpgroup_64_16_4_bf16"),
        (9, 1536, HOPPER, ROWS, "gemm_many_16_8_bf16"),
        (9, 1024, ADA, ROWS, "gemm_many_16_1_bf16"),
    ] {
        let op = normed(product(rows, 1024, k, DType::F32, DType::F32));
        let launches = lowered(&op, target);
        assert_eq!(launches.len(), 2);
        assert_eq!(
            (launches[0].kernel, out_kept(&launches[0])),
            ("rms_norm_bf16", kept)
        );
        assert_eq!(launches[1].kernel, kernel);
        let scratch = address(&op.norm.unwrap().scratch);
        assert_eq!((arg(&launches[0], 3), arg(&launches[1], 0)), (scratch, scratch));
    }
}

#[test]
fn eight_rows_at_a_time_are_taken_out_of_their_blocks() {
    let op = gated(product(70, 96, 1024, DType::Bf16, DType::Bf16));
    let launches = lowered(&op, HOPPER);
    let places: Vec<_> = launches
        .iter()
        .map(|launch| {
            assert_eq!(launch.kernel, "gemm_few_gated_bf16");
            assert_eq!((arg(launch, 1), out_kept(launch)), (BLOCKED, ROWS));
            // Elements from the view's begin on, rows of the block, rows of the launch.
            (
                (arg(launch, 0) - address(&op.x)) / 2,
                arg(launch, 2),
                arg(launch, 6),
            )
        })
        .collect();
    let mut expected: Vec<_> = (0..8).map(|i| (i * 64, 64, 8)).collect();
    expected.push((64 * 1024, 6, 6));
    assert_eq!(places, expected);
    let by_rows = lowered(&op, ADA);
    assert_eq!(arg(&by_rows[1], 0) - address(&op.x), 2 * 8 * 1024);
    assert_eq!(arg(&by_rows[1], 1), ROWS);
}

#[test]
fn a_gate_of_its_own_writes_what_the_product_behind_reads() {
    // No whole tiles: in parts.
    let launches = lowered(&gated(product(9, 2048, 40, DType::Bf16, DType::Bf16)), HOPPER);
    let kernels: Vec<_> = launches.iter().map(|launch| launch.kernel).collect();
    assert_eq!(kernels, ["gemm_any", "silu_mul_narrow"]);
    assert_eq!((out_kept(&launches[0]), out_kept(&launches[1])), (F32, BLOCKED));
    let launches = lowered(&gated(product(9, 80, 1024, DType::Bf16, DType::Bf16)), HOPPER);
    assert_eq!((arg(&launches[0], 1), out_kept(&launches[1])), (BLOCKED, ROWS));
}

#[test]
fn no_rows_launch_nothing() {
    assert!(lowered(&product(0, 1024, 1024, DType::Bf16, DType::F32), HOPPER).is_empty());
}

/// The names of what an operation becomes on 9.0.
fn kernels(op: &Gemm) -> Vec<&'static str> {
    lowered(op, HOPPER).iter().map(|launch| launch.kernel).collect()
}

fn followed(op: Gemm) -> Gemm {
    let (rows, n) = (op.rows, op.w.n);
    Gemm {
        next: normed(product(rows, 64, n, DType::F32, DType::F32)).norm,
        ..op
    }
}

#[test]
fn a_split_norm_is_begun_by_the_product_ahead_or_by_a_launch_of_its_own() {
    use DType::{Bf16, F32 as Wide};
    let prepared = |op: Gemm| Gemm {
        norm: op.norm.map(|norm| InputNorm {
            prepared: true,
            ..norm
        }),
        ..op
    };
    let behind = |rows, n, k| normed(product(rows, n, k, Wide, Wide));
    let check = |op: Gemm, expected: &[&str]| {
        assert_eq!(
            kernels(&op),
            expected,
            "{} rows of {:?}",
            op.rows,
            (op.w.n, op.w.k)
        );
    };
    let warpgroups = "gemm_warpgroup_64_16_4_bf16";
    check(behind(9, 2048, 1024), &["prepare_norm_bf16", warpgroups]);
    check(prepared(behind(9, 2048, 1024)), &[warpgroups]);
    check(behind(1, 2048, 1024), &["prepare_norm_bf16", warpgroups]);
    // Rows that are too wide, or odd, are normed in one piece whatever was prepared.
    check(prepared(behind(9, 1024, 3072)), &["rms_norm_bf16", warpgroups]);
    check(
        prepared(behind(9, 2048, 512)),
        &["rms_norm_bf16", "gemm_many_16_8_bf16"],
    );
    // What leaves it: the product itself, or what comes behind it.
    check(followed(product(9, 1024, 2048, Bf16, Wide)), &[warpgroups]);
    check(
        followed(product(9, 1024, 2048, Wide, Wide)),
        &["gemm_many_16_8_bf16", "prepare_norm_bf16"],
    );
    check(
        followed(product(9, 1024, 40, Bf16, Wide)),
        &["gemm_any", "prepare_norm_bf16"],
    );
    check(followed(product(1, 1024, 2048, Bf16, Wide)), &[warpgroups]);
    check(
        followed(product(1, 1024, 2048, Wide, Wide)),
        &["gemm_few_bf16", "prepare_norm_bf16"],
    );
    check(followed(product(9, 512, 2048, Bf16, Wide)), &[warpgroups]);

    // The addresses that the two halves share.
    let op = followed(product(9, 1024, 2048, Bf16, Wide));
    let next = op.next.as_ref().unwrap();
    let ahead = &lowered(&op, HOPPER)[0];
    let read = Gemm {
        norm: Some(InputNorm {
            prepared: true,
            ..next.clone()
        }),
        ..product(9, 2048, 1024, Wide, Wide)
    };
    let behind = &lowered(&read, HOPPER)[0];
    let [x, squares] = [address(&next.scratch), address(&next.scratch) + 9 * 1024 * 2];
    assert_eq!([arg(behind, 0), arg(behind, 1)], [x, squares]);
    assert_eq!([arg(ahead, 10), arg(ahead, 11)], [x, squares]);
    assert_eq!(arg(ahead, 9), address(&next.weight));
}
