//! What one engine step costs besides the model: 64 rows on the chain, on a device and with nodes that do
//! nothing. The time is wall time a decode step, all threads and channels of the engine included.
//!
//! Where the device takes no time the engine thread never blocks, so what a real device adds is measured too:
//! behind steps of [`DEVICE_STEP`] each step also costs a block and a wake-up, which the thread's CPU time shows.
#![allow(missing_docs)] // The macros of criterion make public items.

use std::sync::Arc;
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use laneway_device::testing::IdleStream;
use laneway_device::{
    Buffer, BufferSpec, Device, DeviceFacts, Launcher, Matrix, MatrixSpec, Priority, Result, Stream,
    StreamConfig, Touches, View,
};
use laneway_engine::node::*;
use laneway_engine::{
    Engine, EngineConfig, EngineHandle, LaneConfig, Limits, NodeConfig, OutputEvent, ResourceConfig,
    Submission,
};
use laneway_plan::declaration::*;

const ITEM_WORDS: usize = 16;

/// What a step takes on the device that is not infinitely fast.
const DEVICE_STEP: Duration = Duration::from_millis(1);

/// Computes nothing; each step on one of its streams takes this long.
#[derive(Debug)]
struct NullDevice(Duration);

impl Device for NullDevice {
    fn facts(&self) -> DeviceFacts {
        DeviceFacts {
            name: "null".into(),
            memory_bytes: u64::MAX,
            used_bytes: 0,
            sms: 0,
            partition_granularity: 0,
            exact_buckets: true,
        }
    }

    fn alloc(&self, spec: BufferSpec) -> Result<Buffer> {
        Ok(Buffer::from_storage(Buffer::next_id(), spec, Box::new(())))
    }

    fn alloc_with(&self, spec: BufferSpec, _data: &[u8]) -> Result<Buffer> {
        self.alloc(spec)
    }

    fn pack_matrix(&self, _spec: MatrixSpec<'_>) -> Result<Matrix> {
        unreachable!("the nodes have no weights")
    }

    fn create_stream(&self, config: StreamConfig) -> Result<Arc<dyn Stream>> {
        Ok(Arc::new(IdleStream::new(config, self.0)))
    }

    fn host_write(&self, _view: &View, _bytes: &[u8]) -> Result<()> {
        Ok(())
    }

    fn host_read(&self, _view: &View, _bytes: &mut [u8]) -> Result<()> {
        Ok(())
    }
}

/// Counts its steps, and makes an item a step until there are as many as the payload says.
struct NullNode {
    name: String,
    max_rows: usize,
    makes_items: bool,
    item: Arc<[i32]>,
}

impl Node for NullNode {
    fn name(&self) -> &str {
        &self.name
    }

    fn max_rows(&self, _walk: WalkId) -> usize {
        self.max_rows
    }

    fn open(&mut self, _walk: WalkId, _payload: &Payload) -> std::result::Result<RowState, RowError> {
        Ok(Box::new(0u64))
    }

