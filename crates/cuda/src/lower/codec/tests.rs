//! Which kernel a convolution of the released codec becomes.

use laneway_device::op::{Conv, Pointwise, Snake, StateSlice, Windows};
use laneway_device::{DType, Matrix};

use super::super::testing::view;
use super::{Target, conv};
use crate::launch::Launch;

const H200: Target = Target { sms: 132, arch: 90 };
const A100: Target = Target { sms: 108, arch: 80 };

/// Inputs, outputs, taps, dilation, time rows a frame, and slices of the sum.
const SHAPES: &[(usize, usize, usize, usize, usize, usize)] = &[
    (512, 1024, 3, 1, 1, 4),
    (1024, 1536, 7, 1, 4, 8),
    (1536, 6144, 2, 1, 4, 4),
    (768, 768, 7, 9, 32, 8),
    (768, 768, 1, 1, 32, 1),
    (768, 1920, 2, 1, 32, 4),
    (384, 384, 7, 9, 160, 4),
    (384, 384, 1, 1, 160, 1),
    (384, 768, 2, 1, 160, 1),
    (192, 192, 7, 9, 640, 1),
    (192, 288, 2, 1, 640, 1),
    (96, 96, 7, 9, 1920, 1),
];

fn launches(
    shape: (usize, usize, usize, usize, usize, usize),
    streams: usize,
    target: Target,
) -> Vec<Launch> {
    launches_of(DType::Bf16, shape, streams, target)
}

fn launches_of(
    weights: DType,
    shape: (usize, usize, usize, usize, usize, usize),
    streams: usize,
    target: Target,
) -> Vec<Launch> {
    let mut out = Vec::new();
    conv(&conv_of(weights, shape, streams), target, &mut out);
    out
}

fn conv_of(
    weights: DType,
    (c_in, c_out, taps, dilation, rate, _): (usize, usize, usize, usize, usize, usize),
    streams: usize,
) -> Conv {
    let (rows, k) = (streams * rate, taps * c_in);
    let past = (taps - 1) * dilation * c_in;
    Conv {
        x: view(DType::F32, rows * c_in),
        rows,
        w: Matrix {
            packed: view(weights, c_out.next_multiple_of(16) * k).buffer,
            n: c_out,
            k,
        },
        bias: Some(view(DType::F32, c_out)),
        c_in,
        taps,
        dilation,
        snake: None,
        state: (taps > 1).then(|| StateSlice {
            pool: view(DType::F32, streams * past),
            slot_stride: past,
            offset: 0,
        }),
        windows: Windows {
            windows: view(DType::I32, streams * 3),
            count: streams,
            rate,
        },
        pointwise: None,
        scratch: None,
        residual: None,
        clamp: false,
        out: view(DType::F32, rows * c_out),
    }
}

/// The last arguments: slices, blocks of a cluster, slices of a block, channels staged at a time, staged rows.
fn cut(launch: &Launch) -> [i32; 5] {
    last(launch)
}

fn last<const N: usize>(launch: &Launch) -> [i32; N] {
    let fields = launch.args.fields();
    let int = |(offset, size): &(usize, usize)| {
        i32::from_ne_bytes(launch.args.bytes()[*offset..offset + size].try_into().unwrap())
    };
    let last: Vec<_> = fields[fields.len() - N..].iter().map(int).collect();
    last.try_into().unwrap()
}

#[test]
fn rows_pick_the_tile_and_never_the_order_of_a_sum() {
    for target in [H200, A100] {
        for &shape in SHAPES {
            for streams in [1, 3, 8, 64, 256] {
                let launch = &launches(shape, streams, target)[0];
                assert!(
                    launch.kernel.starts_with("conv_mma_"),
                    "{shape:?}: {}",
                    launch.kernel
                );
                let [slices, blocks, share, ..] = cut(launch);
                assert_eq!(slices as usize, shape.5, "{shape:?} of {streams} streams");
                assert_eq!(blocks * share, slices);
                assert_eq!(blocks as u32, launch.cluster);
                assert!(blocks == 1 || target.arch >= 90);
            }
        }
    }
}

#[test]
fn every_tile_is_covered_and_two_blocks_fit_a_multiprocessor() {
    for &shape in SHAPES {
        for streams in [1, 16, 64, 256] {
            let launch = &launches(shape, streams, H200)[0];
            let tile = launch.kernel.strip_prefix("conv_mma_bf16_").unwrap();
            let (outputs, rows) = tile.split_once('x').unwrap();
            let (outputs, rows): (u32, u32) = (outputs.parse().unwrap(), rows.parse().unwrap());
            assert!(launch.grid[0] / launch.cluster * outputs >= shape.1 as u32);
            assert!(launch.grid[1] * rows >= (streams * shape.4) as u32);
            assert!(launch.shared <= 113 << 10, "{shape:?} x {streams}: {launch:?}");
            let [slices, _, _, chunk, _] = cut(launch);
            let slice = shape.0 as i32 / slices;
            assert!(
                chunk % 16 == 0 && slice % chunk == 0,
                "{shape:?}: {chunk} of {slice}"
            );
        }
    }
}

