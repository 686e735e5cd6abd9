//! What callers rely on, one behaviour a test.

use std::sync::Arc;
use std::time::{Duration, Instant};

use laneway_engine::node::FinishReason;
use laneway_engine::{FailureKind, Health, Limits, OutputEvent, PushError, RequestStream, SubmitError};

use crate::support::*;

fn check(config: RigConfig, requests: &[FakeRequest]) {
    let rig = Rig::start(config);
    let mut streams: Vec<_> = requests
        .iter()
        .enumerate()
        .map(|(index, request)| rig.submit(&index.to_string(), request.clone()))
        .collect();
    for (stream, request) in streams.iter_mut().zip(requests) {
        rig.collect(stream).assert_finished(request);
    }
    rig.wait_until_empty();
    rig.device.sanitizer.assert_clean();
}

fn on_chain() -> RigConfig {
    RigConfig {
        nodes: vec![("Talker", 0), ("Codec", 0)],
        ..RigConfig::default()
    }
}

#[test]
fn one_request_alone() {
    check(RigConfig::default(), &[FakeRequest::new(1, 20)]);
}

#[test]
fn eight_together_make_what_each_makes_alone() {
    let requests: Vec<_> = (0..8).map(|seed| FakeRequest::new(seed, 5 + 3 * seed)).collect();
    check(RigConfig::default(), &requests);
}

#[test]
fn the_codec_on_the_chain_makes_the_same() {
    let requests: Vec<_> = (0..8).map(|seed| FakeRequest::new(seed, 5 + 3 * seed)).collect();
    check(on_chain(), &requests);
}

#[test]
fn an_end_token_ends_without_an_item() {
    let request = FakeRequest {
        end_token: true,
        ..FakeRequest::new(3, 9)
    };
    check(RigConfig::default(), &[request.clone(), request]);
}

#[test]
fn more_requests_than_rows_take_turns() {
    let config = RigConfig {
        max_rows: 2,
        ..RigConfig::default()
    };
    let requests: Vec<_> = (0..8).map(|seed| FakeRequest::new(seed, 12)).collect();
    check(config, &requests);
}

#[test]
fn more_requests_than_pages_wait_their_turn() {
    let config = RigConfig {
        pages: 12,
        ..RigConfig::default()
    };
    let requests: Vec<_> = (0..12).map(|seed| FakeRequest::new(seed, 12)).collect();
    check(config, &requests);
}

#[test]
fn a_reference_is_encoded_once_and_primes_the_codec() {
    for nodes in [
        vec![("Talker", 0), ("Codec", 1), ("RefEncoder", 2)],
        vec![("Talker", 0), ("Codec", 1), ("RefEncoder", 1)],
        vec![("Talker", 0), ("Codec", 0), ("RefEncoder", 0)],
    ] {
        let rig = Rig::start(RigConfig {
            nodes,
            ..RigConfig::default()
        });
        let requests: Vec<_> = (0..5)
            .map(|seed| FakeRequest {
                reference: if seed == 3 { 0 } else { 7 + 5 * seed },
                ..FakeRequest::new(seed, 10)
            })
            .collect();
        let mut streams: Vec<_> = requests
            .iter()
            .enumerate()
            .map(|(index, request)| rig.submit(&index.to_string(), request.clone()))
            .collect();
        for (stream, request) in streams.iter_mut().zip(&requests) {
            let collected = rig.collect(stream);
            collected.assert_finished(request);
            assert_eq!(collected.results, usize::from(request.reference > 0));
        }
        rig.device.sanitizer.assert_clean();
    }
}

#[test]
fn a_result_in_hand_skips_the_encoder() {
    let rig = Rig::start(RigConfig {
        nodes: vec![("Talker", 0), ("Codec", 1), ("RefEncoder", 2)],
        ..RigConfig::default()
    });
    let request = FakeRequest {
        reference: 6,
        ..FakeRequest::new(2, 6)
    };
    let mut cached = submission("a", request.clone());
    cached.results = vec![(
        "reference".into(),
        Arc::new(Reference(request.reference_items())) as _,
    )];
    let mut stream = rig.handle.submit(cached).unwrap();
    let collected = rig.collect(&mut stream);
    collected.assert_finished(&request);
    assert_eq!((collected.results, rig.steps("ref_encode")), (0, 0));
}

