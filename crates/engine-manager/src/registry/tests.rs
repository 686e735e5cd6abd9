use std::sync::Arc;

use super::*;

const LEASE: Duration = Duration::from_secs(5);

fn registry() -> Registry {
    Registry::new(vec![0, 1], LEASE, 100)
}

fn from(rank: u32, address: &str) -> Registration {
    Registration {
        rank,
        address: address.into(),
        version: "0.1.0".into(),
    }
}

#[tokio::test(start_paused = true)]
async fn a_rank_outside_the_deployment_is_refused_with_the_ranks_that_exist() {
    let refusal = registry().register(from(7, "http://a")).unwrap_err();
    assert_eq!(
        refusal,
        RegistryError::UnknownRank {
            rank: 7,
            known: vec![0, 1]
        }
    );
}

#[tokio::test(start_paused = true)]
async fn a_rank_has_one_holder_until_its_lease_ends() {
    let registry = registry();
    let first = registry.register(from(0, "http://a")).unwrap();
    let refusal = registry.register(from(0, "http://b")).unwrap_err();
    assert!(
        matches!(
            refusal,
            RegistryError::Held {
                lease_left_ms: 5000,
                ..
            }
        ),
        "{refusal}"
    );

    let again = registry.register(from(0, "http://a")).unwrap();
    assert_ne!(first, again, "a restart is a new life");
    assert!(registry.heartbeat(0, first, WorkerState::Serving).is_err());

    tokio::time::advance(LEASE).await;
    registry.register(from(0, "http://b")).unwrap();
}

#[tokio::test(start_paused = true)]
async fn watchers_hear_of_states_and_not_of_renewals() {
    let registry = registry();
    let mut watch = registry.watch();
    let incarnation = registry.register(from(1, "http://a")).unwrap();
    assert_eq!(watch.borrow_and_update().workers[&1].state, WorkerState::Loading);

    registry.heartbeat(1, incarnation, WorkerState::Loading).unwrap();
    assert!(!watch.has_changed().unwrap());
    registry.heartbeat(1, incarnation, WorkerState::Serving).unwrap();
    assert_eq!(watch.borrow_and_update().workers[&1].state, WorkerState::Serving);
}

#[tokio::test(start_paused = true)]
async fn a_silent_worker_leaves_the_topology_and_a_renewing_one_stays() {
    let registry = Arc::new(registry());
    let token = CancellationToken::new();
    let sweeper = tokio::spawn({
        let (registry, token) = (registry.clone(), token.clone());
        async move { registry.sweep(token).await }
    });
    let quiet = registry.register(from(0, "http://a")).unwrap();
    let lively = registry.register(from(1, "http://b")).unwrap();
    let mut watch = registry.watch();
    for _ in 0..4 {
        tokio::time::sleep(LEASE / 4).await;
        registry.heartbeat(1, lively, WorkerState::Loading).unwrap();
    }
    watch
        .wait_for(|topology| !topology.workers.contains_key(&0))
        .await
        .unwrap();
    assert!(watch.borrow().workers.contains_key(&1));
    assert!(registry.heartbeat(0, quiet, WorkerState::Serving).is_err());

    token.cancel();
    sweeper.await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn leaving_frees_the_rank_at_once_and_only_for_the_same_life() {
    let registry = registry();
    let old = registry.register(from(0, "http://a")).unwrap();
    let new = registry.register(from(0, "http://a")).unwrap();
    registry.deregister(0, old);
    assert!(registry.watch().borrow().workers.contains_key(&0));
    registry.deregister(0, new);
    assert!(registry.watch().borrow().workers.is_empty());
    registry.register(from(0, "http://b")).unwrap();
}
