//! Nodes that are left to measurement (`lane: auto`): which arm each is on, what is observed of it, and how it
//! moves. The decision itself is [`crate::auto`]'s.
//!
//! A node moves at a step's boundary: once its arm is to change, nothing of it is launched until what is in flight
//! has landed; then the new arm's stream waits for the old one's, and the node, its pools and its walks change
//! hands together. So there is never more than one stream that works on its state, and no byte can differ.

use std::sync::Arc;
use std::time::Duration;

use laneway_device::{DeviceError, Stream};
use laneway_plan::declaration::WalkKind;

use super::Core;
use crate::auto::{Chooser, Flip, ON_CHAIN, Seen, SeenStep};
use crate::config::AutoPolicy;
use crate::node::Node;
use crate::stats::{AutoStats, FlipCount};
use crate::step::Row;
use crate::topology::CHAIN;

/// One way to run a node.
#[derive(Debug, Clone)]
pub(crate) struct Arm {
    /// `chain`, `lane1`, `lane1-sms32`.
    pub(crate) name: Arc<str>,
    pub(crate) lane: usize,
    pub(crate) stream: Arc<dyn Stream>,
}

/// Who decides.
#[derive(Debug)]
enum Policy {
    Measured(Box<Chooser>),
    /// The next arm every so many steps of the node.
    Cycle {
        every: u32,
        steps: u32,
    },
}

/// A node that may move.
pub(crate) struct Auto {
    node: usize,
    arms: Vec<Arm>,
    in_force: usize,
    wanted: usize,
    policy: Policy,
    /// The node itself while it is on its lane and no order has it.
    parked: Option<Box<dyn Node>>,
}

impl Auto {
    /// It starts on the first of its lane's arms.
    pub(crate) fn new(node: usize, arms: Vec<Arm>, policy: AutoPolicy, parked: Box<dyn Node>) -> Self {
        let start = ON_CHAIN + 1;
        let policy = match policy {
            AutoPolicy::Measured => Policy::Measured(Box::new(Chooser::new(arms.len(), start))),
            AutoPolicy::Cycle(every) => Policy::Cycle { every, steps: 0 },
        };
        Self {
            node,
            arms,
            in_force: start,
            wanted: start,
            policy,
            parked: Some(parked),
        }
    }

    fn stats(&self, name: &Arc<str>) -> AutoStats {
        AutoStats {
            node: name.clone(),
            arms: self.arms.iter().map(|arm| arm.name.clone()).collect(),
            in_force: self.in_force,
            flips: Vec::new(),
        }
    }
}

/// A node on its way to its lane's thread and back, with the stream of its arm.
pub(crate) struct Carried {
    pub(crate) node: Box<dyn Node>,
    pub(crate) stream: Arc<dyn Stream>,
}

impl std::fmt::Debug for Carried {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "node {} for {:?}", self.node.name(), self.stream)
    }
}

impl Core {
    /// Put every movable node where it starts.
    pub(super) fn place_autos(&mut self) {
        let mut stats = self.shared.stats.lock();
        for auto in &self.autos {
            let arm = &auto.arms[auto.in_force];
            for &pool in &self.topology.nodes[auto.node].pools {
                self.resources.zero_on(pool, arm.lane, arm.stream.clone());
            }
            stats.autos.push(auto.stats(&self.topology.nodes[auto.node].name));
        }
    }

    /// The lane that the walk runs on now.
    pub(super) fn lane_of(&self, walk: usize) -> usize {
        self.lane_by_node[self.topology.walks[walk].node]
    }

    /// The node is about to move: nothing of it is launched.
    pub(super) fn is_moving(&self, node: usize) -> bool {
        let mut autos = self.autos.iter();
        autos.any(|auto| auto.node == node && auto.wanted != auto.in_force)
    }

    fn auto(&mut self, node: usize) -> Option<&mut Auto> {
        self.autos.iter_mut().find(|auto| auto.node == node)
    }

    /// What an order takes along for a node that may move; `None` for one that lives with its lane's thread.
    pub(super) fn carry(&mut self, node: usize) -> Option<Carried> {
        let auto = self.auto(node)?;
        Some(Carried {
            node: auto.parked.take()?,
            stream: auto.arms[auto.in_force].stream.clone(),
        })
    }

    pub(super) fn park(&mut self, node: usize, carried: Carried) {
        if let Some(auto) = self.auto(node) {
            auto.parked = Some(carried.node);
        }
    }

