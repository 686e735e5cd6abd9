//! Streams of several utterances: long texts, and texts that come in pieces.

use laneway_gateway::Config;
use laneway_proto::{ErrorCode, Failure, v1};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use v1::stream_synthesize_request::Message;
use v1::stream_synthesize_response::Event;

use crate::conversation::{Conversation, sent, start};
use crate::fake::{FakeWorker, Step, speaks};
use crate::harness::{TestGateway, gateway, named, ours, soon};

async fn served(script: Vec<Step>, change: impl FnOnce(&mut Config)) -> (FakeWorker, TestGateway) {
    let worker = FakeWorker::start("a", script);
    let gateway = gateway(&[&worker], change).await;
    gateway.serving().await;
    (worker, gateway)
}

fn texts_and_seeds(worker: &FakeWorker) -> Vec<(String, u64)> {
    let requests = worker.shared.requests.lock().unwrap();
    requests
        .iter()
        .map(|(_, request)| (request.text.clone(), request.seed))
        .collect()
}

/// A begun sentence whose end waits for the gate.
fn held() -> Vec<Step> {
    vec![
        Step::Started,
        Step::Audio(1, 0.25),
        Step::Gate,
        Step::Audio(2, -0.5),
        Step::Finish(v1::FinishReason::Stop),
    ]
}

#[tokio::test]
async fn a_text_in_pieces_is_spoken_sentence_by_sentence_in_one_stream() {
    let (worker, gateway) = served(speaks(), |_| ()).await;
    let talk = Conversation::begin(&gateway, start()).await;
    for piece in [
        "Pi is 3.",
        "14",
        ". Dr",
        ". Who",
        " agrees! ",
        "He sa",
        "id <|im_",
        "end|>",
    ] {
        talk.text(piece).await;
    }
    talk.end().await;
    let heard = talk.rest().await.unwrap();
    let sentences = ["Pi is 3.14.", "Dr. Who agrees!", "He said <|im_end|>"];
    assert_eq!(heard.texts(), sentences);
    assert_eq!(
        heard
            .sentences
            .iter()
            .map(|(index, _)| *index)
            .collect::<Vec<_>>(),
        [0, 1, 2]
    );
    let asked = texts_and_seeds(&worker);
    assert_eq!(
        asked,
        [
            (sentences[0].into(), 100),
            (sentences[1].into(), 101),
            (sentences[2].into(), 102)
        ]
    );
    assert!(
        worker
            .shared
            .requests
            .lock()
            .unwrap()
            .iter()
            .all(|(_, request)| request.voice == "ryan")
    );
    let finished = heard.finished.unwrap();
    assert_eq!(
        (finished.reason(), finished.frames, finished.samples),
        (v1::FinishReason::Stop, 9, 9 * 1920)
    );
    assert_eq!(heard.audio.len(), 9 * 1920 * 2);
    let timings = finished.timings.unwrap();
    assert!(timings.first_audio_us > 0 && timings.first_audible_us.unwrap() <= timings.total_us);
}

/// One resampler and one container for all sentences: what each of them holds back at a seam is not lost.
#[tokio::test]
async fn all_sentences_are_one_stream_in_every_format() {
    let (_worker, gateway) = served(speaks(), |_| ()).await;
    for (format, sample_rate, speed, n_samples, magic) in [
        (v1::AudioFormat::PcmS16le, 22_050, None, 15_876, &b""[..]),
        (v1::AudioFormat::Flac, 16_000, None, 11_520, b"fLaC"),
        (v1::AudioFormat::Opus, 24_000, None, 17_280, b"OggS"),
        (v1::AudioFormat::Wav, 24_000, Some(2.0), 8_640, b"RIFF"),
    ] {
        let start = v1::SynthesizeRequest {
            text: "One. Two. Three.".into(),
            format: format.into(),
            sample_rate,
            speed,
            ..start()
        };
        let mut talk = Conversation::begin(&gateway, start).await;
        talk.end().await;
        let (mut bytes, mut finished, mut n_chunks) = (Vec::new(), None, 0);
        while let Some(event) = talk.next().await.unwrap() {
            match event {
                Event::Chunk(chunk) => {
                    assert_eq!(chunk.index, n_chunks);
                    n_chunks += 1;
                    bytes.extend_from_slice(&chunk.audio);
                }
                Event::Finished(event) => finished = Some(event),
                _ => {}
            }
        }
        let finished = finished.unwrap();
        assert_eq!((finished.frames, finished.samples), (9, n_samples), "{format:?}");
        assert!(bytes.starts_with(magic), "{format:?}");
        let marks = bytes
            .windows(4)
            .filter(|window| !magic.is_empty() && window == &magic)
            .count();
        assert!(
            magic.is_empty() || magic == b"OggS" || marks == 1,
            "{format:?}: one header"
        );
        if format == v1::AudioFormat::PcmS16le {
            assert_eq!(bytes.len() as u64, 2 * n_samples);
        }
    }
}

