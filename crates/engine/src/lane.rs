//! A lane's launch thread. It owns the lane's nodes, is started by the engine with one order at a time, and
//! ends when the engine drops the order channel. Planning, launching, waiting and postprocessing of a lane's
//! steps all happen here, so that a lane never costs the chain host time.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender};
use std::time::{Duration, Instant};

use laneway_device::{DeviceError, Event as DeviceEvent, Stream, Touches};

use crate::core::Carried;
use crate::event::Event;
use crate::node::{Node, RowError, RowOutcome};
use crate::phase::{Phase, Recorders};
use crate::step::{self, Attempt, Job, Row, Times};

/// One step to run. Its `waits` are the events of the steps that made its inputs.
#[derive(Debug)]
pub(crate) struct Order {
    pub(crate) walk: usize,
    /// Index of the node among the worker's.
    pub(crate) node: usize,
    pub(crate) job: Job,
    pub(crate) rows: Vec<Row>,
    pub(crate) waits: Vec<DeviceEvent>,
    /// The node, when it may move, with the stream that it is on now.
    pub(crate) carried: Option<Carried>,
}

/// How a step went.
#[derive(Debug)]
pub(crate) struct Report {
    pub(crate) lane: usize,
    pub(crate) walk: usize,
    pub(crate) rows: Vec<Row>,
    /// Rows that did not fit beside the others.
    pub(crate) left_over: Vec<Row>,
    pub(crate) outcome: Outcome,
    /// Recorded behind what was launched, if anything was.
    pub(crate) event: Option<DeviceEvent>,
    pub(crate) took: Duration,
    /// The same by the device's clock, from the first operation to the last.
    pub(crate) device: Option<Duration>,
    /// As the order had it.
    pub(crate) carried: Option<Carried>,
}

/// What became of the rows.
#[derive(Debug)]
pub(crate) enum Outcome {
    /// One outcome a row.
    Landed(Vec<RowOutcome>),
    /// These cannot run; nothing was launched.
    Refused(Vec<(usize, RowError)>),
    /// The step failed, and nothing of it runs any more.
    Failed(DeviceError),
    /// It may still run: the lane is lost.
    Stuck(String),
}

/// What a lane's thread works with.
pub(crate) struct Lane {
    pub(crate) lane: usize,
    /// Its nodes by their index among the worker's.
    pub(crate) nodes: Vec<(usize, Box<dyn Node>)>,
    pub(crate) stream: Arc<dyn Stream>,
    pub(crate) step_deadline: Duration,
    pub(crate) recorders: Arc<Recorders>,
}

impl Lane {
    /// Serve orders until their channel closes.
    pub(crate) fn run(mut self, orders: &Receiver<Order>, events: &SyncSender<Event>) {
        let mut touches = Touches::none();
        while let Ok(order) = orders.recv() {
            let started = Instant::now();
            let mut report = Report {
                lane: self.lane,
                walk: order.walk,
                rows: order.rows,
                left_over: Vec::new(),
                // Stays when the node panics.
                outcome: Outcome::Stuck("a node panicked".into()),
                event: None,
                took: Duration::ZERO,
                device: None,
                carried: None,
            };
            let mut carried = order.carried;
            let stepped = catch_unwind(AssertUnwindSafe(|| {
                self.step(
                    order.node,
                    order.job,
                    &order.waits,
                    carried.as_mut(),
                    &mut report,
                    &mut touches,
                )
            }));
            report.outcome = stepped
                .unwrap_or_else(|panic| Outcome::Stuck(format!("a node panicked: {}", message(&*panic))));
            report.took = started.elapsed();
            report.carried = carried;
            if events.send(Event::LaneLanded(Box::new(report))).is_err() {
                return;
            }
        }
    }

    fn step(
        &mut self,
        node: usize,
        job: Job,
        waits: &[DeviceEvent],
        carried: Option<&mut Carried>,
        report: &mut Report,
        touches: &mut Touches,
    ) -> Outcome {
        let (node, stream) = match carried {
            Some(carried) => (&mut *carried.node, carried.stream.clone()),
            None => {
                let found = self.nodes.iter_mut().find(|(index, _)| *index == node);
                let found = found.expect("an order goes to the lane that owns its node");
                (&mut *found.1, self.stream.clone())
            }
        };
        let fitting = step::fitting(node, job, &report.rows);
        report.left_over = report.rows.split_off(fitting);
        let mut times = Times {
            marks_start: true,
            ..Times::default()
        };
        let error = match step::launch(node, job, &mut report.rows, &*stream, waits, touches, &mut times) {
            Attempt::Launched { event, error } => {
                report.event = Some(event);
                error
            }
            Attempt::Refused(rows) => return Outcome::Refused(rows),
            Attempt::Failed(error) => return Outcome::Failed(error),
            Attempt::Lost(error) => return Outcome::Stuck(error.to_string()),
        };
        let launched = Instant::now();
        let landing = report
            .event
            .as_ref()
            .map(|event| event.synchronize(self.step_deadline));
        let ends = times.start.as_ref().zip(report.event.as_ref());
        report.device = ends.and_then(|(start, end)| end.since(start));
        self.recorders.phase(self.lane, Phase::Plan, times.plan);
        self.recorders.phase(self.lane, Phase::Launch, times.launch);
        self.recorders.phase(self.lane, Phase::Wait, launched.elapsed());
        match (landing, error) {
            (Some(Err(stuck @ DeviceError::Deadline { .. })), _) => Outcome::Stuck(stuck.to_string()),
            (_, Some(error)) | (Some(Err(error)), None) => Outcome::Failed(error),
            _ => {
                let landed = Instant::now();
                let outcomes = step::land(node, job, &mut report.rows);
                self.recorders
                    .phase(self.lane, Phase::Postprocess, landed.elapsed());
                Outcome::Landed(outcomes)
            }
        }
    }
}

/// The text of a panic.
fn message(panic: &(dyn std::any::Any + Send)) -> &str {
    panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no message")
}
