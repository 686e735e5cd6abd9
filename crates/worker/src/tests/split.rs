//! A Talker worker and a Codec worker.

use laneway_engine::node::FinishReason;
use laneway_engine::{Failure as EngineFailure, FailureKind, OutputEvent};
use laneway_plan::worker_plan::Direction;
use laneway_proto::samples_from_bytes;
use laneway_proto::v1::decode_request::Message;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use super::fake::{SAMPLES_PER_FRAME, plan};
use super::*;

async fn codec(manager: &FakeManager) -> Harness {
    Harness::start(manager, plan(1, Some((Direction::From, 0))), FakeBackend::new())
        .await
        .serving()
        .await
}

async fn talker(manager: &FakeManager) -> Harness {
    Harness::start(manager, plan(0, Some((Direction::To, 1))), FakeBackend::new()).await
}

/// An open decode call: where its messages go, and what it answers.
async fn decode(
    harness: &Harness,
) -> (
    mpsc::Sender<v1::DecodeRequest>,
    tonic::Streaming<v1::DecodeResponse>,
) {
    let (sender, receiver) = mpsc::channel(64);
    let header = v1::DecodeHeader {
        request_id: "a".into(),
        max_frames: 50,
        ..Default::default()
    };
    sender.send(message(Message::Header(header))).await.unwrap();
    let answer = harness
        .worker
        .clone()
        .decode(ReceiverStream::new(receiver))
        .await
        .unwrap();
    (sender, answer.into_inner())
}

fn message(message: Message) -> v1::DecodeRequest {
    v1::DecodeRequest {
        message: Some(message),
    }
}

fn frames(first_index: u32, codes: &[u32]) -> v1::DecodeRequest {
    message(Message::Frames(v1::Frames {
        first_index,
        words_per_frame: 2,
        codes: codes.to_vec(),
    }))
}

/// Frames come faster than they are decoded: nothing is lost, and the audio is whole.
#[tokio::test]
async fn frames_wait_for_room_and_come_back_as_audio() {
    let manager = FakeManager::start().await;
    let codec = codec(&manager).await;
    codec.backend.hold(true);
    let (sender, mut answer) = decode(&codec).await;
    for index in 0..10 {
        sender.send(frames(index, &[index, 99])).await.unwrap();
    }
    sender
        .send(message(Message::End(v1::DecodeEnd {})))
        .await
        .unwrap();
    codec.backend.until_live(1).await;
    codec.backend.hold(false);
    let mut heard = Vec::new();
    loop {
        let response = tokio::time::timeout(PATIENCE, answer.message())
            .await
            .unwrap()
            .unwrap()
            .unwrap();
        match response.message.unwrap() {
            v1::decode_response::Message::Started(started) => assert_eq!(started.max_frames, 50),
            v1::decode_response::Message::Audio(audio) => {
                assert_eq!(audio.sample_offset, heard.len() as u64);
                heard.extend(samples_from_bytes(&audio.samples).unwrap());
            }
            v1::decode_response::Message::Finished(finished) => {
                assert_eq!((finished.frames, finished.samples), (10, heard.len() as u64));
                break;
            }
        }
    }
    let wanted: Vec<f32> = (0..10)
        .flat_map(|code| [code as f32 / 100.0; SAMPLES_PER_FRAME])
        .collect();
    assert_eq!(heard, wanted);
    codec.backend.until_live(0).await;
}

#[tokio::test]
async fn frames_that_would_read_past_a_table_or_are_out_of_order_end_the_call() {
    let manager = FakeManager::start().await;
    let codec = codec(&manager).await;
    for (bad, why) in [
        (frames(0, &[1, 100]), "outside the codebook"),
        (frames(0, &[1, u32::MAX]), "outside the codebook"),
        (frames(3, &[1, 1]), "frame 0 was next"),
        (frames(0, &[1, 1, 1]), "whole number of frames"),
        (frames(0, &[1; 102]), "more frames"),
        (
            message(Message::Header(v1::DecodeHeader::default())),
            "second header",
        ),
    ] {
        let (sender, mut answer) = decode(&codec).await;
        sender.send(bad).await.unwrap();
        let failure = failure_of(&mut answer).await;
        assert_eq!(failure.code, ErrorCode::InvalidArgument);
        assert!(failure.message.contains(why), "{failure}");
        codec.backend.until_live(0).await;
    }
}

