//! Workers that are asked for their status, at fixed addresses, at those that names stand for and at those of a cluster's
//! Services.
//!
//! One task asks all of them at every tick, and whenever an address comes or goes. Names are looked up again at an interval
//! and Services are followed, each by a task of its own, so that nobody's silence holds anything up. While a name or a Service
//! cannot be asked, its last addresses stand.

use std::collections::{HashMap, HashSet};
use std::fmt::Display;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use laneway_proto::v1;
use laneway_proto::v1::worker_client::WorkerClient;
use laneway_tls::Dial;
use tokio::sync::watch;
use tokio::time::MissedTickBehavior;
use tokio_util::task::AbortOnDropHandle;
use tonic::transport::{Channel, Uri};

use super::names::{DnsName, Resolver};
use super::slices::{self, Cluster, ServiceName};
use super::{Discovery, dialled, publish};
use crate::config::LinkConfig;
use crate::facts::Worker;

/// Questions for a status in a row without an answer after which a worker is gone. One may be lost to a busy machine; a
/// call that fails finds a dead worker sooner.
const MAX_MISSED: u32 = 3;

/// Between two lookups of a name, in questions for a status.
const TICKS_OF_LOOKUP: u32 = 6;

/// Most workers behind one name or Service. Who answers with more is not ours.
pub(super) const MAX_ENDPOINTS: usize = 256;

/// An address with a worker behind it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Endpoint {
    pub(super) address: SocketAddr,
    /// New requests may go there, if the worker itself says so too.
    pub(super) takes_requests: bool,
}

/// All that was found, by source.
type AllFound = Vec<Vec<Endpoint>>;

/// What one source of addresses found.
#[derive(Debug, Clone)]
pub(super) struct Found {
    all: Arc<watch::Sender<AllFound>>,
    /// The source's own place.
    index: usize,
}

impl Found {
    /// Of the only source.
    #[cfg(test)]
    pub(super) fn only(all: watch::Sender<AllFound>) -> Self {
        let all = Arc::new(all);
        Self { all, index: 0 }
    }

    /// From now on these are the endpoints of `name`.
    pub(super) fn set(&self, name: &impl Display, mut endpoints: Vec<Endpoint>) {
        if endpoints.len() > MAX_ENDPOINTS {
            let n_endpoints = endpoints.len();
            tracing::error!(%name, n_endpoints, "more than {MAX_ENDPOINTS} addresses: the rest is left out");
            endpoints.truncate(MAX_ENDPOINTS);
        }
        self.all.send_if_modified(|all| {
            let current = &mut all[self.index];
            let changed = *current != endpoints;
            if changed {
                tracing::info!(%name, ?endpoints, "addresses changed");
                *current = endpoints;
            }
            changed
        });
    }
}

/// Asks its workers itself.
pub(super) struct Polling<R> {
    pub(super) fixed: Vec<Uri>,
    pub(super) names: Vec<DnsName>,
    pub(super) services: Vec<(Cluster, ServiceName)>,
    pub(super) resolver: Arc<R>,
    pub(super) link: LinkConfig,
}

impl<R: Resolver + 'static> Polling<R> {
    /// Follow every name and Service. The tasks end when they are dropped.
    fn look(&self, every: Duration) -> (watch::Receiver<AllFound>, Vec<AbortOnDropHandle<()>>) {
        let n_sources = self.names.len() + self.services.len();
        let (sender, receiver) = watch::channel(vec![Vec::new(); n_sources]);
        let all = Arc::new(sender);
        let mut places = (0..n_sources).map(|index| Found {
            all: all.clone(),
            index,
        });
        let of_name = |(name, found): (&DnsName, Found)| {
            let (name, resolver) = (name.clone(), self.resolver.clone());
            tokio::spawn(async move { follow(&name, &*resolver, every, &found).await })
        };
        let mut tasks: Vec<_> = self.names.iter().zip(places.by_ref()).map(of_name).collect();
        let of_service = |((cluster, service), found): (&(Cluster, ServiceName), Found)| {
            let (cluster, service) = (cluster.clone(), service.clone());
            tokio::spawn(async move { slices::follow(cluster, &service, &found).await })
        };
        tasks.extend(self.services.iter().zip(places).map(of_service));
        (receiver, tasks.into_iter().map(AbortOnDropHandle::new).collect())
    }

    /// Keep `all` to what there is now.
    fn arrange(&self, all: &mut Vec<Polled>, found: &AllFound) {
        let mut wanted: HashMap<Uri, bool> = self.fixed.iter().map(|uri| (uri.clone(), true)).collect();
        for endpoint in found.iter().flatten() {
            if let Some(uri) = uri(endpoint.address) {
                // Whoever says that it ends knows more than who has not heard of it yet.
                *wanted.entry(uri).or_insert(true) &= endpoint.takes_requests;
            }
        }
        all.retain(|each| wanted.contains_key(&each.uri));
        for (uri, takes_requests) in wanted {
            match all.iter_mut().find(|each| each.uri == uri) {
                Some(each) => each.takes_requests = takes_requests,
                None => all.push(Polled::new(uri, takes_requests, &self.link)),
            }
        }
        all.sort_by_cached_key(|each| each.uri.to_string());
    }
}

async fn follow(name: &DnsName, resolver: &impl Resolver, every: Duration, found: &Found) {
    let mut ticks = tokio::time::interval(every);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        match resolver.addresses(name).await {
            Ok(addresses) => {
                let endpoint = |address| Endpoint {
                    address,
                    takes_requests: true,
                };
                found.set(name, addresses.into_iter().map(endpoint).collect());
            }
            Err(error) => tracing::warn!(%name, %error, "name not looked up: its last addresses stand"),
        }
    }
}

