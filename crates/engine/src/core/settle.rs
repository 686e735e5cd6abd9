//! From landed rows to what follows: items to their edges, output to listeners, ends of requests.

use std::sync::Arc;
use std::time::Duration;

use laneway_plan::declaration::WalkKind;

use super::Core;
use crate::edge::Origin;
use crate::node::{FinishReason, RequestId, RowOutcome};
use crate::output::{Failure, FailureKind, OutputEvent};
use crate::phase::Phase;
use crate::request::Delivery;
use crate::samples::Samples;
use crate::step::Row;
use crate::topology::{Topology, WalkInfo};

impl Core {
    /// Note what a part of a step on `lane` took.
    pub(super) fn phase(&self, lane: usize, phase: Phase, took: Duration) {
        self.shared.recorders.phase(lane, phase, took);
    }

    /// Note what a step cost: `took` as the host saw it, `device` by the device's clock, where it has one.
    pub(super) fn step_landed(
        &mut self,
        walk: usize,
        rows: &[Row],
        took: Duration,
        device: Option<Duration>,
    ) {
        let device = device.unwrap_or(took);
        self.observe(walk, rows, device);
        self.shared.stats.lock().walks[walk].landed(rows.len(), took);
        let recorders = &self.shared.recorders.walks[walk];
        recorders.rows.add(rows.len() as u64);
        recorders.device.add_time(device);
        match self.topology.walks[walk].kind {
            WalkKind::Stream => {
                let items = rows.iter().map(|row| row.window.items.len()).sum();
                recorders.items.add(items as u64);
                self.paces[walk].landed(items, took);
            }
            WalkKind::Loop => self.beat = took,
            _ => {}
        }
    }

    /// The rows of a landed step. Their states go back to their requests; one whose request is gone meanwhile
    /// is dropped.
    pub(super) fn settle(
        &mut self,
        walk: usize,
        mut rows: Vec<Row>,
        mut outcomes: Vec<RowOutcome>,
        origin: &Origin,
    ) {
        let topology = self.topology.clone();
        let info = &topology.walks[walk];
        for (row, outcome) in rows.iter_mut().zip(&mut outcomes) {
            let place = row.place;
            let Some(request) = self.requests.find(place, row.request) else {
                continue;
            };
            let part = &mut request.nodes[info.node];
            part.in_flight -= 1;
            if let Some(state) = row.state.take() {
                part.state = Some(state);
            }
            if info.may_output {
                request.unreserve_output();
            }
            if let Some(error) = outcome.error.take() {
                self.fail(place, error.into());
                continue;
            }
            match info.kind {
                WalkKind::Entry | WalkKind::Loop => self.made(&topology, info, row, outcome, origin),
                WalkKind::Once => self.delivered(&topology, info, place, outcome, origin),
                WalkKind::Prime => self.finish_if_drained(place),
                WalkKind::Stream => self.consumed(&topology, info, row, outcome),
            }
        }
    }

    /// A step of an entry or loop walk: items for its edge, maybe the end.
    fn made(
        &mut self,
        topology: &Topology,
        info: &WalkInfo,
        row: &Row,
        outcome: &mut RowOutcome,
        origin: &Origin,
    ) {
        let (place, id) = (row.place, row.request);
        let request = self.requests.at(place);
        request.producing -= 1;
        if request.ended.is_some() {
            self.shared.stats.lock().overrun_rows += 1;
            return;
        }
        if info.kind == WalkKind::Entry {
            request.stats.prefill = Some(request.age());
            row.held.lease.fill();
        }
        if !outcome.items.is_empty() && request.stats.first_item.is_none() {
            request.stats.first_item = Some(request.age());
        }
        let first_item = request.stats.items;
        let n_items = outcome.items.len();
        request.stats.items += n_items as u32;
        if let Some(edge) = info.produces {
            let queue = &mut request.edges[edge].queue;
            match topology.edges[edge].consumer {
                Some(consumer) => {
                    // A consumer on the same stream runs behind it anyway.
                    let crosses = self.lane_by_node[topology.walks[consumer].node] != info.lane;
                    queue.arrive(outcome.items.drain(..), row.ring_row, crosses.then_some(origin));
                }
                None => {
                    queue.arrive(outcome.items.iter().cloned(), row.ring_row, None);
                    // They leave for another worker, whose own edge holds them from here on.
                    queue.leave(n_items);
                    if n_items > 0 {
                        request.send(OutputEvent::Items {
                            edge: topology.edges[edge].name.clone(),
                            first_item,
                            items: std::mem::take(&mut outcome.items),
                        });
                    }
                }
            }
        }
        if let Some(samples) = outcome.output.take() {
            self.output(place, samples, first_item, n_items as u32);
        }
        // A walk with nothing to loop behind it ends with its only step.
        let finish = outcome
            .finish
            .or(topology.looping.is_none().then_some(FinishReason::Stop));
        match finish {
            Some(reason) => self.end_producers(place, reason),
            None => self.settle_stop(place, id),
        }
    }

    /// A walk that runs once: its result.
    fn delivered(
        &mut self,
        topology: &Topology,
        info: &WalkInfo,
        place: usize,
        outcome: &mut RowOutcome,
        origin: &Origin,
    ) {
        let edge = info.delivers.expect("a walk that runs once delivers");
        let Some(result) = outcome.result.take() else {
            let message = format!("walk {} delivered no result", info.name);
            self.fail(place, Failure::new(FailureKind::Internal, message));
            return;
        };
        let request = self.requests.at(place);
        request.deliveries[edge] = Delivery::Done(result.clone(), Some(origin.clone()));
        request.send(OutputEvent::Result {
            edge: topology.request_edges[edge].name.clone(),
            result,
        });
        self.prime_if_delivered(place);
    }

