//! A model with the shape of a speech model and arithmetic that shows every mistake: each request's items and
//! samples are a chain over device memory, `y' = y/2 + input (+ the page of the position before)/4`, so that a
//! dirty slot, a wrong page, a ring row read too early or a neighbour's row changes everything behind it.

use std::collections::HashMap;
use std::sync::Arc;

use laneway_device::{Buffer, BufferSpec, DType, Device, DeviceError, Launcher, Op, Place, Touches, op};
use laneway_engine::node::*;
use laneway_plan::declaration::*;
use parking_lot::Mutex;

/// Words of an item, a state slot and a position of the cache.
pub(crate) const WORDS: usize = 4;
pub(crate) const PAGE: u32 = 4;
pub(crate) const MAX_WINDOW: u32 = 8;
pub(crate) const CAPACITY: u32 = 16;

pub(crate) const REF_ENCODE: usize = 0;
pub(crate) const PREFILL: usize = 1;
pub(crate) const DECODE: usize = 2;
pub(crate) const PRIME: usize = 3;
pub(crate) const CHUNK: usize = 4;

type Words = [f32; WORDS];

/// Where a request goes wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    /// The node does not open it for this walk.
    Open(usize),
    /// This walk's plan refuses it at this step.
    Plan(usize, u32),
    /// This walk's outcome at this step is an error.
    Outcome(usize, u32),
    /// This walk's launch breaks off at this step, after its first operation.
    Forward(usize, u32),
    /// An operation of this walk fails on the device at this step.
    Device(usize, u32),
    /// The node panics in this walk's plan at this step.
    Panic(usize, u32),
}

/// What is submitted.
#[derive(Debug, Clone, Default)]
pub(crate) struct FakeRequest {
    pub(crate) seed: u32,
    /// Items to make.
    pub(crate) frames: u32,
    /// Ends by an end token: one more step, with no item.
    pub(crate) end_token: bool,
    /// Items of its reference; 0: none.
    pub(crate) reference: u32,
    pub(crate) fault: Option<Fault>,
    /// Its prompt is a page with this content, which others may share; its first item depends on it.
    pub(crate) prompt: Option<u32>,
}

fn input(seed: u32, step: u32) -> Words {
    std::array::from_fn(|word| ((seed * 31 + step * 17 + word as u32 * 7) % 97) as f32 / 8.0)
}

/// What a request makes, computed on the host.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Expected {
    pub(crate) items: Vec<Words>,
    pub(crate) samples: Vec<f32>,
}

impl FakeRequest {
    pub(crate) fn new(seed: u32, frames: u32) -> Self {
        Self {
            seed,
            frames,
            ..Self::default()
        }
    }

    pub(crate) fn reference_items(&self) -> Vec<Words> {
        (0..self.reference)
            .map(|step| input(self.seed + 1000, step))
            .collect()
    }

    fn prompt_words(&self) -> Words {
        self.prompt.map_or([0.0; WORDS], |prompt| input(prompt + 2000, 0))
    }

    fn producer_input(&self, step: u32, reference: Option<&Reference>) -> Words {
        let mut words = input(self.seed, step);
        if step == 0
            && let Some(first) = reference.and_then(|reference| reference.0.first())
        {
            for (word, add) in words.iter_mut().zip(first) {
                *word += add;
            }
        }
        words
    }

    pub(crate) fn expected(&self) -> Expected {
        let reference = (self.reference > 0).then(|| Reference(self.reference_items()));
        let (mut y, mut items) = ([0.0; WORDS], Vec::new());
        for step in 0..self.frames {
            let before = if step == 0 { self.prompt_words() } else { y };
            let input = self.producer_input(step, reference.as_ref());
            y = std::array::from_fn(|word| before[word] * 0.25 + (y[word] * 0.5 + input[word]));
            items.push(y);
        }
        let mut state = [0.0; WORDS];
        for item in self.reference_items() {
            state = std::array::from_fn(|word| state[word] * 0.5 + item[word]);
        }
        let samples = items
            .iter()
            .map(|item| {
                state = std::array::from_fn(|word| state[word] * 0.5 + item[word]);
                state[0]
            })
            .collect();
        Expected { items, samples }
    }
}