#[tonic::async_trait]
impl<R: Resolver + 'static> Discovery for Polling<R> {
    async fn run(self: Box<Self>, workers: watch::Sender<Vec<Worker>>) {
        let every = self.link.poll_interval;
        let (mut found, tasks) = self.look(every * TICKS_OF_LOOKUP);
        let mut all: Vec<Polled> = Vec::new();
        let mut ticks = tokio::time::interval(every);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        ticks.tick().await;
        loop {
            self.arrange(&mut all, &found.borrow_and_update());
            // An address that takes nothing more is told at once, however late the others answer.
            publish(&workers, known(&all));
            let timeout = self.link.unary_timeout;
            let asked = async {
                // Of who is not ready and was never heard of, nothing is to be known: a pod that loads, or a lost node's.
                let asked = all.iter_mut().filter(|each| each.is_asked());
                futures::future::join_all(asked.map(|each| each.poll(timeout))).await;
                publish(&workers, known(&all));
                ticks.tick().await;
            };
            // Where there is nothing to look up, nothing changes.
            let changed = async {
                match tasks.is_empty() {
                    true => std::future::pending().await,
                    false => found.changed().await,
                }
            };
            tokio::select! {
                () = asked => {}
                changed = changed => if changed.is_err() { return },
            }
        }
    }
}

fn uri(address: SocketAddr) -> Option<Uri> {
    format!("http://{address}").parse().ok()
}

/// Workers that answer, each once: one machine may have several addresses.
fn known(all: &[Polled]) -> Vec<Worker> {
    let mut seen = HashSet::new();
    let workers = all.iter().filter_map(|each| {
        let worker = each.last.clone()?;
        let serving = worker.serving && each.takes_requests;
        Some(Worker { serving, ..worker })
    });
    workers.filter(|worker| seen.insert(worker.id.clone())).collect()
}

/// An address that is asked.
struct Polled {
    uri: Uri,
    client: WorkerClient<Channel>,
    dial: Dial,
    /// As who found the address says.
    takes_requests: bool,
    /// As the worker there last described itself.
    last: Option<Worker>,
    n_missed: u32,
}

impl Polled {
    fn new(uri: Uri, takes_requests: bool, link: &LinkConfig) -> Self {
        let (channel, dial) = dialled(uri.clone(), link);
        Self {
            client: WorkerClient::new(channel),
            dial,
            uri,
            takes_requests,
            last: None,
            n_missed: 0,
        }
    }

    /// Whether there is anything to hear there: it is ready, or was heard of and ends.
    fn is_asked(&self) -> bool {
        self.takes_requests || self.last.is_some()
    }

    /// Ask for its status, and keep what it said last through a few questions without an answer.
    async fn poll(&mut self, timeout: Duration) {
        let mut request = tonic::Request::new(v1::WorkerStatusRequest {});
        request.set_timeout(timeout);
        let status = match self.client.status(request).await {
            Ok(response) => response.into_inner(),
            Err(status) => {
                self.n_missed = self.n_missed.saturating_add(1);
                let error = self.dial.why(&status);
                tracing::debug!(worker = %self.uri, n_missed = self.n_missed, error, "no status");
                if self.n_missed == MAX_MISSED {
                    self.last = None;
                    tracing::warn!(worker = %self.uri, error, "no worker answers here: nothing is sent to it");
                }
                return;
            }
        };
        self.n_missed = 0;
        self.last = Worker::from_status(self.uri.to_string(), status)
            .inspect_err(|error| tracing::error!(worker = %self.uri, %error, "worker ignored"))
            .ok();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io;
    use tokio::sync::{Mutex, mpsc};

    type Answer = io::Result<Vec<SocketAddr>>;

    /// Answers what the test says, when it says it.
    struct Scripted(Mutex<mpsc::Receiver<Answer>>);

    #[tonic::async_trait]
    impl Resolver for Scripted {
        async fn addresses(&self, _name: &DnsName) -> Answer {
            match self.0.lock().await.recv().await {
                Some(answer) => answer,
                None => std::future::pending().await,
            }
        }
    }

    fn addresses(n: u16) -> Vec<SocketAddr> {
        (1..=n).map(|port| ([10, 0, 0, 1], port).into()).collect()
    }

    #[tokio::test]
    async fn a_name_is_looked_up_again_and_keeps_its_addresses_while_it_cannot_be() {
        let (answers, script) = mpsc::channel(1);
        let (sender, mut found) = watch::channel(vec![Vec::new()]);
        let name: DnsName = "dns://worker:7071".parse().unwrap();
        tokio::spawn(async move {
            let resolver = Scripted(Mutex::new(script));
            follow(&name, &resolver, Duration::from_millis(1), &Found::only(sender)).await;
        });
        for (n_answered, n_kept) in [(1, 1), (2, 2), (0, 0), (300, MAX_ENDPOINTS)] {
            answers
                .send(Err(io::Error::other("nobody answers")))
                .await
                .unwrap();
            assert!(
                !found.has_changed().unwrap(),
                "a lookup that failed changes nothing"
            );
            answers.send(Ok(addresses(n_answered))).await.unwrap();
            let changed = tokio::time::timeout(Duration::from_secs(20), found.changed());
            changed.await.expect("it is looked up again").unwrap();
            let endpoints = found.borrow_and_update()[0].clone();
            let found: Vec<_> = endpoints.iter().map(|endpoint| endpoint.address).collect();
            assert_eq!(found, addresses(n_kept as u16));
            assert!(endpoints.iter().all(|endpoint| endpoint.takes_requests));
        }
    }
}
