use std::sync::Arc;

use super::*;

const LEASE: Duration = Duration::from_secs(5);

fn registry() -> Registry {
    Registry::new(vec![0, 1], LEASE, 100)
}

/// A worker that is named after its address.
fn from(rank: u32, address: &str) -> Registration {
    Registration {
        worker_id: format!("worker at {address}"),
        rank,
        address: address.into(),
        version: "0.1.0".into(),
    }
}

fn report(state: WorkerState) -> Report {
    Report {
        state,
        load: v1::WorkerLoad::default(),
        facts: None,
    }
}

fn beat(
    registry: &Registry,
    address: &str,
    generation: u64,
    state: WorkerState,
) -> Result<(), RegistryError> {
    registry.heartbeat(&format!("worker at {address}"), generation, report(state))
}

#[test]
fn a_rank_outside_the_deployment_is_refused_with_the_ranks_that_exist() {
    let refusal = registry().register(from(7, "http://a")).unwrap_err();
    assert_eq!(
        refusal,
        RegistryError::UnknownRank {
            rank: 7,
            known: vec![0, 1]
        }
    );
}

#[test]
fn a_rank_has_one_holder_until_its_lease_ends() {
    let registry = registry();
    let now = Instant::now();
    let first = registry.register_at(now, from(0, "http://a")).unwrap();
    let refusal = registry.register_at(now, from(0, "http://b")).unwrap_err();
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

    let again = registry.register_at(now, from(0, "http://a")).unwrap();
    assert_ne!(first, again, "a restart is another registration");
    assert!(beat(&registry, "http://a", first, WorkerState::Serving).is_err());

    registry.register_at(now + LEASE, from(0, "http://b")).unwrap();
}

#[test]
fn watchers_hear_of_reports_and_not_of_renewals() {
    let registry = registry();
    let mut watch = registry.watch();
    let generation = registry.register(from(1, "http://a")).unwrap();
    assert_eq!(
        watch.borrow_and_update().workers[&1].report.state,
        WorkerState::Loading
    );

    beat(&registry, "http://a", generation, WorkerState::Loading).unwrap();
    assert!(!watch.has_changed().unwrap());
    beat(&registry, "http://a", generation, WorkerState::Serving).unwrap();
    assert_eq!(
        watch.borrow_and_update().workers[&1].report.state,
        WorkerState::Serving
    );
}

#[test]
fn a_silent_worker_leaves_and_a_renewing_one_stays() {
    let registry = registry();
    let now = Instant::now();
    let quiet = registry.register_at(now, from(0, "http://a")).unwrap();
    let lively = registry.register_at(now, from(1, "http://b")).unwrap();
    let renewed = registry.heartbeat_at(
        now + LEASE / 2,
        "worker at http://b",
        lively,
        report(WorkerState::Serving),
    );
    renewed.unwrap();
    registry.expire(now + LEASE);
    let watch = registry.watch();
    assert_eq!(watch.borrow().workers.keys().collect::<Vec<_>>(), [&1]);
    assert!(beat(&registry, "http://a", quiet, WorkerState::Serving).is_err());
}

#[tokio::test]
async fn the_sweeper_ends_leases_by_itself() {
    let registry = Arc::new(Registry::new(vec![0, 1], Duration::from_millis(20), 0));
    let token = CancellationToken::new();
    let sweeper = tokio::spawn({
        let (registry, token) = (registry.clone(), token.clone());
        async move { registry.sweep(token).await }
    });
    let mut watch = registry.watch();
    for rank in [0, 1] {
        registry.register(from(rank, "http://a")).unwrap();
    }
    let swept = tokio::time::timeout(LEASE, watch.wait_for(|topology| topology.workers.is_empty())).await;
    swept.expect("the leases never ended").unwrap();
    token.cancel();
    sweeper.await.unwrap();
}

#[test]
fn leaving_frees_the_rank_at_once_and_only_for_the_same_registration() {
    let registry = registry();
    let old = registry.register(from(0, "http://a")).unwrap();
    let new = registry.register(from(0, "http://a")).unwrap();
    registry.deregister("worker at http://a", old);
    assert!(registry.watch().borrow().workers.contains_key(&0));
    registry.deregister("worker at http://a", new);
    assert!(registry.watch().borrow().workers.is_empty());
    registry.register(from(0, "http://b")).unwrap();
}