    fn plan(
        &mut self,
        _walk: WalkId,
        _stage: Stage,
        _rows: &mut [StepRow<'_>],
        _touches: &mut Touches,
    ) -> std::result::Result<(), PlanError> {
        Ok(())
    }

    fn forward(
        &mut self,
        _walk: WalkId,
        _stage: Stage,
        _n_rows: usize,
        _launcher: &Launcher<'_>,
    ) -> Result<()> {
        Ok(())
    }

    fn commit(&mut self, _walk: WalkId, _rows: &mut [StepRow<'_>]) {}

    fn postprocess(
        &mut self,
        _walk: WalkId,
        _stage: Stage,
        rows: &mut [Option<StepRow<'_>>],
    ) -> Vec<RowOutcome> {
        let outcome = |row: &mut Option<StepRow<'_>>| {
            let Some(row) = row.as_mut().filter(|_| self.makes_items) else {
                return RowOutcome::default();
            };
            let steps = row.state.downcast_mut::<u64>().expect("this node's own state");
            let wanted = row.payload.downcast_ref::<u64>().expect("a number of steps");
            *steps += 1;
            RowOutcome {
                items: vec![self.item.clone()],
                finish: (*steps >= *wanted).then_some(FinishReason::Length),
                ..RowOutcome::default()
            }
        };
        rows.iter_mut().map(outcome).collect()
    }

    fn warm_up(&mut self, _launcher: &Launcher<'_>) -> Result<()> {
        Ok(())
    }
}

struct NullModel(ModelDeclaration);

impl Model for NullModel {
    fn declaration(&self) -> &ModelDeclaration {
        &self.0
    }

    fn build_node(
        &self,
        name: &str,
        context: NodeContext,
    ) -> std::result::Result<Box<dyn Node>, Box<dyn std::error::Error + Send + Sync>> {
        Ok(Box::new(NullNode {
            name: name.into(),
            max_rows: context.max_rows,
            makes_items: name == "Talker",
            item: vec![0; ITEM_WORDS].into(),
        }))
    }

    fn needs(&self, node: &str, _payload: &Payload) -> Vec<Need> {
        let (resource, amount) = match node {
            "Talker" => ("kv", Amount::Positions(512)),
            _ => ("state", Amount::Slots(1)),
        };
        vec![Need {
            resource: resource.into(),
            amount,
            prefix: Vec::new(),
        }]
    }
}

fn declaration() -> ModelDeclaration {
    let node = |name: &str, resource: &str| NodeDecl {
        name: name.into(),
        parallel_ranks: 1,
        stop_check: false,
        output_spans: false,
        resources: vec![resource.into()],
        weight_bytes: 0,
        workspace_bytes: 0,
        workspace_bytes_per_row: 0,
    };
    let walk = |name: &str, node: &str, kind| WalkDecl {
        name: name.into(),
        nodes: vec![node.into()],
        kind,
        combined_with: None,
        state_across_requests: false,
    };
    let resource = |key: &str, page_size| ResourceDecl {
        key: key.into(),
        kind: key.into(),
        page_size,
        zero_on_release: page_size == 0,
        element: Default::default(),
        report: ResourceReport {
            bytes_per_slot: 4,
            ..ResourceReport::default()
        },
    };
    ModelDeclaration {
        model: "null".into(),
        nodes: vec![node("Talker", "kv"), node("Codec", "state")],
        walks: vec![
            walk("prefill", "Talker", WalkKind::Entry),
            walk("decode", "Talker", WalkKind::Loop),
            walk("chunk", "Codec", WalkKind::Stream),
        ],
        stream_edges: vec![StreamEdgeDecl {
            name: "codes".into(),
            from: vec!["prefill".into(), "decode".into()],
            to: "chunk".into(),
            item_words: ITEM_WORDS as u32,
            chunk: ChunkPolicy {
                first: 1,
                ramp: vec![2, 4, 8],
                steady: 16,
            },
            max_window: 32,
            capacity: 64,
        }],
        request_edges: Vec::new(),
        resources: vec![resource("kv", 16), resource("state", 0)],
    }
}

fn start(rows: usize, codec_lane: usize, device_step: Duration) -> (Engine, EngineHandle) {
    let lane = LaneConfig {
        priority: Priority::Normal,
        partition_sms: None,
        max_rows: rows,
    };
    let placed = |node: &str, lane| NodeConfig {
        node: node.into(),
        lane,
        auto: None,
    };
    let resource = |key: &str, slots, page_size| ResourceConfig {
        key: key.into(),
        slots,
        page_size,
    };
    let config = EngineConfig {
        device: Arc::new(NullDevice(device_step)),
        model: Arc::new(NullModel(declaration())),
        lanes: vec![lane; codec_lane + 1],
        nodes: vec![placed("Talker", 0), placed("Codec", codec_lane)],
        resources: vec![
            resource("kv", 64 * rows as u32, 16),
            resource("state", 2 * rows as u32, 0),
        ],
        chunks: Default::default(),
        max_prefill_tokens: 8192,
        max_seq_len: 8192,
        capture_buckets: vec![rows],
        playback_hz: 24_000,
        limits: Limits {
            max_running: rows,
            ..Limits::default()
        },
    };
    Engine::start(config).expect("an engine that does nothing starts")
}

/// Run `rows` requests of `steps` steps each at once.
fn run(handle: &EngineHandle, rows: usize, steps: u64) -> Duration {
    let began = Instant::now();
    let mut streams: Vec<_> = (0..rows)
        .map(|row| {
            let submission = Submission {
                id: row.to_string(),
                payload: Arc::new(steps) as Payload,
                chunk: None,
                deadline: None,
                results: Vec::new(),
            };
            handle.submit(submission).expect("there is a place for every row")
        })
        .collect();
    for stream in &mut streams {
        let last = std::iter::from_fn(|| stream.blocking_recv()).last();
        assert!(matches!(last, Some(OutputEvent::Finished { .. })), "{last:?}");
    }
    began.elapsed()
}

/// What the engine thread ran for each chain step: unlike wall time, it does not count who else ran.
fn print_cpu_time(handle: &EngineHandle) {
    let stats = handle.stats();
    let on_chain = stats.walks.iter().filter(|walk| walk.lane == 0);
    let steps: u64 = on_chain.map(|walk| walk.steps).sum();
    let tasks = std::fs::read_dir("/proc/self/task")
        .into_iter()
        .flatten()
        .flatten();
    let engine = tasks
        .map(|task| task.path())
        .find(|task| std::fs::read_to_string(task.join("comm")).is_ok_and(|name| name.trim() == "engine"));
    let ran = engine.and_then(|task| std::fs::read_to_string(task.join("schedstat")).ok());
    let ran_ns: Option<f64> = ran.and_then(|text| text.split(' ').next()?.parse().ok());
    if let (Some(ran_ns), 1..) = (ran_ns, steps) {
        println!(
            "{:24}CPU time of the engine thread: {:.1} µs a chain step",
            "",
            ran_ns / 1e3 / steps as f64
        );
    }
}

fn engine_step(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("engine_step");
    group.sample_size(20);
    group.warm_up_time(Duration::from_secs(1));
    group.measurement_time(Duration::from_secs(2));
    for (placement, codec_lane) in [("codec on the chain", 0), ("codec on a lane", 1)] {
        for rows in [1, 64] {
            let (engine, handle) = start(rows, codec_lane, Duration::ZERO);
            group.bench_function(BenchmarkId::new(placement, rows), |bencher| {
                bencher.iter_custom(|steps| run(&handle, rows, steps));
            });
            print_cpu_time(&handle);
            drop(engine);
        }
    }
    group.finish();
}

/// Host time behind a device that is the slower of the two, as in real service.
fn host_time(_: &mut Criterion) {
    for (placement, codec_lane) in [("codec on the chain", 0), ("codec on a lane", 1)] {
        let (engine, handle) = start(64, codec_lane, DEVICE_STEP);
        run(&handle, 64, 2000);
        println!("host_time/{placement}/64, behind device steps of {DEVICE_STEP:?}");
        print_cpu_time(&handle);
        drop(engine);
    }
}

criterion_group!(benches, engine_step, host_time);
criterion_main!(benches);
