//! More than fits, too late, and callers who change their mind.

use std::num::NonZeroUsize;
use std::time::{Duration, Instant};

use laneway_proto::{ErrorCode, Failure, v1};
use tonic::Code;

use crate::fake::{FakeWorker, Step, caller_id, speaks, speaks_much};
use crate::harness::{gateway, named, ours, request, soon};

fn hangs() -> Vec<Step> {
    vec![Step::Started, Step::Audio(1, 0.5), Step::Hang]
}

#[tokio::test]
async fn requests_beyond_the_bound_are_refused_at_once_and_admitted_ones_go_on() {
    let script = vec![
        Step::Started,
        Step::Audio(1, 0.5),
        Step::Gate,
        Step::Finish(v1::FinishReason::Stop),
    ];
    let worker = FakeWorker::start("a", script);
    let gateway = gateway(&[&worker], |config| {
        config.max_in_flight = NonZeroUsize::new(2).unwrap()
    })
    .await;
    gateway.serving().await;
    let mut admitted = vec![
        gateway.begin(request()).await.unwrap(),
        gateway.begin(request()).await.unwrap(),
    ];
    for call in &mut admitted {
        call.accepted().await;
        call.chunk().await;
    }
    let mut waits = Vec::new();
    for _ in 0..20 {
        let asked = Instant::now();
        let status = gateway.begin(request()).await.map(|_| ()).unwrap_err();
        waits.push(asked.elapsed());
        assert_eq!(status.code(), Code::ResourceExhausted);
        assert!(
            ours(status).retry_after.is_some(),
            "RetryInfo says when to try again"
        );
    }
    waits.sort();
    assert!(
        waits[10] < Duration::from_millis(100),
        "answered at once: {waits:?}"
    );
    worker.open_gate();
    for call in admitted {
        call.rest().await.2.unwrap();
    }
    gateway.speak(request()).await.unwrap();
}

#[tokio::test]
async fn a_full_gateway_answers_health_and_refuses_on_the_same_connection() {
    const PLACES: usize = 300;
    let worker = FakeWorker::start("a", hangs());
    worker.set_status(|status| {
        status.load = Some(v1::WorkerLoad {
            capacity: PLACES as u32,
            ..Default::default()
        });
    });
    let gateway = gateway(&[&worker], |config| {
        config.max_in_flight = NonZeroUsize::new(PLACES).unwrap()
    })
    .await;
    gateway.serving().await;
    let mut held = Vec::new();
    for _ in 0..PLACES {
        held.push(gateway.begin(request()).await.unwrap());
    }
    worker.until_open(PLACES).await;
    let asked = Instant::now();
    gateway.serving().await;
    assert!(
        asked.elapsed() < Duration::from_secs(1),
        "health took {:?}",
        asked.elapsed()
    );
    for _ in 0..PLACES {
        assert_eq!(gateway.fails(request()).await.code, ErrorCode::Overloaded);
    }
    drop(held);
    worker.until_open(0).await;
}

#[tokio::test]
async fn a_full_worker_is_passed_over_and_full_workers_are_said_to_be_so() {
    let full = vec![Step::Refuse(Failure::new(
        ErrorCode::Overloaded,
        "the queue is full",
    ))];
    let (a, b) = (
        FakeWorker::start("a", full.clone()),
        FakeWorker::start("b", speaks()),
    );
    let gateway = gateway(&[&a, &b], |_| ()).await;
    soon(async {
        while gateway
            .models()
            .list(v1::ListModelsRequest {})
            .await
            .unwrap()
            .into_inner()
            .models
            .is_empty()
        {}
    })
    .await;
    for _ in 0..4 {
        gateway.speak(request()).await.unwrap();
    }
    b.plays(full);
    let failure = gateway.fails(request()).await;
    assert_eq!(failure.code, ErrorCode::Overloaded);
    assert!(failure.retry_after.is_some());
}

#[tokio::test]
async fn a_full_gateway_and_full_workers_answer_before_a_clip_is_decoded() {
    for max_in_flight in [1, 100] {
        let worker = FakeWorker::start("a", hangs());
        worker.set_status(|status| {
            let facts = status.facts.as_mut().unwrap();
            facts.voices.clear();
            facts.takes_reference = true;
            facts.limits.as_mut().unwrap().max_reference_ms = 1000;
            status.load = Some(v1::WorkerLoad {
                capacity: 1,
                ..Default::default()
            });
        });
        let gateway = gateway(&[&worker], |config| {
            config.max_in_flight = NonZeroUsize::new(max_in_flight).unwrap();
        })
        .await;
        gateway.serving().await;
        let cloning = |audio: Vec<u8>| v1::SynthesizeRequest {
            voice: String::new(),
            reference: Some(v1::ReferenceClip {
                audio: audio.into(),
                sample_rate: 24_000,
                text: String::new(),
            }),
            ..request()
        };
        let no_clip = cloning(vec![1, 2, 3]);
        assert_eq!(
            gateway.fails(no_clip.clone()).await.code,
            ErrorCode::InvalidArgument
        );
        let mut held = gateway.begin(cloning(vec![0; 4800])).await.unwrap();
        held.accepted().await;
        assert_eq!(gateway.fails(no_clip).await.code, ErrorCode::Overloaded);
    }
}

