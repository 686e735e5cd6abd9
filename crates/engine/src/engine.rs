//! Building an engine, and ending it.
//!
//! Threads: `engine` runs the loop and launches the chain, `chain-landing` waits for its steps, and `lane1`,
//! `lane2`, … launch a lane each. All of them are started here and have ended when [`Engine`] is dropped.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use laneway_device::{
    BufferSpec, DType, Device, DeviceError, Launcher, Place, Stream, StreamConfig, Touches,
};
use laneway_plan::declaration::WalkKind;

use crate::config::EngineConfig;
use crate::core::{Arm, Auto, Chain, Core, CoreParts, DEPTH, LaneState, run_landing};
use crate::edge::{Origin, OriginStep};
use crate::event::Event;
use crate::handle::{EngineHandle, Gate, Health, Shared};
use crate::lane::Lane;
use crate::node::{BoundResource, EdgeRing, Node, NodeContext};
use crate::resource::{Resources, bind};
use crate::stats::{PoolStats, WalkStats};
use crate::topology::{CHAIN, Topology};

/// Why an engine did not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The configuration asks for something that the engine cannot run.
    #[error("{0}")]
    Config(String),
    /// The device refused a stream or an allocation.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// A node could not be built.
    #[error("build node {node}: {source}")]
    Build {
        /// Node name.
        node: String,
        /// The model's reason.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A node failed on its warm-up run.
    #[error("warm up node {node}: {source}")]
    WarmUp {
        /// Node name.
        node: String,
        /// The device's reason.
        source: DeviceError,
    },
    /// A thread could not be started, or panicked while it built its nodes.
    #[error("start thread {thread}: {problem}")]
    Thread {
        /// Thread name.
        thread: String,
        /// What happened.
        problem: String,
    },
    /// Building and warming up took too long.
    #[error("the engine did not start within {0:?}")]
    Deadline(Duration),
}

/// A running engine. Dropping it ends every request that is left and waits for its threads.
#[derive(Debug)]
pub struct Engine {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

/// Nodes of a lane by their index among the worker's.
type Nodes = Vec<(usize, Box<dyn Node>)>;

/// A lane is ready: most rows of a step for each of its walks, what its warm-up ended with, and those of its nodes
/// that do not stay with its thread.
type LaneReady = Result<(Vec<(usize, usize)>, Origin, Nodes), StartError>;

impl Engine {
    /// Build pools, rings, streams and nodes, warm every node up on its own stream and thread, and return
    /// once all of it is ready.
    ///
    /// # Errors
    /// [`StartError`]; nothing keeps running.
    pub fn start(config: EngineConfig) -> Result<(Engine, EngineHandle), StartError> {
        let topology = Arc::new(Topology::new(&config).map_err(StartError::Config)?);
        let streams = streams(&config)?;
        let resources = topology
            .pools
            .iter()
            .map(|pool| bind(&*config.device, pool))
            .collect::<Result<Vec<_>, _>>()?;
        let rings = rings(&*config.device, &topology)?;
        let arms = arms(&config, &topology, &streams)?;
        // One message for each request that may be live, each lane's and chain step's landing, and a few.
        let limits = &topology.limits;
        let capacity = limits.max_running + limits.max_queue + topology.n_lanes + 16;
        let (events, inbox) = sync_channel(capacity);
        let shared = Arc::new(Shared::new(events, topology.clone()));
        let builder = Arc::new(Builder {
            config,
            topology: topology.clone(),
            streams,
            arms,
            resources,
            rings,
        });
        let (started, start) = sync_channel(1);
        let thread = {
            let (builder, shared) = (builder.clone(), shared.clone());
            spawn("engine", move || {
                engine_thread(&builder, &shared, inbox, &started)
            })?
        };
        let deadline = builder.config.limits.start_deadline;
        drop(builder);
        let engine = Engine {
            shared: shared.clone(),
            thread: Some(thread),
        };
        match start.recv_timeout(deadline) {
            Ok(Ok(())) => Ok((engine, EngineHandle { shared })),
            Ok(Err(error)) => Err(error),
            Err(RecvTimeoutError::Timeout) => {
                // Threads that are still building end by themselves once they see that nobody waits.
                std::mem::forget(engine);
                Err(StartError::Deadline(deadline))
            }
            Err(RecvTimeoutError::Disconnected) => Err(StartError::Thread {
                thread: "engine".into(),
                problem: "it panicked while it built the chain's nodes".into(),
            }),
        }
    }

