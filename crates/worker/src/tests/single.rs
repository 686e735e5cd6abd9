//! One worker with everything in it.

use std::sync::mpsc;
use std::time::{Duration, Instant};

use laneway_engine::node::FinishReason;
use laneway_engine::{Failure as EngineFailure, FailureKind, Health, OutputEvent};
use laneway_proto::samples_from_bytes;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use super::fake::plan;
use super::*;
use crate::RegisterError;
use crate::backend::Strength;

async fn serving() -> (FakeManager, Harness) {
    let manager = FakeManager::start().await;
    let harness = Harness::start(&manager, plan(0, None), FakeBackend::new())
        .await
        .serving()
        .await;
    (manager, harness)
}

#[tokio::test]
async fn nothing_is_served_before_the_model_is_loaded() {
    let manager = FakeManager::start().await;
    let (release, wait) = mpsc::channel::<()>();
    let backend = FakeBackend::new();
    let loaded = backend.clone();
    let load: Load = Box::new(move |_| {
        wait.recv()?;
        Ok(loaded)
    });
    let mut harness = Harness::start_with(&manager, plan(0, None), backend, load).await;
    harness.until(ServingStatus::NotServing).await;
    manager.until(&[(0, v1::WorkerState::Loading)]).await;
    assert_eq!(code(harness.synthesize("early").await), ErrorCode::NoWorker);
    let status = harness
        .worker
        .status(v1::WorkerStatusRequest {})
        .await
        .unwrap()
        .into_inner();
    assert_eq!((status.state(), status.facts), (v1::WorkerState::Loading, None));

    release.send(()).unwrap();
    harness.until(ServingStatus::Serving).await;
    manager.until(&[(0, v1::WorkerState::Serving)]).await;
    let status = harness
        .worker
        .status(v1::WorkerStatusRequest {})
        .await
        .unwrap()
        .into_inner();
    assert_eq!(status.facts.unwrap().model, "fake");
    assert!(status.takes_requests);
    harness.end().await;
    manager.until(&[]).await;
}

#[tokio::test]
async fn a_model_that_does_not_load_ends_the_worker() {
    let manager = FakeManager::start().await;
    let load: Load = Box::new(|_| anyhow::bail!("tensor `talker.norm` is missing"));
    let harness = Harness::start_with(&manager, plan(0, None), FakeBackend::new(), load).await;
    let error = harness.run.await.unwrap().unwrap_err();
    assert!(format!("{error:#}").contains("talker.norm"), "{error:#}");
    manager.until(&[]).await;
}

#[tokio::test]
async fn a_refused_registration_carries_every_reason() {
    let manager = FakeManager::start().await;
    let refusal = Failure::of_field(ErrorCode::UnknownRank, "node_groups[0].lane", "no such lane");
    manager.refuse(refusal.clone());
    let harness = Harness::start(&manager, plan(0, None), FakeBackend::new()).await;
    let error = harness.run.await.unwrap().unwrap_err();
    match error.downcast::<RegisterError>().unwrap() {
        RegisterError::Refused { violations, .. } => assert_eq!(violations, refusal.violations),
        other => panic!("{other}"),
    }
}

#[tokio::test]
async fn a_stream_is_started_then_audio_in_order_then_finished() {
    let (_manager, harness) = serving().await;
    let mut stream = harness.synthesize("a").await.unwrap();
    assert_eq!(
        next(&mut stream).await,
        Event::Started(v1::WorkerStarted {
            max_frames: 50,
            prompt_positions: 12,
        })
    );
    harness.backend.samples("a", &[0.0, 0.001]);
    harness.backend.samples("a", &[0.5, -0.5, 0.25]);
    let mut heard = Vec::new();
    for offset in [0, 2] {
        let Event::Audio(audio) = next(&mut stream).await else {
            panic!("no audio")
        };
        assert_eq!(audio.sample_offset, offset);
        heard.extend(samples_from_bytes(&audio.samples).unwrap());
    }
    assert_eq!(heard, [0.0, 0.001, 0.5, -0.5, 0.25]);
    harness.backend.finish("a", FinishReason::Length, 2);
    let Event::Finished(finished) = next(&mut stream).await else {
        panic!("no end")
    };
    assert_eq!(
        (finished.reason(), finished.frames, finished.samples),
        (v1::FinishReason::Length, 2, 5)
    );
    assert!(finished.timings.unwrap().first_audible_us.is_some());
    assert!(stream.message().await.unwrap().is_none());
    harness.end().await;
}

