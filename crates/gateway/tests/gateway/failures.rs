//! Workers that fail, die, stall or lie.

use std::time::Duration;

use laneway_proto::{ErrorCode, Failure, v1};
use tokio::net::TcpListener;
use tonic::Code;
use tonic_health::pb::health_check_response::ServingStatus;

use crate::fake::{FakeManager, FakeWorker, Step, speaks};
use crate::harness::{gateway, gateway_of, named, ours, request, soon};

fn gated() -> Vec<Step> {
    vec![
        Step::Started,
        Step::Audio(1, 0.5),
        Step::Gate,
        Step::Audio(1, 0.5),
        Step::Finish(v1::FinishReason::Stop),
    ]
}

#[tokio::test]
async fn one_failed_row_ends_alone_and_says_nothing_internal() {
    let worker = FakeWorker::start("a", gated());
    let gateway = gateway(&[&worker], |_| ()).await;
    gateway.serving().await;
    let mut neighbour = gateway.begin(request()).await.unwrap();
    neighbour.accepted().await;
    worker.plays(vec![
        Step::Started,
        Step::Audio(1, 0.5),
        Step::Fail(Failure::new(
            ErrorCode::Internal,
            "secret: logits of row 3 are NaN",
        )),
    ]);
    let (_, chunks, end) = gateway.begin(request()).await.unwrap().rest().await;
    assert_eq!(chunks.len(), 1, "what was made before it failed was delivered");
    let status = end.unwrap_err();
    assert_eq!(status.code(), Code::Internal);
    assert_eq!(ours(status).message, "internal error");
    worker.open_gate();
    assert_eq!(neighbour.rest().await.2.unwrap().finished.frames, 2);
}

#[tokio::test]
async fn what_a_worker_refuses_in_its_own_words_reaches_the_caller() {
    let refusal = Failure::of_field(
        ErrorCode::InvalidArgument,
        "text",
        "tokens are over the context of 8192",
    );
    let worker = FakeWorker::start("a", vec![Step::Refuse(refusal.clone())]);
    let gateway = gateway(&[&worker], |_| ()).await;
    gateway.serving().await;
    assert_eq!(gateway.fails(request()).await, refusal);
    assert_eq!(worker.n_requests(), 1, "another worker would refuse it too");
}

#[tokio::test]
async fn a_worker_that_dies_ends_its_own_streams_and_nobody_elses() {
    let (mut a, b) = (FakeWorker::start("a", gated()), FakeWorker::start("b", gated()));
    let manager = FakeManager::start(vec![a.info()]).await;
    let gateway = gateway_of(&manager, |_| ()).await;
    gateway.serving().await;
    let mut on_a = gateway.begin(request()).await.unwrap();
    on_a.accepted().await;
    on_a.chunk().await;
    manager.publish(vec![a.info(), b.info()]);
    // The least loaded worker is the one that holds nothing.
    let mut on_b = soon(async {
        loop {
            let mut call = gateway.begin(request()).await.unwrap();
            call.accepted().await;
            if b.n_requests() == 1 {
                return call;
            }
        }
    })
    .await;
    on_b.chunk().await;
    a.die();
    let failure = on_a.failure().await;
    assert_eq!(
        (failure.code, failure.code.grpc()),
        (ErrorCode::WorkerLost, Code::Unavailable)
    );
    b.open_gate();
    on_b.rest().await.2.unwrap();
    gateway.speak(request()).await.unwrap();
}

#[tokio::test]
async fn health_follows_the_last_worker_down_and_back_up() {
    let mut worker = FakeWorker::start("a", gated());
    // The topology goes on naming it: the gateway has to find out for itself.
    let manager = FakeManager::start(vec![worker.info()]).await;
    let gateway = gateway_of(&manager, |_| ()).await;
    let mut health = gateway.health().await;
    health.until(ServingStatus::Serving).await;
    let mut call = gateway.begin(request()).await.unwrap();
    call.accepted().await;
    worker.die();
    assert_eq!(call.failure().await.code, ErrorCode::WorkerLost);
    health.until(ServingStatus::NotServing).await;
    let failure = gateway.fails(request()).await;
    assert_eq!(
        (failure.code, failure.code.grpc()),
        (ErrorCode::NoWorker, Code::Unavailable)
    );
    let _reborn = FakeWorker::start_at("a", speaks(), worker.address);
    health.until(ServingStatus::Serving).await;
    gateway.speak(request()).await.unwrap();
}