    /// A window: its places are free again, its samples go out.
    fn consumed(&mut self, topology: &Topology, info: &WalkInfo, row: &Row, outcome: &mut RowOutcome) {
        let (place, items) = (row.place, &row.window.items);
        let edge = info.consumes.expect("a stream walk has an edge");
        let request = self.requests.at(place);
        request.edges[edge].queue.window_landed(items);
        if !topology.edges[edge].produced_here
            && let Some(ingress) = &request.control.ingress
        {
            ingress.lock().held -= items.len();
        }
        request.stats.windows += 1;
        if let Some(samples) = outcome.output.take() {
            let first_item = items.first().map_or(0, |item| item.index);
            self.output(place, samples, first_item, items.len() as u32);
        }
        self.finish_if_drained(place);
    }

    fn output(&mut self, place: usize, samples: Samples, first_item: u32, n_items: u32) {
        let request = self.requests.at(place);
        if request.stats.first_output.is_none() {
            request.stats.first_output = Some(request.age());
        }
        request.stats.samples += samples.len() as u64;
        request.send(OutputEvent::Samples {
            samples,
            first_item,
            n_items,
        });
    }

    /// Nothing more will be made for the request: its consumers flush.
    pub(super) fn end_producers(&mut self, place: usize, reason: FinishReason) {
        let request = self.requests.at(place);
        request.ended = Some(reason);
        for edge in &mut request.edges {
            edge.queue.close();
        }
        self.finish_if_drained(place);
    }

    /// A stop takes effect once the last producing step has landed.
    pub(super) fn settle_stop(&mut self, place: usize, id: RequestId) {
        if let Some(request) = self.requests.find(place, id)
            && request.stopping
            && request.producing == 0
            && request.ended.is_none()
        {
            self.end_producers(place, FinishReason::Stopped);
        }
    }

    /// Finish a request of which nothing is left to make and nothing left to consume.
    fn finish_if_drained(&mut self, place: usize) {
        let topology = self.topology.clone();
        let request = self.requests.at(place);
        let Some(reason) = request.ended else { return };
        let drained = topology.edges.iter().zip(&request.edges).all(|(edge, part)| {
            edge.consumer.is_none_or(|walk| {
                part.queue.drained() && request.nodes[topology.walks[walk].node].in_flight == 0
            })
        });
        if !drained {
            return;
        }
        let mut stats = std::mem::take(&mut request.stats);
        stats.total = request.age();
        self.shared.stats.lock().finished += 1;
        let total = stats.total;
        self.end(place, OutputEvent::Finished { reason, stats });
        let mut registry = self.shared.registry.lock();
        registry.typical_duration = (registry.typical_duration * 7 + total) / 8;
    }

    /// End a request that did not finish.
    pub(super) fn fail(&mut self, place: usize, failure: Failure) {
        {
            let mut stats = self.shared.stats.lock();
            match failure.kind {
                FailureKind::Cancelled => stats.cancelled += 1,
                _ => stats.failed += 1,
            }
        }
        self.end(place, OutputEvent::Failed(failure));
    }

    /// The only way out: the request leaves every list, its id is free, its listener gets the terminal event.
    /// Steps in flight keep what they name until they have landed.
    fn end(&mut self, place: usize, terminal: OutputEvent) {
        let request = self.requests.remove(place);
        if request.running {
            self.running.retain(|&other| other != place);
        } else {
            self.waiting.retain(|&other| other != place);
        }
        {
            let mut registry = self.shared.registry.lock();
            registry.live.remove(&request.control.name);
            if registry.live.is_empty() {
                self.shared.all_ended.notify_all();
            }
        }
        request.send(terminal);
    }

    /// `lane` runs nothing any more: end what still needs it, and nothing else.
    pub(super) fn lose_lane(&mut self, lane: usize, why: &str) {
        if self.lanes[lane].lost.is_some() {
            return;
        }
        let name: Arc<str> = match lane {
            0 => "the chain".into(),
            lane => format!("lane {lane}").into(),
        };
        let message = format!("{name} is lost: {why}");
        self.lanes[lane].lost = Some(message.clone());
        self.unhealthy(message.clone());
        let places: Vec<usize> = self.requests.places().collect();
        for place in places {
            if self.needs_lane(place, lane) {
                self.fail(place, Failure::new(FailureKind::Unavailable, message.clone()));
            }
        }
    }

    /// Whether anything that the request still waits for runs on `lane`.
    fn needs_lane(&mut self, place: usize, lane: usize) -> bool {
        let topology = self.topology.clone();
        let request = self.requests.at(place);
        topology
            .walks
            .iter()
            .filter(|walk| self.lane_by_node[walk.node] == lane)
            .any(|walk| match walk.kind {
                WalkKind::Entry | WalkKind::Loop => request.ended.is_none(),
                WalkKind::Once => walk.delivers.is_some_and(|edge| {
                    matches!(request.deliveries[edge], Delivery::Pending | Delivery::Running)
                }),
                WalkKind::Prime | WalkKind::Stream => walk.consumes.is_some_and(|edge| {
                    !request.edges[edge].queue.drained() || request.nodes[walk.node].in_flight > 0
                }),
            })
    }
}