/// A Talker worker sends items out, a Codec worker takes them in: the same samples as in one worker.
#[test]
fn two_workers_make_what_one_makes() {
    let talker = Rig::start(RigConfig {
        nodes: vec![("Talker", 0)],
        ..RigConfig::default()
    });
    let codec = Rig::start(RigConfig {
        nodes: vec![("Codec", 0)],
        ..RigConfig::default()
    });
    let request = FakeRequest::new(4, 23);
    let mut items = talker.submit("a", request.clone());
    let mut samples = codec.submit("a", request.clone());
    let mut collected = Collected::default();
    let reason = loop {
        match talker.next(&mut items).expect("a terminal event comes first") {
            OutputEvent::Items { items, .. } => {
                while let Err(error) = codec.handle.push_items("a", &items) {
                    assert!(matches!(error, PushError::Full { .. }), "{error}");
                    collected.add(codec.next(&mut samples).expect("a full edge makes windows"));
                }
            }
            OutputEvent::Finished { reason, .. } => break reason,
            OutputEvent::Failed(failure) => panic!("{failure}"),
            _ => {}
        }
    };
    codec.handle.end_items("a", reason).unwrap();
    while let Some(event) = codec.next(&mut samples) {
        collected.add(event);
    }
    collected.assert_finished(&request);
    assert_eq!(
        codec.handle.push_items("a", &[]),
        Err(PushError::UnknownRequest("a".into()))
    );
    codec.wait_until_empty();
    talker.wait_until_empty();
}

#[test]
fn pushing_is_bounded_and_checked() {
    let codec = Rig::start(RigConfig {
        nodes: vec![("Codec", 0)],
        ..RigConfig::default()
    });
    codec.device.gate("chain").close();
    let _stream = codec.submit("a", FakeRequest::new(1, 40));
    let item: Arc<[i32]> = vec![0; model::WORDS].into();
    let many = vec![item.clone(); model::CAPACITY as usize];
    codec.handle.push_items("a", &many).unwrap();
    let error = codec.handle.push_items("a", &[item]).unwrap_err();
    assert!(
        matches!(
            error,
            PushError::Full {
                held: 16,
                capacity: 16,
                ..
            }
        ),
        "{error}"
    );
    let error = codec.handle.push_items("a", &[vec![0; 3].into()]).unwrap_err();
    assert_eq!(error, PushError::ItemWords { got: 3, want: 4 });
    codec.handle.end_items("a", FinishReason::Stop).unwrap();
    let error = codec.handle.push_items("a", &many).unwrap_err();
    assert_eq!(error, PushError::Closed("a".into()));
}

/// The end of the items and a stop that the engine sees in one turn end the request once, with or without
/// items, and nobody else's.
#[test]
fn a_stop_may_meet_the_end_of_the_items() {
    let codec = Rig::start(RigConfig {
        nodes: vec![("Codec", 0)],
        ..RigConfig::default()
    });
    for n_items in [0, 1] {
        let mut stream = codec.submit("a", FakeRequest::new(1, 40));
        let items = vec![vec![0; model::WORDS].into(); n_items];
        codec.handle.push_items("a", &items).unwrap();
        codec.handle.end_items("a", FinishReason::Stop).unwrap();
        stream.stop();
        let mut terminal = 0;
        while let Some(event) = codec.next(&mut stream) {
            terminal += usize::from(matches!(
                event,
                OutputEvent::Finished { .. } | OutputEvent::Failed(_)
            ));
        }
        assert_eq!(terminal, 1, "{n_items} items");
        codec.wait_until_empty();
    }
}

/// A prompt that was run before is not run again, makes the same, and its page goes before anybody waits for it.
#[test]
fn a_known_prompt_is_read_from_the_cache() {
    let mut model = FakeModel::new();
    model.declaration.resources[0].report.prefix_cache = true;
    let config = RigConfig {
        pages: 24,
        ..RigConfig::default()
    };
    let rig = Rig::start_with(FakeDevice::new(), model, config);
    let request = |seed, prompt| FakeRequest {
        prompt: Some(prompt),
        ..FakeRequest::new(seed, 20)
    };
    for (round, prompt) in [1, 2, 1, 1, 2].into_iter().enumerate() {
        let request = request(round as u32, prompt);
        rig.run("a", request.clone()).assert_finished(&request);
        rig.wait_until_empty();
    }
    assert_eq!(*rig.log.cached.lock(), 3);
    // More prompts at once than pages for them: the unused ones are given up, and nobody waits for ever.
    let requests: Vec<_> = (0..12).map(|seed| request(seed, seed % 5)).collect();
    let mut streams: Vec<_> = requests
        .iter()
        .map(|request| rig.submit(&request.seed.to_string(), request.clone()))
        .collect();
    for (stream, request) in streams.iter_mut().zip(&requests) {
        rig.collect(stream).assert_finished(request);
    }
    rig.wait_until_empty();
    rig.device.sanitizer.assert_clean();
}

