//! The chain: lane 0, launched by the engine thread itself, two steps deep. Step N+1 is planned and launched
//! while N runs; N's results are read once it has landed, and rows that ended there drop out of N+1.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use laneway_device::{DeviceError, Event as DeviceEvent, Stream, Touches};
use laneway_plan::declaration::WalkKind;

use super::Core;
use crate::edge::OriginStep;
use crate::event::Event;
use crate::node::{Node, Stage};
use crate::phase::Phase;
use crate::step::{self, Attempt, Job, Row, Times};
use crate::topology::{CHAIN, Topology};

/// Steps in flight: the one that runs and the staged one.
pub(crate) const DEPTH: usize = 2;

/// A step for the landing thread to wait for.
#[derive(Debug)]
pub(crate) struct Landing {
    seq: u64,
    event: DeviceEvent,
}

/// The landing thread: waits for chain steps in order and tells the engine thread, which hands them over only
/// when it is about to block. Ends when the engine thread drops its end.
pub(crate) fn run_landing(steps: &Receiver<Landing>, events: &SyncSender<Event>, step_deadline: Duration) {
    while let Ok(Landing { seq, event }) = steps.recv() {
        let result = event.synchronize(step_deadline);
        if events.send(Event::ChainLanded { seq, result }).is_err() {
            return;
        }
    }
}

/// A launched step.
struct InFlight {
    seq: u64,
    walk: usize,
    job: Job,
    rows: Vec<Row>,
    event: DeviceEvent,
    /// It broke off half-way.
    error: Option<DeviceError>,
    launched_at: Instant,
    queued_at: Instant,
}

/// The chain's nodes and steps.
pub(crate) struct Chain {
    /// By their index among the worker's.
    nodes: Vec<(usize, Box<dyn Node>)>,
    stream: Arc<dyn Stream>,
    in_flight: VecDeque<InFlight>,
    landing: Option<SyncSender<Landing>>,
    /// The newest step that the landing thread was given, and how many of those it has yet to report.
    handed_over: u64,
    unreported: usize,
    landing_thread: Option<JoinHandle<()>>,
    touches: Touches,
    /// When the newest step landed: a step behind it began no earlier.
    last_landing: Instant,
}

impl Chain {
    pub(crate) fn new(
        nodes: Vec<(usize, Box<dyn Node>)>,
        stream: Arc<dyn Stream>,
        landing: SyncSender<Landing>,
        landing_thread: JoinHandle<()>,
    ) -> Self {
        Self {
            nodes,
            stream,
            in_flight: VecDeque::with_capacity(DEPTH),
            landing: Some(landing),
            handed_over: 0,
            unreported: 0,
            landing_thread: Some(landing_thread),
            touches: Touches::none(),
            last_landing: Instant::now(),
        }
    }

    fn node(&mut self, node: usize) -> &mut dyn Node {
        let found = self.nodes.iter_mut().find(|(index, _)| *index == node);
        &mut *found.expect("a chain walk's node is on the chain").1
    }

    /// Whether a step of the node is in flight.
    pub(super) fn runs(&self, node: usize, topology: &Topology) -> bool {
        let mut steps = self.in_flight.iter();
        steps.any(|step| topology.walks[step.walk].node == node)
    }

    /// Whether a step in flight makes items for a lane.
    pub(super) fn makes_items(&self, topology: &Topology) -> bool {
        let mut steps = self.in_flight.iter();
        steps.any(|step| topology.walks[step.walk].kind == WalkKind::Loop)
    }

    /// A node joins the chain.
    pub(super) fn add_node(&mut self, node: usize, built: Box<dyn Node>) {
        self.nodes.push((node, built));
    }

    /// A node leaves the chain.
    pub(super) fn take_node(&mut self, node: usize) -> Option<Box<dyn Node>> {
        let place = self.nodes.iter().position(|(index, _)| *index == node)?;
        Some(self.nodes.swap_remove(place).1)
    }

    /// Stop waiting for further steps; the thread ends behind those it has.
    pub(crate) fn end(&mut self) -> Option<JoinHandle<()>> {
        self.landing = None;
        self.landing_thread.take()
    }
}

impl Core {
    /// Launch steps while fewer than two are in flight and something is ready.
    pub(super) fn fill_chain(&mut self) {
        while self.chain.in_flight.len() < DEPTH && self.lanes[CHAIN].lost.is_none() {
            let began = Instant::now();
            let Some((walk, rows)) = self.next_step(CHAIN) else {
                return;
            };
            self.phase(CHAIN, Phase::Admit, began.elapsed());
            self.launch_chain_step(walk, rows, began);
            self.shared.stats.lock().walks[walk].host_time += began.elapsed();
        }
    }

