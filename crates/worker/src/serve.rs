//! A worker's life: bind, register, load, warm up, serve, drain.
//!
//! [`WorkerServer::run`] is the only entry; every task it starts ends with it.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use laneway_engine::{EngineStats, Health};
use laneway_plan::worker_plan::{Direction, EdgeKind};
use laneway_plan::{DeviceInventory, WorkerPlan};
use laneway_proto::v1;
use laneway_proto::v1::engine_manager_client::EngineManagerClient;
use laneway_tls::{Dial, InternalTls};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;

use crate::backend::Backend;
use crate::builders::Builders;
use crate::listen::{self, Listeners};
use crate::manager::{self, Beat, Identity};
use crate::meter;
use crate::peer;
use crate::report::Reporter;
use crate::service::{Codec, Core, Role, WorkerService};
use crate::share;
use crate::state::{self, Admission, State};
use crate::warm_up::warm_up;

/// How long open connections may take to close when nothing is left to be read from them.
const CLOSE_DEADLINE: Duration = Duration::from_millis(500);

/// What a worker is started with.
#[derive(Debug, Clone)]
pub struct WorkerConfig {
    /// The part of the deployment that it serves.
    pub rank: u32,
    /// Where it listens; port 0 takes a free one.
    pub listen: SocketAddr,
    /// Host that others dial; the one that it listens on when absent.
    pub advertise: Option<String>,
    /// Where the engine-manager answers, `host:port` or a whole URI.
    pub engine_manager: String,
    /// What every connection with another role is encrypted with; none is without it.
    pub tls: Option<InternalTls>,
    /// What this machine has.
    pub devices: DeviceInventory,
    /// How long it may take to get a plan.
    pub register_patience: Duration,
    /// Directory that the workers of this host share: each also listens at a Unix socket in it, and reaches the others
    /// through theirs. One worker a rank may run with it.
    pub socket_directory: Option<PathBuf>,
}

/// Builds the model and starts its engine. Runs on a thread that may block.
pub type Load = Box<dyn FnOnce(&WorkerPlan) -> anyhow::Result<Arc<dyn Backend>> + Send>;

/// A worker with its address, not serving yet.
#[derive(Debug)]
pub struct WorkerServer {
    config: WorkerConfig,
    listeners: Listeners,
    local_addr: SocketAddr,
}

impl WorkerServer {
    /// Bind the address.
    ///
    /// # Errors
    /// It cannot be bound, or nobody else could dial it.
    pub async fn bind(config: WorkerConfig) -> anyhow::Result<Self> {
        let listen = config.listen;
        anyhow::ensure!(
            !listen.ip().is_unspecified() || config.advertise.is_some(),
            "listen on {listen}: nobody can dial that address; state the host to register with --advertise"
        );
        let socket = config
            .socket_directory
            .as_ref()
            .map(|directory| listen::socket(directory, config.rank));
        let listeners = Listeners::bind(listen, socket).await?;
        let local_addr = listeners.local_addr()?;
        Ok(WorkerServer {
            config,
            listeners,
            local_addr,
        })
    }

    /// Where it listens.
    pub fn local_addr(&self) -> SocketAddr {
        self.local_addr
    }