/// Result of the reference encoder.
#[derive(Debug, Clone)]
pub(crate) struct Reference(pub(crate) Vec<Words>);

/// The model.
pub(crate) struct FakeModel {
    pub(crate) declaration: ModelDeclaration,
    pub(crate) log: Arc<Log>,
}

/// What the nodes were asked to do.
#[derive(Debug, Default)]
pub(crate) struct Log {
    /// Rows planned so far, by seed.
    pub(crate) planned: Mutex<HashMap<u32, u32>>,
    /// Prompts that were in the cache.
    pub(crate) cached: Mutex<u32>,
}

impl FakeModel {
    pub(crate) fn new() -> Self {
        let node = |name: &str, stop_check, resources: &[&str]| NodeDecl {
            name: name.into(),
            parallel_ranks: 1,
            stop_check,
            output_spans: false,
            resources: resources.iter().map(|key| key.to_string()).collect(),
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
        let resource = |key: &str, kind: &str, page_size: u32, zero_on_release| ResourceDecl {
            key: key.into(),
            kind: kind.into(),
            page_size,
            zero_on_release,
            report: ResourceReport {
                bytes_per_slot: (WORDS * 4) as u64 * u64::from(page_size.max(1)),
                ..ResourceReport::default()
            },
        };
        Self {
            log: Arc::default(),
            declaration: ModelDeclaration {
                model: "fake".into(),
                nodes: vec![
                    node("Talker", true, &["talker_kv", "talker_state"]),
                    node("Codec", false, &["codec_state"]),
                    node("RefEncoder", false, &[]),
                ],
                walks: vec![
                    walk("ref_encode", "RefEncoder", WalkKind::Once),
                    walk("talker_prefill", "Talker", WalkKind::Entry),
                    walk("talker_decode", "Talker", WalkKind::Loop),
                    walk("codec_prime", "Codec", WalkKind::Prime),
                    walk("codec_chunk", "Codec", WalkKind::Stream),
                ],
                stream_edges: vec![StreamEdgeDecl {
                    name: "codes".into(),
                    from: vec!["talker_prefill".into(), "talker_decode".into()],
                    to: "codec_chunk".into(),
                    item_words: WORDS as u32,
                    chunk: ChunkPolicy {
                        first: 1,
                        ramp: vec![2],
                        steady: 4,
                    },
                    max_window: MAX_WINDOW,
                    capacity: CAPACITY,
                }],
                request_edges: vec![RequestEdgeDecl {
                    name: "reference".into(),
                    from: "ref_encode".into(),
                    to: vec!["talker_prefill".into(), "codec_prime".into()],
                }],
                resources: vec![
                    resource("talker_kv", "paged_kv", PAGE, false),
                    resource("talker_state", "state_pool", 0, true),
                    resource("codec_state", "state_pool", 0, true),
                ],
            },
        }
    }
}

fn request(payload: &Payload) -> &FakeRequest {
    payload.downcast_ref().expect("the tests submit fake requests")
}

fn words_of(words: &Words) -> Arc<[i32]> {
    words.iter().map(|word| word.to_bits() as i32).collect()
}

impl Model for FakeModel {
    fn declaration(&self) -> &ModelDeclaration {
        &self.declaration
    }

    fn build_node(
        &self,
        name: &str,
        context: NodeContext,
    ) -> Result<Box<dyn Node>, Box<dyn std::error::Error + Send + Sync>> {
        let declared = self.declaration.nodes.iter().find(|node| node.name == name);
        let given: Vec<_> = context
            .resources
            .iter()
            .map(|resource| resource.key.clone())
            .collect();
        assert_eq!(
            given,
            declared.expect("a declared node").resources,
            "a node gets what it declares"
        );
        let log = self.log.clone();
        Ok(match name {
            "Talker" => Box::new(Talker {
                banks: [
                    Bank::new(&context, TALKER_INDICES, 2)?,
                    Bank::new(&context, TALKER_INDICES, 2)?,
                ],
                kit: Kit::new(context, log)?,
            }),
            "Codec" => Box::new(Codec {
                banks: [Bank::codec(&context)?, Bank::codec(&context)?],
                kit: Kit::new(context, log)?,
            }),
            "RefEncoder" => Box::new(RefEncoder {
                banks: [
                    Bank::new(&context, 0, MAX_REFERENCE)?,
                    Bank::new(&context, 0, MAX_REFERENCE)?,
                ],
                kit: Kit::new(context, log)?,
            }),
            other => return Err(format!("no node {other}").into()),
        })
    }

