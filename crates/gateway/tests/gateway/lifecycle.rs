//! Starting, telling the truth about health, going away.

use std::time::Duration;

use laneway_gateway::ServeError;
use laneway_proto::{ErrorCode, v1};
use tonic::Code;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_reflection::pb::{v1 as reflection_v1, v1alpha as reflection_v1alpha};

use crate::fake::{FakeManager, FakeWorker, MUCH_CHUNKS, Step, speaks, speaks_much};
use crate::harness::{gateway, gateway_of, ours, request, soon};

fn with_state(worker: &FakeWorker, state: v1::WorkerState) -> Vec<v1::WorkerInfo> {
    vec![v1::WorkerInfo {
        state: state.into(),
        ..worker.info()
    }]
}

#[tokio::test]
async fn health_is_serving_exactly_while_a_worker_serves() {
    let worker = FakeWorker::start("a", speaks());
    let manager = FakeManager::start(vec![]).await;
    let gateway = gateway_of(&manager, |_| ()).await;
    let mut health = gateway.health().await;
    health.until(ServingStatus::NotServing).await;
    assert_eq!(gateway.fails(request()).await.code, ErrorCode::NoWorker);
    manager.publish(with_state(&worker, v1::WorkerState::Loading));
    manager.publish(with_state(&worker, v1::WorkerState::Serving));
    health.until(ServingStatus::Serving).await;
    gateway.speak(request()).await.unwrap();
    for state in [
        v1::WorkerState::Draining,
        v1::WorkerState::Failed,
        v1::WorkerState::Loading,
    ] {
        manager.publish(with_state(&worker, state));
        health.until(ServingStatus::NotServing).await;
        manager.publish(with_state(&worker, v1::WorkerState::Serving));
        health.until(ServingStatus::Serving).await;
    }
    manager.publish(vec![]);
    health.until(ServingStatus::NotServing).await;
}

#[tokio::test]
async fn a_codec_worker_alone_serves_nobody() {
    let worker = FakeWorker::start("a", speaks());
    worker.set_status(|status| status.takes_requests = false);
    let gateway = gateway(&[&worker], |_| ()).await;
    gateway.not_serving().await;
    worker.set_status(|status| status.takes_requests = true);
    gateway.serving().await;
}

#[tokio::test]
async fn workers_outlive_the_engine_manager() {
    let worker = FakeWorker::start("a", speaks());
    let manager = FakeManager::start(vec![worker.info()]).await;
    let gateway = gateway_of(&manager, |_| ()).await;
    gateway.serving().await;
    drop(manager);
    gateway.speak(request()).await.unwrap();
    gateway.serving().await;
}

#[tokio::test]
async fn a_drain_refuses_new_calls_and_lets_running_streams_finish() {
    let script = vec![
        Step::Started,
        Step::Audio(1, 0.5),
        Step::Gate,
        Step::Finish(v1::FinishReason::Stop),
    ];
    let worker = FakeWorker::start("a", script);
    let mut gateway = gateway(&[&worker], |_| ()).await;
    let mut health = gateway.health().await;
    health.until(ServingStatus::Serving).await;
    let mut running = gateway.begin(request()).await.unwrap();
    running.accepted().await;
    running.chunk().await;
    gateway.shutdown.drain.cancel();
    health.until(ServingStatus::NotServing).await;
    let status = gateway.begin(request()).await.map(|_| ()).unwrap_err();
    assert_eq!(status.code(), Code::Unavailable);
    assert_eq!(ours(status).code, ErrorCode::Draining);
    assert!(!gateway.served.is_finished());
    worker.open_gate();
    assert_eq!(running.rest().await.2.unwrap().finished.frames, 1);
    soon(&mut gateway.served).await.unwrap().unwrap();
}

#[tokio::test]
async fn a_drain_waits_for_the_caller_who_has_yet_to_read_a_finished_stream() {
    let worker = FakeWorker::start("a", speaks_much());
    let mut gateway = gateway(&[&worker], |_| ()).await;
    gateway.serving().await;
    let call = gateway.begin_narrow(request()).await.unwrap();
    worker.until_ended(1).await;
    let _watch = gateway.health().await;
    gateway.shutdown.drain.cancel();
    gateway.not_serving().await;
    let ended = tokio::time::timeout(Duration::from_secs(1), &mut gateway.served).await;
    assert!(ended.is_err(), "nobody has read the stream: {ended:?}");
    assert_eq!(call.rest().await.2.unwrap().chunks.len(), MUCH_CHUNKS);
    soon(&mut gateway.served).await.unwrap().unwrap();
}

#[tokio::test]
async fn a_caller_who_never_reads_holds_a_drain_up_to_its_bound_and_no_longer() {
    let worker = FakeWorker::start("a", speaks_much());
    let mut gateway = gateway(&[&worker], |config| {
        config.drain_bound = Duration::from_millis(300)
    })
    .await;
    gateway.serving().await;
    let call = gateway.begin_narrow(request()).await.unwrap();
    worker.until_ended(1).await;
    gateway.shutdown.drain.cancel();
    soon(&mut gateway.served).await.unwrap().unwrap();
    drop(call);
}

#[tokio::test]
async fn a_stream_that_does_not_finish_is_ended_at_the_drain_bound() {
    let worker = FakeWorker::start("a", vec![Step::Started, Step::Hang]);
    let mut gateway = gateway(&[&worker], |config| {
        config.drain_bound = Duration::from_millis(100)
    })
    .await;
    gateway.serving().await;
    let mut running = gateway.begin(request()).await.unwrap();
    running.accepted().await;
    gateway.shutdown.drain.cancel();
    let failure = running.failure().await;
    assert_eq!(
        (failure.code, failure.code.grpc()),
        (ErrorCode::Draining, Code::Unavailable)
    );
    soon(&mut gateway.served).await.unwrap().unwrap();
    worker.until_open(0).await;
}

