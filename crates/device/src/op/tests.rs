//! What each operation reaches, and what its validation refuses.

use std::sync::Arc;

mod cases;

use super::*;
use crate::{Buffer, BufferSpec, CpuConfig, CpuDevice, DType, Device, DeviceError, Place, TouchKind, View};
use cases::CASES;

/// What is put wrong with the n-th operand that an operation is built from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Wrong {
    Nothing,
    /// One element too short.
    Length(usize),
    /// Another element type.
    Type(usize),
}

struct Make {
    device: Arc<CpuDevice>,
    wrong: Wrong,
    buffers: Vec<Buffer>,
}

impl Make {
    fn buffer(&mut self, name: &str, len: usize, dtype: DType) -> Buffer {
        let n = self.buffers.len();
        let buffer = self
            .device
            .alloc(BufferSpec {
                name: name.to_owned(),
                dtype: match dtype {
                    dtype if self.wrong != Wrong::Type(n) => dtype,
                    DType::F32 => DType::I32,
                    DType::U32 => DType::F32,
                    DType::I32 | DType::Bf16 | DType::F16 => DType::Bf16,
                },
                len: len - usize::from(self.wrong == Wrong::Length(n)),
                place: Place::Device,
            })
            .unwrap();
        self.buffers.push(buffer.clone());
        buffer
    }

    fn f32(&mut self, name: &str, len: usize) -> View {
        self.buffer(name, len, DType::F32).view()
    }

    fn i32(&mut self, name: &str, len: usize) -> View {
        self.buffer(name, len, DType::I32).view()
    }

    fn matrix(&mut self, n: usize, k: usize) -> Matrix {
        let packed = self.buffer("w", n * k, DType::F32);
        Matrix { packed, n, k }
    }

    fn cache(&mut self) -> KvCache {
        KvCache {
            pool: self.f32("cache.pool", 2 * 2 * 2 * 4),
            page_stride: 2 * 2 * 2 * 4,
            k_offset: 0,
            v_offset: 2 * 2 * 4,
            page_size: 2,
            kv_heads: 2,
            head_dim: 4,
            table: self.i32("cache.table", 6),
            blocks_per_sequence: 2,
            ring: false,
        }
    }

    fn state(&mut self, name: &str, len: usize) -> StateSlice {
        StateSlice {
            pool: self.f32(name, len),
            slot_stride: len,
            offset: 0,
        }
    }

    fn windows(&mut self) -> Windows {
        Windows {
            windows: self.i32("windows", 6),
            count: 2,
            rate: 1,
        }
    }
}

fn device() -> Arc<CpuDevice> {
    let config = CpuConfig {
        memory_bytes: Some(1 << 20),
    };
    Arc::new(CpuDevice::new(config).unwrap())
}

fn make(device: &Arc<CpuDevice>, wrong: Wrong) -> Make {
    Make {
        device: Arc::clone(device),
        wrong,
        buffers: Vec::new(),
    }
}

#[test]
fn every_operand_is_reached_and_checked() {
    let device = device();
    for (build, free_length, free_type) in CASES {
        let mut right = make(&device, Wrong::Nothing);
        let op = build(&mut right);
        op.validate().unwrap();

        let accesses = op.access();
        let mut reached: Vec<u64> = accesses.direct.iter().map(|access| access.buffer.id()).collect();
        reached.extend(accesses.indirect.iter().map(|pool| pool.buffer.id()));
        reached.sort_unstable();
        let made: Vec<u64> = right.buffers.iter().map(Buffer::id).collect();
        assert_eq!(reached, made, "buffers of {op:?}");

        for (i, buffer) in right.buffers.iter().enumerate() {
            for (wrong, free) in [(Wrong::Length(i), free_length), (Wrong::Type(i), free_type)] {
                let outcome = build(&mut make(&device, wrong)).validate();
                let refused =
                    matches!(outcome, Err(DeviceError::BadOperation { op: name, .. }) if name == op.name());
                assert_eq!(
                    refused,
                    !free.contains(&buffer.name()),
                    "{} with {wrong:?} of {}: {outcome:?}",
                    op.name(),
                    buffer.name()
                );
            }
        }
    }
}

#[test]
fn every_operation_is_a_case() {
    let device = device();
    let mut names: Vec<&str> = CASES
        .iter()
        .map(|(build, ..)| build(&mut make(&device, Wrong::Nothing)).name())
        .collect();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), Op::NAMES.len());
}

/// Written and read ranges of an operation as text, pools with `*`.
fn accesses(op: &Op) -> String {
    let accesses = op.access();
    let mut parts: Vec<String> = Vec::new();
    let sign = |kind| if kind == TouchKind::Write { "w" } else { "r" };
    for access in &accesses.direct {
        let ranges: Vec<String> = access.ranges().map(|range| format!("{range:?}")).collect();
        parts.push(format!(
            "{} {} {}",
            sign(access.kind),
            access.role,
            ranges.join(" ")
        ));
    }
    for pool in &accesses.indirect {
        parts.push(format!("{}* {} {:?}", sign(pool.kind), pool.role, pool.range));
    }
    parts.join(", ")
}

