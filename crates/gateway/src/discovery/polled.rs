//! Workers that are asked for their status, at fixed addresses and at those that names stand for.
//!
//! One task asks all of them at every tick. Names are looked up again at an interval, at the same time as the asking, so
//! that a lookup without an answer holds nothing up. While a name cannot be looked up, its last addresses stand.

use std::collections::HashSet;
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

use super::names::{DnsName, MAX_ADDRESSES, Resolver};
use super::{Discovery, dialled, publish};
use crate::config::LinkConfig;
use crate::facts::Worker;

/// Questions for a status in a row without an answer after which a worker is gone. One may be lost to a busy machine; a
/// call that fails finds a dead worker sooner.
const MAX_MISSED: u32 = 3;

/// Between two lookups of a name, in questions for a status.
const TICKS_OF_LOOKUP: u32 = 6;

/// Asks its workers itself.
pub(super) struct Polling<R> {
    fixed: Vec<Uri>,
    names: Vec<DnsName>,
    resolver: Arc<R>,
    link: LinkConfig,
}

impl<R: Resolver + 'static> Polling<R> {
    pub(super) fn new(fixed: Vec<Uri>, names: Vec<DnsName>, resolver: R, link: LinkConfig) -> Self {
        Self {
            fixed,
            names,
            resolver: Arc::new(resolver),
            link,
        }
    }

    /// Look every name up, again and again. The tasks end when they are dropped.
    fn look_up(&self, every: Duration) -> Vec<(watch::Receiver<Vec<SocketAddr>>, AbortOnDropHandle<()>)> {
        let of_name = |name: &DnsName| {
            let (sender, receiver) = watch::channel(Vec::new());
            let (name, resolver) = (name.clone(), self.resolver.clone());
            let task = tokio::spawn(async move { follow(&name, &*resolver, every, sender).await });
            (receiver, AbortOnDropHandle::new(task))
        };
        self.names.iter().map(of_name).collect()
    }
}

async fn follow(
    name: &DnsName,
    resolver: &impl Resolver,
    every: Duration,
    found: watch::Sender<Vec<SocketAddr>>,
) {
    let mut ticks = tokio::time::interval(every);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        match resolver.addresses(name).await {
            Ok(mut addresses) => {
                if addresses.len() > MAX_ADDRESSES {
                    let n_addresses = addresses.len();
                    tracing::error!(%name, n_addresses, "a name has more than {MAX_ADDRESSES} addresses: the rest is left out");
                    addresses.truncate(MAX_ADDRESSES);
                }
                found.send_if_modified(|current| {
                    let changed = *current != addresses;
                    if changed {
                        tracing::info!(%name, ?addresses, "addresses of a name changed");
                        *current = addresses;
                    }
                    changed
                });
            }
            Err(error) => tracing::warn!(%name, %error, "name not looked up: its last addresses stand"),
        }
    }
}

#[tonic::async_trait]
impl<R: Resolver + 'static> Discovery for Polling<R> {
    async fn run(self: Box<Self>, workers: watch::Sender<Vec<Worker>>) {
        let every = self.link.poll_interval;
        let lookups = self.look_up(every * TICKS_OF_LOOKUP);
        let mut all: Vec<Polled> = Vec::new();
        let mut ticks = tokio::time::interval(every);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            let looked_up = lookups
                .iter()
                .flat_map(|(addresses, _)| addresses.borrow().clone());
            let looked_up: Vec<_> = looked_up.filter_map(uri).collect();
            let wanted: HashSet<&Uri> = self.fixed.iter().chain(&looked_up).collect();
            all.retain(|each| wanted.contains(&each.uri));
            for uri in wanted {
                if !all.iter().any(|each| each.uri == *uri) {
                    all.push(Polled::new(uri.clone(), &self.link));
                }
            }
            all.sort_by_cached_key(|each| each.uri.to_string());
            let timeout = self.link.unary_timeout;
            futures::future::join_all(all.iter_mut().map(|each| each.poll(timeout))).await;
            publish(&workers, known(&all));
        }
    }
}

fn uri(address: SocketAddr) -> Option<Uri> {
    format!("http://{address}").parse().ok()
}

/// Workers that answer, each once: one machine may have several addresses.
fn known(all: &[Polled]) -> Vec<Worker> {
    let mut seen = HashSet::new();
    let workers = all.iter().filter_map(|each| each.last.clone());
    workers.filter(|worker| seen.insert(worker.id.clone())).collect()
}

/// An address that is asked.
struct Polled {
    uri: Uri,
    client: WorkerClient<Channel>,
    dial: Dial,
    /// As the worker there last described itself.
    last: Option<Worker>,
    n_missed: u32,
}

impl Polled {
    fn new(uri: Uri, link: &LinkConfig) -> Self {
        let (channel, dial) = dialled(uri.clone(), link);
        Self {
            client: WorkerClient::new(channel),
            dial,
            uri,
            last: None,
            n_missed: 0,
        }
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
        let (sender, mut found) = watch::channel(Vec::new());
        let name: DnsName = "dns://worker:7071".parse().unwrap();
        tokio::spawn(async move {
            let resolver = Scripted(Mutex::new(script));
            follow(&name, &resolver, Duration::from_millis(1), sender).await;
        });
        for (n_answered, n_kept) in [(1, 1), (2, 2), (0, 0), (300, MAX_ADDRESSES)] {
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
            assert_eq!(*found.borrow_and_update(), addresses(n_kept as u16));
        }
    }
}