#[tokio::test]
async fn closing_the_sending_side_ends_the_text() {
    let (_worker, gateway) = served(speaks(), |_| ()).await;
    let first = v1::SynthesizeRequest {
        text: "One. Tw".into(),
        ..start()
    };
    let talk = Conversation::begin(&gateway, first).await;
    talk.text("o").await;
    let Conversation { sender, events } = talk;
    drop(sender);
    let closed = Conversation {
        sender: mpsc::channel(1).0,
        events,
    };
    assert_eq!(closed.rest().await.unwrap().texts(), ["One.", "Two"]);
}

#[tokio::test]
async fn the_next_sentence_is_with_a_worker_while_this_one_is_heard_and_no_other() {
    let (worker, gateway) = served(held(), |config| {
        config.max_in_flight = std::num::NonZeroUsize::MIN
    })
    .await;
    let mut talk = Conversation::begin(&gateway, start()).await;
    talk.text("One. Two. Three. Four").await;
    assert_eq!(talk.sentence().await.text, "One.");
    worker.until_open(2).await;
    assert_eq!(talk.chunk().await.index, 0);
    // Whatever else would be submitted had the time to come.
    worker.until_asked(3).await;
    assert_eq!(worker.n_requests(), 2, "one is heard, one is next");
    worker.open_gate();
    talk.end().await;
    assert_eq!(talk.rest().await.unwrap().texts(), ["Two.", "Three.", "Four"]);
}

#[tokio::test]
async fn a_flush_speaks_what_has_no_end_yet() {
    let (_worker, gateway) = served(speaks(), |_| ()).await;
    let mut talk = Conversation::begin(&gateway, start()).await;
    talk.text("One moment").await;
    talk.send(Message::Flush(v1::FlushText {})).await;
    assert_eq!(talk.sentence().await.text, "One moment");
    talk.text(" please").await;
    talk.end().await;
    assert_eq!(talk.rest().await.unwrap().texts(), ["please"]);
}

#[tokio::test]
async fn a_cancel_drops_what_was_sent_and_the_stream_goes_on() {
    let hangs = vec![Step::Started, Step::Audio(1, 0.25), Step::Hang];
    let (worker, gateway) = served(hangs, |_| ()).await;
    let mut talk = Conversation::begin(&gateway, start()).await;
    talk.text("One. Two. Three. Fo").await;
    assert_eq!(talk.sentence().await.text, "One.");
    let heard = talk.chunk().await;
    worker.until_open(2).await;
    worker.plays(speaks());
    talk.send(Message::Cancel(v1::CancelUtterance {})).await;
    // Both that were begun end at the worker.
    worker.until_ended(2).await;
    talk.text("Five. Six").await;
    talk.end().await;
    let after = talk.rest().await.unwrap();
    assert_eq!(after.cancelled, [1920]);
    assert_eq!(after.sentences, [(1, "Five.".into()), (2, "Six".into())]);
    assert_eq!(heard.index, 0);
    let finished = after.finished.unwrap();
    assert_eq!(
        (finished.reason(), finished.samples),
        (v1::FinishReason::Stop, 7 * 1920)
    );
    assert_eq!(worker.n_requests(), 4);
}