#[tokio::test]
async fn a_request_without_audio_is_tried_elsewhere() {
    let (mut a, b) = (
        FakeWorker::start("a", vec![Step::Started, Step::Gate]),
        FakeWorker::start("b", speaks()),
    );
    let manager = FakeManager::start(vec![a.info()]).await;
    let gateway = gateway_of(&manager, |_| ()).await;
    gateway.serving().await;
    let call = gateway.begin(named("mine")).await.unwrap();
    a.until_open(1).await;
    manager.publish(vec![a.info(), b.info()]);
    // Until requests go to the new worker too.
    soon(async {
        while b.n_requests() == 0 {
            gateway.begin(request()).await.unwrap().accepted().await;
        }
    })
    .await;
    a.die();
    let spoken = call.rest().await.2.unwrap();
    assert_eq!(spoken.finished.frames, 3);
    assert_eq!(spoken.accepted.request_id, "mine", "told once, whatever it took");
    let mine = |worker: &FakeWorker| worker.caller_ids().iter().filter(|id| *id == "mine").count();
    assert_eq!((mine(&a), mine(&b)), (1, 1));
}

#[tokio::test]
async fn a_request_without_audio_waits_for_its_worker_to_come_back() {
    let mut worker = FakeWorker::start("a", vec![Step::Started, Step::Gate]);
    let manager = FakeManager::start(vec![worker.info()]).await;
    let gateway = gateway_of(&manager, |config| {
        config.stream.replacement = Duration::from_secs(60)
    })
    .await;
    gateway.serving().await;
    let call = gateway.begin(named("mine")).await.unwrap();
    worker.until_open(1).await;
    worker.die();
    gateway.not_serving().await;
    // What comes meanwhile has no worker that it could wait for, and is told so at once.
    assert_eq!(gateway.fails(request()).await.code, ErrorCode::NoWorker);
    let reborn = FakeWorker::start_at("a", speaks(), worker.address);
    let spoken = call.rest().await.2.unwrap();
    assert_eq!(
        (spoken.finished.frames, spoken.accepted.request_id.as_str()),
        (3, "mine")
    );
    assert_eq!(reborn.caller_ids(), ["mine"]);
}

#[tokio::test]
async fn the_wait_for_a_worker_ends_with_its_bound_with_the_deadline_and_with_the_caller() {
    for (bound_ms, deadline_ms, code) in [
        (300, None, ErrorCode::WorkerLost),
        (60_000, Some(300), ErrorCode::DeadlineExceeded),
    ] {
        let mut worker = FakeWorker::start("a", vec![Step::Started, Step::Gate]);
        let bound = Duration::from_millis(bound_ms);
        let gateway = gateway(&[&worker], |config| config.stream.replacement = bound).await;
        gateway.serving().await;
        let mut call = tonic::Request::new(request());
        if let Some(ms) = deadline_ms {
            call.set_timeout(Duration::from_millis(ms));
        }
        let call = gateway.begin_with(call).await.unwrap();
        worker.until_open(1).await;
        worker.die();
        assert_eq!(call.failure().await.code, code);
    }
}

#[tokio::test]
async fn a_request_that_loses_every_worker_is_given_up() {
    // It ends each stream without a last message, as a worker does that dies of the request.
    let worker = FakeWorker::start("a", vec![Step::Started]);
    let gateway = gateway(&[&worker], |config| {
        config.stream.replacement = Duration::from_secs(60)
    })
    .await;
    gateway.serving().await;
    assert_eq!(gateway.fails(request()).await.code, ErrorCode::WorkerLost);
    assert_eq!(worker.n_requests(), 3);
}

#[tokio::test]
async fn a_draining_worker_is_passed_over() {
    let drains = vec![Step::Refuse(Failure::new(ErrorCode::Draining, "shutting down"))];
    let (a, b) = (FakeWorker::start("a", drains), FakeWorker::start("b", speaks()));
    let manager = FakeManager::start(vec![a.info(), b.info()]).await;
    let gateway = gateway_of(&manager, |_| ()).await;
    gateway.serving().await;
    for _ in 0..4 {
        gateway.speak(request()).await.unwrap();
    }
    assert!(a.n_requests() > 0);
}

#[tokio::test]
async fn a_worker_that_stalls_is_unavailable_after_audio_and_replaced_before() {
    let short = Duration::from_millis(150);
    let stalls = FakeWorker::start("a", vec![Step::Started, Step::Audio(1, 0.5), Step::Gate]);
    let after = gateway(&[&stalls], |config| config.stream.stall = short).await;
    after.serving().await;
    assert_eq!(after.fails(request()).await.code, ErrorCode::WorkerLost);
    stalls.until_open(0).await;

    let (mute, good) = (
        FakeWorker::start("a", vec![Step::Started, Step::Gate]),
        FakeWorker::start("b", speaks()),
    );
    let manager = FakeManager::start(vec![mute.info(), good.info()]).await;
    let before = gateway_of(&manager, |config| config.stream.first_audio = short).await;
    before.serving().await;
    for _ in 0..2 {
        before.speak(request()).await.unwrap();
    }
    mute.until_open(0).await;
    assert!(mute.n_requests() > 0, "one of two went there first");
}