    /// Serve until `shutdown` is cancelled and what ran then has finished or the drain bound is over.
    ///
    /// # Errors
    /// [`crate::RegisterError`] for a refused registration; anything that keeps the model from running, or ends it.
    pub async fn run(self, load: Load, shutdown: CancellationToken) -> anyhow::Result<()> {
        let WorkerServer {
            config,
            listeners,
            local_addr,
        } = self;
        let dial = Dial::from(config.tls.as_ref().map(|tls| tls.client.clone()));
        let _certificates = config.tls.as_ref().map(InternalTls::watch);
        let host = config
            .advertise
            .clone()
            .unwrap_or_else(|| local_addr.ip().to_string());
        if let Some(tls) = &config.tls {
            tls.tell_unless_for(&host);
        }
        let address = match host.parse::<std::net::Ipv6Addr>() {
            Ok(v6) => format!("{}://[{v6}]:{}", dial.scheme(), local_addr.port()),
            Err(_) => format!("{}://{host}:{}", dial.scheme(), local_addr.port()),
        };
        let worker_id = format!("{host}:{}:{}", local_addr.port(), std::process::id());

        let ended = CancellationToken::new();
        // Whatever way this function is left, its tasks end.
        let _end_tasks = ended.clone().drop_guard();
        let state = watch::Sender::new(State::Loading);
        let service = WorkerService {
            core: Arc::new(OnceLock::new()),
            state: state.subscribe(),
            reporter: Arc::new(Reporter::new(worker_id.clone())),
        };
        let close = ended.child_token();
        let mut server = tokio::spawn(listen::serve(
            listeners,
            config.tls.map(|tls| tls.server),
            service.clone(),
            state.subscribe(),
            close.clone(),
        ));

        let manager = dial
            .uri(&config.engine_manager)
            .context("find the engine-manager")?;
        let client = EngineManagerClient::new(
            peer::channel(&manager.to_string(), &dial)
                .with_context(|| format!("dial the engine-manager at {manager}"))?,
        );
        let life = Life {
            identity: Identity {
                worker_id,
                rank: config.rank,
                address,
                devices: config.devices,
            },
            client,
            service,
            state,
            socket_directory: config.socket_directory,
            dial,
            ended: ended.clone(),
        };
        let outcome = life.run(load, config.register_patience, shutdown).await;
        close.cancel();
        // The transport may still hold what a slow caller has yet to read.
        let soon = Instant::now() + CLOSE_DEADLINE;
        let close_by = outcome.as_ref().map_or(soon, |drain_ends| soon.max(*drain_ends));
        let closed = tokio::time::timeout_at(close_by.into(), &mut server).await;
        server.abort();
        outcome?;
        match closed {
            Ok(Ok(served)) => served,
            Ok(Err(panicked)) => Err(panicked).context("serve gRPC"),
            Err(_) => {
                tracing::warn!("connections are cut at the drain bound");
                Ok(())
            }
        }
    }
}

/// What runs beside the server.
struct Life {
    identity: Identity,
    client: EngineManagerClient<Channel>,
    service: WorkerService,
    state: watch::Sender<State>,
    socket_directory: Option<PathBuf>,
    dial: Dial,
    ended: CancellationToken,
}

impl Life {
    /// Returns when the drain has to end: until then callers may read what was made.
    async fn run(
        mut self,
        load: Load,
        patience: Duration,
        shutdown: CancellationToken,
    ) -> anyhow::Result<Instant> {
        let register = manager::register(&mut self.client, &self.identity, patience);
        let Some(registered) = shutdown.run_until_cancelled(register).await else {
            return Ok(Instant::now());
        };
        let registered = registered?;
        tracing::info!(
            rank = registered.plan.rank,
            model = registered.plan.model,
            "got a plan"
        );

        let draining = CancellationToken::new();
        let generation = Arc::new(AtomicU64::new(registered.generation));
        let mut heartbeats = tokio::spawn({
            let heartbeats = Heartbeats {
                client: self.client.clone(),
                identity: self.identity.clone(),
                generation: generation.clone(),
                plan: registered.plan.clone(),
                service: self.service.clone(),
                draining: draining.clone(),
            };
            let (ended, interval) = (self.ended.clone(), registered.heartbeat_interval);
            async move { ended.run_until_cancelled(heartbeats.run(interval)).await }
        });
        let outcome = self
            .serve_plan(load, registered.plan, &mut heartbeats, &shutdown, &draining)
            .await;
        // First no more heartbeats: one behind the farewell would register the worker again.
        if !heartbeats.is_finished() {
            heartbeats.abort();
            let _ = heartbeats.await;
        }
        let generation = generation.load(Ordering::Relaxed);
        if let Err(error) = manager::deregister(&mut self.client, &self.identity, generation).await {
            tracing::debug!(%error, "the engine-manager did not hear of the end");
        }
        outcome
    }