    fn needs(&self, node: &str, payload: &Payload) -> Vec<Need> {
        let request = request(payload);
        let need = |resource: &str, amount| Need {
            resource: resource.into(),
            amount,
            prefix: Vec::new(),
        };
        match node {
            "Talker" => {
                let mut pages = need("talker_kv", Amount::Positions(PAGE + request.frames + 3));
                pages.prefix.extend(request.prompt.map(u64::from));
                vec![pages, need("talker_state", Amount::Slots(1))]
            }
            "Codec" => vec![need("codec_state", Amount::Slots(1))],
            _ => Vec::new(),
        }
    }

    fn runs_once(&self, _walk: WalkId, payload: &Payload) -> bool {
        request(payload).reference > 0
    }

    fn prime_items(&self, _walk: WalkId, _payload: &Payload, results: &[EdgeResult]) -> Vec<Arc<[i32]>> {
        let reference = results
            .first()
            .and_then(|result| result.downcast_ref::<Reference>());
        reference.map_or_else(Vec::new, |reference| reference.0.iter().map(words_of).collect())
    }
}

const TALKER_INDICES: usize = 5;
const MAX_REFERENCE: usize = 32;

/// Pinned and device copies of a step's inputs and outputs, one for each stage.
struct Bank {
    indices_host: Buffer,
    indices: Buffer,
    inputs_host: Buffer,
    inputs: Buffer,
    out: Buffer,
    rows: usize,
}

impl Bank {
    /// `n_indices` lists of one index a row; `depth` blocks of words a row.
    fn new(context: &NodeContext, n_indices: usize, depth: usize) -> laneway_device::Result<Self> {
        let rows = context.max_rows;
        let alloc = |name: &str, dtype, len: usize, place| {
            context.device.alloc(BufferSpec {
                name: format!("{name} of {}", context.stream.config().name),
                dtype,
                len: len.max(1),
                place,
            })
        };
        let words = rows * depth * WORDS;
        Ok(Self {
            indices_host: alloc("indices (host)", DType::I32, rows * n_indices, Place::Pinned)?,
            indices: alloc("indices", DType::I32, rows * n_indices, Place::Device)?,
            inputs_host: alloc("inputs (host)", DType::F32, words, Place::Pinned)?,
            inputs: alloc("inputs", DType::F32, words, Place::Device)?,
            out: alloc("out", DType::F32, words, Place::Pinned)?,
            rows,
        })
    }

    fn codec(context: &NodeContext) -> laneway_device::Result<Self> {
        let window = MAX_WINDOW as usize;
        Self::new(context, 2 * window, window)
    }

    fn fill(&self, device: &dyn Device, indices: &[i32], inputs: &[f32]) -> laneway_device::Result<()> {
        device.host_write(
            &self.indices_host.slice(0, indices.len()),
            bytemuck::cast_slice(indices),
        )?;
        device.host_write(
            &self.inputs_host.slice(0, inputs.len()),
            bytemuck::cast_slice(inputs),
        )
    }

    fn upload(&self, launcher: &Launcher<'_>) -> laneway_device::Result<()> {
        launcher.run(op::Copy {
            src: self.indices_host.view(),
            dst: self.indices.view(),
        })?;
        launcher.run(op::Copy {
            src: self.inputs_host.view(),
            dst: self.inputs.view(),
        })
    }

    fn index(&self, list: usize, n_rows: usize) -> laneway_device::View {
        self.indices.slice(list * self.rows, n_rows)
    }

    fn block(&self, buffer: &Buffer, block: usize, n_rows: usize) -> laneway_device::View {
        buffer.slice(block * self.rows * WORDS, n_rows * WORDS)
    }