#[tokio::test]
async fn a_worker_takes_no_more_than_its_places_and_its_queue() {
    let worker = FakeWorker::start("a", hangs());
    worker.set_status(|status| {
        status.load = Some(v1::WorkerLoad {
            capacity: 1,
            queue_capacity: 1,
            ..Default::default()
        });
    });
    let gateway = gateway(&[&worker], |_| ()).await;
    gateway.serving().await;
    let held = [
        gateway.begin(request()).await.unwrap(),
        gateway.begin(request()).await.unwrap(),
    ];
    worker.until_open(2).await;
    assert_eq!(gateway.fails(request()).await.code, ErrorCode::Overloaded);
    assert_eq!(worker.n_requests(), 2);
    drop(held);
}

#[tokio::test]
async fn a_deadline_ends_the_stream_and_frees_its_place() {
    let worker = FakeWorker::start("a", hangs());
    let gateway = gateway(&[&worker], |config| config.max_in_flight = NonZeroUsize::MIN).await;
    gateway.serving().await;
    let mut sent = tonic::Request::new(request());
    sent.set_timeout(Duration::from_millis(300));
    let asked = Instant::now();
    let status = gateway
        .begin_with(sent)
        .await
        .unwrap()
        .rest()
        .await
        .2
        .unwrap_err();
    assert_eq!(status.code(), Code::DeadlineExceeded);
    assert!(asked.elapsed() >= Duration::from_millis(300));
    assert_eq!(ours(status).code, ErrorCode::DeadlineExceeded);
    worker.until_open(0).await;
    let passed_down = laneway_proto::grpc_timeout(&worker.shared.requests.lock().unwrap()[0].0).unwrap();
    assert!(
        passed_down < Duration::from_millis(400),
        "the worker got {passed_down:?}"
    );
    worker.plays(speaks());
    gateway.speak(request()).await.unwrap();
}

#[tokio::test]
async fn a_caller_who_leaves_stops_the_work_and_frees_its_place() {
    let worker = FakeWorker::start("a", hangs());
    let gateway = gateway(&[&worker], |config| config.max_in_flight = NonZeroUsize::MIN).await;
    gateway.serving().await;
    let mut call = gateway.begin(named("mine")).await.unwrap();
    call.accepted().await;
    worker.until_open(1).await;
    drop(call);
    worker.until_open(0).await;
    worker.plays(speaks());
    // Permit and id are free right behind the worker's stream.
    soon(async { while gateway.speak(named("mine")).await.is_err() {} }).await;
}

#[tokio::test]
async fn a_caller_who_does_not_read_is_dropped() {
    let mut script = vec![Step::Started];
    script.extend(std::iter::repeat_n(Step::Audio(25, 0.5), 200));
    let worker = FakeWorker::start("a", script);
    let gateway = gateway(&[&worker], |config| {
        config.stream.caller = Duration::from_millis(200)
    })
    .await;
    gateway.serving().await;
    let call = gateway.begin(request()).await.unwrap();
    worker.until_ended(1).await;
    assert_eq!(call.failure().await.code, ErrorCode::Cancelled);
}