    async fn serve_plan(
        &mut self,
        load: Load,
        plan: WorkerPlan,
        heartbeats: &mut JoinHandle<Option<anyhow::Error>>,
        shutdown: &CancellationToken,
        draining: &CancellationToken,
    ) -> anyhow::Result<Instant> {
        share::check(&plan, |name| std::env::var(name).ok(), Path::exists)?;
        let role = Role::of(&plan);
        self.service.reporter.planned(role, plan.clone());
        let began = Instant::now();
        let loading = tokio::task::spawn_blocking({
            let plan = plan.clone();
            move || load(&plan)
        });
        let backend = loading
            .await
            .context("load the model")?
            .context("load the model")?;
        warm_up(&*backend, role)
            .await
            .context("speak a warm-up utterance")?;
        let drain_timeout = plan.drain_timeout;
        let (codec, peers_ready) = self.codec(&plan);
        let n_places = plan.max_rows + plan.max_queue;
        let admission = Admission::new(n_places);
        let builders = Builders::start(n_places as usize).context("start the prompt threads")?;
        self.service.reporter.loaded(backend.facts());
        let core = Core {
            backend: backend.clone(),
            builders,
            role,
            codec,
            admission: admission.clone(),
        };
        anyhow::ensure!(self.service.core.set(core).is_ok(), "the model was loaded twice");
        tracing::info!(seconds = began.elapsed().as_secs_f64(), "model loaded and warm");
        let followed = state::follow(
            backend.health(),
            peers_ready,
            draining.clone(),
            self.state.clone(),
            self.ended.clone(),
        );
        tokio::spawn(followed);

        let mut failing = self.state.subscribe();
        tokio::select! {
            () = shutdown.cancelled() => {}
            () = draining.cancelled() => {}
            true = async { failing.wait_for(|state| *state == State::Failed).await.is_ok() } => {
                // An engine that failed stays so: whoever started this worker can start another, and until then the
                // rank is free. What ran has been ended by the engine and has a status to take yet.
                let _ = tokio::time::timeout(CLOSE_DEADLINE, admission.idle()).await;
                let health = backend.health().borrow().clone();
                anyhow::bail!("the engine cannot go on serving: {}", why(&health));
            }
            ended = heartbeats => if let Ok(Some(error)) = ended { return Err(error) },
        }
        // Not ready at once: the state task, its only writer, says so before anything waits.
        draining.cancel();
        let drain_ends = Instant::now() + drain_timeout;
        let leaves = |state: &State| matches!(state, State::Draining | State::Failed);
        let mut state = self.state.subscribe();
        if tokio::time::timeout(CLOSE_DEADLINE, state.wait_for(leaves))
            .await
            .is_err()
        {
            tracing::error!("the state task does not run");
        }
        let n_running = admission.n_held();
        tracing::info!(n_running, bound = ?drain_timeout, "draining");
        if tokio::time::timeout_at(drain_ends.into(), admission.idle())
            .await
            .is_err()
        {
            tracing::warn!(
                n_running = admission.n_held(),
                "the drain bound is over; ending what still runs"
            );
        }
        Ok(drain_ends)
    }

