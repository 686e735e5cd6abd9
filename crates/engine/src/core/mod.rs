//! The engine thread: owner of every request, pool and edge, and of the chain's nodes. One synchronous loop
//! over a closed set of events; it never waits for a device and never blocks on a listener.
//!
//! Started by [`crate::Engine::start`]; ends on [`Event::Shutdown`], or when a node of the chain panics.

mod admit;
mod arms;
mod chain;
mod flags;
mod lanes;
mod ready;
mod settle;

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use laneway_device::Event as DeviceEvent;

pub(crate) use arms::{Arm, Auto, Carried};
pub(crate) use chain::{Chain, DEPTH, run_landing};

use crate::edge::Origin;
use crate::event::Event;
use crate::handle::{Gate, Health, Shared};
use crate::lane::Order;
use crate::output::{Failure, FailureKind};
use crate::pace::Pace;
use crate::request::Table;
use crate::resource::Resources;
use crate::scheduler::{Ready, Turns};
use crate::step::Row;
use crate::topology::{CHAIN, Topology};

/// How often deadlines and stalled listeners are looked at.
const TICK: Duration = Duration::from_millis(20);

/// One stream as the engine thread sees it.
pub(crate) struct LaneState {
    /// To its launch thread; `None` for the chain.
    pub(crate) orders: Option<SyncSender<Order>>,
    pub(crate) thread: Option<JoinHandle<()>>,
    /// A step is with its thread.
    pub(crate) busy: bool,
    /// Steps so far.
    pub(crate) seq: u64,
    pub(crate) turns: Turns,
    /// The chain's steps when windows began to gather for its next step.
    pub(crate) gathers_since: Option<u64>,
    /// Its newest landed step, its nodes' warm-up to begin with.
    pub(crate) landed: Origin,
    /// Why it runs nothing any more.
    pub(crate) lost: Option<String>,
}

impl LaneState {
    pub(crate) fn new(
        orders: Option<SyncSender<Order>>,
        thread: Option<JoinHandle<()>>,
        n_walks: usize,
        warmed_up: Origin,
    ) -> Self {
        Self {
            orders,
            thread,
            busy: false,
            seq: 0,
            turns: Turns::new(n_walks),
            gathers_since: None,
            landed: warmed_up,
            lost: None,
        }
    }
}

/// The engine thread's state.
pub(crate) struct Core {
    pub(crate) topology: Arc<Topology>,
    pub(crate) shared: Arc<Shared>,
    pub(crate) events: Receiver<Event>,
    pub(crate) resources: Resources,
    pub(crate) chain: Chain,
    /// By lane id; entry 0 is the chain's.
    pub(crate) lanes: Vec<LaneState>,
    /// Most rows of a step, by walk.
    pub(crate) max_rows: Vec<usize>,
    pub(crate) playback_hz: u32,
    requests: Table,
    /// Places of requests that wait for admission, first come first.
    waiting: VecDeque<usize>,
    /// Places of admitted requests, in order of admission.
    running: Vec<usize>,
    /// Rows of steps that ran out of time, with their event: what they name is in use until it completes.
    stuck: Vec<(Option<DeviceEvent>, Vec<Row>)>,
    next_tick: Instant,
    /// What windows cost, by walk.
    paces: Vec<Pace>,
    /// How long the chain's newest loop step took.
    beat: Duration,
    /// The lane of each node as it is.
    lane_by_node: Vec<usize>,
    /// Nodes that may move.
    autos: Vec<Auto>,
    began: Instant,
    /// Scratch: ready rows by walk, and the walks that have any.
    candidates: Vec<Vec<usize>>,
    ready: Vec<Ready>,
}

/// What [`Core::new`] is given.
pub(crate) struct CoreParts {
    pub(crate) topology: Arc<Topology>,
    pub(crate) shared: Arc<Shared>,
    pub(crate) events: Receiver<Event>,
    pub(crate) resources: Resources,
    pub(crate) chain: Chain,
    pub(crate) lanes: Vec<LaneState>,
    pub(crate) max_rows: Vec<usize>,
    pub(crate) playback_hz: u32,
    pub(crate) autos: Vec<Auto>,
}

