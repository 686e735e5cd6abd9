//! One step of one node, from rows to a launch and from a landing to outcomes: the same code for the chain,
//! on the engine thread, and for each lane, on its launch thread.

use std::sync::Arc;
use std::time::{Duration, Instant};

use laneway_device::{DeviceError, Event, Launcher, Stream, Touches};
use laneway_plan::declaration::WalkKind;

use crate::edge::Window;
use crate::node::{
    EdgeResult, Node, Payload, PlanError, RequestId, RowError, RowOutcome, RowState, Stage, StepRow, WalkId,
};
use crate::resource::Lease;

/// What every row of one request on one node names. A row holds it until its step has landed, so that slots
/// outlive each step that was launched with them; shared as a whole, since a row then costs one count.
#[derive(Debug)]
pub(crate) struct Held {
    pub(crate) payload: Payload,
    pub(crate) lease: Arc<Lease>,
    /// Only kept: the ring slots that the node's walks read and write.
    pub(crate) _rings: Vec<Arc<Lease>>,
}

/// One request's part in a step.
#[derive(Debug)]
pub(crate) struct Row {
    /// Place in the engine's table, and who must still sit there.
    pub(crate) place: usize,
    pub(crate) request: RequestId,
    pub(crate) held: Arc<Held>,
    /// `None` before the node opened it, and between launch and landing on the chain.
    pub(crate) state: Option<RowState>,
    pub(crate) window: Window,
    pub(crate) ring_row: Option<u32>,
    pub(crate) results: Vec<EdgeResult>,
}

/// What the node is asked to run.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Job {
    pub(crate) walk: WalkId,
    pub(crate) kind: WalkKind,
    pub(crate) stage: Stage,
}

/// What the host spent on getting a step under way.
#[derive(Debug, Default)]
pub(crate) struct Times {
    /// Opening rows and planning.
    pub(crate) plan: Duration,
    /// Queueing it.
    pub(crate) launch: Duration,
    /// Say where the step begins on its stream, for a stream whose steps do not follow each other closely.
    pub(crate) marks_start: bool,
    pub(crate) start: Option<Event>,
}

/// How a launch went.
#[derive(Debug)]
pub(crate) enum Attempt {
    /// It runs; `event` completes when it has landed. With an error: it broke off half-way, and its rows fail
    /// once what was queued has landed.
    Launched {
        event: Event,
        error: Option<DeviceError>,
    },
    /// Rows (by index) cannot run. Nothing was launched.
    Refused(Vec<(usize, RowError)>),
    /// The device refused, and nothing of the step runs.
    Failed(DeviceError),
    /// The stream takes nothing any more, and what of the step runs is not known.
    Lost(DeviceError),
}

/// The first rows that fit one step together; the first always does.
pub(crate) fn fitting(node: &dyn Node, job: Job, rows: &[Row]) -> usize {
    if !matches!(job.kind, WalkKind::Entry | WalkKind::Once) {
        return rows.len();
    }
    let mut chosen = Vec::with_capacity(rows.len());
    for row in rows {
        if !chosen.is_empty() && !node.fits(job.walk, &chosen, &row.held.payload) {
            break;
        }
        chosen.push(row.held.payload.clone());
    }
    chosen.len()
}

/// Open what is new, plan, wait for what the rows were made by, forward, commit.
pub(crate) fn launch(
    node: &mut dyn Node,
    job: Job,
    rows: &mut [Row],
    stream: &dyn Stream,
    waits: &[Event],
    touches: &mut Touches,
    times: &mut Times,
) -> Attempt {
    let began = Instant::now();
    let mut refused = Vec::new();
    for (index, row) in rows.iter_mut().enumerate() {
        if row.state.is_none() {
            match node.open(job.walk, &row.held.payload) {
                Ok(state) => row.state = Some(state),
                Err(error) => refused.push((index, error)),
            }
        }
    }
    if !refused.is_empty() {
        return Attempt::Refused(refused);
    }
    touches.0.clear();
    let n_rows = rows.len();
    let mut views: Vec<StepRow<'_>> = rows.iter_mut().map(view).collect();
    match node.plan(job.walk, job.stage, &mut views, touches) {
        Ok(()) => {}
        Err(PlanError::Rows(errors)) if errors.is_empty() => {
            return Attempt::Refused(vec![(0, refused_without_a_row(node.name()))]);
        }
        Err(PlanError::Rows(errors)) => return Attempt::Refused(errors),
        Err(PlanError::Device(error)) => return Attempt::Failed(error),
    }
    let planned = Instant::now();
    times.plan = planned - began;
    for event in waits {
        if let Err(error) = stream.wait(event) {
            return Attempt::Failed(error);
        }
    }
    if times.marks_start {
        times.start = stream.mark();
    }
    let launcher = Launcher { stream, touches };
    let forward = node.forward(job.walk, job.stage, n_rows, &launcher);
    if forward.is_ok() {
        node.commit(job.walk, &mut views);
    }
    let recorded = stream.record_timed();
    times.launch = planned.elapsed();
    match (recorded, forward) {
        (Ok(event), forward) => Attempt::Launched {
            event,
            error: forward.err(),
        },
        // A failed stream runs nothing more, so nothing of the step is in flight.
        (Err(error @ DeviceError::StreamFailed { .. }), _) => Attempt::Failed(error),
        (Err(_), Err(error)) | (Err(error), Ok(())) => Attempt::Lost(error),
    }
}

/// Turn a landed step into outcomes. A row without a state no longer counts.
pub(crate) fn land(node: &mut dyn Node, job: Job, rows: &mut [Row]) -> Vec<RowOutcome> {
    let n_rows = rows.len();
    let mut views: Vec<Option<StepRow<'_>>> = rows
        .iter_mut()
        .map(|row| row.state.is_some().then(|| view(row)))
        .collect();
    let mut outcomes = node.postprocess(job.walk, job.stage, &mut views);
    // A node that answers for fewer rows than it was given must not leave one hanging.
    outcomes.truncate(n_rows);
    while outcomes.len() < n_rows {
        outcomes.push(RowOutcome {
            error: Some(RowError {
                invalid_argument: false,
                field: None,
                message: format!("node {} returned no outcome for this row", node.name()),
            }),
            ..RowOutcome::default()
        });
    }
    outcomes
}

fn view(row: &mut Row) -> StepRow<'_> {
    StepRow {
        request: row.request,
        payload: &row.held.payload,
        state: row
            .state
            .as_mut()
            .expect("every row was opened before its step is planned"),
        grants: row.held.lease.grants(),
        items: &row.window.items,
        last: row.window.last,
        ring_row: row.ring_row,
        results: &row.results,
    }
}

fn refused_without_a_row(node: &str) -> RowError {
    RowError {
        invalid_argument: false,
        field: None,
        message: format!("node {node} refused a step and named no row"),
    }
}
