//! The invariants about ends: teardown, release, and what is stuck or dead.

use std::time::{Duration, Instant};

use laneway_engine::{FailureKind, Health, Limits, OutputEvent, SubmitError};

use super::{wait_until_staged, with_reference};
use crate::support::model::{CHUNK, DECODE, PREFILL, PRIME, REF_ENCODE};
use crate::support::*;

fn with_fault(seed: u32, frames: u32, fault: Fault) -> FakeRequest {
    FakeRequest {
        fault: Some(fault),
        ..FakeRequest::new(seed, frames)
    }
}

/// Teardown may run from another thread while that lane's step runs; no stream keeps entered state.
#[test]
fn invariant_06_teardown_from_any_thread_while_a_lanes_step_runs() {
    let rig = Rig::start(RigConfig::default());
    let lane = rig.device.gate("lane1");
    for round in 0..6 {
        lane.close();
        let streams: Vec<_> = (0..8)
            .map(|seed| rig.submit(&format!("{round}.{seed}"), FakeRequest::new(seed, 100)))
            .collect();
        eventually("a lane's step runs", || lane.held() == 1);
        std::thread::scope(|scope| {
            for (index, stream) in streams.into_iter().enumerate() {
                let handle = &rig.handle;
                scope.spawn(move || match index % 3 {
                    0 => drop(stream),
                    1 => {
                        stream.kill();
                        stream.canceller().kill();
                    }
                    _ => {
                        let canceller = handle.canceller(&format!("{round}.{index}"));
                        canceller.expect("it is live").kill();
                        stream.stop();
                    }
                });
            }
        });
        eventually("all of them are gone", || rig.stats().running == 0);
        assert!(rig.used("codec_state") > 0, "the step in flight keeps its slots");
        lane.open();
        rig.wait_until_empty();
    }
    let request = FakeRequest::new(9, 20);
    rig.run("after", request.clone()).assert_finished(&request);
    assert_eq!(rig.device.second_enters(), [""; 0]);
    rig.device.sanitizer.assert_clean();
}

/// A cancelled or failed request is never planned again; what it holds is released exactly once, when the last
/// step already launched that names it has landed.
#[test]
fn invariant_13_a_cancelled_request_is_released_once_when_its_last_step_landed() {
    let rig = Rig::start(RigConfig::default());
    let (chain, lane) = (rig.device.gate("chain"), rig.device.gate("lane1"));
    chain.close();
    lane.close();
    let mut stream = rig.submit("a", FakeRequest::new(1, 50));
    wait_until_staged(&rig);
    chain.allow(1);
    eventually("its first window runs", || lane.held() == 1);
    wait_until_staged(&rig);
    let planned = rig.planned(1);
    stream.kill();
    rig.collect(&mut stream).assert_failed(FailureKind::Cancelled);
    let held = || {
        (
            rig.used("talker_kv") > 0,
            rig.used("talker_state"),
            rig.used("codec_state"),
        )
    };
    assert_eq!(held(), (true, 1, 1));
    chain.allow(1);
    eventually("one chain step is left", || chain.held() == 1);
    // Another request turns the loop over, and gets other slots.
    let other = FakeRequest::new(2, 50);
    let mut other_stream = rig.submit("b", other.clone());
    eventually("the other is planned", || rig.planned(2) > 0);
    assert_eq!((rig.used("talker_state"), rig.used("codec_state")), (2, 1));
    chain.allow(1);
    eventually("its last chain step has landed", || rig.used("talker_state") == 1);
    assert_eq!(rig.used("codec_state"), 1, "its lane step still runs");
    chain.open();
    lane.open();
    rig.collect(&mut other_stream).assert_finished(&other);
    rig.wait_until_empty();
    assert_eq!(rig.planned(1), planned, "it was planned again");
    // A second release of a slot panics in the free list and would end the engine.
    assert_eq!(*rig.handle.health().borrow(), Health::Serving);
    rig.device.sanitizer.assert_clean();
}