    /// Where audio is made, and whether that place is there.
    fn codec(&self, plan: &WorkerPlan) -> (Codec, watch::Receiver<bool>) {
        let leaves = plan
            .remote_edges
            .iter()
            .find(|edge| edge.kind == EdgeKind::Stream && edge.direction == Direction::To);
        let Some(edge) = leaves else {
            return (Codec::Local, watch::channel(true).1);
        };
        let (peer, receiver) = watch::channel(None);
        let socket = self
            .socket_directory
            .as_ref()
            .map(|directory| listen::socket(directory, edge.peer_rank));
        tokio::spawn(peer::follow(
            self.client.clone(),
            (edge.peer_rank, socket),
            (plan.max_rows + plan.max_queue, self.dial.clone()),
            peer,
            self.ended.clone(),
        ));
        let ready = watch::Sender::new(false);
        let peers_ready = ready.subscribe();
        let mut peers = receiver.clone();
        let ended = self.ended.clone();
        tokio::spawn(async move {
            let copied = async {
                loop {
                    let there = peers.borrow_and_update().is_some();
                    ready.send_if_modified(|ready| std::mem::replace(ready, there) != there);
                    if peers.changed().await.is_err() {
                        return;
                    }
                }
            };
            ended.run_until_cancelled(copied).await
        });
        (Codec::Remote(receiver), peers_ready)
    }
}

/// What an engine says of its end.
fn why(health: &Health) -> &str {
    match health {
        Health::Unhealthy(why) => why,
        _ => "it ended",
    }
}

impl Role {
    /// What a worker with this plan serves.
    pub(crate) fn of(plan: &WorkerPlan) -> Role {
        let has = |direction| {
            plan.remote_edges
                .iter()
                .any(|edge| edge.kind == EdgeKind::Stream && edge.direction == direction)
        };
        let decodes = has(Direction::From);
        Role {
            synthesizes: !decodes,
            decodes,
        }
    }
}

/// Tells the engine-manager that this worker lives, and how.
struct Heartbeats {
    client: EngineManagerClient<Channel>,
    identity: Identity,
    generation: Arc<AtomicU64>,
    plan: WorkerPlan,
    service: WorkerService,
    draining: CancellationToken,
}

impl Heartbeats {
    /// Until something cannot be mended; returns what.
    async fn run(mut self, interval: Duration) -> anyhow::Error {
        let mut state = self.service.state.clone();
        let mut carried = EngineStats::default();
        loop {
            let core = self.service.core.get();
            let stats = core.map(|core| core.backend.stats()).unwrap_or_default();
            meter::carry_over(&carried, &stats);
            meter::lanes(&self.service.reporter.busy(&stats));
            let heartbeat = self.heartbeat(&stats);
            carried = stats;
            match manager::beat(&mut self.client, heartbeat).await {
                Beat::Heard | Beat::Unheard => {}
                Beat::Drain => self.draining.cancel(),
                Beat::Unknown => {
                    if let Err(error) = self.register_again().await {
                        return error;
                    }
                    continue;
                }
            }
            tokio::select! {
                () = tokio::time::sleep(interval) => {}
                // Gateways should hear of a change of state at once.
                Ok(()) = state.changed() => {}
            }
        }
    }

    fn heartbeat(&self, stats: &EngineStats) -> v1::HeartbeatRequest {
        let state = *self.service.state.borrow();
        v1::HeartbeatRequest {
            worker_id: self.identity.worker_id.clone(),
            generation: self.generation.load(Ordering::Relaxed),
            state: v1::WorkerState::from(state).into(),
            load: Some(self.service.reporter.load(stats)),
            facts: self.service.reporter.facts(state),
        }
    }

    /// The engine-manager restarted, or gave this worker up. What runs here must still be what it wants.
    async fn register_again(&mut self) -> anyhow::Result<()> {
        match manager::register(&mut self.client, &self.identity, Duration::ZERO).await {
            Ok(registered) if registered.plan == self.plan => {
                self.generation.store(registered.generation, Ordering::Relaxed);
            }
            Ok(_) => {
                anyhow::bail!("the deployment changed: this worker must be started again for its new plan")
            }
            Err(error @ manager::RegisterError::Refused { .. }) => return Err(error.into()),
            Err(error) => {
                tracing::warn!(%error, "could not register again yet");
                tokio::time::sleep(Duration::from_millis(200)).await;
            }
        }
        Ok(())
    }
}
