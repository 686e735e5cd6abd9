//! What the fake nodes share: a step's inputs and outputs, workspaces, faults on demand.

use std::sync::Arc;

use laneway_device::{Buffer, BufferSpec, DType, Device, DeviceError, Launcher, Op, Place, Touches, op};
use laneway_engine::node::*;

use super::{Fault, Log, MAX_WINDOW, WORDS, Words, request};

pub(super) const TALKER_INDICES: usize = 5;
pub(super) const MAX_REFERENCE: usize = 32;

/// Pinned and device copies of a step's inputs and outputs, one for each stage.
pub(super) struct Bank {
    pub(super) indices_host: Buffer,
    pub(super) indices: Buffer,
    pub(super) inputs_host: Buffer,
    pub(super) inputs: Buffer,
    pub(super) out: Buffer,
    pub(super) rows: usize,
}

impl Bank {
    /// `n_indices` lists of one index a row; `depth` blocks of words a row.
    pub(super) fn new(context: &NodeContext, n_indices: usize, depth: usize) -> laneway_device::Result<Self> {
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

    pub(super) fn codec(context: &NodeContext) -> laneway_device::Result<Self> {
        let window = MAX_WINDOW as usize;
        Self::new(context, 2 * window, window)
    }

    pub(super) fn fill(
        &self,
        device: &dyn Device,
        indices: &[i32],
        inputs: &[f32],
    ) -> laneway_device::Result<()> {
        device.host_write(
            &self.indices_host.slice(0, indices.len()),
            bytemuck::cast_slice(indices),
        )?;
        device.host_write(
            &self.inputs_host.slice(0, inputs.len()),
            bytemuck::cast_slice(inputs),
        )
    }

    pub(super) fn upload(&self, launcher: &Launcher<'_>) -> laneway_device::Result<()> {
        launcher.run(op::Copy {
            src: self.indices_host.view(),
            dst: self.indices.view(),
        })?;
        launcher.run(op::Copy {
            src: self.inputs_host.view(),
            dst: self.inputs.view(),
        })
    }

    pub(super) fn index(&self, list: usize, n_rows: usize) -> laneway_device::View {
        self.indices.slice(list * self.rows, n_rows)
    }

    pub(super) fn block(&self, buffer: &Buffer, block: usize, n_rows: usize) -> laneway_device::View {
        buffer.slice(block * self.rows * WORDS, n_rows * WORDS)
    }

    pub(super) fn read(
        &self,
        device: &dyn Device,
        block: usize,
        row: usize,
    ) -> laneway_device::Result<Words> {
        let mut words = [0.0; WORDS];
        let view = self.out.slice((block * self.rows + row) * WORDS, WORDS);
        device.host_read(&view, bytemuck::cast_slice_mut(&mut words))?;
        Ok(words)
    }
}

/// What all nodes have.
pub(super) struct Kit {
    pub(super) context: NodeContext,
    /// Workspaces `[max_rows, WORDS]`.
    pub(super) a: Buffer,
    pub(super) b: Buffer,
    pub(super) one: Buffer,
    pub(super) half: Buffer,
    pub(super) quarter: Buffer,
    /// The planned step's touches' faults: set by plan, used by forward.
    pub(super) broken: [Option<Fault>; 2],
    pub(super) log: Arc<Log>,
}

impl Kit {
    pub(super) fn new(context: NodeContext, log: Arc<Log>) -> laneway_device::Result<Self> {
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

    pub(super) fn device(&self) -> &dyn Device {
        &*self.context.device
    }

    pub(super) fn pool(&self, key: &str) -> &BoundResource {
        let found = self.context.resources.iter().find(|resource| resource.key == key);
        found.expect("the node declares it")
    }

    pub(super) fn ring(&self) -> Option<&EdgeRing> {
        self.context.rings.first().map(|(_, ring)| ring)
    }

    pub(super) fn touch_slot(&self, key: &str, slot: u32, touches: &mut Touches) {
        let pool = self.pool(key);
        let start = slot as usize * pool.slot_elements;
        touches.write(pool.pool.slice(start, pool.slot_elements));
    }

    /// `out = x * scale + add`.
    pub(super) fn scale_add(
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

    pub(super) fn gather(
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

    pub(super) fn scatter(
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
    pub(super) fn faults(
        &mut self,
        walk: WalkId,
        stage: Stage,
        rows: &[StepRow<'_>],
    ) -> Result<(), PlanError> {
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

    pub(super) fn break_off(
        &self,
        stage: Stage,
        launcher: &Launcher<'_>,
        index: laneway_device::View,
    ) -> laneway_device::Result<()> {
        let on_lane = launcher.stream.config().name.starts_with("lane");
        assert!(!on_lane || stage == Stage(0), "a lane's buffers are not doubled");
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

    pub(super) fn warm_up(&mut self, launcher: &Launcher<'_>) -> laneway_device::Result<()> {
        let zero: Op = op::Zero { dst: self.a.view() }.into();
        let graph = launcher
            .stream
            .capture(&mut |stream| stream.launch(&zero, &Touches::none()))?;
        launcher.stream.replay(&graph, &Touches::none())
    }
}

pub(super) fn row_error(what: &str) -> RowError {
    RowError {
        invalid_argument: false,
        field: None,
        message: format!("asked to fail in {what}"),
    }
}

/// The nodes' state of a request.
#[derive(Debug, Default)]
pub(super) struct Steps {
    pub(super) launched: u32,
    pub(super) landed: u32,
}

pub(super) fn state(state: &RowState) -> &Steps {
    state
        .downcast_ref()
        .expect("the engine hands a node its own state")
}

pub(super) fn state_mut(state: &mut RowState) -> &mut Steps {
    state
        .downcast_mut()
        .expect("the engine hands a node its own state")
}

pub(super) fn open(walk: WalkId, payload: &Payload) -> Result<RowState, RowError> {
    match request(payload).fault {
        Some(Fault::Open(at)) if at == walk.0 => Err(row_error("open")),
        _ => Ok(Box::new(Steps::default())),
    }
}

pub(super) fn slots<'a>(row: &'a StepRow<'_>, key: &str) -> &'a [u32] {
    let found = row.grants.iter().find(|grant| grant.resource == key);
    &found.expect("the row holds what its node needs").slots
}

pub(super) fn commit(rows: &mut [StepRow<'_>]) {
    for row in rows {
        state_mut(row.state).launched += 1;
    }
}

/// The step that just landed for a row, or its error.
pub(super) fn landed(walk: WalkId, row: &mut StepRow<'_>) -> Result<u32, Box<RowOutcome>> {
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