#[tokio::test]
async fn a_waiting_request_is_answered_and_is_started_when_its_turn_comes() {
    let (_manager, harness) = serving().await;
    harness.backend.full(true);
    let mut stream = harness.synthesize("a").await.unwrap();
    let waits = tokio::time::timeout(Duration::from_millis(100), stream.message()).await;
    assert!(waits.is_err(), "its turn has not come: {waits:?}");
    harness.backend.started("a");
    assert!(matches!(next(&mut stream).await, Event::Started(_)));
}

#[tokio::test]
async fn a_caller_that_goes_away_kills_its_request_and_frees_its_place() {
    let (_manager, harness) = serving().await;
    let first = harness.synthesize("a").await.unwrap();
    let _second = harness.synthesize("b").await.unwrap();
    let refused = failure(harness.synthesize("c").await.unwrap_err());
    assert_eq!(refused.code, ErrorCode::Overloaded);
    assert!(refused.retry_after.is_some());
    drop(first);
    harness.backend.until_live(1).await;
    let _third = harness.synthesize("c").await.unwrap();
}

#[tokio::test]
async fn a_second_request_of_the_same_id_is_refused_and_the_first_runs_on() {
    let (_manager, harness) = serving().await;
    let mut first = harness.synthesize("a").await.unwrap();
    assert_eq!(code(harness.synthesize("a").await), ErrorCode::DuplicateRequest);
    harness.backend.finish("a", FinishReason::Stop, 0);
    next(&mut first).await;
    assert!(matches!(next(&mut first).await, Event::Finished(_)));
}

#[tokio::test]
async fn the_callers_deadline_goes_down_to_the_engine() {
    let (_manager, harness) = serving().await;
    let mut timed = tonic::Request::new(request("a"));
    timed.set_timeout(Duration::from_secs(60));
    let _stream = harness.worker.clone().synthesize(timed).await.unwrap();
    let left = harness.backend.deadline("a").unwrap() - Instant::now();
    assert!(
        left <= Duration::from_secs(60) && left > Duration::from_secs(30),
        "{left:?}"
    );
}

#[tokio::test]
async fn what_ends_a_request_in_the_engine_is_what_its_caller_sees() {
    let (_manager, harness) = serving().await;
    for (kind, wanted) in [
        (FailureKind::InvalidArgument, ErrorCode::InvalidArgument),
        (FailureKind::Cancelled, ErrorCode::Cancelled),
        (FailureKind::DeadlineExceeded, ErrorCode::DeadlineExceeded),
        (FailureKind::Unavailable, ErrorCode::WorkerLost),
        (FailureKind::Internal, ErrorCode::Internal),
    ] {
        let mut stream = harness.synthesize("a").await.unwrap();
        let secret = EngineFailure::new(kind, "step 7 on buffer kv_pages");
        harness.backend.send("a", OutputEvent::Failed(secret));
        let failure = failure_of(&mut stream).await;
        assert_eq!(failure.code, wanted);
        if kind != FailureKind::InvalidArgument {
            assert!(
                !failure.message.contains("kv_pages"),
                "diagnostics stay inside: {failure}"
            );
        }
        harness.backend.until_live(0).await;
    }
}

