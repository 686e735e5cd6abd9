//! Workers as processes of their own, which this process starts, starts again when they die, and ends.
//!
//! [`WorkerProcesses::start`] starts one task for each rank, which owns the rank's process, and one that follows the
//! topology. A worker that has served and dies is started again at its address, after a pause and a bounded number of
//! times; one that never served ends the deployment, because what keeps a model from loading is not mended by trying
//! again. Workers end when their standard input does, so that they also end with a parent that was killed.
//! Under the Multi-Process Service the daemon is found or started first, and ended last by its [`Keeper`].

pub(crate) mod keeper;
mod launch;
mod restarts;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt;
use std::net::SocketAddr;
use std::process::ExitStatus;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use laneway_engine_manager::mps::{Control, Daemon};
use laneway_plan::Deployment;
use laneway_plan::deployment::MpsMode;
use laneway_proto::v1;
use laneway_proto::v1::engine_manager_client::EngineManagerClient;
use laneway_tls::Dial;
use tempfile::TempDir;
use tokio::process::Child;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use crate::EXIT_CONFIG;
use crate::client;
use crate::config::ConfigArguments;
use keeper::Keeper;
use launch::Launch;
use restarts::{Restarts, Verdict};

/// How much longer than its drain a worker may take to end before it is killed.
const END_GRACE: Duration = Duration::from_secs(10);

/// Pause before the topology is asked for again.
const RETRY: Duration = Duration::from_millis(100);

/// How long the driver may take to list a client that runs already.
const CLIENTS_DEADLINE: Duration = Duration::from_secs(5);

/// Whether the workers of a deployment are processes of their own: when there are several, as each has a device or a
/// share of one, and when the Multi-Process Service is to tell them apart.
pub(crate) fn are_wanted(deployment: &Deployment) -> bool {
    deployment.ranks.len() > 1 || under_mps(deployment)
}

fn under_mps(deployment: &Deployment) -> bool {
    matches!(deployment.mps, MpsMode::Required | MpsMode::Unmanaged)
}

/// The process of one rank now.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Life {
    /// `None` between a death and the next start.
    pub(crate) process: Option<u32>,
    /// 1 for the first.
    pub(crate) n_starts: u32,
}

/// A worker found that the deployment cannot run on its machine, and printed why.
#[derive(Debug)]
pub(crate) struct Refused {
    rank: u32,
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "the worker of rank {} refuses the deployment; its reasons are above",
            self.rank
        )
    }
}

impl std::error::Error for Refused {}

/// The engine-manager of a deployment, and how it is dialled.
#[derive(Debug, Clone)]
pub(crate) struct Manager {
    pub(crate) address: String,
    pub(crate) dial: Dial,
    /// The same as flags of a worker.
    pub(crate) tls_flags: Vec<OsString>,
}

/// Every worker of a deployment.
#[derive(Debug)]
pub(crate) struct WorkerProcesses {
    ranks: Vec<Rank>,
    stop: CancellationToken,
    seen: watch::Receiver<Seen>,
    _follow: AbortOnDropHandle<()>,
    daemon: Option<Daemon>,
    /// Of a daemon that was started here.
    keeper: Option<Keeper>,
    /// Where the workers meet.
    _sockets: TempDir,
}

#[derive(Debug)]
struct Rank {
    rank: u32,
    life: watch::Receiver<Life>,
    kill: mpsc::Sender<()>,
    task: JoinHandle<anyhow::Result<()>>,
}

/// What the topology said of each rank last, kept when its worker is gone.
type Seen = BTreeMap<u32, SeenWorker>;

#[derive(Debug, Clone, PartialEq, Eq)]
struct SeenWorker {
    address: String,
    /// Process that serves or has served.
    served: Option<u32>,
    /// The topology has it now.
    there: bool,
}