/// A dead or stuck worker ends its own requests with a clear status, and nobody else's.
#[test]
fn invariant_14_what_is_stuck_or_dead_ends_its_own_requests_only() {
    let quick = Limits {
        step_deadline: Duration::from_millis(300),
        ..RigConfig::default().limits
    };
    let neighbour = Rig::start(RigConfig::default());
    let is_unhealthy = |rig: &Rig| {
        let health = rig.handle.health().borrow().clone();
        assert!(matches!(health, Health::Unhealthy(_)), "{health:?}");
        let error = rig
            .handle
            .submit(submission("late", FakeRequest::new(1, 5)))
            .unwrap_err();
        assert!(matches!(error, SubmitError::Stopped(_)), "{error}");
    };
    let cloned = FakeRequest {
        reference: 5,
        ..FakeRequest::new(2, 100)
    };

    // A lane is stuck: who needs it ends, who does not finishes.
    let rig = Rig::start(RigConfig {
        limits: quick.clone(),
        ..with_reference()
    });
    rig.device.gate("lane2").close();
    rig.device.gate("chain").close();
    let plain = FakeRequest::new(1, 100);
    let mut plain_stream = rig.submit("plain", plain.clone());
    let mut cloned_streams: Vec<_> = (0..3)
        .map(|index| rig.submit(&index.to_string(), cloned.clone()))
        .collect();
    rig.device.gate("chain").open();
    for stream in &mut cloned_streams {
        let collected = rig.collect(stream);
        let failure = collected.assert_failed(FailureKind::Unavailable);
        assert!(failure.message.contains("lane2"), "{failure}");
    }
    rig.collect(&mut plain_stream).assert_finished(&plain);
    is_unhealthy(&rig);

    // The chain is stuck: all of the worker's requests end.
    let rig = Rig::start(RigConfig {
        limits: quick,
        ..RigConfig::default()
    });
    rig.device.gate("chain").close();
    let mut streams: Vec<_> = (0..12)
        .map(|seed| rig.submit(&seed.to_string(), FakeRequest::new(seed, 20)))
        .collect();
    for stream in &mut streams {
        rig.collect(stream).assert_failed(FailureKind::Unavailable);
    }
    is_unhealthy(&rig);
    assert!(rig.used("talker_state") > 0, "what may still run keeps its slots");
    rig.device.gate("chain").open();
    rig.wait_until_empty();

    // A stream fails under a step: its rows end within a second.
    for walk in [CHUNK, DECODE] {
        let rig = Rig::start(RigConfig::default());
        let mut stream = rig.submit("a", with_fault(3, 100, Fault::Device(walk, 2)));
        let began = Instant::now();
        let collected = rig.collect(&mut stream);
        collected.assert_failed(FailureKind::Unavailable);
        collected.assert_samples(&FakeRequest::new(3, 100));
        assert!(began.elapsed() < Duration::from_secs(1));
        is_unhealthy(&rig);
    }

    // A step breaks off on its way: its rows end, nothing else.
    let rig = Rig::start(RigConfig::default());
    let good = FakeRequest::new(1, 40);
    let bad = with_fault(2, 40, Fault::Forward(PREFILL, 0));
    let mut good_stream = rig.submit("good", good.clone());
    while !matches!(rig.next(&mut good_stream), Some(OutputEvent::Started { .. })) {}
    eventually("the good one is prefilled", || rig.steps("talker_prefill") == 1);
    rig.run("bad", bad).assert_failed(FailureKind::Internal);
    let collected = rig.collect(&mut good_stream);
    assert_eq!(collected.samples, good.expected().samples);
    assert_eq!(*rig.handle.health().borrow(), Health::Serving);
    rig.wait_until_empty();

    // A node panics, on a lane and on the chain.
    for (walk, step) in [(PRIME, 0), (DECODE, 1), (REF_ENCODE, 0)] {
        let rig = Rig::start(with_reference());
        let panics = FakeRequest {
            reference: 5,
            ..with_fault(3, 100, Fault::Panic(walk, step))
        };
        rig.run("a", panics).assert_failed(FailureKind::Unavailable);
        let error = rig
            .handle
            .submit(submission("late", FakeRequest::new(1, 5)))
            .unwrap_err();
        assert!(matches!(error, SubmitError::Stopped(_)), "{error}");
    }

    neighbour.run("a", plain.clone()).assert_finished(&plain);
    assert_eq!(*neighbour.handle.health().borrow(), Health::Serving);
}