#[tokio::test]
async fn a_decode_caller_that_goes_away_kills_its_request() {
    let manager = FakeManager::start().await;
    let codec = codec(&manager).await;
    let (sender, answer) = decode(&codec).await;
    codec.backend.until_live(1).await;
    drop((sender, answer));
    codec.backend.until_live(0).await;
    // The same when only its half of the call ends, without an end.
    let (sender, _answer) = decode(&codec).await;
    codec.backend.until_live(1).await;
    drop(sender);
    codec.backend.until_live(0).await;
}

#[tokio::test]
async fn each_worker_refuses_the_others_calls() {
    let manager = FakeManager::start().await;
    let codec = codec(&manager).await;
    let talker = talker(&manager).await.serving().await;
    assert_eq!(code(codec.synthesize("a").await), ErrorCode::InvalidArgument);
    let header = v1::DecodeHeader {
        request_id: "a".into(),
        max_frames: 5,
        ..Default::default()
    };
    let call = tokio_stream::once(message(Message::Header(header)));
    assert_eq!(
        code(talker.worker.clone().decode(call).await),
        ErrorCode::InvalidArgument
    );
}

#[tokio::test]
async fn frames_go_over_and_audio_comes_back_to_the_caller() {
    relays(FakeManager::start().await).await;
}

#[tokio::test]
async fn workers_of_one_host_meet_at_their_sockets() {
    relays(FakeManager::of_one_host().await).await;
}

async fn relays(manager: FakeManager) {
    let mut talker = talker(&manager).await;
    talker.until(ServingStatus::NotServing).await;
    manager.until(&[(0, v1::WorkerState::Loading)]).await;
    let codec = codec(&manager).await;
    talker.until(ServingStatus::Serving).await;

    let mut stream = talker.synthesize("a").await.unwrap();
    assert_eq!(
        next(&mut stream).await,
        Event::Started(v1::WorkerStarted {
            max_frames: 50,
            prompt_positions: 12,
        })
    );
    codec.backend.until_live(1).await;
    talker.backend.items("a", 0, &[[10, 0]]);
    talker.backend.items("a", 1, &[[20, 0], [30, 0]]);
    let mut heard = Vec::new();
    while heard.len() < 3 * SAMPLES_PER_FRAME {
        let Event::Audio(audio) = next(&mut stream).await else {
            panic!("no audio")
        };
        heard.extend(samples_from_bytes(&audio.samples).unwrap());
    }
    let wanted: Vec<f32> = [0.1, 0.2, 0.3]
        .iter()
        .flat_map(|level| [*level; SAMPLES_PER_FRAME])
        .collect();
    assert_eq!(heard, wanted);
    talker.backend.finish("a", FinishReason::Length, 3);
    let Event::Finished(finished) = next(&mut stream).await else {
        panic!("no end")
    };
    assert_eq!(
        (finished.reason(), finished.frames),
        (v1::FinishReason::Length, 3),
        "the Talker says why it ended"
    );
    assert_eq!(finished.samples, heard.len() as u64);
    talker.backend.until_live(0).await;
    codec.backend.until_live(0).await;
    talker.end().await;
    codec.end().await;
}