#[tokio::test]
async fn every_field_is_used_or_refused_by_name() {
    let (_manager, harness) = serving().await;
    type Edit = fn(&mut v1::WorkerSynthesizeRequest);
    let refused: [(&str, Edit); 12] = [
        ("request_id", |r| r.request_id = "no spaces".into()),
        ("return_frames", |r| r.return_frames = true),
        ("sampling.temperature", |r| {
            r.sampling = Some(sampling(Some(f32::NAN), None))
        }),
        ("sampling.temperature", |r| {
            r.sampling = Some(sampling(Some(-1.0), None))
        }),
        ("sampling.temperature", |r| {
            r.sampling = Some(sampling(Some(1e-40), None))
        }),
        ("sampling.predictor_temperature", |r| {
            r.sampling = Some(v1::SamplingParams {
                predictor_temperature: Some(1e-40),
                ..Default::default()
            })
        }),
        ("sampling.top_p", |r| r.sampling = Some(sampling(None, Some(1.5)))),
        ("sampling.exact_frames", |r| {
            r.sampling = Some(v1::SamplingParams {
                exact_frames: Some(0),
                ..Default::default()
            })
        }),
        ("chunk", |r| {
            r.chunk = Some(v1::ChunkPolicy {
                first: 0,
                ramp: vec![],
                steady: 4,
            })
        }),
        ("reference.sample_rate", |r| {
            r.reference = Some(v1::ReferenceClip::default())
        }),
        ("reference.audio", |r| r.reference = Some(clip(f32::NAN))),
        ("reference.audio", |r| r.reference = Some(clip(1e30))),
    ];
    for (field, edit) in refused {
        let mut request = request("a");
        edit(&mut request);
        let failure = failure(harness.worker.clone().synthesize(request).await.unwrap_err());
        assert_eq!(failure.violations[0].field, field, "{failure}");
    }

    let full = v1::WorkerSynthesizeRequest {
        voice: "nano".into(),
        language: "english".into(),
        instruct: "slowly".into(),
        seed: 7,
        sampling: Some(v1::SamplingParams {
            exact_frames: Some(5),
            ..sampling(Some(0.3), Some(0.5))
        }),
        chunk: Some(v1::ChunkPolicy {
            first: 1,
            ramp: vec![2],
            steady: 4,
        }),
        max_frames: Some(9),
        layout: v1::TextLayout::Streamed.into(),
        ..request("a")
    };
    let _stream = harness.worker.clone().synthesize(full).await.unwrap();
    let got = harness.backend.utterance("a");
    assert_eq!(
        (got.voice.as_str(), got.language.as_str(), got.instruct.as_str()),
        ("nano", "english", "slowly")
    );
    assert_eq!((got.seed, got.max_frames), (7, Some(9)));
    assert_eq!(
        (got.sampling.temperature, got.sampling.top_p),
        (Some(0.3), Some(0.5))
    );
    assert_eq!(got.sampling.exact_frames, Some(5));
    assert_eq!(got.chunk.unwrap().ramp, [2]);
    assert_eq!(got.layout, Some(crate::backend::TextLayout::Streamed));
}

fn clip(sample: f32) -> v1::ReferenceClip {
    v1::ReferenceClip {
        audio: laneway_proto::samples_to_bytes(&[0.0, sample]),
        sample_rate: 24_000,
        text: String::new(),
    }
}

fn sampling(temperature: Option<f32>, top_p: Option<f32>) -> v1::SamplingParams {
    v1::SamplingParams {
        temperature,
        top_p,
        ..Default::default()
    }
}

#[tokio::test]
async fn cancel_finds_the_request_and_its_strength() {
    let (_manager, harness) = serving().await;
    let _stream = harness.synthesize("a").await.unwrap();
    let cancel = |id: &str, strength: v1::CancelStrength| {
        let request = v1::WorkerCancelRequest {
            request_id: id.into(),
            strength: strength.into(),
        };
        let mut worker = harness.worker.clone();
        async move { worker.cancel(request).await }
    };
    cancel("a", v1::CancelStrength::Unspecified).await.unwrap();
    assert_eq!(harness.backend.strength("a"), Some(Strength::Stop));
    cancel("a", v1::CancelStrength::Kill).await.unwrap();
    assert_eq!(harness.backend.strength("a"), Some(Strength::Kill));
    assert_eq!(
        code(cancel("b", v1::CancelStrength::Kill).await),
        ErrorCode::RequestNotFound
    );
}

