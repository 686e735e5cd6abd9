use super::*;
use crate::{client, stamp};
use laneway_proto::v1::worker_client::WorkerClient;
use tokio::sync::oneshot;
use v1::worker_synthesize_response::Event;

/// A worker in this process, a caller of it, and what makes it drain.
async fn started(
    flags: &[&str],
) -> (
    WorkerClient<tonic::transport::Channel>,
    oneshot::Sender<()>,
    tokio::task::JoinHandle<anyhow::Result<()>>,
) {
    let arguments = [&["fake-worker"], flags].concat();
    let worker = FakeWorker::bind(Arguments::parse_from(arguments)).await.unwrap();
    let caller = WorkerClient::new(client::channel(worker.address()));
    let (drain, told) = oneshot::channel::<()>();
    let served = tokio::spawn(worker.serve(async move { drop(told.await) }));
    (caller, drain, served)
}

fn request(id: &str, max_frames: Option<u32>) -> v1::WorkerSynthesizeRequest {
    v1::WorkerSynthesizeRequest {
        request_id: id.into(),
        max_frames,
        ..Default::default()
    }
}

async fn events(mut stream: tonic::Streaming<v1::WorkerSynthesizeResponse>) -> Vec<Event> {
    let mut events = Vec::new();
    while let Some(message) = stream.message().await.unwrap() {
        events.extend(message.event);
    }
    events
}

const FAST: [&str; 6] = ["--chunk-ms", "0", "--first-chunk-ms", "0", "--chunk-frames", "2"];

#[tokio::test]
async fn a_stream_is_what_the_protocol_says_with_a_stamp_in_each_chunk() {
    let (mut worker, _drain, _served) = started(&FAST).await;
    let before = stamp::now_ns();
    let stream = worker
        .synthesize(request("a", Some(5)))
        .await
        .unwrap()
        .into_inner();
    let events = events(stream).await;
    assert!(matches!(events[0], Event::Started(_)), "{events:?}");
    let mut n_samples = 0;
    let (last, chunks) = events[1..].split_last().unwrap();
    assert_eq!(chunks.len(), 3, "two frames, two frames, one frame");
    for event in chunks {
        let Event::Audio(audio) = event else {
            panic!("{event:?} in place of audio")
        };
        assert_eq!(audio.sample_offset, n_samples);
        n_samples += audio.samples.len() as u64 / 4;
        let made = stamp::of_f32le(&audio.samples).unwrap();
        assert!((before..=stamp::now_ns()).contains(&made));
    }
    let Event::Finished(finished) = last else {
        panic!("{last:?} at the end")
    };
    assert_eq!(
        (finished.frames, finished.samples, n_samples),
        (5, 5 * 1920, 5 * 1920)
    );
}

#[tokio::test]
async fn places_are_bounded_and_a_stop_or_a_caller_who_leaves_frees_one() {
    let (mut worker, _drain, _served) = started(&["--capacity", "1"]).await;
    let held = worker.synthesize(request("a", Some(1000))).await.unwrap();
    let full = worker.synthesize(request("b", None)).await.unwrap_err();
    assert_eq!(client::failure(&full).code, laneway_proto::ErrorCode::Overloaded);
    let stop = v1::WorkerCancelRequest {
        request_id: "a".into(),
        strength: v1::CancelStrength::Stop.into(),
    };
    worker.cancel(stop.clone()).await.unwrap();
    let events = events(held.into_inner()).await;
    let Some(Event::Finished(finished)) = events.last() else {
        panic!("{events:?}")
    };
    assert_eq!(finished.reason(), v1::FinishReason::Stopped);
    let gone = worker.cancel(stop).await.unwrap_err();
    assert_eq!(
        client::failure(&gone).code,
        laneway_proto::ErrorCode::RequestNotFound
    );

    let left = worker.synthesize(request("c", Some(1000))).await.unwrap();
    drop(left);
    let freed = async {
        while worker
            .status(v1::WorkerStatusRequest {})
            .await
            .unwrap()
            .into_inner()
            .load
            .unwrap()
            .running
            > 0
        {}
    };
    tokio::time::timeout(crate::PATIENCE, freed).await.unwrap();
}

#[tokio::test]
async fn a_drain_refuses_new_requests_and_waits_for_those_that_run() {
    let (mut worker, drain, served) = started(&["--first-chunk-ms", "0", "--chunk-ms", "100"]).await;
    let running = worker
        .synthesize(request("a", Some(12)))
        .await
        .unwrap()
        .into_inner();
    drain.send(()).unwrap();
    let refused = async {
        loop {
            if let Err(status) = worker.synthesize(request("b", Some(1))).await {
                return status;
            }
        }
    };
    let refused = tokio::time::timeout(crate::PATIENCE, refused).await.unwrap();
    assert_eq!(client::failure(&refused).code, laneway_proto::ErrorCode::Draining);
    let events = events(running).await;
    assert!(matches!(events.last(), Some(Event::Finished(_))), "{events:?}");
    served.await.unwrap().unwrap();
}