impl Core {
    pub(crate) fn new(parts: CoreParts) -> Self {
        let n_walks = parts.topology.walks.len();
        let lane_by_node = parts.topology.nodes.iter().map(|node| node.lane).collect();
        let mut core = Self {
            topology: parts.topology,
            shared: parts.shared,
            events: parts.events,
            resources: parts.resources,
            chain: parts.chain,
            lanes: parts.lanes,
            max_rows: parts.max_rows,
            playback_hz: parts.playback_hz,
            requests: Table::default(),
            waiting: VecDeque::new(),
            running: Vec::new(),
            stuck: Vec::new(),
            next_tick: Instant::now(),
            paces: vec![Pace::default(); n_walks],
            beat: Duration::ZERO,
            candidates: vec![Vec::new(); n_walks],
            ready: Vec::with_capacity(n_walks),
            lane_by_node,
            autos: parts.autos,
            began: Instant::now(),
        };
        core.place_autos();
        core
    }

    /// Serve until shutdown.
    pub(crate) fn run(mut self) {
        loop {
            let event = if self.poll_chain() {
                self.events.try_recv().ok()
            } else {
                self.watch_chain();
                match self.events.recv_timeout(TICK) {
                    Ok(event) => Some(event),
                    Err(RecvTimeoutError::Timeout) => None,
                    Err(RecvTimeoutError::Disconnected) => break,
                }
            };
            if self.handle_all(event) {
                break;
            }
            self.turn();
        }
        self.leave();
    }

    /// Handle one event and all behind it. True: leave.
    fn handle_all(&mut self, first: Option<Event>) -> bool {
        let mut next = first;
        while let Some(event) = next {
            match event {
                Event::Submit(accepted) => self.accept(*accepted),
                Event::Wake => {}
                Event::ChainLanded { seq, result } => self.chain_reported(seq, result),
                Event::LaneLanded(report) => self.lane_landed(*report),
                Event::Shutdown => return true,
            }
            next = self.events.try_recv().ok();
        }
        false
    }

    /// Everything that may be due after events.
    fn turn(&mut self) {
        if self.shared.waker.take() {
            self.read_flags();
        }
        let now = Instant::now();
        if now >= self.next_tick {
            self.next_tick = now + TICK;
            self.tick(now);
        }
        if let Some((lane, error)) = self.resources.collect() {
            self.lose_lane(lane, &format!("a released slot could not be zeroed: {error}"));
        }
        self.move_nodes();
        self.admit();
        for lane in CHAIN + 1..self.lanes.len() {
            self.fill_lane(lane);
        }
        self.fill_chain();
        self.publish();
    }

    /// Bring the gauges of the snapshot up to date.
    fn publish(&self) {
        let mut stats = self.shared.stats.lock();
        stats.queued = self.waiting.len();
        stats.running = self.running.len();
        for (index, pool) in stats.pools.iter_mut().enumerate() {
            pool.used = self.resources.used(index);
        }
    }

    /// Take nothing new any more, and say so.
    fn unhealthy(&mut self, why: String) {
        tracing::error!(why, "the engine cannot go on serving");
        self.shared.registry.lock().gate = Gate::Stopped(why.clone());
        self.shared.health.send_replace(Health::Unhealthy(why));
    }

    /// End what is left and wait for the other threads, whose waits have deadlines.
    fn leave(mut self) {
        {
            let mut registry = self.shared.registry.lock();
            if !matches!(registry.gate, Gate::Stopped(_)) {
                registry.gate = Gate::Stopped("it was shut down".into());
            }
        }
        // Submissions that came before the gate closed still get their answer.
        while let Ok(event) = self.events.try_recv() {
            if let Event::Submit(accepted) = event {
                self.accept(*accepted);
            }
        }
        let places: Vec<usize> = self.requests.places().collect();
        for place in places {
            self.fail(
                place,
                Failure::new(FailureKind::Unavailable, "the engine was shut down"),
            );
        }
        let threads: Vec<_> = self
            .lanes
            .iter_mut()
            .filter_map(|lane| {
                lane.orders = None;
                lane.thread.take()
            })
            .chain(self.chain.end())
            .collect();
        // They may still have a landing each to report; the channel has room for all of them.
        for thread in threads {
            if thread.join().is_err() {
                tracing::error!("a thread of the engine panicked");
            }
        }
        self.shared.health.send_replace(Health::Stopped);
    }
}