    /// Take nothing new, and wait at most `bound` for the requests that are left. Returns how many still ran
    /// when the time was up; dropping the engine ends them.
    pub fn drain(&self, bound: Duration) -> usize {
        let deadline = Instant::now() + bound;
        let mut registry = self.shared.registry.lock();
        if matches!(registry.gate, Gate::Open) {
            registry.gate = Gate::Draining;
            self.shared.health.send_replace(Health::Draining);
        }
        while !registry.live.is_empty() {
            if self
                .shared
                .all_ended
                .wait_until(&mut registry, deadline)
                .timed_out()
            {
                break;
            }
        }
        registry.live.len()
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        // An error means that the thread has ended already.
        let _ = self.shared.events.send(Event::Shutdown);
        if thread.join().is_err() {
            tracing::error!("the engine thread panicked");
        }
    }
}

fn streams(config: &EngineConfig) -> Result<Vec<Arc<dyn Stream>>, DeviceError> {
    let lanes = config.lanes.iter().enumerate();
    lanes
        .map(|(lane, lane_config)| {
            config.device.create_stream(StreamConfig {
                name: lane_name(lane),
                priority: lane_config.priority,
                partition_sms: lane_config.partition_sms,
            })
        })
        .collect()
}

/// The arms of each node that may move: the chain, then its lane in each partition, the largest first. Streams are made now, and
/// captures on them with the warm-up: a flip makes nothing.
fn arms(
    config: &EngineConfig,
    topology: &Topology,
    streams: &[Arc<dyn Stream>],
) -> Result<Vec<Vec<Arm>>, DeviceError> {
    let nodes = topology.nodes.iter();
    nodes
        .map(|node| {
            let Some(auto) = &node.auto else {
                return Ok(Vec::new());
            };
            let lane = |sms: u32| {
                let name = match sms {
                    0 => lane_name(node.lane),
                    sms => format!("{}-sms{sms}", lane_name(node.lane)),
                };
                let stream = match sms {
                    0 => streams[node.lane].clone(),
                    sms => config.device.create_stream(StreamConfig {
                        name: name.clone(),
                        priority: config.lanes[node.lane].priority,
                        partition_sms: Some(sms),
                    })?,
                };
                Ok(Arm {
                    name: name.into(),
                    lane: node.lane,
                    stream,
                })
            };
            let chain = Arm {
                name: lane_name(CHAIN).into(),
                lane: CHAIN,
                stream: streams[CHAIN].clone(),
            };
            let mut sms = auto.sms.clone();
            if sms.is_empty() {
                sms.push(0);
            }
            // They are tried in this order: what a small partition leaves undone would be blamed on the next one.
            sms.sort_by_key(|&sms| if sms == 0 { 0 } else { u32::MAX - sms });
            std::iter::once(Ok(chain))
                .chain(sms.iter().map(|&sms| lane(sms)))
                .collect()
        })
        .collect()
}

fn lane_name(lane: usize) -> String {
    match lane {
        CHAIN => "chain".into(),
        lane => format!("lane{lane}"),
    }
}

/// The ring of each edge that has one.
fn rings(device: &dyn Device, topology: &Topology) -> Result<Vec<Option<EdgeRing>>, DeviceError> {
    let slots = topology.limits.max_running as u32;
    let ring = |edge: &crate::topology::EdgeInfo| -> Result<Option<EdgeRing>, DeviceError> {
        if !edge.has_ring() {
            return Ok(None);
        }
        let buffer = device.alloc(BufferSpec {
            name: format!("ring of {}", edge.name),
            dtype: DType::I32,
            len: (slots * edge.capacity * edge.item_words) as usize,
            place: Place::Device,
        })?;
        Ok(Some(EdgeRing {
            buffer,
            slots,
            capacity: edge.capacity,
            item_words: edge.item_words,
        }))
    };
    topology.edges.iter().map(ring).collect()
}

fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>, StartError> {
    let thread = std::thread::Builder::new().name(name.into());
    thread.spawn(body).map_err(|error| StartError::Thread {
        thread: name.into(),
        problem: error.to_string(),
    })
}

/// What every thread builds its nodes from.
struct Builder {
    config: EngineConfig,
    topology: Arc<Topology>,
    streams: Vec<Arc<dyn Stream>>,
    /// By node; empty for one that stays.
    arms: Vec<Vec<Arm>>,
    resources: Vec<BoundResource>,
    rings: Vec<Option<EdgeRing>>,
}

impl Builder {
    /// Build and warm up the nodes of `lane`, on the thread that will own them.
    fn nodes(&self, lane: usize) -> Result<Nodes, StartError> {
        let placed = self.topology.nodes.iter().enumerate();
        placed
            .filter(|(_, node)| node.lane == lane)
            .map(|(index, node)| {
                let name = node.name.to_string();
                let built = self.config.model.build_node(&name, self.context(index));
                let mut built = built.map_err(|source| StartError::Build {
                    node: name.clone(),
                    source,
                })?;
                self.warm_up(&mut *built, index)
                    .and_then(|()| self.settled(lane).map(drop))
                    .map_err(|source| StartError::WarmUp { node: name, source })?;
                Ok((index, built))
            })
            .collect()
    }