#[tokio::test]
async fn a_finished_stream_that_nobody_reads_keeps_its_place_for_a_while_only() {
    let worker = FakeWorker::start("a", speaks_much());
    let patience = Duration::from_secs(1);
    let gateway = gateway(&[&worker], |config| {
        config.max_in_flight = NonZeroUsize::MIN;
        config.stream.caller = patience;
    })
    .await;
    gateway.serving().await;
    let asked = Instant::now();
    let call = gateway.begin_narrow(request()).await.unwrap();
    worker.until_ended(1).await;
    if asked.elapsed() < patience {
        assert_eq!(gateway.fails(request()).await.code, ErrorCode::Overloaded);
    }
    soon(async {
        while let Err(status) = gateway.begin(request()).await {
            assert_eq!(ours(status).code, ErrorCode::Overloaded);
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    })
    .await;
    assert!(asked.elapsed() >= patience);
    assert_eq!(call.failure().await.code, ErrorCode::Cancelled);
}

#[tokio::test]
async fn a_stop_delivers_what_was_made() {
    let worker = FakeWorker::start("a", hangs());
    let gateway = gateway(&[&worker], |_| ()).await;
    gateway.serving().await;
    let mut call = gateway.begin(named("mine")).await.unwrap();
    call.accepted().await;
    call.chunk().await;
    gateway
        .cancel("mine", v1::CancelStrength::Unspecified)
        .await
        .unwrap();
    let spoken = call.rest().await.2.unwrap();
    assert_eq!(spoken.finished.reason(), v1::FinishReason::Stopped);
    assert_eq!(spoken.finished.samples, 1920);
    let cancels = worker.shared.cancels.lock().unwrap().clone();
    assert_eq!(cancels.len(), 1);
    assert_eq!(
        (caller_id(&cancels[0].request_id), cancels[0].strength()),
        ("mine", v1::CancelStrength::Stop)
    );
}

#[tokio::test]
async fn a_stop_that_gets_lost_is_sent_again_and_becomes_a_kill_in_the_end() {
    let worker = FakeWorker::start("a", hangs());
    let gateway = gateway(&[&worker], |_| ()).await;
    gateway.serving().await;
    for (n_lost, ends_well) in [(2, true), (usize::MAX, false)] {
        worker.lose_cancels(n_lost);
        let mut call = gateway.begin(named("mine")).await.unwrap();
        call.accepted().await;
        call.chunk().await;
        gateway.cancel("mine", v1::CancelStrength::Stop).await.unwrap();
        match call.rest().await.2 {
            Ok(spoken) => {
                assert!(ends_well);
                assert_eq!(spoken.finished.reason(), v1::FinishReason::Stopped);
            }
            Err(status) => {
                assert!(!ends_well);
                assert_eq!(ours(status).code, ErrorCode::Cancelled);
            }
        }
        worker.until_open(0).await;
    }
}

#[tokio::test]
async fn an_id_can_be_used_again_as_soon_as_its_kill_is_answered() {
    let worker = FakeWorker::start("a", hangs());
    let gateway = gateway(&[&worker], |_| ()).await;
    gateway.serving().await;
    let mut killed = Vec::new();
    for _ in 0..20 {
        killed.push(gateway.begin(named("mine")).await.unwrap());
        gateway.cancel("mine", v1::CancelStrength::Kill).await.unwrap();
    }
    let mut call = gateway.begin(named("mine")).await.unwrap();
    call.accepted().await;
    call.chunk().await;
    for call in killed {
        assert_eq!(call.failure().await.code, ErrorCode::Cancelled);
    }
    gateway.cancel("mine", v1::CancelStrength::Stop).await.unwrap();
    call.rest().await.2.unwrap();
    let mut ids: Vec<_> = worker
        .shared
        .requests
        .lock()
        .unwrap()
        .iter()
        .map(|(_, request)| request.request_id.clone())
        .collect();
    let n_requests = ids.len();
    ids.sort();
    ids.dedup();
    assert_eq!(ids.len(), n_requests, "the worker may still hold the last one");
}

#[tokio::test]
async fn a_stop_before_any_worker_began_ends_at_once() {
    let worker = FakeWorker::start("a", vec![Step::Gate]);
    let gateway = gateway(&[&worker], |_| ()).await;
    gateway.serving().await;
    let call = gateway.begin(named("mine")).await.unwrap();
    worker.until_open(1).await;
    gateway.cancel("mine", v1::CancelStrength::Stop).await.unwrap();
    let finished = call.rest().await.2.unwrap().finished;
    assert_eq!(
        (finished.reason(), finished.frames),
        (v1::FinishReason::Stopped, 0)
    );
    worker.until_open(0).await;
}

#[tokio::test]
async fn a_kill_ends_the_stream_now() {
    let worker = FakeWorker::start("a", hangs());
    let gateway = gateway(&[&worker], |_| ()).await;
    gateway.serving().await;
    let mut call = gateway.begin(named("mine")).await.unwrap();
    call.accepted().await;
    gateway.cancel("mine", v1::CancelStrength::Kill).await.unwrap();
    let status = call.rest().await.2.unwrap_err();
    assert_eq!(status.code(), Code::Cancelled);
    worker.until_open(0).await;
    let status = gateway
        .cancel("mine", v1::CancelStrength::Kill)
        .await
        .unwrap_err();
    assert_eq!(ours(status).code, ErrorCode::RequestNotFound);
}

/// All requests of a worker share one connection.
#[tokio::test]
async fn callers_who_do_not_read_leave_the_others_their_audio() {
    let mut script = vec![Step::Started];
    script.extend((0..8).map(|_| Step::Audio(100, 0.5)));
    script.push(Step::Finish(v1::FinishReason::Stop));
    let worker = FakeWorker::start("a", script);
    let gateway = gateway(&[&worker], |_| ()).await;
    gateway.serving().await;
    let mut stalled = Vec::new();
    for _ in 0..7 {
        let mut call = gateway.begin_narrow(request()).await.unwrap();
        call.accepted().await;
        call.chunk().await;
        stalled.push(call);
    }
    let (_, _, end) = soon(gateway.begin(request()).await.unwrap().rest()).await;
    assert_eq!(end.unwrap().finished.frames, 800);
}

#[tokio::test]
async fn a_request_over_the_size_bound_is_told_so() {
    let worker = FakeWorker::start("a", vec![]);
    let gateway = gateway(&[&worker], |config| config.max_request_bytes = 1000).await;
    gateway.serving().await;
    let large = v1::SynthesizeRequest {
        text: "a".repeat(2000),
        ..request()
    };
    let failure = gateway.fails(large).await;
    assert_eq!(failure.code, ErrorCode::RequestTooLarge);
    assert_eq!(failure.code.grpc(), tonic::Code::ResourceExhausted);
}