#[test]
fn one_stream_keeps_half_the_multiprocessors_busy_where_there_is_most_weight() {
    for &shape in SHAPES
        .iter()
        .filter(|shape| shape.0 * shape.1 * shape.2 > 2 << 20)
    {
        let launch = &launches(shape, 1, H200)[0];
        assert!(
            launch.grid[0] * launch.grid[1] >= 66,
            "{shape:?}: {:?}",
            launch.grid
        );
    }
}

#[test]
fn the_state_follows_in_a_launch_of_its_own() {
    let names = |shape| -> Vec<_> {
        launches(shape, 2, H200)
            .iter()
            .map(|launch| launch.kernel)
            .collect()
    };
    assert_eq!(names((768, 768, 7, 9, 32, 8))[1..], ["conv_state"]);
    assert_eq!(names((768, 768, 1, 1, 32, 1)).len(), 1);
}

#[test]
fn a_shape_is_multiplied_by_warpgroups_whatever_its_rows() {
    for &shape in SHAPES {
        let (_, _, taps, _, rate, slices) = shape;
        let expected = match taps {
            2 if rate >= 32 => "conv_warpgroup_",
            _ => "conv_mma_f16_",
        };
        for streams in [1, 3, 8, 64, 256] {
            let launches = launches_of(DType::F16, shape, streams, H200);
            let kernel = launches[0].kernel;
            assert!(
                kernel.starts_with(expected),
                "{shape:?} of {streams} streams: {kernel}"
            );
            if expected == "conv_warpgroup_" {
                let [cut, blocks, chunk, buffers, staged, pitch] = last(&launches[0]);
                assert_eq!(cut as usize, slices, "{shape:?} of {streams} streams");
                assert_eq!(blocks as u32, launches[0].cluster);
                assert!(
                    shape.0 as i32 / cut % chunk == 0 && buffers >= 2,
                    "{shape:?}: {chunk}"
                );
                assert!(staged % pitch == 0);
            }
            // The state is made by the snake that the rows are made by.
            if let Some(state) = launches.get(1) {
                let [quick] = last(state);
                assert_eq!(quick, i32::from(expected != "conv_mma_f16_"), "{shape:?}");
            }
            let older = &launches_of(DType::F16, shape, streams, A100)[0];
            assert!(older.kernel.starts_with("conv_mma_f16_"), "{}", older.kernel);
        }
    }
}

/// Rows of the tile that a kernel's name ends with.
fn rows_of_tile(kernel: &str) -> usize {
    let (units, rows) = kernel.rsplit('_').next().unwrap().split_once('x').unwrap();
    units.parse::<usize>().unwrap() * rows.parse::<usize>().unwrap()
}

#[test]
fn clusters_of_the_ring_make_every_output_of_every_row_once() {
    for (streams, sms) in [(1, 132), (3, 132), (64, 132), (256, 132), (64, 8), (1, 2)] {
        let mut launches = Vec::new();
        let target = Target { sms, ..H200 };
        conv(&unit(DType::F16, 192, 640, streams), target, &mut launches);
        let launch = &launches[0];
        let [items, wide, across, down, inputs, stages] = last(launch);
        assert!(launch.kernel.starts_with("unit_ring_"), "{launch:?}");
        assert_eq!(launch.cluster, 1 << (across + down), "{launch:?}");
        assert!(launch.grid[0].is_multiple_of(launch.cluster) && launch.grid[1..] == [1, 1]);
        assert!(launch.grid[0] as i32 <= items << (across + down), "{launch:?}");
        // Outputs and rows of all items together, and nothing that is all beside them.
        assert_eq!((wide, across), (1, 0), "{launch:?}");
        let rows = rows_of_tile(launch.kernel) << down;
        assert_eq!(items as usize, (streams * 640).div_ceil(rows), "{launch:?}");
        assert!(
            inputs >= 2 && stages >= 3 && launch.shared <= 227 << 10,
            "{launch:?}"
        );
    }
}

/// A residual unit of `channels`.
fn unit(weights: DType, channels: usize, rate: usize, streams: usize) -> Conv {
    let snake = || Snake {
        alpha: view(DType::F32, channels),
        inv_beta: view(DType::F32, channels),
    };
    let first = conv_of(weights, (channels, channels, 7, 9, rate, 0), streams);
    let mut unit = Conv {
        snake: Some(snake()),
        pointwise: Some(Pointwise {
            snake: snake(),
            w: Matrix {
                packed: view(weights, channels * channels).buffer,
                n: channels,
                k: channels,
            },
            bias: None,
        }),
        residual: Some(first.x.clone()),
        ..first
    };
    unit.scratch = Some(view(DType::F32, unit.scratch_len()));
    unit
}