#[test]
fn a_stop_flushes_what_was_made() {
    let rig = Rig::start(RigConfig::default());
    let request = FakeRequest::new(1, 200);
    let mut stream = rig.submit("a", request.clone());
    let mut collected = Collected::default();
    while collected.samples.is_empty() {
        collected.add(rig.next(&mut stream).unwrap());
    }
    stream.stop();
    let collected = rig.collect_rest(&mut stream, collected);
    let (reason, stats) = collected.finished.clone().unwrap();
    assert_eq!(reason, FinishReason::Stopped);
    assert_eq!(stats.items as usize, collected.samples.len());
    assert!(stats.items < 200, "it ended early");
    collected.assert_samples(&request);
    rig.wait_until_empty();
}

#[test]
fn a_stop_before_admission_finishes_at_once() {
    let rig = Rig::start(RigConfig {
        limits: Limits {
            max_running: 1,
            ..RigConfig::default().limits
        },
        ..RigConfig::default()
    });
    rig.device.gate("chain").close();
    let _first = rig.submit("a", FakeRequest::new(1, 20));
    let mut second = rig.submit("b", FakeRequest::new(2, 20));
    second.stop();
    let collected = rig.collect(&mut second);
    assert_eq!(collected.finished.unwrap().0, FinishReason::Stopped);
}

#[test]
fn a_kill_and_a_listener_that_leaves_free_everything() {
    let rig = Rig::start(RigConfig::default());
    let mut stream = rig.submit("a", FakeRequest::new(1, 500));
    let leaver = rig.submit("b", FakeRequest::new(2, 500));
    let mut collected = Collected::default();
    while collected.samples.is_empty() {
        collected.add(rig.next(&mut stream).unwrap());
    }
    rig.handle.canceller("a").unwrap().kill();
    drop(leaver);
    let collected = rig.collect_rest(&mut stream, collected);
    collected.assert_failed(FailureKind::Cancelled);
    rig.wait_until_empty();
    assert_eq!(rig.stats().cancelled, 2);
    assert!(rig.handle.canceller("a").is_none());
}

#[test]
fn a_deadline_ends_a_request() {
    let rig = Rig::start(RigConfig::default());
    rig.device.gate("chain").close();
    let mut late = submission("a", FakeRequest::new(1, 500));
    late.deadline = Some(Instant::now() + Duration::from_millis(50));
    let mut stream = rig.handle.submit(late).unwrap();
    rig.collect(&mut stream)
        .assert_failed(FailureKind::DeadlineExceeded);
    rig.device.gate("chain").open();
    rig.wait_until_empty();
}

#[test]
fn a_listener_that_takes_nothing_is_ended_and_keeps_nobody_waiting() {
    let limits = Limits {
        output_events: 3,
        listener_stall: Duration::from_millis(200),
        ..RigConfig::default().limits
    };
    let rig = Rig::start(RigConfig {
        limits,
        ..RigConfig::default()
    });
    let idle = rig.submit("idle", FakeRequest::new(1, 200));
    let request = FakeRequest::new(2, 60);
    rig.run("busy", request.clone()).assert_finished(&request);
    let mut idle = idle;
    eventually("the idle request is ended", || rig.stats().failed == 1);
    let collected = rig.collect(&mut idle);
    collected.assert_failed(FailureKind::ListenerStalled);
    collected.assert_samples(&FakeRequest::new(1, 200));
    rig.wait_until_empty();
}

/// A slow listener parks its request and loses nothing.
#[test]
fn a_slow_listener_gets_everything() {
    let limits = Limits {
        output_events: 1,
        ..RigConfig::default().limits
    };
    for nodes in [
        vec![("Talker", 0), ("Codec", 1)],
        vec![("Talker", 0), ("Codec", 0)],
    ] {
        let rig = Rig::start(RigConfig {
            limits: limits.clone(),
            nodes,
            ..RigConfig::default()
        });
        let request = FakeRequest::new(1, 60);
        let mut stream = rig.submit("a", request.clone());
        eventually("its producer parks", || rig.stats().parks > 0);
        rig.collect(&mut stream).assert_finished(&request);
    }
}

/// Nobody listens, and still there is a place for the events that must come.
#[test]
fn the_terminal_event_always_has_its_place() {
    let rig = Rig::start(RigConfig {
        nodes: vec![("Talker", 0), ("Codec", 1), ("RefEncoder", 2)],
        limits: Limits {
            output_events: 1,
            ..RigConfig::default().limits
        },
        ..RigConfig::default()
    });
    for (seed, end) in [
        (1, RequestStream::stop as fn(&RequestStream)),
        (2, RequestStream::kill),
    ] {
        let request = FakeRequest {
            reference: 4,
            ..FakeRequest::new(seed, 100)
        };
        let mut stream = rig.submit("a", request);
        eventually("it makes items", || rig.planned(seed) > 5);
        end(&stream);
        let collected = rig.collect(&mut stream);
        assert_eq!(
            (collected.started, collected.results, collected.terminals),
            (1, 1, 1)
        );
    }
}