#[tokio::test]
async fn a_request_is_started_when_the_talker_starts_it() {
    let manager = FakeManager::start().await;
    let codec = codec(&manager).await;
    let talker = talker(&manager).await.serving().await;
    talker.backend.full(true);
    let mut stream = talker.synthesize("a").await.unwrap();
    // The codec worker has a place for it, and has started already.
    codec.backend.until_live(1).await;
    let waits = tokio::time::timeout(Duration::from_millis(100), stream.message()).await;
    assert!(waits.is_err(), "its turn has not come: {waits:?}");
    talker.backend.started("a");
    assert!(matches!(next(&mut stream).await, Event::Started(_)));
}

#[tokio::test]
async fn a_caller_that_goes_away_ends_the_request_in_both_workers() {
    let manager = FakeManager::start().await;
    let codec = codec(&manager).await;
    let talker = talker(&manager).await.serving().await;
    let stream = talker.synthesize("a").await.unwrap();
    codec.backend.until_live(1).await;
    drop(stream);
    talker.backend.until_live(0).await;
    codec.backend.until_live(0).await;
}

#[tokio::test]
async fn a_codec_worker_that_goes_away_ends_its_streams_unavailable() {
    let manager = FakeManager::start().await;
    let codec = codec(&manager).await;
    let mut talker = talker(&manager).await.serving().await;
    let mut stream = talker.synthesize("a").await.unwrap();
    codec.backend.until_live(1).await;
    // What a killed process does to its connections is tested with real processes; here its engine ends.
    let ended = EngineFailure::new(FailureKind::Unavailable, "the engine ended");
    codec.backend.send("a", OutputEvent::Failed(ended));
    let failure = failure_of(&mut stream).await;
    assert_eq!(
        (failure.code, failure.code.grpc()),
        (ErrorCode::WorkerLost, tonic::Code::Unavailable)
    );
    talker.backend.until_live(0).await;
    codec.backend.until_live(0).await;
    codec.end().await;
    talker.until(ServingStatus::NotServing).await;
    assert_eq!(code(talker.synthesize("b").await), ErrorCode::NoWorker);
}

/// The topology lists it until its lease ends; the connection breaks at once.
#[tokio::test]
async fn a_talker_stops_serving_when_the_connection_to_its_codec_breaks() {
    let manager = FakeManager::start().await;
    let codec = codec(&manager).await;
    let mut talker = talker(&manager).await.serving().await;
    codec.run.abort();
    talker.until(ServingStatus::NotServing).await;
}

/// A request without room in the engine gets more small messages than a connection holds unread: HTTP/2 ends one that has
/// too many.
#[tokio::test]
async fn frames_of_a_parked_request_do_not_end_the_connection() {
    const N_FRAMES: u32 = 10_000;
    let manager = FakeManager::start().await;
    let codec = codec(&manager).await;
    codec.backend.allow_frames(N_FRAMES);
    codec.backend.hold(true);
    let (sender, receiver) = mpsc::channel(64);
    let header = v1::DecodeHeader {
        request_id: "a".into(),
        max_frames: N_FRAMES,
        ..Default::default()
    };
    sender.send(message(Message::Header(header))).await.unwrap();
    let call = codec.worker.clone().decode(ReceiverStream::new(receiver)).await;
    let mut answer = call.unwrap().into_inner();
    let sent = async {
        for index in 0..N_FRAMES {
            sender.send(frames(index, &[1, 1])).await.unwrap();
            // One by one, as a Talker makes them: what waits together travels together.
            while sender.capacity() < sender.max_capacity() {
                tokio::task::yield_now().await;
            }
        }
        sender
            .send(message(Message::End(v1::DecodeEnd {})))
            .await
            .unwrap();
    };
    tokio::time::timeout(PATIENCE, sent).await.unwrap();
    codec.backend.hold(false);
    let finished = async {
        loop {
            let response = answer.message().await.unwrap().unwrap();
            if let Some(v1::decode_response::Message::Finished(finished)) = response.message {
                return finished.frames;
            }
        }
    };
    assert_eq!(tokio::time::timeout(PATIENCE, finished).await.unwrap(), N_FRAMES);
}