/// What waits for a slow caller would be heard after it had said stop.
#[tokio::test]
async fn a_cancel_takes_back_what_the_caller_has_not_taken() {
    let mut script = vec![Step::Started];
    script.extend(std::iter::repeat_n(Step::Audio(25, 0.5), 12));
    script.push(Step::Hang);
    let (worker, gateway) = served(script, |_| ()).await;
    let mut speech =
        v1::speech_client::SpeechClient::new(crate::harness::narrow(&gateway.address.to_string()));
    let (sender, messages) = mpsc::channel(64);
    let start = v1::SynthesizeRequest {
        text: "One. T".into(),
        format: v1::AudioFormat::Wav.into(),
        ..start()
    };
    sender.send(sent(Message::Start(start))).await.unwrap();
    let response = soon(speech.stream_synthesize(ReceiverStream::new(messages)))
        .await
        .unwrap();
    let mut talk = Conversation {
        sender,
        events: response.into_inner(),
    };
    // Not read: the window fills, then what waits in the gateway.
    worker.until_open(1).await;
    worker.until_asked(5).await;
    worker.plays(speaks());
    talk.send(Message::Cancel(v1::CancelUtterance {})).await;
    worker.until_ended(1).await;
    talk.text("wo. Three").await;
    talk.end().await;
    let (mut samples, mut index, mut cancelled, mut after) = (0, 0, false, 0);
    while let Some(event) = talk.next().await.unwrap() {
        match event {
            Event::Chunk(chunk) => {
                assert_eq!(
                    (chunk.index, chunk.sample_offset),
                    (index, samples),
                    "numbered through the cancel"
                );
                let header = if index == 0 { 44 } else { 0 };
                samples += (chunk.audio.len() as u64 - header) / 2;
                index += 1;
                after += u32::from(cancelled);
            }
            Event::Cancelled(at) => {
                assert_eq!(at.sample_offset, samples);
                assert!(samples < 6 * 25 * 1920, "something was taken back: {samples}");
                cancelled = true;
            }
            Event::Finished(finished) => assert_eq!(finished.samples, samples),
            Event::Accepted(_) | Event::Sentence(_) => {}
        }
    }
    assert!(
        cancelled && after == 4,
        "two sentences of two chunks behind the cancel, not {after}"
    );
}

#[tokio::test]
async fn a_cancel_behind_the_end_ends_the_stream() {
    let hangs = vec![Step::Started, Step::Audio(1, 0.25), Step::Hang];
    let (worker, gateway) = served(hangs, |_| ()).await;
    let mut talk = Conversation::begin(&gateway, start()).await;
    talk.text("One. Two.").await;
    talk.end().await;
    talk.sentence().await;
    worker.until_open(2).await;
    talk.send(Message::Cancel(v1::CancelUtterance {})).await;
    let heard = talk.rest().await.unwrap();
    assert_eq!(
        (heard.cancelled, heard.finished.unwrap().samples),
        (vec![1920], 1920)
    );
    worker.until_ended(2).await;
}

#[tokio::test]
async fn a_caller_who_leaves_ends_every_utterance_and_frees_the_place() {
    let hangs = vec![Step::Started, Step::Audio(1, 0.25), Step::Hang];
    let (worker, gateway) = served(hangs, |config| config.max_in_flight = std::num::NonZeroUsize::MIN).await;
    let mut talk = Conversation::begin(&gateway, start()).await;
    talk.text("One. Two. Three.").await;
    talk.sentence().await;
    worker.until_open(2).await;
    drop(talk);
    worker.until_ended(2).await;
    worker.until_open(0).await;
    assert_eq!(worker.n_requests(), 2);
    worker.plays(speaks());
    soon(async { while gateway.speak(named("talk")).await.is_err() {} }).await;
}

#[tokio::test]
async fn a_stop_delivers_what_was_made_and_a_kill_drops_it() {
    let hangs = vec![Step::Started, Step::Audio(1, 0.25), Step::Hang];
    let (worker, gateway) = served(hangs, |_| ()).await;
    let mut talk = Conversation::begin(&gateway, start()).await;
    talk.text("One. Two. Three.").await;
    talk.sentence().await;
    worker.until_open(2).await;
    gateway.cancel("talk", v1::CancelStrength::Stop).await.unwrap();
    let finished = talk.rest().await.unwrap().finished.unwrap();
    assert_eq!(
        (finished.reason(), finished.frames),
        (v1::FinishReason::Stopped, 1)
    );
    let mut talk = Conversation::begin(&gateway, start()).await;
    talk.text("One. Two. Three.").await;
    talk.sentence().await;
    gateway.cancel("talk", v1::CancelStrength::Kill).await.unwrap();
    assert_eq!(talk.failure().await.code, ErrorCode::Cancelled);
    worker.until_ended(4).await;
}