    /// A step landed: say so to whoever decides, and ask.
    pub(super) fn observe(&mut self, walk: usize, rows: &[Row], took: Duration) {
        if self.autos.is_empty() {
            return;
        }
        let topology = self.topology.clone();
        let info = &topology.walks[walk];
        let at = self.began.elapsed();
        let wanting = match info.kind {
            WalkKind::Loop => self.wanting(),
            _ => 0,
        };
        for index in 0..self.autos.len() {
            let auto = &mut self.autos[index];
            let step = match info.kind {
                WalkKind::Loop => SeenStep::Chain {
                    wanting,
                    rows: rows.len(),
                    beside: self.lanes[auto.arms[auto.in_force].lane].busy,
                },
                WalkKind::Stream if info.node == auto.node => SeenStep::Node {
                    rows: rows.len(),
                    items: rows.iter().map(|row| row.window.items.len()).sum(),
                },
                WalkKind::Stream => continue,
                _ if info.lane == CHAIN => SeenStep::Begin { rows: rows.len() },
                _ => continue,
            };
            let arm = auto.in_force;
            match &mut auto.policy {
                Policy::Measured(chooser) => {
                    chooser.observe(&Seen { at, arm, took, step });
                    if let Some(flip) = chooser.decide(at) {
                        self.wants_to_move(index, &flip);
                    }
                }
                Policy::Cycle { every, steps } => {
                    *steps += u32::from(matches!(step, SeenStep::Node { .. }));
                    if steps >= every {
                        *steps = 0;
                        auto.wanted = (arm + 1) % auto.arms.len();
                        self.count_flip(index, "cycle");
                    }
                }
            }
        }
    }

    /// Requests that have frames to make.
    fn wanting(&mut self) -> usize {
        let requests = &mut self.requests;
        let wants = |&&place: &&usize| {
            let request = requests.at(place);
            request.entered && request.ended.is_none() && !request.stopping
        };
        self.running.iter().filter(wants).count()
    }

    fn wants_to_move(&mut self, index: usize, flip: &Flip) {
        let auto = &mut self.autos[index];
        auto.wanted = flip.to;
        let ms = |time: Option<Duration>| time.map(|time| time.as_secs_f64() * 1e3);
        tracing::info!(
            node = &*self.topology.nodes[auto.node].name,
            from = &*auto.arms[flip.from].name,
            to = &*auto.arms[flip.to].name,
            reason = flip.reason.label(),
            from_ms = ms(flip.from_cost),
            to_ms = ms(flip.to_cost),
            requests = flip.wanting,
            width = flip.width,
            chain_step_beside_ms = ms(flip.beside),
            chain_step_alone_ms = ms(flip.alone),
            "the node's arm is chosen"
        );
        if auto.wanted != auto.in_force {
            self.count_flip(index, flip.reason.label());
        }
    }

    fn count_flip(&mut self, index: usize, reason: &'static str) {
        let to = self.autos[index].wanted;
        let mut stats = self.shared.stats.lock();
        let flips = &mut stats.autos[index].flips;
        match flips
            .iter_mut()
            .find(|flip| flip.to == to && flip.reason == reason)
        {
            Some(flip) => flip.count += 1,
            None => flips.push(FlipCount { to, reason, count: 1 }),
        }
    }

    /// Move what is to move and has nothing in flight.
    pub(super) fn move_nodes(&mut self) {
        for index in 0..self.autos.len() {
            let auto = &self.autos[index];
            if auto.wanted == auto.in_force {
                continue;
            }
            let (node, from, to) = (auto.node, &auto.arms[auto.in_force], &auto.arms[auto.wanted]);
            if self.lanes[from.lane].lost.is_some() || self.lanes[to.lane].lost.is_some() {
                // Nothing runs there any more, and what it did last is not known.
                self.autos[index].wanted = self.autos[index].in_force;
                continue;
            }
            let in_flight = match from.lane {
                CHAIN => self.chain.runs(node, &self.topology),
                lane => self.lanes[lane].busy,
            };
            if in_flight {
                continue;
            }
            let (from, to) = (from.clone(), to.clone());
            match self.move_node(index, node, &from, &to) {
                Ok(()) => self.shared.stats.lock().autos[index].in_force = self.autos[index].in_force,
                Err(error) => {
                    // A stream that takes no event takes no step either.
                    self.autos[index].wanted = self.autos[index].in_force;
                    self.lose_lane(from.lane, &format!("a node could not leave it: {error}"));
                }
            }
        }
    }

    fn move_node(&mut self, index: usize, node: usize, from: &Arm, to: &Arm) -> Result<(), DeviceError> {
        // Everything that the old stream was given comes first: the last step, zeroes of released slots, and on the
        // chain the steps that made what the node reads next.
        to.stream.wait(&from.stream.record()?)?;
        let moved = match from.lane {
            CHAIN => self.chain.take_node(node),
            _ => self.autos[index].parked.take(),
        };
        let moved = moved.expect("a node with nothing in flight is where its arm is");
        match to.lane {
            CHAIN => self.chain.add_node(node, moved),
            _ => self.autos[index].parked = Some(moved),
        }
        for &pool in &self.topology.nodes[node].pools {
            self.resources.zero_on(pool, to.lane, to.stream.clone());
        }
        self.lane_by_node[node] = to.lane;
        self.autos[index].in_force = self.autos[index].wanted;
        let mut stats = self.shared.stats.lock();
        for (walk, stats) in self.topology.walks.iter().zip(&mut stats.walks) {
            if walk.node == node {
                stats.lane = to.lane;
            }
        }
        Ok(())
    }
}