    /// Warm a node up on every stream that it may run on, one behind the other; its lane's comes last, so that the
    /// rest of the start is behind all of it.
    fn warm_up(&self, node: &mut dyn Node, index: usize) -> Result<(), DeviceError> {
        let own = &self.streams[self.topology.nodes[index].lane];
        let touches = Touches::none();
        let warm = |node: &mut dyn Node, stream: &Arc<dyn Stream>| {
            let launcher = Launcher {
                stream: &**stream,
                touches: &touches,
            };
            node.warm_up(&launcher)
        };
        let arms = &self.arms[index];
        if arms.is_empty() {
            return warm(node, own);
        }
        // The arm that it starts on is waited for by all others when it first leaves it.
        let start = arms[1..].iter().chain(&arms[..1]).rev();
        let mut last: Option<laneway_device::Event> = None;
        for arm in start {
            if let Some(event) = &last {
                arm.stream.wait(event)?;
            }
            warm(node, &arm.stream)?;
            let event = arm.stream.record()?;
            // The host fills the same staging memory for the next.
            event.synchronize(self.config.limits.start_deadline)?;
            last = Some(event);
        }
        last.map_or(Ok(()), |event| own.wait(&event))
    }

    /// Wait until everything on the lane's stream has run.
    fn settled(&self, lane: usize) -> Result<Origin, DeviceError> {
        let event = self.streams[lane].record()?;
        event.synchronize(self.config.limits.start_deadline)?;
        Ok(Arc::new(OriginStep { lane, seq: 0, event }))
    }

    fn context(&self, node: usize) -> NodeContext {
        let info = &self.topology.nodes[node];
        let rings = self.topology.edges_of(node).filter_map(|edge| {
            let ring = self.rings[edge].clone()?;
            Some((self.topology.edges[edge].name.to_string(), ring))
        });
        NodeContext {
            device: self.config.device.clone(),
            stream: self.streams[info.lane].clone(),
            resources: info
                .pools
                .iter()
                .map(|&pool| self.resources[pool].clone())
                .collect(),
            rings: rings.collect(),
            max_rows: self.config.lanes[info.lane].max_rows,
            max_prefill_tokens: self.config.max_prefill_tokens,
            max_seq_len: self.config.max_seq_len,
            capture_buckets: self.config.capture_buckets.clone(),
        }
    }