#[tokio::test]
async fn a_caller_who_says_nothing_is_ended_and_one_who_is_spoken_to_is_not() {
    let idle = std::time::Duration::from_millis(300);
    let (worker, gateway) = served(held(), |config| config.stream.idle = idle).await;
    let mut talk = Conversation::begin(&gateway, start()).await;
    talk.text("One. Tw").await;
    talk.sentence().await;
    tokio::time::sleep(2 * idle).await;
    worker.open_gate();
    let failure = talk.failure().await;
    assert_eq!(failure.code, ErrorCode::DeadlineExceeded);
    assert!(failure.message.contains("0.3 seconds"), "{failure}");
    let (_sender, messages) = mpsc::channel(1);
    let refused = soon(gateway.speech().stream_synthesize(ReceiverStream::new(messages))).await;
    assert_eq!(
        ours(refused.unwrap_err()).code,
        ErrorCode::DeadlineExceeded,
        "a start has to come too"
    );
}

#[tokio::test]
async fn the_deadline_is_of_the_whole_stream() {
    let (worker, gateway) = served(held(), |_| ()).await;
    let with_deadline = |messages| {
        let mut call = tonic::Request::new(messages);
        call.set_timeout(std::time::Duration::from_millis(400));
        call
    };
    let begun = Conversation::try_begin(&gateway, sent(Message::Start(start())), with_deadline).await;
    let talk = begun.unwrap();
    talk.text("One. Two. Three.").await;
    worker.until_open(2).await;
    worker.until_ended(2).await;
}

#[tokio::test]
async fn what_is_no_text_ends_the_stream_by_name() {
    let (_worker, gateway) = served(speaks(), |config| config.max_text_chars = 50).await;
    let first = async |first| {
        let refused = Conversation::try_begin(&gateway, first, tonic::Request::new).await;
        ours(refused.err().unwrap())
    };
    for wrong in [
        v1::StreamSynthesizeRequest { message: None },
        sent(Message::Text("Hello.".into())),
        sent(Message::End(v1::EndOfText {})),
    ] {
        let failure = first(wrong).await;
        assert_eq!(failure.code, ErrorCode::InvalidArgument);
        assert_eq!(failure.violations[0].field, "message");
    }
    let bob = v1::SynthesizeRequest {
        voice: "bob".into(),
        ..start()
    };
    assert_eq!(
        first(sent(Message::Start(bob))).await.code,
        ErrorCode::UnknownVoice
    );

    for (message, code, words) in [
        (
            sent(Message::Text("a\u{7}".into())),
            ErrorCode::InvalidText,
            "U+0007",
        ),
        (
            sent(Message::Text("a".repeat(51))),
            ErrorCode::TextTooLong,
            "limit of 50",
        ),
        (
            sent(Message::Start(start())),
            ErrorCode::InvalidArgument,
            "only the first",
        ),
        (
            v1::StreamSynthesizeRequest { message: None },
            ErrorCode::InvalidArgument,
            "flush",
        ),
    ] {
        let talk = Conversation::begin(&gateway, start()).await;
        talk.sender.send(message).await.unwrap();
        let failure = talk.failure().await;
        assert_eq!(failure.code, code, "{failure}");
        assert!(failure.message.contains(words), "{failure}");
    }
    let talk = Conversation::begin(&gateway, start()).await;
    talk.text("One.").await;
    talk.end().await;
    talk.text("Two.").await;
    assert!(talk.failure().await.message.contains("no text may follow"));
}

#[tokio::test]
async fn nothing_to_speak_is_no_failure() {
    let (worker, gateway) = served(speaks(), |_| ()).await;
    let wav = v1::SynthesizeRequest {
        format: v1::AudioFormat::Wav.into(),
        ..start()
    };
    let talk = Conversation::begin(&gateway, wav).await;
    talk.text(" … 😀").await;
    talk.end().await;
    let heard = talk.rest().await.unwrap();
    assert_eq!(
        (heard.audio.len(), heard.finished.unwrap().samples),
        (44, 0),
        "a WAV is a file"
    );
    assert_eq!(worker.n_requests(), 0);
}