impl WorkerProcesses {
    /// Start every worker under the engine-manager at this address.
    ///
    /// # Errors
    /// There is no daemon to work with, or a process cannot be started.
    pub(crate) async fn start(
        config: &ConfigArguments,
        deployment: &Deployment,
        manager: Manager,
        metrics: Option<SocketAddr>,
    ) -> anyhow::Result<Self> {
        let control = Control::from_environment();
        let daemon = match deployment.mps {
            MpsMode::Required => Some(control.find_or_start().await?),
            MpsMode::Unmanaged => Some(control.find().await?),
            MpsMode::Unset | MpsMode::Disabled => None,
        };
        let keeper = match &daemon {
            Some(daemon) if daemon.started_here() => Some(Keeper::start(daemon)?),
            _ => None,
        };
        let pipe_directory = daemon.as_ref().map(Daemon::pipe_directory);
        let sockets = tempfile::Builder::new()
            .prefix("laneway-")
            .tempdir()
            .context("make a directory for the workers' sockets (TMPDIR says where)")?;
        let launch = Launch::new(
            config,
            deployment,
            &manager,
            pipe_directory,
            metrics,
            sockets.path().to_owned(),
        );
        let (sender, seen) = watch::channel(Seen::new());
        let follow = AbortOnDropHandle::new(tokio::spawn(follow(manager, sender)));
        let stop = CancellationToken::new();
        let start = |spec: &laneway_plan::deployment::RankSpec| {
            let (life, lives) = watch::channel(Life::default());
            let (kill, kills) = mpsc::channel(1);
            let keep = Keep {
                rank: spec.rank,
                launch: launch.clone(),
                drain: deployment.services.drain_timeout,
                seen: seen.clone(),
                life,
                kills,
                stop: stop.clone(),
                daemon: daemon.clone(),
            };
            Rank {
                rank: spec.rank,
                life: lives,
                kill,
                task: tokio::spawn(keep.run()),
            }
        };
        Ok(WorkerProcesses {
            ranks: deployment.ranks.iter().map(start).collect(),
            seen,
            _follow: follow,
            daemon,
            keeper,
            stop,
            _sockets: sockets,
        })
    }

    /// Hold the workers to being clients of the daemon, once they serve.
    ///
    /// # Errors
    /// One runs beside it; see [`Daemon::check_clients`].
    pub(crate) async fn check_clients(&self) -> anyhow::Result<()> {
        let Some(daemon) = &self.daemon else { return Ok(()) };
        let processes: Vec<u32> = self
            .lives()
            .into_iter()
            .filter_map(|(_, life)| life.process)
            .collect();
        let until = Instant::now() + CLIENTS_DEADLINE;
        loop {
            match daemon.check_clients(&processes).await {
                Ok(()) => return Ok(()),
                Err(error) if Instant::now() > until => return Err(error.into()),
                Err(_) => tokio::time::sleep(RETRY).await,
            }
        }
    }

    /// Where the workers answer, by rank; those that are up.
    pub(crate) fn addresses(&self) -> Vec<String> {
        let seen = self.seen.borrow();
        seen.values()
            .filter(|worker| worker.there)
            .map(|worker| worker.address.clone())
            .collect()
    }

    /// The process of each rank.
    pub(crate) fn lives(&self) -> Vec<(u32, Life)> {
        self.ranks
            .iter()
            .map(|rank| (rank.rank, *rank.life.borrow()))
            .collect()
    }

    /// Whether the rank is served by another process than this, which is over.
    pub(crate) fn serves(&self, rank: u32, not: u32) -> bool {
        let seen = self.seen.borrow();
        let now = self
            .ranks
            .iter()
            .find(|each| each.rank == rank)
            .and_then(|each| each.life.borrow().process);
        let Some(worker) = seen.get(&rank) else {
            return false;
        };
        worker.there && now.is_some() && now != Some(not) && worker.served == now
    }