#[test]
fn ranges_are_exact() {
    let device = device();
    let mut m = make(&device, Wrong::Nothing);
    let check = |op: Op, expected: &str| assert_eq!(accesses(&op), expected);
    let (src, dst, index) = (m.i32("src", 100), m.i32("dst", 100), m.i32("index", 10));
    check(
        Copy {
            src: src.slice(10, 5),
            dst: dst.slice(20, 5),
        }
        .into(),
        "r src 10..15, w dst 20..25",
    );
    check(
        CopyColumns {
            src: src.slice(10, 40),
            src_stride: 10,
            src_first: 2,
            add: None,
            rows: 3,
            columns: 4,
            dst: dst.slice(50, 12),
            dst_stride: 4,
            dst_first: 0,
        }
        .into(),
        "r src 12..16 22..26 32..36, w dst 50..62",
    );
    check(
        GatherRows {
            src: src.slice(20, 60),
            indirect: true,
            index: index.slice(4, 2),
            rows: 2,
            width: 5,
            out: dst.slice(0, 50),
        }
        .into(),
        "r index 4..6, w out 0..10, r* src 20..80",
    );
    check(
        TileRow {
            src: src.slice(0, 3),
            rows: 0,
            columns: 3,
            dst,
            dst_stride: 7,
            dst_first: 2,
        }
        .into(),
        "r src 0..3, w dst ",
    );
}

#[test]
fn overlaps_are_refused_unless_in_place() {
    let device = device();
    let mut m = make(&device, Wrong::Nothing);
    let x = m.f32("x", 12);
    let weight = m.f32("weight", 3);
    let norm = |from: usize, to: usize| RmsNorm {
        x: x.slice(from, 6),
        rows: 2,
        width: 3,
        weight: weight.clone(),
        eps: 1e-6,
        out: x.slice(to, 6),
    };
    Op::from(norm(0, 0)).validate().unwrap();
    Op::from(norm(0, 6)).validate().unwrap();
    let error = Op::from(norm(0, 3)).validate().unwrap_err();
    assert_eq!(
        error.to_string(),
        "RmsNorm: out overlaps x in x: elements from 3 and from 0"
    );
    let silu = SiluMul {
        x: x.clone(),
        rows: 2,
        width: 3,
        out: x.slice(0, 6),
    };
    Op::from(silu).validate().unwrap_err();
}

/// One case: an operation that fits, a change to it, and what its validation then says.
fn check_refused(build: impl FnOnce(&mut Make) -> Op, expected: &str) {
    let device = device();
    let error = build(&mut make(&device, Wrong::Nothing)).validate().unwrap_err();
    assert_eq!(error.to_string(), expected);
}

#[test]
fn refusals_name_the_operand_and_the_numbers() {
    check_refused(
        |m| {
            Op::from(SiluMul {
                x: m.f32("gate_up", 11),
                rows: 2,
                width: 3,
                out: m.f32("hidden", 6),
            })
        },
        "SiluMul: x (gate_up[0..11]) has 11 elements, 12 are needed",
    );
    check_refused(
        |m| {
            Op::from(Copy {
                src: m.i32("ids", 3),
                dst: m.f32("work", 3),
            })
        },
        "Copy: src ids[0..3] is 3 x I32, dst work[0..3] is 3 x F32: they must be the same",
    );
    check_refused(
        |m| {
            Op::from(RopeTable {
                positions: m.f32("positions", 3),
                inv_freq: m.f32("inv_freq", 2),
                rows: 3,
                head_dim: 4,
                out: m.f32("out", 12),
            })
        },
        "RopeTable: positions (positions) is F32, it must be I32",
    );
    check_refused(
        |m| {
            Op::from(TileRow {
                src: m.i32("src", 2),
                rows: 3,
                columns: 2,
                dst: m.i32("dst", 30),
                dst_stride: 5,
                dst_first: 4,
            })
        },
        "TileRow: dst: columns 4..6 leave rows of 5",
    );
    check_refused(
        |m| {
            Op::from(Attention {
                q: m.f32("q", 12),
                rows: 1,
                heads: 3,
                sequences: m.i32("sequences", 1),
                positions: m.i32("positions", 1),
                cache: m.cache(),
                window: None,
                out: m.f32("out", 12),
            })
        },
        "Attention: 3 query heads do not divide into 2 groups",
    );
    check_refused(
        |m| {
            Op::from(DepthwiseConv {
                x: m.f32("x", 10),
                rows: 5,
                w: m.f32("w", 6),
                bias: m.f32("bias", 2),
                channels: 2,
                taps: 3,
                state: StateSlice {
                    pool: m.f32("codec_state", 100),
                    slot_stride: 10,
                    offset: 7,
                },
                windows: m.windows(),
                out: m.f32("out", 10),
            })
        },
        "DepthwiseConv: state: 4 elements at offset 7 leave a slot of 10 in codec_state[0..100]",
    );
    let pointwise_of = |m: &mut Make, k| Conv {
        x: m.f32("x", 5 * 2),
        rows: 5,
        w: m.matrix(3, 2),
        bias: None,
        c_in: 2,
        taps: 1,
        dilation: 1,
        snake: None,
        state: None,
        windows: m.windows(),
        pointwise: Some(Pointwise {
            snake: Snake {
                alpha: m.f32("alpha", 3),
                inv_beta: m.f32("inv_beta", 3),
            },
            w: m.matrix(4, k),
            bias: None,
        }),
        scratch: Some(m.f32("scratch", 5 * 3)),
        residual: None,
        clamp: false,
        out: m.f32("out", 5 * 4),
    };
    check_refused(
        |m| pointwise_of(m, 2).into(),
        "Conv: pointwise.w has 2 inputs, the convolution in front of it gives 3",
    );
    check_refused(
        |m| {
            let scratch = None;
            Conv {
                scratch,
                ..pointwise_of(m, 3)
            }
            .into()
        },
        "Conv: a convolution with a second one needs a scratch",
    );
}