#[tokio::test]
async fn a_begun_stream_waits_for_room_and_a_new_one_is_told_at_once() {
    let full = || {
        let refusal = Failure::new(ErrorCode::Overloaded, "full");
        vec![Step::Refuse(
            refusal.retry_after(std::time::Duration::from_millis(50)),
        )]
    };
    let (worker, gateway) = served(held(), |_| ()).await;
    let mut talk = Conversation::begin(&gateway, start()).await;
    talk.text("One.").await;
    talk.send(Message::Flush(v1::FlushText {})).await;
    talk.sentence().await;
    worker.plays(full());
    talk.text("Two.").await;
    talk.end().await;
    soon(async {
        while worker.n_requests() < 3 {
            worker.until_asked(1).await;
        }
    })
    .await;
    worker.plays(speaks());
    worker.open_gate();
    assert_eq!(talk.rest().await.unwrap().texts(), ["Two."]);

    worker.plays(full());
    let talk = Conversation::begin(&gateway, start()).await;
    talk.text("One.").await;
    talk.end().await;
    assert_eq!(talk.failure().await.code, ErrorCode::Overloaded);
}

#[tokio::test]
async fn a_failed_sentence_ends_the_stream_behind_the_audio_before_it() {
    let (worker, gateway) = served(held(), |_| ()).await;
    let mut talk = Conversation::begin(&gateway, start()).await;
    talk.text("One.").await;
    talk.send(Message::Flush(v1::FlushText {})).await;
    talk.sentence().await;
    worker.plays(vec![Step::Started, Step::Fail(Failure::internal())]);
    talk.text("Two.").await;
    talk.end().await;
    soon(async {
        while worker.n_requests() < 2 {
            worker.until_asked(1).await;
        }
    })
    .await;
    worker.open_gate();
    let mut n_bytes = 0;
    let failure = loop {
        match talk.next().await {
            Ok(Some(Event::Chunk(chunk))) => n_bytes += chunk.audio.len(),
            Ok(Some(other)) => panic!("{other:?}"),
            Ok(None) => panic!("a failed stream ends with its status"),
            Err(failure) => break failure,
        }
    };
    assert_eq!((failure.code, n_bytes), (ErrorCode::Internal, 3 * 3840));
}

#[tokio::test]
async fn a_long_text_is_one_stream_of_parts() {
    let (worker, gateway) = served(speaks(), |_| ()).await;
    let sentence = |letter: &str| format!("{}.", letter.repeat(119));
    let (a, b, c) = (sentence("A"), sentence("B"), sentence("C"));
    let long = v1::SynthesizeRequest {
        text: format!("{a} {b} {c}"),
        seed: Some(u64::MAX),
        format: v1::AudioFormat::Wav.into(),
        ..named("long")
    };
    let spoken = gateway.speak(long.clone()).await.unwrap();
    assert_eq!(texts_and_seeds(&worker), [(a, u64::MAX), (b, 0), (c, 1)]);
    assert_eq!(
        (spoken.accepted.request_id.as_str(), spoken.accepted.seed),
        ("long", u64::MAX)
    );
    let places: Vec<_> = spoken
        .chunks
        .iter()
        .map(|chunk| (chunk.index, chunk.sample_offset, chunk.audio.len()))
        .collect();
    let frames = |n_frames: u64| n_frames * 1920;
    assert_eq!(
        places,
        [
            (0, 0, 44 + 3840),
            (1, frames(1), 7680),
            (2, frames(3), 3840),
            (3, frames(4), 7680),
            (4, frames(6), 3840),
            (5, frames(7), 7680)
        ]
    );
    assert_eq!((spoken.finished.frames, spoken.finished.samples), (9, frames(9)));
    assert_eq!(spoken.finished.prompt_positions, 12);

    let most = v1::SynthesizeRequest {
        max_frames: Some(5),
        ..long
    };
    let spoken = gateway.speak(most).await.unwrap();
    assert_eq!(
        (spoken.finished.reason(), spoken.finished.frames),
        (v1::FinishReason::Length, 5)
    );
    assert_eq!(
        spoken.chunks.iter().map(|chunk| chunk.audio.len()).sum::<usize>(),
        44 + 5 * 3840
    );
    worker.until_open(0).await;
}