    /// Kill the process of a rank, as an accident would.
    pub(crate) async fn kill(&self, rank: u32) -> anyhow::Result<()> {
        let rank = self.ranks.iter().find(|each| each.rank == rank);
        let rank = rank.context("kill a worker: there is no such rank")?;
        rank.kill.send(()).await.context("kill a worker: nobody keeps it")
    }

    /// The tasks that keep the processes.
    pub(crate) fn tasks(&mut self) -> impl Iterator<Item = &mut JoinHandle<anyhow::Result<()>>> {
        self.ranks.iter_mut().map(|rank| &mut rank.task)
    }

    /// End every worker, and then the daemon if it was started here.
    ///
    /// # Errors
    /// The first that did not end as it should.
    pub(crate) async fn end(self) -> anyhow::Result<()> {
        self.stop.cancel();
        let mut outcome = Ok(());
        for rank in self.ranks {
            // What ended before was told when it did, and its handle must not be polled again.
            if !rank.task.is_finished() {
                outcome = outcome.and(rank.task.await?);
            }
        }
        if let (Some(keeper), Some(daemon)) = (self.keeper, &self.daemon) {
            outcome = outcome.and(keeper.end(daemon.pipe_directory()).await);
        }
        outcome
    }
}

/// Follow the topology until aborted.
async fn follow(manager: Manager, seen: watch::Sender<Seen>) {
    let Manager { address, dial, .. } = manager;
    let Ok(endpoint) = client::endpoint(&address, &dial) else {
        tracing::error!(address, "the engine-manager's address cannot be dialled");
        return;
    };
    let mut manager = EngineManagerClient::new(dial.lazy(endpoint));
    loop {
        if let Ok(response) = manager.watch_topology(v1::WatchTopologyRequest {}).await {
            let mut versions = response.into_inner();
            while let Ok(Some(topology)) = versions.message().await {
                seen.send_modify(|seen| note(seen, &topology));
            }
        }
        tokio::time::sleep(RETRY).await;
    }
}

fn note(seen: &mut Seen, topology: &v1::Topology) {
    for worker in seen.values_mut() {
        worker.there = false;
    }
    for info in &topology.workers {
        // A worker's id ends with its process.
        let process = info.worker_id.rsplit(':').next().and_then(|id| id.parse().ok());
        let serves = info.state() == v1::WorkerState::Serving;
        let before = seen.get(&info.rank).and_then(|worker| worker.served);
        let worker = SeenWorker {
            address: info.address.clone(),
            served: if serves { process } else { before },
            there: true,
        };
        seen.insert(info.rank, worker);
    }
}

/// What keeps one rank's process.
struct Keep {
    rank: u32,
    launch: Launch,
    drain: Duration,
    seen: watch::Receiver<Seen>,
    life: watch::Sender<Life>,
    kills: mpsc::Receiver<()>,
    stop: CancellationToken,
    daemon: Option<Daemon>,
}