#[tokio::test]
async fn a_drain_refuses_the_new_and_finishes_the_old() {
    let (manager, mut harness) = serving().await;
    let mut stream = harness.synthesize("a").await.unwrap();
    harness.shutdown.cancel();
    harness.until(ServingStatus::NotServing).await;
    manager.until(&[(0, v1::WorkerState::Draining)]).await;
    assert_eq!(code(harness.synthesize("b").await), ErrorCode::Draining);
    assert!(!harness.run.is_finished());
    harness.backend.samples("a", &[0.5]);
    harness.backend.finish("a", FinishReason::Stop, 1);
    next(&mut stream).await;
    assert!(matches!(next(&mut stream).await, Event::Audio(_)));
    assert!(matches!(next(&mut stream).await, Event::Finished(_)));
    harness.end().await;
    manager.until(&[]).await;
}

#[tokio::test]
async fn a_drain_waits_for_the_caller_who_has_yet_to_read_a_finished_stream() {
    const NARROW_BYTES: u32 = 65_535;
    let (_manager, mut harness) = serving().await;
    let channel = tonic::transport::Endpoint::from_shared(format!("http://{}", harness.address))
        .unwrap()
        .initial_stream_window_size(NARROW_BYTES)
        .initial_connection_window_size(NARROW_BYTES)
        .connect_lazy();
    let mut stream = WorkerClient::new(channel)
        .synthesize(request("a"))
        .await
        .unwrap()
        .into_inner();
    // The transport takes all of it, and the caller has room for half.
    harness.backend.samples("a", &[0.5; NARROW_BYTES as usize / 2]);
    harness.backend.finish("a", FinishReason::Stop, 1);
    harness.shutdown.cancel();
    let ended = tokio::time::timeout(Duration::from_secs(1), &mut harness.run).await;
    assert!(ended.is_err(), "nobody has read the stream: {ended:?}");
    next(&mut stream).await;
    assert!(matches!(next(&mut stream).await, Event::Audio(_)));
    assert!(matches!(next(&mut stream).await, Event::Finished(_)));
    assert!(stream.message().await.unwrap().is_none());
    harness.end().await;
}

#[tokio::test]
async fn a_worker_whose_engine_fails_for_good_ends_and_says_why() {
    let (_manager, harness) = serving().await;
    harness
        .backend
        .health
        .send_replace(Health::Unhealthy("no step lands".into()));
    let error = tokio::time::timeout(PATIENCE, harness.run)
        .await
        .expect("a worker that can do nothing stays")
        .unwrap()
        .unwrap_err();
    assert!(error.to_string().contains("no step lands"), "{error}");
}

#[tokio::test]
async fn a_forgotten_worker_registers_again_and_one_with_another_plan_ends() {
    let (manager, mut harness) = serving().await;
    manager.forget();
    manager.until(&[(0, v1::WorkerState::Serving)]).await;
    harness.until(ServingStatus::Serving).await;

    let mut other = plan(0, None);
    other.max_rows = 2;
    manager.plan(other);
    manager.forget();
    let error = tokio::time::timeout(PATIENCE, harness.run)
        .await
        .unwrap()
        .unwrap()
        .unwrap_err();
    assert!(error.to_string().contains("deployment changed"), "{error}");
}

#[tokio::test]
async fn a_caller_that_answers_no_ping_is_ended() {
    let (_manager, harness) = serving().await;
    let mut silent = TcpStream::connect(harness.address).await.unwrap();
    // It says that it speaks HTTP/2, and its settings.
    silent
        .write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0")
        .await
        .unwrap();
    let mut said = Vec::new();
    // Reset or closed: it is over.
    let ended = tokio::time::timeout(PATIENCE, silent.read_to_end(&mut said));
    let _ = ended.await.expect("the connection stands for ever");
    assert!(!said.is_empty(), "it was served before");
    harness.end().await;
}