#[test]
fn a_residual_unit_is_one_kernel_where_its_weights_fit_and_more_elsewhere() {
    let names = |op: &Conv, target| -> Vec<&str> {
        let mut out = Vec::new();
        conv(op, target, &mut out);
        out.iter().map(|launch| launch.kernel).collect()
    };
    for streams in [1, 3, 64, 256] {
        let small = unit(DType::F16, 96, 1920, streams);
        assert_eq!(names(&small, H200), ["unit_warpgroup_96", "conv_state"]);
        for (op, target, kernels) in [
            (&small, A100, "conv_mma_f16"),
            (&unit(DType::F32, 96, 1920, streams), H200, "conv_any_f32"),
            (&unit(DType::Bf16, 96, 1920, streams), H200, "conv_mma_bf16"),
            (&unit(DType::F16, 384, 160, streams), A100, "conv_mma_f16"),
        ] {
            let names = names(op, target);
            assert_eq!((names.len(), names[1]), (3, "conv_state"), "{names:?}");
            assert!(
                names[0].starts_with(kernels) && names[2].starts_with(kernels),
                "{names:?}"
            );
        }
        for (channels, rate) in [(384, 160), (768, 32)] {
            let names = names(&unit(DType::F16, channels, rate, streams), H200);
            assert_eq!([names[0], names[3]], ["conv_stage", "conv_state"], "{names:?}");
            assert!(names[1].starts_with("conv_staged_inner_7_"), "{names:?}");
            assert!(names[2].starts_with("conv_staged_1_"), "{names:?}");
        }
        let mut launches = Vec::new();
        conv(&small, H200, &mut launches);
        let (tiles, launch) = (streams * 15, &launches[0]);
        assert_eq!(launch.grid, [tiles.min(132) as u32, 1, 1]);
        assert!(launch.shared <= 227 << 10, "{launch:?}");
    }
}

#[test]
fn what_is_staged_is_staged_once_and_multiplied_whole_whatever_the_rows() {
    // Inputs, outputs, taps, dilation and rate of what comes here, and places of a tile by the kernel's name.
    let shapes = [
        (1024, 1536, 7, 1, 4),
        (1536, 6144, 2, 1, 4),
        (768, 1920, 2, 1, 32),
        (384, 768, 2, 1, 160),
    ];
    for (c_in, c_out, taps, dilation, rate) in shapes {
        for streams in [1, 3, 8, 64, 256, 400] {
            let mut op = conv_of(DType::F16, (c_in, c_out, taps, dilation, rate, 0), streams);
            let past = (taps - 1) * dilation;
            let places = streams * (rate + past);
            op.scratch = Some(view(DType::F32, op.scratch_len()));
            let mut launches = Vec::new();
            conv(&op, H200, &mut launches);
            let names: Vec<_> = launches.iter().map(|launch| launch.kernel).collect();
            let [stage, products, state] = &launches[..] else {
                panic!("{names:?}");
            };
            assert_eq!((stage.kernel, state.kernel), ("conv_stage", "conv_state"));
            assert!(
                products.kernel.starts_with(&format!("conv_staged_{taps}_")),
                "{names:?}"
            );
            let tile = rows_of_staged(products.kernel);
            let outputs = (products.block as usize / 128 - 1) * 64;
            let [all, across, buffers] = places_across_buffers(products);
            assert_eq!([all, across], [places, c_out.div_ceil(outputs)]);
            assert!(buffers >= 2 && products.shared <= 227 << 10, "{products:?}");
            let items = (places - past).div_ceil(tile) * across;
            assert_eq!(products.grid, [items.min(132) as u32, 1, 1]);
            assert!(stage.grid[0] as usize * 64 >= places && stage.grid[1] as usize * 64 <= c_in);
        }
    }
}

/// Places of a tile, from a kernel's name.
fn rows_of_staged(kernel: &str) -> usize {
    kernel.rsplit('_').next().unwrap().parse().unwrap()
}

/// Ahead of five pointers at the end.
fn places_across_buffers(launch: &Launch) -> [usize; 3] {
    let fields = launch.args.fields();
    let int = |(offset, size): &(usize, usize)| {
        i32::from_ne_bytes(launch.args.bytes()[*offset..offset + size].try_into().unwrap()) as usize
    };
    let last: Vec<_> = fields[fields.len() - 8..fields.len() - 5]
        .iter()
        .map(int)
        .collect();
    last.try_into().unwrap()
}