    /// Most rows of a step, for each walk of these nodes.
    fn max_rows(&self, nodes: &Nodes) -> Vec<(usize, usize)> {
        let walks = self.topology.walks.iter().enumerate();
        walks
            .filter_map(|(index, walk)| {
                let (_, node) = nodes.iter().find(|(node, _)| *node == walk.node)?;
                // Prefill is bounded by the node alone: its rows are not yet among the lane's running ones.
                let bound = match walk.kind {
                    WalkKind::Entry | WalkKind::Once => usize::MAX,
                    _ => self.config.lanes[walk.lane].max_rows,
                };
                Some((index, node.max_rows(walk.id).min(bound).max(1)))
            })
            .collect()
    }
}

/// Body of the `engine` thread: start the others, build the chain, then run the loop.
fn engine_thread(
    builder: &Arc<Builder>,
    shared: &Arc<Shared>,
    inbox: Receiver<Event>,
    started: &SyncSender<Result<(), StartError>>,
) {
    let ended = EndGuard(shared.clone());
    match build_core(builder, shared, inbox) {
        Ok(core) => {
            if started.send(Ok(())).is_ok() {
                core.run();
            }
        }
        Err(error) => {
            let _ = started.send(Err(error));
        }
    }
    drop(ended);
}

/// Leaves the truth behind, also when the loop panicked.
struct EndGuard(Arc<Shared>);

impl Drop for EndGuard {
    fn drop(&mut self) {
        let mut registry = self.0.registry.lock();
        if !matches!(registry.gate, Gate::Stopped(_)) {
            registry.gate = Gate::Stopped("its thread ended".into());
        }
        registry.live.clear();
        self.0.all_ended.notify_all();
        self.0.health.send_replace(Health::Stopped);
    }
}

fn build_core(
    builder: &Arc<Builder>,
    shared: &Arc<Shared>,
    inbox: Receiver<Event>,
) -> Result<Core, StartError> {
    let topology = builder.topology.clone();
    let n_walks = topology.walks.len();
    let mut threads = Vec::new();
    let mut readies = Vec::new();
    for lane in CHAIN + 1..topology.n_lanes {
        let (orders, order_inbox) = sync_channel(1);
        let (ready, is_ready) = sync_channel(1);
        let (builder, events) = (builder.clone(), shared.events.clone());
        let recorders = shared.recorders.clone();
        let thread = spawn(&lane_name(lane), move || {
            let nodes = match builder.nodes(lane) {
                Ok(nodes) => nodes,
                Err(error) => {
                    let _ = ready.send(Err(error));
                    return;
                }
            };
            let warmed_up = builder.settled(lane).map_err(StartError::Device);
            let (moving, nodes): (Nodes, Nodes) = {
                let moves = |index: usize| !builder.arms[index].is_empty();
                nodes.into_iter().partition(|(index, _)| moves(*index))
            };
            let rows: LaneReady = warmed_up.map(|origin| {
                let mut rows = builder.max_rows(&nodes);
                rows.extend(builder.max_rows(&moving));
                (rows, origin, moving)
            });
            let served = Lane {
                lane,
                nodes,
                stream: builder.streams[lane].clone(),
                step_deadline: builder.config.limits.step_deadline,
                recorders,
            };
            drop(builder);
            let is_ready = rows.is_ok();
            if ready.send(rows).is_ok() && is_ready {
                served.run(&order_inbox, &events);
            }
        })?;
        threads.push((orders, thread));
        readies.push((lane, is_ready));
    }
    let chain_nodes = builder.nodes(CHAIN)?;
    let mut max_rows = vec![1; n_walks];
    let mut all_rows = builder.max_rows(&chain_nodes);
    let warmed_up = builder.settled(CHAIN)?;
    let mut autos = Vec::new();
    let mut lanes = vec![LaneState::new(None, None, n_walks, warmed_up)];
    for ((lane, is_ready), (orders, thread)) in readies.into_iter().zip(threads) {
        let ready: LaneReady = is_ready.recv().map_err(|_| StartError::Thread {
            thread: lane_name(lane),
            problem: "it panicked while it built its nodes".into(),
        })?;
        let (rows, warmed_up, moving) = ready?;
        all_rows.extend(rows);
        autos.extend(moving.into_iter().filter_map(|(node, built)| {
            let auto = topology.nodes[node].auto.as_ref()?;
            Some(Auto::new(node, builder.arms[node].clone(), auto.policy, built))
        }));
        lanes.push(LaneState::new(Some(orders), Some(thread), n_walks, warmed_up));
    }
    for (walk, rows) in all_rows {
        max_rows[walk] = rows;
    }
    let (landing, steps) = sync_channel(DEPTH);
    let events = shared.events.clone();
    let step_deadline = builder.config.limits.step_deadline;
    let landing_thread = spawn("chain-landing", move || {
        run_landing(&steps, &events, step_deadline)
    })?;
    let ring_slots: Vec<u32> = builder
        .rings
        .iter()
        .map(|ring| ring.as_ref().map_or(0, |ring| ring.slots))
        .collect();
    let resources = Resources::new(
        &topology,
        &builder.resources,
        &ring_slots,
        &builder.streams,
        shared.waker.clone(),
    );
    {
        let mut stats = shared.stats.lock();
        stats.walks = walk_stats(&topology);
        stats.pools = topology
            .pools
            .iter()
            .map(|pool| PoolStats {
                key: pool.key.clone(),
                slots: pool.slots,
                used: 0,
            })
            .collect();
    }
    Ok(Core::new(CoreParts {
        chain: Chain::new(
            chain_nodes,
            builder.streams[CHAIN].clone(),
            landing,
            landing_thread,
        ),
        topology,
        shared: shared.clone(),
        events: inbox,
        resources,
        lanes,
        max_rows,
        playback_hz: builder.config.playback_hz,
        autos,
    }))
}

fn walk_stats(topology: &Topology) -> Vec<WalkStats> {
    let walks = topology.walks.iter();
    walks
        .map(|walk| WalkStats {
            walk: walk.name.clone(),
            node: topology.nodes[walk.node].name.clone(),
            lane: walk.lane,
            kind: Some(walk.kind),
            ..WalkStats::default()
        })
        .collect()
}