#[tokio::test]
async fn a_second_shutdown_exits_now() {
    let worker = FakeWorker::start("a", vec![Step::Started, Step::Hang]);
    let mut gateway = gateway(&[&worker], |_| ()).await;
    gateway.serving().await;
    let mut running = gateway.begin(request()).await.unwrap();
    running.accepted().await;
    gateway.shutdown.drain.cancel();
    gateway.shutdown.now.cancel();
    assert!(matches!(
        soon(&mut gateway.served).await.unwrap(),
        Err(ServeError::Aborted)
    ));
}

#[tokio::test]
async fn the_address_is_known_before_anything_is_served_and_a_taken_one_is_named() {
    let worker = FakeWorker::start("a", speaks());
    let first = gateway(&[&worker], |_| ()).await;
    assert_ne!(first.address.port(), 0);
    let discovery = laneway_gateway::DiscoveryConfig::Static(vec![]);
    let error = laneway_gateway::Config::new(first.address, discovery)
        .build()
        .await
        .unwrap_err();
    assert!(error.to_string().contains(&first.address.to_string()), "{error}");
}

#[tokio::test]
async fn reflection_lists_the_services_in_both_versions_and_can_be_switched_off() {
    let worker = FakeWorker::start("a", speaks());
    let gateway_on = gateway(&[&worker], |_| ()).await;
    let wanted = [
        "laneway.v1.Speech",
        "laneway.v1.Models",
        "laneway.v1.Requests",
        "nvidia.riva.tts.RivaSpeechSynthesis",
        "grpc.health.v1.Health",
    ];

    let mut client =
        reflection_v1::server_reflection_client::ServerReflectionClient::new(gateway_on.channel.clone());
    let ask = reflection_v1::ServerReflectionRequest {
        host: String::new(),
        message_request: Some(
            reflection_v1::server_reflection_request::MessageRequest::ListServices(String::new()),
        ),
    };
    let answer = soon(client.server_reflection_info(tokio_stream::once(ask.clone())))
        .await
        .unwrap();
    let answer = soon(answer.into_inner().message())
        .await
        .unwrap()
        .unwrap()
        .message_response
        .unwrap();
    let reflection_v1::server_reflection_response::MessageResponse::ListServicesResponse(list) = answer
    else {
        panic!("{answer:?}");
    };
    for name in wanted {
        assert!(
            list.service.iter().any(|service| service.name == name),
            "{name} is missing from {list:?}"
        );
    }
    assert_eq!(list.service.len(), wanted.len(), "{list:?}");

    let mut client =
        reflection_v1alpha::server_reflection_client::ServerReflectionClient::new(gateway_on.channel.clone());
    let ask_alpha = reflection_v1alpha::ServerReflectionRequest {
        host: String::new(),
        message_request: Some(
            reflection_v1alpha::server_reflection_request::MessageRequest::FileContainingSymbol(
                "laneway.v1.Speech".into(),
            ),
        ),
    };
    let answer = soon(client.server_reflection_info(tokio_stream::once(ask_alpha)))
        .await
        .unwrap();
    let answer = soon(answer.into_inner().message())
        .await
        .unwrap()
        .unwrap()
        .message_response
        .unwrap();
    assert!(matches!(
        answer,
        reflection_v1alpha::server_reflection_response::MessageResponse::FileDescriptorResponse(_)
    ));

    let gateway_off = gateway(&[&worker], |config| config.reflection = false).await;
    let mut client =
        reflection_v1::server_reflection_client::ServerReflectionClient::new(gateway_off.channel.clone());
    let status = soon(client.server_reflection_info(tokio_stream::once(ask)))
        .await
        .unwrap_err();
    assert_eq!(status.code(), Code::Unimplemented);
}

#[tokio::test]
async fn every_metric_of_the_gateway_moves() {
    let recorder = laneway_telemetry::install_recorder().unwrap();
    let worker = FakeWorker::start("a", speaks());
    let gateway = gateway(&[&worker], |_| ()).await;
    gateway.serving().await;
    gateway.speak(request()).await.unwrap();
    let _ = gateway
        .fails(v1::SynthesizeRequest {
            text: String::new(),
            ..request()
        })
        .await;
    worker.plays(vec![Step::Started, Step::Hang]);
    let mut call = gateway.begin(request()).await.unwrap();
    let id = call.accepted().await.request_id;
    gateway.cancel(&id, v1::CancelStrength::Kill).await.unwrap();
    call.failure().await;
    worker.plays(vec![Step::Refuse(laneway_proto::Failure::new(
        ErrorCode::Draining,
        "going",
    ))]);
    let second = FakeWorker::start("b", speaks());
    let manager = FakeManager::start(vec![worker.info(), second.info()]).await;
    let two = gateway_of(&manager, |_| ()).await;
    two.serving().await;
    for _ in 0..2 {
        two.speak(request()).await.unwrap();
    }
    worker.plays(vec![Step::Fail(laneway_proto::Failure::internal())]);
    for _ in 0..5 {
        gateway.fails(request()).await;
    }
    let place = tempfile::tempdir().unwrap();
    let voices = crate::voices::opened(place.path()).await;
    let keeping = crate::harness::gateway(&[&second], |config| config.voices = Some(voices)).await;
    keeping.serving().await;
    let text = recorder.render();
    for metric in laneway_telemetry::metric::METRICS
        .iter()
        .filter(|each| each.name.contains("_gateway_"))
    {
        let moved = text.lines().any(|line| line.starts_with(metric.name));
        assert!(moved, "{} is missing from\n{text}", metric.name);
    }
}
