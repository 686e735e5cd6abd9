//! Who serves which rank right now.
//!
//! The registry owns the topology inside a `watch` channel, so that every reader sees whole versions of it.
//! [`Registry::sweep`] is the one task beside it: the manager starts it, it ends workers whose lease ran out,
//! and it ends with the manager's token.

use std::collections::BTreeMap;
use std::time::Duration;

use laneway_proto::v1;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

#[cfg(test)]
mod tests;

/// What a worker says of itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WorkerState {
    /// Registered, not ready: weights, captures, warm-up.
    Loading,
    /// Takes requests.
    Serving,
    /// Finishes what it has.
    Draining,
    /// Its engine is dead or stuck.
    Failed,
}

impl WorkerState {
    /// Every state.
    pub const ALL: [WorkerState; 4] = [Self::Loading, Self::Serving, Self::Draining, Self::Failed];
}

/// What a heartbeat brings. Load and facts pass through unread, so they stay in their wire form.
#[derive(Debug, Clone, PartialEq)]
pub struct Report {
    /// What the worker says of itself.
    pub state: WorkerState,
    /// How much it has to do.
    pub load: v1::WorkerLoad,
    /// What its model can do, from [`WorkerState::Serving`] on.
    pub facts: Option<v1::ModelFacts>,
}

/// A registered worker.
#[derive(Debug, Clone, PartialEq)]
pub struct Worker {
    /// Its own name for itself.
    pub worker_id: String,
    /// The part of the deployment that it serves.
    pub rank: u32,
    /// Where its gRPC service answers, `http://host:port`.
    pub address: String,
    /// Its build.
    pub version: String,
    /// Tells this registration from the one before; heartbeats carry it.
    pub generation: u64,
    /// What it last said.
    pub report: Report,
    lease_until: Instant,
    /// It has said how it is since it registered.
    reported: bool,
}

impl Worker {
    fn is(&self, worker_id: &str, generation: u64) -> bool {
        self.worker_id == worker_id && self.generation == generation
    }
}

/// Every live worker, by rank.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Topology {
    /// Grows with every change that a watcher should see.
    pub revision: u64,
    /// Live workers.
    pub workers: BTreeMap<u32, Worker>,
    /// Until then more workers may live than are listed: this manager started, or has heard nobody at all and may be
    /// the one that was cut off. Whoever has an older topology does better to keep it.
    pub settles: Option<Instant>,
}

/// What a worker registers with.
#[derive(Debug, Clone)]
pub struct Registration {
    /// Its own name for itself.
    pub worker_id: String,
    /// The part of the deployment that it wants to serve.
    pub rank: u32,
    /// Where its gRPC service answers.
    pub address: String,
    /// Its build.
    pub version: String,
}

/// A registration or heartbeat that cannot be taken.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RegistryError {
    /// The deployment has no such rank.
    #[error("the deployment has no rank {rank}: it has {known:?}")]
    UnknownRank {
        /// Asked for.
        rank: u32,
        /// What exists.
        known: Vec<u32>,
    },
    /// Another worker serves the rank and its lease still runs.
    #[error(
        "rank {rank} is held by the worker at {address}; its lease ends in {lease_left_ms} ms unless it renews it"
    )]
    Held {
        /// Asked for.
        rank: u32,
        /// Who has it.
        address: String,
        /// Milliseconds to its lease's end.
        lease_left_ms: u64,
    },
    /// The heartbeat names a registration that is over.
    #[error("worker {worker_id} has no lease for generation {generation}: register again")]
    LeaseLost {
        /// Whose heartbeat.
        worker_id: String,
        /// The registration that it named.
        generation: u64,
    },
}

/// Owner of the topology.
#[derive(Debug)]
pub struct Registry {
    ranks: Vec<u32>,
    lease: Duration,
    first_generation: u64,
    topology: watch::Sender<Topology>,
}

impl Registry {
    /// A registry with no worker. `first_generation` must differ from one life of the manager to the next, so
    /// that a heartbeat meant for the last one is not taken.
    pub fn new(ranks: Vec<u32>, lease: Duration, first_generation: u64) -> Self {
        let topology = Topology {
            settles: Some(Instant::now() + lease),
            ..Topology::default()
        };
        Registry {
            ranks,
            lease,
            first_generation,
            topology: watch::channel(topology).0,
        }
    }

    /// How long a worker may stay silent.
    pub fn lease(&self) -> Duration {
        self.lease
    }

    /// Follow the topology; the current one is there at once.
    pub fn watch(&self) -> watch::Receiver<Topology> {
        self.topology.subscribe()
    }