    fn read(&self, device: &dyn Device, block: usize, row: usize) -> laneway_device::Result<Words> {
        let mut words = [0.0; WORDS];
        let view = self.out.slice((block * self.rows + row) * WORDS, WORDS);
        device.host_read(&view, bytemuck::cast_slice_mut(&mut words))?;
        Ok(words)
    }
}

/// What all nodes have.
struct Kit {
    context: NodeContext,
    /// Workspaces `[max_rows, WORDS]`.
    a: Buffer,
    b: Buffer,
    one: Buffer,
    half: Buffer,
    quarter: Buffer,
    /// The planned step's touches' faults: set by plan, used by forward.
    broken: [Option<Fault>; 2],
    log: Arc<Log>,
}

impl Kit {
    fn new(context: NodeContext, log: Arc<Log>) -> laneway_device::Result<Self> {
        let device = context.device.clone();
        let work = |name: &str| {
            device.alloc(BufferSpec {
                name: format!("{name} of {}", context.stream.config().name),
                dtype: DType::F32,
                len: context.max_rows * WORDS,
                place: Place::Device,
            })
        };
        let table = |name: &str, value: f32| {
            let spec = BufferSpec {
                name: name.into(),
                dtype: DType::F32,
                len: WORDS,
                place: Place::Device,
            };
            device.alloc_with(spec, bytemuck::cast_slice(&[value; WORDS]))
        };
        Ok(Self {
            a: work("workspace a")?,
            b: work("workspace b")?,
            one: table("one", 1.0)?,
            half: table("half", 0.5)?,
            quarter: table("quarter", 0.25)?,
            broken: [None; 2],
            log,
            context,
        })
    }

    fn device(&self) -> &dyn Device {
        &*self.context.device
    }

    fn pool(&self, key: &str) -> &BoundResource {
        let found = self.context.resources.iter().find(|resource| resource.key == key);
        found.expect("the node declares it")
    }

    fn ring(&self) -> Option<&EdgeRing> {
        self.context.rings.first().map(|(_, ring)| ring)
    }

    fn touch_slot(&self, key: &str, slot: u32, touches: &mut Touches) {
        let pool = self.pool(key);
        let start = slot as usize * pool.slot_words;
        touches.write(pool.pool.slice(start, pool.slot_words));
    }

    /// `out = x * scale + add`.
    fn scale_add(
        launcher: &Launcher<'_>,
        x: &Buffer,
        scale: &Buffer,
        add: laneway_device::View,
        n_rows: usize,
        out: &Buffer,
    ) -> laneway_device::Result<()> {
        launcher.run(op::ChannelScale {
            x: x.slice(0, n_rows * WORDS),
            scale: scale.view(),
            add: Some(add),
            rows: n_rows,
            channels: WORDS,
            out: out.slice(0, n_rows * WORDS),
        })
    }

    fn gather(
        launcher: &Launcher<'_>,
        pool: &Buffer,
        index: laneway_device::View,
        n_rows: usize,
        out: &Buffer,
    ) -> laneway_device::Result<()> {
        launcher.run(op::GatherRows {
            src: pool.view(),
            indirect: true,
            index,
            rows: n_rows,
            width: WORDS,
            out: out.slice(0, n_rows * WORDS),
        })
    }

    fn scatter(
        launcher: &Launcher<'_>,
        src: &Buffer,
        index: laneway_device::View,
        n_rows: usize,
        pool: &Buffer,
    ) -> laneway_device::Result<()> {
        launcher.run(op::ScatterRows {
            src: src.slice(0, n_rows * WORDS),
            index,
            rows: n_rows,
            width: WORDS,
            dst: pool.view(),
        })
    }

