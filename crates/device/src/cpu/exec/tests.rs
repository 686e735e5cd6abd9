//! Operations from views to results: aliasing, operands that do not fit, pools reached by index.

use super::*;
use crate::cpu::{CpuConfig, CpuDevice, storage};
use crate::op::SampleRow;
use crate::{BufferSpec, Device, MatrixSpec, Place};

struct Bench(CpuDevice);

impl Bench {
    fn new() -> Self {
        let memory_bytes = Some(1 << 24);
        Self(CpuDevice::new(CpuConfig { memory_bytes }).unwrap())
    }

    fn view(&self, name: &str, dtype: DType, bytes: &[u8]) -> View {
        let spec = BufferSpec {
            name: name.to_owned(),
            dtype,
            len: bytes.len() / dtype.size(),
            place: Place::Device,
        };
        self.0.alloc_with(spec, bytes).unwrap().view()
    }

    fn floats(&self, name: &str, values: &[f32]) -> View {
        self.view(name, DType::F32, bytemuck::cast_slice(values))
    }

    fn ints(&self, name: &str, values: &[i32]) -> View {
        self.view(name, DType::I32, bytemuck::cast_slice(values))
    }

    fn matrix(&self, n: usize, k: usize, values: &[f32]) -> Matrix {
        let spec = MatrixSpec {
            name: "w",
            n,
            k,
            dtype: DType::F32,
            data: bytemuck::cast_slice(values),
        };
        self.0.pack_matrix(spec).unwrap()
    }
}

/// What a view holds.
fn contents<T: bytemuck::Pod>(view: &View) -> Vec<T> {
    // SAFETY: the tests run every operation on this thread and keep no other slice.
    unsafe { storage::slice::<T>(view) }.to_vec()
}

fn run(op: impl Into<Op>) -> Result<(), String> {
    execute(&op.into())
}

fn refused(op: impl Into<Op>, problem: &str) {
    let error = run(op).unwrap_err();
    assert!(error.contains(problem), "{error}");
}

#[test]
fn gemm_adds_to_its_output_and_refuses_operands_that_overlap_or_are_short() {
    let bench = Bench::new();
    let op = op::Gemm {
        norm: None,
        gated: None,
        x: bench.floats("x", &[1.0, 2.0, 3.0, 4.0]),
        rows: 2,
        w: bench.matrix(3, 2, &[1.0, 0.0, 0.0, 1.0, 1.0, 1.0]),
        bias: Some(bench.floats("bias", &[0.0, 0.0, -10.0])),
        activation: op::Activation::Relu,
        scale: Some(bench.floats("scale", &[1.0, 2.0, 3.0])),
        accumulate: true,
        out: bench.floats("out", &[100.0; 6]),
        next: None,
    };
    run(op.clone()).unwrap();
    assert_eq!(
        contents::<f32>(&op.out),
        [101.0, 104.0, 100.0, 103.0, 108.0, 100.0]
    );
    let accumulate = false;
    run(op::Gemm {
        accumulate,
        ..op.clone()
    })
    .unwrap();
    assert_eq!(contents::<f32>(&op.out), [1.0, 4.0, 0.0, 3.0, 8.0, 0.0]);

    let both = bench.floats("both", &[0.0; 9]);
    let (x, out) = (both.slice(5, 4), both.slice(0, 6));
    refused(op::Gemm { x, out, ..op.clone() }, "overlaps");
    refused(
        op::Gemm { rows: 3, ..op },
        "has 6 elements, the operation needs 9",
    );
}

#[test]
fn a_gated_product_behind_a_norm_is_its_parts() {
    let bench = Bench::new();
    let values = |n: usize, step: f32| (0..n).map(|i| (i as f32 * step).sin()).collect::<Vec<_>>();
    let (rows, n, k) = (3, 6, 5);
    let x = bench.floats("x", &values(rows * k, 0.7));
    let weight = bench.floats("weight", &values(k, 0.3));
    let w = bench.matrix(n, k, &values(n * k, 0.11));
    let floats = |name: &str, len: usize| bench.floats(name, &vec![0.0; len]);
    let fused = op::Gemm {
        norm: Some(op::InputNorm {
            weight: weight.clone(),
            eps: 1e-6,
            scratch: floats("scratch", rows * k),
            prepared: false,
        }),
        gated: Some(floats("gated", rows * n)),
        x: x.clone(),
        rows,
        w: w.clone(),
        bias: None,
        activation: op::Activation::None,
        scale: None,
        accumulate: false,
        out: floats("out", rows * n / 2),
        next: None,
    };
    run(fused.clone()).unwrap();
    let (normed, product) = (floats("normed", rows * k), floats("product", rows * n));
    let out = floats("parts", rows * n / 2);
    run(op::RmsNorm {
        x,
        rows,
        width: k,
        weight,
        eps: 1e-6,
        out: normed.clone(),
    })
    .unwrap();
    run(op::Gemm {
        norm: None,
        gated: None,
        x: normed,
        out: product.clone(),
        ..fused.clone()
    })
    .unwrap();
    run(op::SiluMul {
        x: product,
        rows,
        width: n / 2,
        out: out.clone(),
    })
    .unwrap();
    assert_eq!(contents::<f32>(&fused.out), contents::<f32>(&out));
    assert!(contents::<f32>(&out).iter().any(|v| *v != 0.0));
}

