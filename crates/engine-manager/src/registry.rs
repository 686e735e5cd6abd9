//! Who serves which rank right now.
//!
//! The registry owns the topology inside a `watch` channel, so that every reader sees whole versions of it.
//! [`Registry::sweep`] is the one task beside it: the manager starts it, it ends workers whose lease ran out,
//! and it ends with the manager's token.

use std::collections::BTreeMap;
use std::time::Duration;

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

/// A registered worker.
#[derive(Debug, Clone, PartialEq)]
pub struct Worker {
    /// The part of the deployment that it serves.
    pub rank: u32,
    /// Where its gRPC service answers, `http://host:port`.
    pub address: String,
    /// Its build.
    pub version: String,
    /// Tells this life of the worker from the one before; heartbeats carry it.
    pub incarnation: u64,
    /// What it last said.
    pub state: WorkerState,
    lease_until: Instant,
}

/// Every live worker, by rank.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Topology {
    /// Grows with every change that a watcher should see.
    pub revision: u64,
    /// Live workers.
    pub workers: BTreeMap<u32, Worker>,
}

/// What a worker registers with.
#[derive(Debug, Clone)]
pub struct Registration {
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
    /// The heartbeat is from a life that is over.
    #[error("rank {rank} has no lease for incarnation {incarnation}: register again")]
    LeaseLost {
        /// Whose heartbeat.
        rank: u32,
        /// The life that it named.
        incarnation: u64,
    },
}

/// Owner of the topology.
#[derive(Debug)]
pub struct Registry {
    ranks: Vec<u32>,
    lease: Duration,
    first_incarnation: u64,
    topology: watch::Sender<Topology>,
}

impl Registry {
    /// A registry with no worker. `first_incarnation` must differ from one life of the manager to the next, so
    /// that a heartbeat meant for the last one is not taken.
    pub fn new(ranks: Vec<u32>, lease: Duration, first_incarnation: u64) -> Self {
        Registry {
            ranks,
            lease,
            first_incarnation,
            topology: watch::channel(Topology::default()).0,
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

    /// Give the rank to the worker and return its incarnation. The same address may register again (it
    /// restarted); another must wait for the lease to end.
    ///
    /// # Errors
    /// [`RegistryError::UnknownRank`], [`RegistryError::Held`].
    pub fn register(&self, registration: Registration) -> Result<u64, RegistryError> {
        let Registration {
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
        let now = Instant::now();
        let mut answer = Err(RegistryError::LeaseLost { rank, incarnation: 0 });
        self.topology.send_if_modified(|topology| {
            if let Some(holder) = topology.workers.get(&rank) {
                if holder.address != address && holder.lease_until > now {
                    let lease_left_ms = (holder.lease_until - now).as_millis() as u64;
                    answer = Err(RegistryError::Held {
                        rank,
                        address: holder.address.clone(),
                        lease_left_ms,
                    });
                    return false;
                }
            }
            topology.revision += 1;
            let incarnation = self.first_incarnation + topology.revision;
            let (state, lease_until) = (WorkerState::Loading, now + self.lease);
            topology.workers.insert(
                rank,
                Worker {
                    rank,
                    address,
                    version,
                    incarnation,
                    state,
                    lease_until,
                },
            );
            answer = Ok(incarnation);
            true
        });
        answer
    }

    /// Renew a lease and note the worker's state; watchers hear of it only when the state changed.
    ///
    /// # Errors
    /// [`RegistryError::LeaseLost`] when this life of the worker is over: it must register again.
    pub fn heartbeat(&self, rank: u32, incarnation: u64, state: WorkerState) -> Result<(), RegistryError> {
        let mut answer = Err(RegistryError::LeaseLost { rank, incarnation });
        let until = Instant::now() + self.lease;
        self.topology.send_if_modified(|topology| {
            let Some(worker) = topology
                .workers
                .get_mut(&rank)
                .filter(|w| w.incarnation == incarnation)
            else {
                return false;
            };
            answer = Ok(());
            worker.lease_until = until;
            let changed = worker.state != state;
            worker.state = state;
            topology.revision += u64::from(changed);
            changed
        });
        answer
    }

    /// A worker leaves on its own account. A life that is already over is no error.
    pub fn deregister(&self, rank: u32, incarnation: u64) {
        self.remove_if(|worker| worker.rank == rank && worker.incarnation == incarnation);
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
                () = silence => self.expire(),
                changed = changes.changed() => if changed.is_err() { return },
            }
        }
    }

    fn expire(&self) {
        let now = Instant::now();
        for worker in self.remove_if(|worker| worker.lease_until <= now) {
            tracing::warn!(
                rank = worker.rank,
                address = worker.address,
                "worker lease ran out"
            );
        }
    }

    fn remove_if(&self, gone: impl Fn(&Worker) -> bool) -> Vec<Worker> {
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
            !removed.is_empty()
        });
        removed
    }
}