    /// Give the rank to the worker and return the registration's generation. The same worker, or another at its
    /// address, may register again (it restarted); anyone else must wait for the lease to end.
    ///
    /// # Errors
    /// [`RegistryError::UnknownRank`], [`RegistryError::Held`].
    pub fn register(&self, registration: Registration) -> Result<u64, RegistryError> {
        self.register_at(Instant::now(), registration)
    }

    fn register_at(&self, now: Instant, registration: Registration) -> Result<u64, RegistryError> {
        let Registration {
            worker_id,
            rank,
            address,
            version,
        } = registration;
        if !self.ranks.contains(&rank) {
            return Err(RegistryError::UnknownRank {
                rank,
                known: self.ranks.clone(),
            });
        }
        let mut answer = Ok(0);
        self.topology.send_if_modified(|topology| {
            if let Some(holder) = topology.workers.get(&rank) {
                let same = holder.address == address || holder.worker_id == worker_id;
                if !same && holder.lease_until > now {
                    let lease_left_ms = (holder.lease_until - now).as_millis() as u64;
                    answer = Err(RegistryError::Held {
                        rank,
                        address: holder.address.clone(),
                        lease_left_ms,
                    });
                    return false;
                }
            }
            if topology.workers.is_empty() {
                topology.settles = Some(now + self.lease);
            }
            topology.revision += 1;
            let generation = self.first_generation + topology.revision;
            let report = Report {
                state: WorkerState::Loading,
                load: v1::WorkerLoad::default(),
                facts: None,
            };
            let lease_until = now + self.lease;
            let worker = Worker {
                worker_id,
                rank,
                address,
                version,
                generation,
                report,
                lease_until,
                reported: false,
            };
            topology.workers.insert(rank, worker);
            answer = Ok(generation);
            true
        });
        answer
    }

    /// Renew a lease and note what the worker reports; watchers hear of it only when that changed.
    ///
    /// # Errors
    /// [`RegistryError::LeaseLost`] when this registration is over: the worker must register again.
    pub fn heartbeat(&self, worker_id: &str, generation: u64, report: Report) -> Result<(), RegistryError> {
        self.heartbeat_at(Instant::now(), worker_id, generation, report)
    }

    fn heartbeat_at(
        &self,
        now: Instant,
        worker_id: &str,
        generation: u64,
        report: Report,
    ) -> Result<(), RegistryError> {
        let mut answer = Err(RegistryError::LeaseLost {
            worker_id: worker_id.to_owned(),
            generation,
        });
        let until = now + self.lease;
        self.topology.send_if_modified(|topology| {
            let worker = topology
                .workers
                .values_mut()
                .find(|worker| worker.is(worker_id, generation));
            let Some(worker) = worker else { return false };
            answer = Ok(());
            worker.lease_until = until;
            let mut changed = worker.report != report;
            worker.report = report;
            worker.reported = true;
            let all = topology.workers.len() == self.ranks.len();
            if all && topology.workers.values().all(|worker| worker.reported) {
                changed |= topology.settles.take().is_some();
            }
            topology.revision += u64::from(changed);
            changed
        });
        answer
    }

    /// A worker leaves on its own account. A registration that is already over is no error.
    pub fn deregister(&self, worker_id: &str, generation: u64) {
        self.remove_if(|worker| worker.is(worker_id, generation), None);
    }

    /// End workers whose lease ran out, until the token is cancelled.
    pub async fn sweep(&self, token: CancellationToken) {
        let mut changes = self.topology.subscribe();
        loop {
            let next = changes
                .borrow_and_update()
                .workers
                .values()
                .map(|worker| worker.lease_until)
                .min();
            let silence = async {
                match next {
                    Some(until) => tokio::time::sleep_until(until).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = token.cancelled() => return,
                () = silence => self.expire(Instant::now()),
                changed = changes.changed() => if changed.is_err() { return },
            }
        }
    }

    fn expire(&self, now: Instant) {
        let settles = Some(now + self.lease);
        for worker in self.remove_if(|worker| worker.lease_until <= now, settles) {
            tracing::warn!(
                rank = worker.rank,
                address = worker.address,
                "worker lease ran out"
            );
        }
    }

    /// Take out who is gone. Where nobody is left, `settles` says until when that is doubted.
    fn remove_if(&self, gone: impl Fn(&Worker) -> bool, settles: Option<Instant>) -> Vec<Worker> {
        let mut removed = Vec::new();
        self.topology.send_if_modified(|topology| {
            topology.workers.retain(|_, worker| {
                let keep = !gone(worker);
                if !keep {
                    removed.push(worker.clone());
                }
                keep
            });
            topology.revision += u64::from(!removed.is_empty());
            if !removed.is_empty() && topology.workers.is_empty() {
                topology.settles = settles;
            }
            !removed.is_empty()
        });
        removed
    }
}