#[test]
fn norms_work_in_place() {
    let bench = Bench::new();
    let weight = bench.floats("weight", &[1.0, 2.0]);
    let x = bench.floats("x", &[3.0, 4.0, 1.0, 1.0]);
    let elsewhere = bench.floats("out", &[0.0; 4]);
    let op = op::RmsNorm {
        x: x.clone(),
        rows: 2,
        width: 2,
        weight: weight.clone(),
        eps: 0.0,
        out: elsewhere.clone(),
    };
    run(op.clone()).unwrap();
    run(op::RmsNorm { out: x.clone(), ..op }).unwrap();
    assert_eq!(contents::<f32>(&x), contents::<f32>(&elsewhere));
    assert!((contents::<f32>(&x)[1] - 8.0 / 12.5f32.sqrt()).abs() < 1e-6);
    let shifted = bench.floats("shifted", &[1.0; 6]);
    let layer_norm = op::LayerNorm {
        x: shifted.slice(0, 4),
        rows: 2,
        width: 2,
        bias: weight.clone(),
        weight,
        eps: 1e-5,
        out: shifted.slice(1, 4),
    };
    refused(layer_norm, "overlaps");
}

#[test]
fn embeddings_are_summed_over_groups() {
    let bench = Bench::new();
    let halves: Vec<u16> = [10.0f32, 20.0]
        .iter()
        .map(|x| (x.to_bits() >> 16) as u16)
        .collect();
    let op = op::Embed {
        tables: vec![
            bench.floats("first", &[1.0, 2.0]),
            bench.view("second", DType::Bf16, bytemuck::cast_slice(&halves)),
        ],
        ids: bench.ints("ids", &[9, 0, 1, 9, -1, 0]),
        ids_stride: 3,
        first_id: 1,
        rows: 2,
        width: 1,
        accumulate: false,
        out: bench.floats("out", &[5.0, 5.0]),
    };
    run(op.clone()).unwrap();
    assert_eq!(contents::<f32>(&op.out), [21.0, 10.0]);
    run(op::Embed {
        accumulate: true,
        ..op.clone()
    })
    .unwrap();
    assert_eq!(contents::<f32>(&op.out), [42.0, 20.0]);
    refused(
        op::Embed {
            first_id: 2,
            ..op.clone()
        },
        "leave a row of 3 ids",
    );
    let ids = bench.ints("ids", &[0, 0, 2, 0, 0, 0]);
    refused(
        op::Embed { ids, ..op },
        "row 0 group 1 (second[0..2]): id 2 is past the 2 entries",
    );
}

fn sample_row(slot: i32) -> SampleRow {
    SampleRow {
        temperature: 0.0,
        top_p: 1.0,
        repetition_penalty: 2.0,
        top_k: 0,
        seed_lo: 0,
        seed_hi: 0,
        frame: 0,
        eos: -1,
        ban_eos: 0,
        slot,
        reserved: [0; 2],
    }
}

#[test]
fn sampling_updates_the_seen_sets_of_its_rows() {
    let bench = Bench::new();
    let vocab = 40;
    let mut logits = vec![0.0; 3 * vocab];
    for row in logits.chunks_exact_mut(vocab) {
        (row[3], row[35]) = (4.0, 3.0);
    }
    let rows = [sample_row(1), sample_row(0), sample_row(-1)];
    let op = op::Sample {
        logits: bench.floats("logits", &logits),
        rows: 3,
        vocab,
        live: vocab,
        extra_live: -1,
        params: bench.view("params", DType::U32, bytemuck::cast_slice(&rows)),
        group: 0,
        seen: Some(op::StateSlice {
            pool: bench.floats("seen", &[0.0; 7]),
            slot_stride: 3,
            offset: 1,
        }),
        tokens: bench.ints("tokens", &[-7; 6]),
        token_stride: 2,
        token_offset: 1,
        scores: Some(bench.floats("scores", &vec![0.0; 3 * vocab])),
    };
    // The second step penalises token 3 (4 / 2) where a seen set holds it, so that token 35 wins.
    for want in [[-7, 3, -7, 3, -7, 3], [-7, 35, -7, 35, -7, 3]] {
        run(op.clone()).unwrap();
        assert_eq!(contents::<i32>(&op.tokens), want);
    }
    let seen = op.seen.as_ref().map(|seen| contents::<u32>(&seen.pool));
    assert_eq!(seen, Some(vec![0, 1 << 3, 1 << 3, 0, 1 << 3, 1 << 3, 0]));
    assert_eq!(op.scores.as_ref().map(|s| contents::<f32>(s)[3]), Some(2.0));
    assert_eq!(contents::<f32>(&op.logits), logits, "the logits stay as they are");
    let params = bench.view("params", DType::U32, bytemuck::cast_slice(&[sample_row(2); 3]));
    refused(
        op::Sample { params, ..op.clone() },
        "row 0: slot 2 is not in the pool",
    );
    refused(op::Sample { live: 0, ..op }, "row 0: every token is banned");
}

