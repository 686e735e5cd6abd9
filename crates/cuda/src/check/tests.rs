//! The check itself: the CPU device agrees with itself, and devices that are wrong in one way each are found out.

use laneway_device::op::{ChannelScale, InputNorm, Zero};
use laneway_device::{
    Buffer, BufferSpec, CpuConfig, CpuDevice, DeviceFacts, Event, Graph, Matrix, MatrixSpec, Op, Place,
    Stream, StreamConfig, Touches, View, op,
};

use super::*;

fn cpu() -> Arc<dyn Device> {
    Arc::new(CpuDevice::new(CpuConfig { memory_bytes: None }).unwrap())
}

fn config(subject: Arc<dyn Device>, filter: Option<&str>) -> CheckConfig {
    CheckConfig {
        reference: cpu(),
        subject,
        shuffled: None,
        arch: 0,
        guards: None,
        products: Products::AsGiven,
        caches: vec![DType::F32],
        states: vec![DType::F32],
        filter: filter.map(str::to_owned),
        seed: 7,
        sizes: Sizes::Small,
        threads: 2,
    }
}

/// The reports of a check.
fn reports(config: &CheckConfig) -> Vec<CaseReport> {
    let mut all = Vec::new();
    let summary = check(config, &mut |report| all.push(report.clone())).unwrap();
    assert_eq!(summary.cases, all.len());
    assert_eq!(
        summary.passed,
        all.iter().filter(|report| report.passed()).count()
    );
    assert_eq!(summary.lost, None);
    all
}

#[test]
fn the_cpu_device_agrees_with_itself_on_every_operation() {
    let mut config = config(cpu(), None);
    config.shuffled = Some(cpu());
    let all = reports(&config);
    for report in &all {
        assert!(report.passed(), "{}\n{:?}", report.line(), report.problems);
    }
    for name in Op::NAMES {
        assert!(all.iter().any(|report| report.op == *name), "no case of {name}");
    }
}

#[test]
fn operands_of_products_lie_in_blocks_on_the_device_and_by_rows_in_an_outcome() {
    let (rows, width) = (70, 1024);
    let values: Vec<f32> = (0..rows * width).map(|i| (i % 251) as f32).collect();
    let mut e = Experiment::new(rows);
    let narrow = e.input_rows("narrow", width, data::Data::real(&values, DType::Bf16));
    let wide = e.input_rows("wide", width, data::Data::floats(&values));
    for (arch, blocks) in [(0, false), (89, false), (90, true)] {
        let rig = Rig::new(cpu(), arch).unwrap();
        let (outcome, placed) = e.run(&rig, None).unwrap();
        for (slot, moved) in [(narrow, blocks), (wide, false)] {
            let held = rig.download(&placed.view(slot)).unwrap();
            let fetched = slot.of(&outcome);
            assert_eq!(fetched.first_difference(&held).is_some(), moved, "arch {arch}");
            let element = |row, column| fetched.float(row * width + column);
            assert_eq!(element(69, 1023), values[70 * width - 1], "arch {arch}");
            if moved {
                // Row 65 is the second of a block of six; its third eight columns lie behind two eights of all six.
                assert_eq!(held.float(64 * width + (2 * 6 + 1) * 8 + 3), element(65, 19));
            }
        }
    }
}

/// A CPU device that does one thing wrong.
#[derive(Debug)]
struct Mutant {
    inner: Arc<dyn Device>,
    alter: Alter,
}

/// What is launched in place of an operation. `nudge` changes the first element of a view in its last bits.
type Alter = fn(Op, &dyn Fn(View) -> Op) -> Vec<Op>;

#[derive(Debug)]
struct MutantStream {
    inner: Arc<dyn Stream>,
    alter: Alter,
    factor: View,
}

impl Device for Mutant {
    fn facts(&self) -> DeviceFacts {
        self.inner.facts()
    }

    fn alloc(&self, spec: BufferSpec) -> Result<Buffer> {
        self.inner.alloc(spec)
    }

    fn alloc_with(&self, spec: BufferSpec, data: &[u8]) -> Result<Buffer> {
        self.inner.alloc_with(spec, data)
    }

    fn pack_matrix(&self, spec: MatrixSpec<'_>) -> Result<Matrix> {
        self.inner.pack_matrix(spec)
    }

