//! Lanes from the engine thread's side: one order at a time to each launch thread, and what its report means.

use std::sync::Arc;
use std::time::Instant;

use laneway_device::DeviceError;
use laneway_plan::declaration::WalkKind;

use super::Core;
use crate::edge::OriginStep;
use crate::lane::{Order, Outcome, Report};
use crate::node::{RowError, Stage};
use crate::output::{Failure, FailureKind};
use crate::phase::Phase;
use crate::scheduler::GATHER_WINDOWS;
use crate::step::{Job, Row};
use crate::topology::CHAIN;

impl Core {
    /// Give an idle lane its next step.
    pub(super) fn fill_lane(&mut self, lane: usize) {
        if self.lanes[lane].busy || self.lanes[lane].lost.is_some() {
            return;
        }
        let began = Instant::now();
        let Some((walk, rows)) = self.next_step(lane) else {
            return;
        };
        self.phase(lane, Phase::Admit, began.elapsed());
        let waits = self.waits(lane, walk, &rows);
        let carried = self.carry(self.topology.walks[walk].node);
        let info = &self.topology.walks[walk];
        let order = Order {
            walk,
            node: info.node,
            job: Job {
                walk: info.id,
                kind: info.kind,
                stage: Stage(0),
            },
            rows,
            waits,
            carried,
        };
        self.lanes[lane].busy = true;
        let orders = self.lanes[lane].orders.as_ref();
        let sent = orders.is_some_and(|orders| orders.try_send(order).is_ok());
        if !sent {
            // The channel has room for one order and none is out, so the thread is gone.
            self.lose_lane(lane, "its launch thread ended");
        }
    }

    /// A lane's step is over.
    pub(super) fn lane_landed(&mut self, report: Report) {
        let Report {
            lane,
            walk,
            rows,
            left_over,
            outcome,
            event,
            took,
            device,
            carried,
        } = report;
        if let Some(carried) = carried {
            self.park(self.topology.walks[walk].node, carried);
        }
        self.lanes[lane].busy = false;
        self.lanes[lane].seq += 1;
        let landed = !matches!(outcome, Outcome::Stuck(_));
        if let Some(event) = event.as_ref().filter(|_| landed) {
            self.lanes[lane].landed = Arc::new(OriginStep {
                lane,
                seq: self.lanes[lane].seq,
                event: event.clone(),
            });
        }
        if !left_over.is_empty() {
            // They have gathered already.
            let chain = self.lanes[CHAIN].seq;
            self.lanes[lane].gathers_since = Some(chain.saturating_sub(u64::from(GATHER_WINDOWS)));
        }
        for row in left_over.into_iter().rev() {
            self.put_back(walk, row);
        }
        match outcome {
            Outcome::Landed(outcomes) => {
                let origin = self.lanes[lane].landed.clone();
                self.step_landed(walk, &rows, took, device);
                let made = Instant::now();
                self.settle(walk, rows, outcomes, &origin);
                self.phase(lane, Phase::Settle, made.elapsed());
            }
            Outcome::Refused(errors) => self.refused(walk, rows, errors),
            Outcome::Failed(error) => self.step_failed(walk, rows, &error),
            Outcome::Stuck(why) => {
                self.stuck.push((event, rows));
                self.lose_lane(lane, &why);
            }
        }
    }

    /// A plan was refused: the rows that it names fail, the others go back where they came from.
    pub(super) fn refused(&mut self, walk: usize, rows: Vec<Row>, errors: Vec<(usize, RowError)>) {
        self.shared.stats.lock().refused_steps += 1;
        let mut errors = errors;
        for (index, row) in rows.into_iter().enumerate().rev() {
            match errors.iter().position(|(at, _)| *at == index) {
                Some(at) => {
                    let (_, error) = errors.swap_remove(at);
                    if self.requests.find(row.place, row.request).is_some() {
                        self.fail(row.place, error.into());
                    }
                }
                None => self.put_back(walk, row),
            }
        }
    }

    /// A step failed as a whole, and nothing of it runs any more: its rows fail.
    pub(super) fn step_failed(&mut self, walk: usize, rows: Vec<Row>, error: &DeviceError) {
        let info = &self.topology.walks[walk];
        let (lane, node) = (self.lane_of(walk), info.node);
        let produces = matches!(info.kind, WalkKind::Entry | WalkKind::Loop);
        tracing::error!(walk = &*info.name, rows = rows.len(), %error, "a step failed");
        if matches!(error, DeviceError::StreamFailed { .. }) {
            // A failed stream runs nothing more.
            self.lose_lane(lane, &error.to_string());
        }
        for row in rows {
            match self.requests.find(row.place, row.request) {
                None => {}
                // It had its end already and was overrun: this step was not for its output.
                Some(request) if produces && request.ended.is_some() => {
                    request.producing -= 1;
                    request.nodes[node].in_flight -= 1;
                }
                Some(_) => self.fail(row.place, Failure::new(FailureKind::Internal, error.to_string())),
            }
        }
    }
}