#[test]
fn rows_move_by_index() {
    let bench = Bench::new();
    let gather = op::GatherRows {
        src: bench.ints("src", &[1, 2, 3, 4]),
        indirect: true,
        index: bench.ints("index", &[1, -1, 0]),
        rows: 3,
        width: 2,
        out: bench.ints("out", &[9; 6]),
    };
    run(gather.clone()).unwrap();
    assert_eq!(contents::<i32>(&gather.out), [3, 4, 0, 0, 1, 2]);
    let scatter = op::ScatterRows {
        src: gather.out.clone(),
        index: gather.index.clone(),
        rows: 3,
        width: 2,
        dst: gather.src.clone(),
    };
    run(scatter.clone()).unwrap();
    assert_eq!(contents::<i32>(&gather.src), [1, 2, 3, 4]);
    let index = bench.ints("index", &[0, 0, 2]);
    refused(
        op::GatherRows {
            index: index.clone(),
            ..gather
        },
        "leaves src[0..4]",
    );
    refused(op::ScatterRows { index, ..scatter }, "leaves src[0..4]");
}

#[test]
fn columns_are_copied_added_and_tiled() {
    let bench = Bench::new();
    let table = bench.floats("table", &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    let op = op::CopyColumns {
        src: table.clone(),
        src_stride: 3,
        src_first: 0,
        add: None,
        rows: 2,
        columns: 1,
        dst: table.clone(),
        dst_stride: 3,
        dst_first: 2,
    };
    run(op.clone()).unwrap();
    assert_eq!(contents::<f32>(&table), [1.0, 2.0, 1.0, 4.0, 5.0, 4.0]);
    let add = Some((table.clone(), 3, 1));
    run(op::CopyColumns {
        src_first: 2,
        add,
        ..op.clone()
    })
    .unwrap();
    assert_eq!(contents::<f32>(&table), [1.0, 2.0, 3.0, 4.0, 5.0, 9.0]);
    refused(
        op::CopyColumns {
            columns: 2,
            src_first: 1,
            dst_first: 0,
            ..op.clone()
        },
        "overlaps",
    );
    refused(op::CopyColumns { rows: 3, ..op }, "leaves table[0..6]");
    let tile = op::TileRow {
        src: bench.floats("src", &[7.0, 8.0]),
        rows: 2,
        columns: 2,
        dst: table.clone(),
        dst_stride: 3,
        dst_first: 1,
    };
    run(tile).unwrap();
    assert_eq!(contents::<f32>(&table), [1.0, 7.0, 8.0, 4.0, 7.0, 8.0]);
}

#[test]
fn copies_and_zeroes_elements_of_any_size() {
    let bench = Bench::new();
    let halves = bench.view("halves", DType::Bf16, bytemuck::cast_slice(&[1u16, 2, 3]));
    let ints = bench.ints("ints", &[4, 5]);
    run(op::Copy {
        src: halves.slice(0, 1),
        dst: halves.slice(2, 1),
    })
    .unwrap();
    run(op::Zero {
        dst: halves.slice(1, 1),
    })
    .unwrap();
    run(op::Zero {
        dst: ints.slice(0, 1),
    })
    .unwrap();
    assert_eq!(contents::<u16>(&halves), [1, 0, 1]);
    assert_eq!(contents::<i32>(&ints), [0, 5]);
    refused(
        op::Copy {
            src: ints.clone(),
            dst: halves.slice(0, 2),
        },
        "differ in type or length",
    );
}

fn small_conv(bench: &Bench) -> op::Conv {
    op::Conv {
        x: bench.floats("x", &[1.0, 2.0, 3.0, 4.0]),
        rows: 4,
        w: bench.matrix(1, 2, &[10.0, 1.0]),
        bias: None,
        c_in: 1,
        taps: 2,
        dilation: 1,
        snake: None,
        state: Some(op::StateSlice {
            pool: bench.floats("state", &[0.0, 7.0, 0.0, 8.0]),
            slot_stride: 2,
            offset: 1,
        }),
        windows: op::Windows {
            windows: bench.ints("windows", &[1, 1, 1, 0, 0, -1, 0, 1, 0]),
            count: 3,
            rate: 2,
        },
        pointwise: None,
        scratch: None,
        residual: None,
        clamp: false,
        out: bench.floats("out", &[0.5; 4]),
    }
}

#[test]
fn convolutions_carry_the_state_of_their_slots() {
    let bench = Bench::new();
    let op = small_conv(&bench);
    run(op.clone()).unwrap();
    assert_eq!(contents::<f32>(&op.out), [71.0, 12.0, 83.0, 34.0]);
    let state = op.state.as_ref().map(|state| contents::<f32>(&state.pool));
    assert_eq!(state, Some(vec![0.0, 2.0, 0.0, 4.0]));
    let residual = Some(op.out.clone());
    run(op::Conv {
        residual,
        clamp: true,
        ..op.clone()
    })
    .unwrap();
    assert_eq!(
        contents::<f32>(&op.out),
        [1.0; 4],
        "the output is its own residual, then clamped"
    );

    for windows in [
        [1, 1, 1, 0, 0, 0, 0, 1, 2],
        [1, 1, 1, 0, 0, 0, 2, 1, 0],
        [1, 1, -1, 0, 0, 0, 0, 1, 0],
    ] {
        let mut op = op.clone();
        op.windows.windows = bench.ints("windows", &windows);
        refused(op, "leaves its operands");
    }
    refused(
        op::Conv {
            taps: 1,
            ..op.clone()
        },
        "1 taps of 1 channels",
    );
    refused(
        op::Conv {
            out: op.x.clone(),
            ..op
        },
        "overlaps",
    );
}

#[test]
fn a_pointwise_convolution_goes_over_what_the_first_one_gives() {
    let bench = Bench::new();
    let op = op::Conv {
        pointwise: Some(op::Pointwise {
            snake: op::Snake {
                alpha: bench.floats("alpha", &[0.0]),
                inv_beta: bench.floats("inv_beta", &[1.0]),
            },
            w: bench.matrix(2, 1, &[1.0, -2.0]),
            bias: Some(bench.floats("bias", &[0.0, 0.5])),
        }),
        scratch: Some(bench.floats("scratch", &[f32::NAN; 16])),
        residual: Some(bench.floats("residual", &[100.0; 8])),
        out: bench.floats("wide_out", &[f32::NAN; 8]),
        ..small_conv(&bench)
    };
    run(op.clone()).unwrap();
    let first = [71.0, 12.0, 83.0, 34.0];
    let expected: Vec<f32> = first.iter().flat_map(|y| [100.0 + y, 100.5 - 2.0 * y]).collect();
    assert_eq!(contents::<f32>(&op.out), expected);
    let state = op.state.as_ref().map(|state| contents::<f32>(&state.pool));
    assert_eq!(
        state,
        Some(vec![0.0, 2.0, 0.0, 4.0]),
        "the first one's inputs are carried"
    );
}

#[test]
fn depthwise_convolutions_carry_state_too() {
    let bench = Bench::new();
    let conv = small_conv(&bench);
    let op = op::DepthwiseConv {
        x: conv.x,
        rows: 4,
        w: bench.floats("w", &[10.0, 1.0]),
        bias: bench.floats("bias", &[0.25]),
        channels: 1,
        taps: 2,
        state: conv.state.clone().unwrap(),
        windows: conv.windows,
        out: conv.out,
    };
    run(op.clone()).unwrap();
    assert_eq!(contents::<f32>(&op.out), [71.25, 12.25, 83.25, 34.25]);
    assert_eq!(contents::<f32>(&op.state.pool), [0.0, 2.0, 0.0, 4.0]);
}

#[test]
fn nearest_codes_go_where_their_stride_says() {
    let bench = Bench::new();
    let op = op::NearestCode {
        x: bench.floats("x", &[0.9, 0.1]),
        rows: 2,
        width: 1,
        book: bench.floats("book", &[0.0, 1.0]),
        entries: 2,
        codes: bench.ints("codes", &[-1; 4]),
        code_stride: 2,
        code_offset: 1,
    };
    run(op.clone()).unwrap();
    assert_eq!(contents::<i32>(&op.codes), [-1, 1, -1, 0]);
    assert_eq!(contents::<f32>(&op.x), [0.9f32 - 1.0, 0.1]);
    refused(
        op::NearestCode { code_offset: 3, ..op },
        "row 1: its code leaves codes[0..4]",
    );
}