#[test]
fn what_never_fits_is_refused_at_once() {
    let rig = Rig::start(RigConfig::default());
    let refuse = |id: &str, request: FakeRequest| rig.handle.submit(submission(id, request)).unwrap_err();
    let error = refuse("a", FakeRequest::new(1, 100_000));
    assert!(
        matches!(&error, SubmitError::Invalid(row) if row.message.contains("talker_kv")),
        "{error}"
    );
    let mut wide = submission("a", FakeRequest::new(1, 5));
    wide.chunk = Some(laneway_plan::declaration::ChunkPolicy {
        first: 9,
        ramp: vec![],
        steady: 1,
    });
    let error = rig.handle.submit(wide).unwrap_err();
    assert!(
        matches!(&error, SubmitError::Invalid(row) if row.field.as_deref() == Some("chunk")),
        "{error}"
    );
}

#[test]
fn more_than_may_wait_is_refused_at_once_and_ids_are_unique() {
    let rig = Rig::start(RigConfig {
        limits: Limits {
            max_running: 2,
            max_queue: 1,
            ..RigConfig::default().limits
        },
        ..RigConfig::default()
    });
    rig.device.gate("chain").close();
    let requests: Vec<_> = (0..3)
        .map(|index| rig.submit(&index.to_string(), FakeRequest::new(index, 5)))
        .collect();
    let again = rig
        .handle
        .submit(submission("1", FakeRequest::new(1, 5)))
        .unwrap_err();
    assert!(matches!(again, SubmitError::DuplicateId(_)), "{again}");
    let more = rig
        .handle
        .submit(submission("3", FakeRequest::new(1, 5)))
        .unwrap_err();
    assert!(matches!(more, SubmitError::QueueFull { live: 3, .. }), "{more}");
    rig.device.gate("chain").open();
    for (mut stream, seed) in requests.into_iter().zip(0..) {
        rig.collect(&mut stream)
            .assert_finished(&FakeRequest::new(seed, 5));
    }
    rig.run("1", FakeRequest::new(7, 5))
        .assert_finished(&FakeRequest::new(7, 5));
}

#[test]
fn a_drain_finishes_what_runs_and_takes_nothing_new() {
    let rig = Rig::start(RigConfig::default());
    let chain = rig.device.gate("chain");
    chain.close();
    let request = FakeRequest::new(1, 30);
    let mut stream = rig.submit("a", request.clone());
    let engine = rig.engine.as_ref().unwrap();
    assert_eq!(engine.drain(Duration::from_millis(1)), 1);
    assert_eq!(*rig.handle.health().borrow(), Health::Draining);
    let error = rig.handle.submit(submission("b", request.clone())).unwrap_err();
    assert!(matches!(error, SubmitError::Draining), "{error}");
    chain.open();
    assert_eq!(engine.drain(PATIENCE), 0);
    rig.collect(&mut stream).assert_finished(&request);
}

#[test]
fn dropping_the_engine_ends_what_is_left() {
    let mut rig = Rig::start(RigConfig::default());
    let mut stream = rig.submit("a", FakeRequest::new(1, 100));
    rig.device.gate("lane1").close();
    let mut held = rig.submit("b", FakeRequest::new(1, 200));
    rig.device.gate("lane1").open();
    rig.engine = None;
    assert_eq!(rig.collect(&mut stream).terminals, 1);
    rig.collect(&mut held).assert_failed(FailureKind::Unavailable);
    let error = rig
        .handle
        .submit(submission("c", FakeRequest::new(1, 5)))
        .unwrap_err();
    assert!(matches!(error, SubmitError::Stopped(_)), "{error}");
    assert_eq!(*rig.handle.health().borrow(), Health::Stopped);
}

#[test]
fn an_engine_gives_its_memory_back() {
    let device = FakeDevice::new();
    let before = laneway_device::Device::facts(&*device).used_bytes;
    {
        let rig = Rig::start_on(device.clone(), RigConfig::default());
        assert!(laneway_device::Device::facts(&*device).used_bytes > before);
        rig.run("a", FakeRequest::new(1, 20));
    }
    eventually("the memory is back", || {
        laneway_device::Device::facts(&*device).used_bytes == before
    });
}
