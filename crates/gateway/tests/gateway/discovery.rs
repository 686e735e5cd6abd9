//! Workers behind names, and workers that answer and fail what they are given.

use laneway_gateway::DiscoveryConfig;
use laneway_proto::{ErrorCode, Failure, v1};

use crate::fake::{FakeWorker, Step, speaks};
use crate::harness::{gateway, gateway_at, request};

#[tokio::test]
async fn a_name_stands_for_the_workers_behind_its_addresses() {
    let worker = FakeWorker::start("a", speaks());
    let name = format!("dns://localhost:{}", worker.address.port());
    let discovery = DiscoveryConfig::Named {
        fixed: Vec::new(),
        names: vec![name.parse().unwrap()],
        services: Vec::new(),
    };
    let gateway = gateway_at(discovery).await;
    gateway.serving().await;
    gateway.speak(request()).await.unwrap();
    assert_eq!(worker.n_requests(), 1);
}

/// One worker answers its health and fails every request; the other one works, and is busier.
#[tokio::test]
async fn a_worker_that_fails_everything_stops_getting_requests() {
    let failing = FakeWorker::start("a", vec![Step::Fail(Failure::internal())]);
    let working = FakeWorker::start("b", speaks());
    working.set_status(|status| {
        status.load = Some(v1::WorkerLoad {
            running: 4,
            capacity: 8,
            queue_capacity: 8,
            queued: 0,
        })
    });
    let gateway = gateway(&[&failing, &working], |_| ()).await;
    gateway.serving().await;
    // Until both are known.
    let mut n_failed = 0;
    while working.n_requests() == 0 {
        match gateway.speak(request()).await {
            Ok(_) => {}
            Err(status) => {
                assert_eq!(crate::harness::ours(status).code, ErrorCode::Internal);
                n_failed += 1;
                assert!(n_failed < 50, "it goes on getting requests");
            }
        }
    }
    let n_before = failing.n_requests();
    assert!(n_before >= 5, "it was left alone after {n_before} failures");
    for _ in 0..5 {
        gateway.speak(request()).await.unwrap();
    }
    assert_eq!(failing.n_requests(), n_before);
}