    /// Refuse or remember what the rows' faults ask for.
    fn faults(&mut self, walk: WalkId, stage: Stage, rows: &[StepRow<'_>]) -> Result<(), PlanError> {
        let on_lane = self.context.stream.config().name.starts_with("lane");
        assert!(!on_lane || stage == Stage(0), "a lane's buffers are not doubled");
        for row in rows {
            *self
                .log
                .planned
                .lock()
                .entry(request(row.payload).seed)
                .or_default() += 1;
        }
        self.broken[stage.0] = None;
        let mut refused = Vec::new();
        for (index, row) in rows.iter().enumerate() {
            let step = state(row.state).launched;
            match request(row.payload).fault {
                Some(Fault::Plan(at, when)) if (at, when) == (walk.0, step) => {
                    refused.push((index, row_error("plan")));
                }
                Some(fault @ (Fault::Forward(at, when) | Fault::Device(at, when)))
                    if (at, when) == (walk.0, step) =>
                {
                    self.broken[stage.0] = Some(fault);
                }
                Some(Fault::Panic(at, when)) if (at, when) == (walk.0, step) => panic!("asked to panic"),
                _ => {}
            }
        }
        if refused.is_empty() {
            Ok(())
        } else {
            Err(PlanError::Rows(refused))
        }
    }

    fn break_off(
        &self,
        stage: Stage,
        launcher: &Launcher<'_>,
        index: laneway_device::View,
    ) -> laneway_device::Result<()> {
        match self.broken[stage.0] {
            Some(Fault::Forward(..)) => Err(DeviceError::BadOperation {
                op: "Fake",
                problem: "asked to break off".into(),
            }),
            // An index far outside of its source fails where it is used.
            Some(Fault::Device(..)) => launcher.run(op::GatherRows {
                src: self.one.view(),
                indirect: false,
                index,
                rows: 1,
                width: WORDS,
                out: self.b.slice(0, WORDS),
            }),
            _ => Ok(()),
        }
    }

    fn warm_up(&mut self, launcher: &Launcher<'_>) -> laneway_device::Result<()> {
        let zero: Op = op::Zero { dst: self.a.view() }.into();
        let graph = launcher
            .stream
            .capture(&mut |stream| stream.launch(&zero, &Touches::none()))?;
        launcher.stream.replay(&graph, &Touches::none())
    }
}

fn row_error(what: &str) -> RowError {
    RowError {
        invalid_argument: false,
        field: None,
        message: format!("asked to fail in {what}"),
    }
}

/// The nodes' state of a request.
#[derive(Debug, Default)]
struct Steps {
    launched: u32,
    landed: u32,
}

fn state(state: &RowState) -> &Steps {
    state
        .downcast_ref()
        .expect("the engine hands a node its own state")
}

fn state_mut(state: &mut RowState) -> &mut Steps {
    state
        .downcast_mut()
        .expect("the engine hands a node its own state")
}

fn open(walk: WalkId, payload: &Payload) -> Result<RowState, RowError> {
    match request(payload).fault {
        Some(Fault::Open(at)) if at == walk.0 => Err(row_error("open")),
        _ => Ok(Box::new(Steps::default())),
    }
}

fn slots<'a>(row: &'a StepRow<'_>, key: &str) -> &'a [u32] {
    let found = row.grants.iter().find(|grant| grant.resource == key);
    &found.expect("the row holds what its node needs").slots
}

fn commit(rows: &mut [StepRow<'_>]) {
    for row in rows {
        state_mut(row.state).launched += 1;
    }
}

/// The step that just landed for a row, or its error.
fn landed(walk: WalkId, row: &mut StepRow<'_>) -> Result<u32, Box<RowOutcome>> {
    let steps = state_mut(row.state);
    let step = steps.landed;
    steps.landed += 1;
    match request(row.payload).fault {
        Some(Fault::Outcome(at, when)) if (at, when) == (walk.0, step) => Err(Box::new(RowOutcome {
            error: Some(row_error("outcome")),
            ..RowOutcome::default()
        })),
        _ => Ok(step),
    }
}

struct Talker {
    kit: Kit,
    banks: [Bank; 2],
}

impl Node for Talker {
    fn name(&self) -> &str {
        "Talker"
    }

    fn max_rows(&self, _walk: WalkId) -> usize {
        self.kit.context.max_rows
    }

    fn open(&mut self, walk: WalkId, payload: &Payload) -> Result<RowState, RowError> {
        open(walk, payload)
    }

    fn plan(
        &mut self,
        walk: WalkId,
        stage: Stage,
        rows: &mut [StepRow<'_>],
        touches: &mut Touches,
    ) -> Result<(), PlanError> {
        self.kit.faults(walk, stage, rows)?;
        let bank = &self.banks[stage.0];
        let mut indices = vec![-1; bank.rows * TALKER_INDICES];
        let mut inputs = vec![0.0; 2 * bank.rows * WORDS];
        for (index, row) in rows.iter().enumerate() {
            let step = state(row.state).launched;
            let slot = slots(row, "talker_state")[0];
            let pages = slots(row, "talker_kv");
            // The prompt's page comes before those of the steps.
            let at = |position: u32| (pages[(1 + position / PAGE) as usize] * PAGE + position % PAGE) as i32;
            let prompt = (pages[0] * PAGE) as i32;
            indices[index] = slot as i32;
            indices[bank.rows + index] = row.ring_row.map_or(-1, |row| row as i32);
            indices[2 * bank.rows + index] = at(step);
            if step > 0 {
                indices[3 * bank.rows + index] = at(step - 1);
            } else if request(row.payload).prompt.is_some() {
                indices[3 * bank.rows + index] = prompt;
                let cached = row.grants[0].cached > 0;
                if !cached {
                    indices[4 * bank.rows + index] = prompt;
                }
                *self.kit.log.cached.lock() += u32::from(cached);
            }
            inputs[(bank.rows + index) * WORDS..][..WORDS]
                .copy_from_slice(&request(row.payload).prompt_words());
            let reference = row.results.first().and_then(|result| result.downcast_ref());
            inputs[index * WORDS..][..WORDS]
                .copy_from_slice(&request(row.payload).producer_input(step, reference));
            self.kit.touch_slot("talker_state", slot, touches);
            for &page in pages {
                self.kit.touch_slot("talker_kv", page, touches);
            }
            if let (Some(ring), Some(row)) = (self.kit.ring(), row.ring_row) {
                touches.write(ring.buffer.slice(row as usize * WORDS, WORDS));
            }
        }
        if let Some(Fault::Device(..)) = self.kit.broken[stage.0] {
            indices[0] = 1 << 20;
        }
        bank.fill(self.kit.device(), &indices, &inputs)?;
        Ok(())
    }

    fn forward(
        &mut self,
        _walk: WalkId,
        stage: Stage,
        n_rows: usize,
        launcher: &Launcher<'_>,
    ) -> laneway_device::Result<()> {
        let (kit, bank) = (&self.kit, &self.banks[stage.0]);
        let (states, pages) = (&kit.pool("talker_state").pool, &kit.pool("talker_kv").pool);
        bank.upload(launcher)?;
        kit.break_off(stage, launcher, bank.index(0, 1))?;
        Kit::gather(launcher, states, bank.index(0, n_rows), n_rows, &kit.a)?;
        let inputs = bank.block(&bank.inputs, 0, n_rows);
        Kit::scale_add(launcher, &kit.a, &kit.half, inputs, n_rows, &kit.a)?;
        launcher.run(op::Copy {
            src: bank.block(&bank.inputs, 1, n_rows),
            dst: kit.b.slice(0, n_rows * WORDS),
        })?;
        Kit::scatter(launcher, &kit.b, bank.index(4, n_rows), n_rows, pages)?;
        Kit::gather(launcher, pages, bank.index(3, n_rows), n_rows, &kit.b)?;
        let sum = kit.a.slice(0, n_rows * WORDS);
        Kit::scale_add(launcher, &kit.b, &kit.quarter, sum, n_rows, &kit.b)?;
        Kit::scatter(launcher, &kit.b, bank.index(0, n_rows), n_rows, states)?;
        Kit::scatter(launcher, &kit.b, bank.index(2, n_rows), n_rows, pages)?;
        if let Some(ring) = kit.ring() {
            Kit::scatter(launcher, &kit.b, bank.index(1, n_rows), n_rows, &ring.buffer)?;
        }
        launcher.run(op::Copy {
            src: kit.b.slice(0, n_rows * WORDS),
            dst: bank.block(&bank.out, 0, n_rows),
        })
    }

    fn commit(&mut self, _walk: WalkId, rows: &mut [StepRow<'_>]) {
        commit(rows);
    }

    fn postprocess(
        &mut self,
        walk: WalkId,
        stage: Stage,
        rows: &mut [Option<StepRow<'_>>],
    ) -> Vec<RowOutcome> {
        let (kit, bank) = (&self.kit, &self.banks[stage.0]);
        let outcome = |(index, row): (usize, &mut Option<StepRow<'_>>)| {
            let Some(row) = row else {
                return RowOutcome::default();
            };
            let step = match landed(walk, row) {
                Ok(step) => step,
                Err(outcome) => return *outcome,
            };
            let request = request(row.payload);
            if request.end_token && step == request.frames {
                return RowOutcome {
                    finish: Some(FinishReason::Stop),
                    ..RowOutcome::default()
                };
            }
            let words = bank.read(kit.device(), 0, index).expect("the step has landed");
            let at_budget = !request.end_token && step + 1 == request.frames;
            RowOutcome {
                items: vec![words_of(&words)],
                finish: at_budget.then_some(FinishReason::Length),
                ..RowOutcome::default()
            }
        };
        rows.iter_mut().enumerate().map(outcome).collect()
    }

    fn warm_up(&mut self, launcher: &Launcher<'_>) -> laneway_device::Result<()> {
        self.kit.warm_up(launcher)
    }
}

struct Codec {
    kit: Kit,
    banks: [Bank; 2],
}

impl Node for Codec {
    fn name(&self) -> &str {
        "Codec"
    }

    fn max_rows(&self, _walk: WalkId) -> usize {
        self.kit.context.max_rows
    }

    fn open(&mut self, walk: WalkId, payload: &Payload) -> Result<RowState, RowError> {
        open(walk, payload)
    }

    fn plan(
        &mut self,
        walk: WalkId,
        stage: Stage,
        rows: &mut [StepRow<'_>],
        touches: &mut Touches,
    ) -> Result<(), PlanError> {
        self.kit.faults(walk, stage, rows)?;
        let (bank, window) = (&self.banks[stage.0], MAX_WINDOW as usize);
        let mut indices = vec![-1; bank.rows * 2 * window];
        let mut inputs = vec![0.0; bank.rows * window * WORDS];
        for (index, row) in rows.iter().enumerate() {
            let slot = slots(row, "codec_state")[0];
            self.kit.touch_slot("codec_state", slot, touches);
            for (place, item) in row.items.iter().enumerate() {
                indices[(window + place) * bank.rows + index] = slot as i32;
                match (item.ring_row, self.kit.ring()) {
                    (Some(ring_row), Some(ring)) => {
                        indices[place * bank.rows + index] = ring_row as i32;
                        touches.read(ring.buffer.slice(ring_row as usize * WORDS, WORDS));
                    }
                    _ => {
                        let words = &mut inputs[(place * bank.rows + index) * WORDS..][..WORDS];
                        for (word, &bits) in words.iter_mut().zip(item.words.iter()) {
                            *word = f32::from_bits(bits as u32);
                        }
                    }
                }
            }
        }
        if let Some(ring) = self.kit.ring() {
            touches.read(ring.buffer.slice(0, 0));
        }
        if let Some(Fault::Device(..)) = self.kit.broken[stage.0] {
            indices[0] = 1 << 20;
        }
        bank.fill(self.kit.device(), &indices, &inputs)?;
        Ok(())
    }

    fn forward(
        &mut self,
        _walk: WalkId,
        stage: Stage,
        n_rows: usize,
        launcher: &Launcher<'_>,
    ) -> laneway_device::Result<()> {
        let (kit, bank, window) = (&self.kit, &self.banks[stage.0], MAX_WINDOW as usize);
        let states = &kit.pool("codec_state").pool;
        bank.upload(launcher)?;
        kit.break_off(stage, launcher, bank.index(0, 1))?;
        for place in 0..window {
            let item = bank.block(&bank.inputs, place, n_rows);
            if let Some(ring) = kit.ring() {
                Kit::gather(launcher, &ring.buffer, bank.index(place, n_rows), n_rows, &kit.a)?;
                Kit::scale_add(launcher, &kit.a, &kit.one, item, n_rows, &kit.a)?;
            } else {
                launcher.run(op::Copy {
                    src: item,
                    dst: kit.a.slice(0, n_rows * WORDS),
                })?;
            }
            let slots = || bank.index(window + place, n_rows);
            Kit::gather(launcher, states, slots(), n_rows, &kit.b)?;
            let item = kit.a.slice(0, n_rows * WORDS);
            Kit::scale_add(launcher, &kit.b, &kit.half, item, n_rows, &kit.b)?;
            Kit::scatter(launcher, &kit.b, slots(), n_rows, states)?;
            launcher.run(op::Copy {
                src: kit.b.slice(0, n_rows * WORDS),
                dst: bank.block(&bank.out, place, n_rows),
            })?;
        }
        Ok(())
    }

    fn commit(&mut self, _walk: WalkId, rows: &mut [StepRow<'_>]) {
        commit(rows);
    }

    fn postprocess(
        &mut self,
        walk: WalkId,
        stage: Stage,
        rows: &mut [Option<StepRow<'_>>],
    ) -> Vec<RowOutcome> {
        let (kit, bank) = (&self.kit, &self.banks[stage.0]);
        let outcome = |(index, row): (usize, &mut Option<StepRow<'_>>)| {
            let Some(row) = row else {
                return RowOutcome::default();
            };
            if let Err(outcome) = landed(walk, row) {
                return *outcome;
            }
            let sample = |place| {
                bank.read(kit.device(), place, index)
                    .expect("the step has landed")[0]
            };
            RowOutcome {
                output: (walk.0 == CHUNK).then(|| (0..row.items.len()).map(sample).collect()),
                ..RowOutcome::default()
            }
        };
        rows.iter_mut().enumerate().map(outcome).collect()
    }

    fn warm_up(&mut self, launcher: &Launcher<'_>) -> laneway_device::Result<()> {
        self.kit.warm_up(launcher)
    }
}

struct RefEncoder {
    kit: Kit,
    banks: [Bank; 2],
}

impl Node for RefEncoder {
    fn name(&self) -> &str {
        "RefEncoder"
    }

    fn max_rows(&self, _walk: WalkId) -> usize {
        self.kit.context.max_rows
    }

    fn open(&mut self, walk: WalkId, payload: &Payload) -> Result<RowState, RowError> {
        open(walk, payload)
    }

    fn fits(&self, _walk: WalkId, chosen: &[Payload], _next: &Payload) -> bool {
        chosen.len() < 2
    }

    fn plan(
        &mut self,
        walk: WalkId,
        stage: Stage,
        rows: &mut [StepRow<'_>],
        _touches: &mut Touches,
    ) -> Result<(), PlanError> {
        self.kit.faults(walk, stage, rows)?;
        assert!(rows.len() <= 2, "the engine asks how many fit");
        let bank = &self.banks[stage.0];
        let mut inputs = vec![0.0; bank.rows * MAX_REFERENCE * WORDS];
        for (index, row) in rows.iter().enumerate() {
            for (place, item) in request(row.payload).reference_items().iter().enumerate() {
                inputs[(place * bank.rows + index) * WORDS..][..WORDS].copy_from_slice(item);
            }
        }
        bank.fill(self.kit.device(), &[], &inputs)?;
        Ok(())
    }

    fn forward(
        &mut self,
        _walk: WalkId,
        stage: Stage,
        _n_rows: usize,
        launcher: &Launcher<'_>,
    ) -> laneway_device::Result<()> {
        let bank = &self.banks[stage.0];
        bank.upload(launcher)?;
        self.kit.break_off(stage, launcher, bank.index(0, 0))?;
        launcher.run(op::Copy {
            src: bank.inputs.view(),
            dst: bank.out.view(),
        })
    }

    fn commit(&mut self, _walk: WalkId, rows: &mut [StepRow<'_>]) {
        commit(rows);
    }

    fn postprocess(
        &mut self,
        walk: WalkId,
        stage: Stage,
        rows: &mut [Option<StepRow<'_>>],
    ) -> Vec<RowOutcome> {
        let (kit, bank) = (&self.kit, &self.banks[stage.0]);
        let outcome = |(index, row): (usize, &mut Option<StepRow<'_>>)| {
            let Some(row) = row else {
                return RowOutcome::default();
            };
            if let Err(outcome) = landed(walk, row) {
                return *outcome;
            }
            let items = 0..request(row.payload).reference as usize;
            let read = |place| {
                bank.read(kit.device(), place, index)
                    .expect("the step has landed")
            };
            RowOutcome {
                result: Some(Arc::new(Reference(items.map(read).collect()))),
                ..RowOutcome::default()
            }
        };
        rows.iter_mut().enumerate().map(outcome).collect()
    }

    fn warm_up(&mut self, launcher: &Launcher<'_>) -> laneway_device::Result<()> {
        self.kit.warm_up(launcher)
    }
}