#[tokio::test]
async fn waiting_for_its_turn_is_no_stall_of_the_worker() {
    let mut script = vec![Step::Gate];
    script.extend(speaks());
    let worker = FakeWorker::start("a", script);
    let gateway = gateway(&[&worker], |config| {
        config.stream.first_audio = Duration::from_millis(300);
        config.stream.stall = Duration::from_millis(300);
    })
    .await;
    gateway.serving().await;
    let mut call = gateway.begin(request()).await.unwrap();
    call.accepted().await;
    worker.until_open(1).await;
    let waits = tokio::time::timeout(Duration::from_secs(1), call.events.message()).await;
    assert!(waits.is_err(), "its turn has not come: {waits:?}");
    worker.open_gate();
    assert_eq!(call.rest().await.2.unwrap().finished.frames, 3);
    assert_eq!(worker.n_requests(), 1);
}

#[tokio::test]
async fn too_long_a_wait_for_its_turn_is_overload_and_the_worker_stays() {
    let worker = FakeWorker::start("a", vec![Step::Gate]);
    let gateway = gateway(&[&worker], |config| {
        config.stream.queue = Duration::from_millis(200)
    })
    .await;
    gateway.serving().await;
    let failure = gateway.fails(request()).await;
    assert_eq!(failure.code, ErrorCode::Overloaded);
    assert!(failure.retry_after.is_some());
    worker.until_open(0).await;
    worker.plays(speaks());
    gateway.speak(request()).await.unwrap();
}

#[tokio::test]
async fn a_fixed_worker_is_kept_through_two_unanswered_questions_and_not_a_third() {
    let worker = FakeWorker::start("a", speaks());
    let gateway = gateway(&[&worker], |_| ()).await;
    let mut health = gateway.health().await;
    health.until(ServingStatus::Serving).await;
    for _ in 0..5 {
        worker.lose_statuses(2);
        worker.until_asked(4).await;
    }
    let changed = tokio::time::timeout(
        Duration::from_millis(100),
        health.until(ServingStatus::NotServing),
    );
    assert!(changed.await.is_err(), "two lost answers are no death");
    worker.lose_statuses(usize::MAX);
    health.until(ServingStatus::NotServing).await;
    worker.lose_statuses(0);
    health.until(ServingStatus::Serving).await;
}

#[tokio::test]
async fn a_machine_that_is_gone_without_a_word_is_found_by_pings() {
    // It takes connections and never says anything.
    let black_hole = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let good = FakeWorker::start("b", speaks());
    let gone = v1::WorkerInfo {
        worker_id: "a".into(),
        address: format!("http://{}", black_hole.local_addr().unwrap()),
        ..good.info()
    };
    let manager = FakeManager::start(vec![gone]).await;
    let gateway = gateway_of(&manager, |config| {
        config.link.keep_alive_interval = Duration::from_millis(100);
        config.link.keep_alive_timeout = Duration::from_millis(100);
        config.link.unary_timeout = Duration::from_millis(300);
    })
    .await;
    let mut health = gateway.health().await;
    health.until(ServingStatus::Serving).await;
    assert_eq!(gateway.fails(request()).await.code, ErrorCode::WorkerLost);
    health.until(ServingStatus::NotServing).await;
    drop(black_hole);
}

#[tokio::test]
async fn a_worker_that_breaks_the_protocol_is_an_internal_error() {
    let worker = FakeWorker::start("a", vec![]);
    let gateway = gateway(&[&worker], |_| ()).await;
    gateway.serving().await;
    let audio = Step::Audio(1, 0.5);
    for (script, code) in [
        (
            vec![Step::Started, audio.clone(), Step::Misplaced],
            ErrorCode::Internal,
        ),
        (
            vec![
                Step::Started,
                audio.clone(),
                Step::Finish(v1::FinishReason::Unspecified),
            ],
            ErrorCode::Internal,
        ),
        (vec![Step::Started, audio.clone()], ErrorCode::WorkerLost),
    ] {
        worker.plays(script);
        assert_eq!(gateway.fails(request()).await.code, code);
    }
}