impl Keep {
    /// Until it is told to end the worker, or the worker cannot be kept.
    async fn run(mut self) -> anyhow::Result<()> {
        let mut restarts = Restarts::default();
        let mut listen = None;
        loop {
            let mut child = self
                .launch
                .command(self.rank, listen)
                .spawn()
                .with_context(|| format!("start the worker of rank {}", self.rank))?;
            // Held here: to wait for a child would close what is left in it, which is its word to end.
            let lifeline = child.stdin.take();
            let process = child.id();
            self.life.send_modify(|life| {
                life.process = process;
                life.n_starts += 1;
            });
            let status = tokio::select! {
                status = child.wait() => status.context("wait for a worker")?,
                () = self.stop.cancelled() => {
                    drop(lifeline);
                    return self.end(child).await;
                }
                Some(()) = self.kills.recv() => {
                    tracing::warn!(rank = self.rank, process, "killing a worker, as told");
                    child.start_kill().context("kill a worker")?;
                    child.wait().await.context("wait for a worker")?
                }
            };
            self.life.send_modify(|life| life.process = None);
            let (ever_served, address) = self.served(process);
            // The rank's lease is still the dead one's: it is free for the same address at once.
            listen = address;
            let pause = self.after(status, ever_served, &mut restarts)?;
            tracing::warn!(rank = self.rank, process, %status, ?pause, "a worker died; it is started again");
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                () = self.stop.cancelled() => return Ok(()),
            }
        }
    }

    /// Whether the rank was ever served, and where by this process.
    fn served(&self, process: Option<u32>) -> (bool, Option<SocketAddr>) {
        let seen = self.seen.borrow();
        let Some(worker) = seen.get(&self.rank) else {
            return (false, None);
        };
        let here = process.is_some() && worker.served == process;
        let address = worker.address.rsplit('/').next().and_then(|at| at.parse().ok());
        (worker.served.is_some(), address.filter(|_| here))
    }

    fn after(
        &self,
        status: ExitStatus,
        ever_served: bool,
        restarts: &mut Restarts,
    ) -> anyhow::Result<Duration> {
        let rank = self.rank;
        if status.code() == Some(i32::from(EXIT_CONFIG)) {
            return Err(Refused { rank }.into());
        }
        anyhow::ensure!(
            ever_served,
            "the worker of rank {rank} ended with {status} before it served (its reasons are above)"
        );
        match restarts.died(Instant::now()) {
            Verdict::After(pause) => Ok(pause),
            Verdict::GiveUp { deaths, within } => anyhow::bail!(
                "the worker of rank {rank} died {deaths} times in {within:?}, the last time with {status}: it is not \
                 started again"
            ),
        }
    }

    /// Wait for a worker that was told to end: it drains, and is killed when it takes too long.
    async fn end(&self, mut child: Child) -> anyhow::Result<()> {
        let patience = self.drain + END_GRACE;
        let rank = self.rank;
        match tokio::time::timeout(patience, child.wait()).await {
            Ok(status) => {
                let status = status.context("wait for a worker")?;
                anyhow::ensure!(status.success(), "the worker of rank {rank} ended with {status}");
                return Ok(());
            }
            Err(_) => tracing::error!(rank, ?patience, "a worker does not end; killing it"),
        }
        if let (Some(daemon), Some(process)) = (&self.daemon, child.id())
            && let Err(error) = daemon.terminate_client(process).await
        {
            tracing::warn!(rank, %error, "the worker's work on the device was not ended before it");
        }
        child.kill().await.context("kill a worker")?;
        anyhow::bail!("the worker of rank {rank} did not end within {patience:?} and was killed")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn topology(workers: &[(u32, &str, v1::WorkerState)]) -> v1::Topology {
        let info = |(rank, worker_id, state): &(u32, &str, v1::WorkerState)| v1::WorkerInfo {
            rank: *rank,
            worker_id: (*worker_id).to_owned(),
            address: format!("http://{}", worker_id.rsplit_once(':').unwrap().0),
            state: (*state).into(),
            ..Default::default()
        };
        v1::Topology {
            version: 1,
            workers: workers.iter().map(info).collect(),
        }
    }

    #[test]
    fn a_rank_is_served_from_the_first_process_that_did_and_is_remembered() {
        use v1::WorkerState::{Loading, Serving};
        let mut seen = Seen::new();
        let mut check = |workers: &[(u32, &str, v1::WorkerState)], there: bool, served: Option<u32>| {
            note(&mut seen, &topology(workers));
            let worker = &seen[&1];
            assert_eq!((worker.there, worker.served), (there, served), "{workers:?}");
            assert_eq!(worker.address, "http://127.0.0.1:4711");
        };
        check(&[(1, "127.0.0.1:4711:20", Loading)], true, None);
        check(&[(1, "127.0.0.1:4711:20", Serving)], true, Some(20));
        check(&[], false, Some(20));
        // The next life has not served yet.
        check(&[(1, "127.0.0.1:4711:21", Loading)], true, Some(20));
        check(&[(1, "127.0.0.1:4711:21", Serving)], true, Some(21));
    }
}