    fn create_stream(&self, config: StreamConfig) -> Result<Arc<dyn Stream>> {
        let spec = BufferSpec {
            name: "factor".to_owned(),
            dtype: DType::F32,
            len: 1,
            place: Place::Device,
        };
        let factor = self.inner.alloc_with(spec, &1.000_000_3f32.to_le_bytes())?;
        Ok(Arc::new(MutantStream {
            inner: self.inner.create_stream(config)?,
            alter: self.alter,
            factor: factor.view(),
        }))
    }

    fn host_write(&self, view: &View, bytes: &[u8]) -> Result<()> {
        self.inner.host_write(view, bytes)
    }

    fn host_read(&self, view: &View, bytes: &mut [u8]) -> Result<()> {
        self.inner.host_read(view, bytes)
    }
}

impl Stream for MutantStream {
    fn config(&self) -> &StreamConfig {
        self.inner.config()
    }

    fn id(&self) -> u64 {
        self.inner.id()
    }

    fn launch(&self, op: &Op, touches: &Touches) -> Result<()> {
        let nudge = |x: View| {
            let x = x.slice(0, 1);
            let scale = ChannelScale {
                x: x.clone(),
                scale: self.factor.clone(),
                add: None,
                rows: 1,
                channels: 1,
                out: x,
            };
            scale.into()
        };
        for op in (self.alter)(op.clone(), &nudge) {
            self.inner.launch(&op, touches)?;
        }
        Ok(())
    }

    fn record(&self) -> Result<Event> {
        self.inner.record()
    }

    fn wait(&self, event: &Event) -> Result<()> {
        self.inner.wait(event)
    }

    fn capture(&self, build: &mut dyn FnMut(&dyn Stream) -> Result<()>) -> Result<Graph> {
        self.inner.capture(build)
    }

    fn replay(&self, graph: &Graph, touches: &Touches) -> Result<()> {
        self.inner.replay(graph, touches)
    }
}

fn mutant(alter: Alter) -> Arc<dyn Device> {
    Arc::new(Mutant { inner: cpu(), alter })
}

/// Some case of `op` fails on the mutant, for a reason that says `why`.
fn caught(op: &str, alter: Alter, why: &str) {
    let all = reports(&config(mutant(alter), Some(op)));
    assert!(!all.is_empty());
    let mut problems = all.iter().flat_map(|report| &report.problems);
    assert!(
        problems.any(|problem| problem.contains(why)),
        "{op} {why}: {all:#?}"
    );
    assert!(all.iter().any(|report| report.line().ends_with("FAIL")));
}

fn zero(view: View) -> Op {
    Zero { dst: view }.into()
}

#[test]
fn one_wrong_element_of_a_product_is_found() {
    let alter: Alter = |op, _| match op {
        Op::Gemm(op) => {
            let last = op.rows * op.out_width() - 1;
            let dst = op.out.slice(last, 1);
            vec![op.into(), zero(dst)]
        }
        op => vec![op],
    };
    caught("Gemm", alter, "worst [");
}

#[test]
fn rows_that_depend_on_their_batch_are_found_though_the_numbers_are_right() {
    let alter: Alter = |op, nudge| match op {
        Op::Gemm(op) if op.rows > 16 => {
            let out = op.out.clone();
            vec![op.into(), nudge(out)]
        }
        op => vec![op],
    };
    let all = reports(&config(mutant(alter), Some("Gemm")));
    let of_batch = |problem: &String| problem.contains("in a batch of");
    let found = all.iter().filter(|report| report.problems.iter().any(of_batch));
    // An element that an activation made 0 cannot be nudged.
    assert!(found.count() > all.len() * 3 / 4, "{all:#?}");
    assert!(all.iter().all(|report| report.error < 3e-5), "{all:#?}");
    let alter: Alter = |op, _| match op {
        Op::RmsNorm(mut op) if op.rows % 2 == 1 => {
            op.eps *= 1.3;
            vec![op.into()]
        }
        op => vec![op],
    };
    caught("RmsNorm", alter, "has other bits");
}