    fn launch_chain_step(&mut self, walk: usize, mut rows: Vec<Row>, began: Instant) {
        let info = &self.topology.walks[walk];
        let (node, seq) = (info.node, self.lanes[CHAIN].seq + 1);
        let job = Job {
            walk: info.id,
            kind: info.kind,
            stage: Stage((seq % DEPTH as u64) as usize),
        };
        let fitting = step::fitting(self.chain.node(node), job, &rows);
        for row in rows.split_off(fitting).into_iter().rev() {
            self.put_back(walk, row);
        }
        let waits = self.waits(CHAIN, walk, &rows);
        let stream = self.chain.stream.clone();
        let mut touches = std::mem::take(&mut self.chain.touches);
        let mut times = Times::default();
        let attempt = step::launch(
            self.chain.node(node),
            job,
            &mut rows,
            &*stream,
            &waits,
            &mut touches,
            &mut times,
        );
        touches.0.clear();
        self.chain.touches = touches;
        match attempt {
            Attempt::Launched { event, error } => {
                self.lanes[CHAIN].seq = seq;
                self.phase(CHAIN, Phase::Plan, times.plan);
                self.phase(CHAIN, Phase::Launch, times.launch);
                // The next step may be planned before this one lands, so the states go home at once.
                for row in &mut rows {
                    self.swap_state(node, row);
                }
                self.chain.in_flight.push_back(InFlight {
                    seq,
                    walk,
                    job,
                    rows,
                    event,
                    error,
                    launched_at: began,
                    queued_at: Instant::now(),
                });
            }
            Attempt::Refused(errors) => self.refused(walk, rows, errors),
            Attempt::Failed(error) => self.step_failed(walk, rows, &error),
            Attempt::Lost(error) => {
                self.stuck.push((None, rows));
                self.chain_lost(&error.to_string());
            }
        }
    }

    /// Move a row's state between the row and its request, whichever has it.
    fn swap_state(&mut self, node: usize, row: &mut Row) {
        if let Some(request) = self.requests.find(row.place, row.request) {
            std::mem::swap(&mut request.nodes[node].state, &mut row.state);
        }
    }

    /// Land the oldest step if it has completed: one that did so while the engine thread was at work needs no
    /// other thread to wake it. True: it landed.
    pub(super) fn poll_chain(&mut self) -> bool {
        let Some(step) = self.chain.in_flight.front().filter(|step| step.event.is_done()) else {
            return false;
        };
        let (seq, event) = (step.seq, step.event.clone());
        // It is done: this asks how it went, and does not wait.
        let result = event.synchronize(Duration::ZERO);
        self.chain_landed(seq, result);
        true
    }

    /// The engine thread is about to block: let the landing thread wake it.
    pub(super) fn watch_chain(&mut self) {
        let chain = &mut self.chain;
        for step in &chain.in_flight {
            // With as many unreported as it has room for, a report is on its way, and this is called again.
            if step.seq <= chain.handed_over || chain.unreported == DEPTH {
                continue;
            }
            let landing = Landing {
                seq: step.seq,
                event: step.event.clone(),
            };
            let thread = chain.landing.as_ref();
            if thread.is_none_or(|thread| thread.try_send(landing).is_err()) {
                self.chain_lost("its landing thread ended");
                return;
            }
            chain.handed_over = step.seq;
            chain.unreported += 1;
        }
    }

    /// The landing thread reports.
    pub(super) fn chain_reported(&mut self, seq: u64, result: Result<(), DeviceError>) {
        self.chain.unreported -= 1;
        self.chain_landed(seq, result);
    }

    /// The oldest chain step landed, failed, or is stuck.
    fn chain_landed(&mut self, seq: u64, result: Result<(), DeviceError>) {
        if self.chain.in_flight.front().is_none_or(|step| step.seq != seq) {
            // It was polled before the report came. Or a step that was given up landed after all; `tick` lets
            // go of what it held.
            return;
        }
        if let Err(error @ DeviceError::Deadline { .. }) = result {
            self.chain_lost(&error.to_string());
            return;
        }
        let step = self.chain.in_flight.pop_front().expect("it was just seen");
        let InFlight {
            walk, job, mut rows, ..
        } = step;
        // Behind another step it began when that one ended; behind nothing, when it was launched.
        let follows = step.launched_at < self.chain.last_landing;
        let before = &self.lanes[CHAIN].landed.event;
        let device = follows.then(|| step.event.since(before)).flatten();
        let origin = Arc::new(OriginStep {
            lane: CHAIN,
            seq,
            event: step.event,
        });
        self.lanes[CHAIN].landed = origin.clone();
        if let Err(error) = step.error.map_or(result, Err) {
            self.step_failed(walk, rows, &error);
            return;
        }
        let now = Instant::now();
        let took = now - step.launched_at.max(self.chain.last_landing);
        self.chain.last_landing = now;
        self.phase(CHAIN, Phase::Wait, now - step.queued_at);
        self.step_landed(walk, &rows, took, device);
        let node = self.topology.walks[walk].node;
        // Rows that ended at the step before are overrun: the node skips them.
        let produces = matches!(job.kind, WalkKind::Entry | WalkKind::Loop);
        for row in &mut rows {
            let live = self.requests.find(row.place, row.request);
            if live.is_some_and(|request| !(produces && request.ended.is_some())) {
                self.swap_state(node, row);
            }
        }
        let began = Instant::now();
        let outcomes = step::land(self.chain.node(node), job, &mut rows);
        let made = Instant::now();
        self.phase(CHAIN, Phase::Postprocess, made - began);
        self.settle(walk, rows, outcomes, &origin);
        self.phase(CHAIN, Phase::Settle, made.elapsed());
        self.shared.stats.lock().walks[walk].host_time += now.elapsed();
    }

    /// The chain runs nothing any more.
    fn chain_lost(&mut self, why: &str) {
        let steps = self.chain.in_flight.drain(..);
        self.stuck.extend(steps.map(|step| (Some(step.event), step.rows)));
        self.lose_lane(CHAIN, why);
    }
}
