//! A lane's launch thread. It owns the lane's nodes, is started by the engine with one order at a time, and
//! ends when the engine drops the order channel. Planning, launching, waiting and postprocessing of a lane's
//! steps all happen here, so that a lane never costs the chain host time.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender};
use std::time::{Duration, Instant};

use laneway_device::{DeviceError, Event as DeviceEvent, Stream, Touches};

use crate::event::Event;
use crate::node::{Node, RowError, RowOutcome};
use crate::step::{self, Attempt, Job, Row};

/// One step to run. Its `waits` are the events of the steps that made its inputs.
#[derive(Debug)]
pub(crate) struct Order {
    pub(crate) walk: usize,
    /// Index of the node among the worker's.
    pub(crate) node: usize,
    pub(crate) job: Job,
    pub(crate) rows: Vec<Row>,
    pub(crate) waits: Vec<DeviceEvent>,
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
    pub(crate) took: Duration,
}

/// What became of the rows.
#[derive(Debug)]
pub(crate) enum Outcome {
    /// One outcome a row, and the step's event.
    Landed(Vec<RowOutcome>, DeviceEvent),
    /// These cannot run; nothing was launched.
    Refused(Vec<(usize, RowError)>),
    /// The step failed, and nothing of it runs any more.
    Failed(DeviceError),
    /// It may still run: the lane is lost.
    Stuck(Option<DeviceEvent>, String),
}

/// What a lane's thread works with.
pub(crate) struct Lane {
    pub(crate) lane: usize,
    /// Its nodes by their index among the worker's.
    pub(crate) nodes: Vec<(usize, Box<dyn Node>)>,
    pub(crate) stream: Arc<dyn Stream>,
    pub(crate) step_deadline: Duration,
}

impl Lane {
    /// Serve orders until their channel closes.
    pub(crate) fn run(mut self, orders: &Receiver<Order>, events: &SyncSender<Event>) {
        let mut touches = Touches::none();
        while let Ok(mut order) = orders.recv() {
            let started = Instant::now();
            let mut left_over = Vec::new();
            let outcome = catch_unwind(AssertUnwindSafe(|| {
                self.step(&mut order, &mut left_over, &mut touches)
            }))
            .unwrap_or_else(|panic| Outcome::Stuck(None, format!("a node panicked: {}", message(&*panic))));
            let report = Report {
                lane: self.lane,
                walk: order.walk,
                rows: order.rows,
                left_over,
                outcome,
                took: started.elapsed(),
            };
            if events.send(Event::LaneLanded(Box::new(report))).is_err() {
                return;
            }
        }
    }

    fn step(&mut self, order: &mut Order, left_over: &mut Vec<Row>, touches: &mut Touches) -> Outcome {
        let node = self
            .nodes
            .iter_mut()
            .find_map(|(index, node)| (*index == order.node).then_some(node))
            .expect("an order goes to the lane that owns its node");
        *left_over = order
            .rows
            .split_off(step::fitting(&**node, order.job, &order.rows));
        let attempt = step::launch(
            &mut **node,
            order.job,
            &mut order.rows,
            &*self.stream,
            &order.waits,
            touches,
        );
        let (event, error) = match attempt {
            Attempt::Launched { event, error } => (event, error),
            Attempt::Refused(rows) => return Outcome::Refused(rows),
            Attempt::Failed(error) => return Outcome::Failed(error),
            Attempt::Lost(error) => return Outcome::Stuck(None, error.to_string()),
        };
        match event.synchronize(self.step_deadline) {
            Err(error @ DeviceError::Deadline { .. }) => Outcome::Stuck(Some(event), error.to_string()),
            Err(failed) => Outcome::Failed(error.unwrap_or(failed)),
            Ok(()) => match error {
                Some(error) => Outcome::Failed(error),
                None => Outcome::Landed(
                    step::land(&mut **node, order.job, &mut order.rows, |_| false),
                    event,
                ),
            },
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