#[test]
fn outputs_and_state_that_depend_on_the_windows_are_found() {
    let alter: Alter = |op, nudge| match op {
        Op::Conv(op) if op.windows.count > 1 => {
            let out = op.out.clone();
            vec![op.into(), nudge(out)]
        }
        op => vec![op],
    };
    caught("Conv", alter, "one frame at a time: out of stream 0 frame");
    // A launch of one window of one frame loses an input that it should carry on.
    let alter: Alter = |op, _| match op {
        Op::DepthwiseConv(op) if op.windows.count == 1 => {
            let state = &op.state;
            let carried = (0..state.pool.len / state.slot_stride)
                .map(|slot| zero(state.pool.slice(slot * state.slot_stride + state.offset, 1)));
            let carried: Vec<Op> = carried.collect();
            [Op::from(op)].into_iter().chain(carried).collect()
        }
        op => vec![op],
    };
    caught("DepthwiseConv", alter, "other bits");
}

#[test]
fn a_fused_operation_that_is_not_its_parts_is_found() {
    let alter: Alter = |op, nudge| match op {
        Op::DecodeAttention(op) => {
            let out = op.out.clone();
            vec![op.into(), nudge(out)]
        }
        op => vec![op],
    };
    caught("DecodeAttention", alter, "apart: out");
    let alter: Alter = |op, _| match op {
        Op::Gemm(mut op) => {
            if let Some(InputNorm { eps, .. }) = &mut op.norm {
                *eps = 1e-2;
            }
            vec![op.into()]
        }
        op => vec![op],
    };
    caught("Gemm", alter, "norm apart");
}

#[test]
fn what_must_not_be_read_or_written_is_found() {
    let alter: Alter = |op, _| match op {
        Op::SiluMul(op) => {
            let x = op.x.slice(1, 1);
            vec![op.into(), zero(x)]
        }
        op => vec![op],
    };
    caught("SiluMul", alter, "x[1] is 0x0");
    let alter: Alter = |op, _| match op {
        Op::CopyColumns(op) if op.dst_first > 0 => {
            let beside = op.dst.slice(op.dst_first - 1, 1);
            vec![op.into(), zero(beside)]
        }
        op => vec![op],
    };
    caught("CopyColumns", alter, "dst[");
    // Looks back further than it may.
    let alter: Alter = |op, _| match op {
        Op::Attention(mut op) => {
            op.window = op.window.map(|window| window + 1);
            vec![op.into()]
        }
        op => vec![op],
    };
    caught("Attention", alter, "out");
}

#[test]
fn a_wrong_token_is_found() {
    let alter: Alter = |op, _| match op {
        Op::Sample(op) => {
            let wrong = op::Sample {
                group: op.group + 1,
                ..op
            };
            vec![wrong.into()]
        }
        op => vec![op],
    };
    caught("Sample", alter, "worse");
}

#[test]
fn a_subject_that_does_not_round_what_it_says_it_rounds_is_found() {
    let mut config = config(cpu(), Some("Gemm"));
    config.products = Products::Bf16;
    let all = reports(&config);
    for report in &all {
        // One product of one input may round to what it was.
        let unit = report.shape.starts_with("64x1 ");
        assert!(unit || !report.passed(), "{}", report.line());
    }
    config.products = Products::F32;
    assert!(reports(&config).iter().all(CaseReport::passed));
}

#[test]
fn cases_behind_a_failed_or_a_missing_operation_still_run() {
    let alter: Alter = |op, _| match op {
        Op::RmsNorm(op) if op.width == 33 => panic!("not there yet"),
        Op::RmsNorm(mut op) if op.width == 7 => {
            op.rows += 1;
            vec![op.into()]
        }
        op => vec![op],
    };
    let all = reports(&config(mutant(alter), Some("RmsNorm")));
    let failed: Vec<_> = all.iter().filter(|report| !report.passed()).collect();
    assert_eq!(failed.len(), 4, "{all:#?}");
    assert!(
        failed
            .iter()
            .any(|report| report.problems[0] == "panicked: not there yet")
    );
    assert!(all.iter().any(|report| report.passed()));
}

#[test]
fn another_block_order_that_changes_a_bit_and_a_broken_guard_are_found() {
    let alter: Alter = |op, nudge| match op {
        Op::TimeStats(op) => {
            let mean = op.mean.clone();
            vec![op.into(), nudge(mean)]
        }
        op => vec![op],
    };
    let mut config = config(cpu(), Some("TimeStats"));
    config.shuffled = Some(mutant(alter));
    config.guards = Some(Box::new(|| Err("behind `x`".to_owned())));
    for report in reports(&config) {
        assert!(
            report
                .problems
                .iter()
                .any(|p| p.starts_with("shuffled blocks: mean")),
            "{report:?}"
        );
        assert!(report.problems.contains(&"guards: behind `x`".to_owned()));
    }
}
