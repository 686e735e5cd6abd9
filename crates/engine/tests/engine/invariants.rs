//! The invariants of the engine, one test each, under their numbers in the design.

mod endings;

use std::collections::BTreeSet;

use laneway_device::sanitize::Rule;
use laneway_engine::{Engine, FailureKind, OutputEvent, StartError};
use laneway_plan::declaration::ChunkPolicy;

use crate::support::device::Call;
use crate::support::model::{CAPACITY, CHUNK, DECODE, PREFILL};
use crate::support::*;

fn with_reference() -> RigConfig {
    RigConfig {
        nodes: vec![("Talker", 0), ("Codec", 1), ("RefEncoder", 2)],
        ..RigConfig::default()
    }
}

/// Two chain steps are in flight: the one that runs and the staged one.
fn wait_until_staged(rig: &Rig) {
    let chain = rig.device.gate("chain");
    eventually("the chain is two steps deep", || chain.held() == 2);
}

/// A lane's step never promotes, drops or clears the chain's staged plan, also when it is refused or fails.
#[test]
fn invariant_01_a_lane_step_leaves_the_chains_staged_plan_alone() {
    for fault in [
        None,
        Some(Fault::Open(CHUNK)),
        Some(Fault::Plan(CHUNK, 0)),
        Some(Fault::Forward(CHUNK, 0)),
        Some(Fault::Outcome(CHUNK, 0)),
    ] {
        let rig = Rig::start(RigConfig::default());
        let (chain, lane) = (rig.device.gate("chain"), rig.device.gate("lane1"));
        chain.close();
        lane.close();
        let other = FakeRequest {
            fault,
            ..FakeRequest::new(1, 30)
        };
        let mut other_stream = rig.submit("other", other.clone());
        let good = FakeRequest::new(2, 30);
        let mut wide = submission("good", good.clone());
        // It stays off the lane while the other's step goes its way there.
        wide.chunk = Some(ChunkPolicy {
            first: 8,
            ramp: vec![],
            steady: 8,
        });
        let mut good_stream = rig.handle.submit(wide).unwrap();
        wait_until_staged(&rig);
        chain.allow(4);
        wait_until_staged(&rig);
        let decoded = rig.steps("talker_decode");
        lane.open();
        match fault {
            None => eventually("the lane's step lands", || rig.steps("codec_chunk") > 0),
            Some(_) => eventually("the lane's step goes wrong", || rig.stats().failed == 1),
        }
        assert_eq!(
            chain.held(),
            2,
            "the staged step is where it was, and nothing else was launched"
        );
        assert_eq!(rig.steps("talker_decode"), decoded);
        chain.open();
        rig.collect(&mut good_stream).assert_finished(&good);
        let collected = rig.collect(&mut other_stream);
        match fault {
            None => collected.assert_finished(&other),
            Some(_) => drop(collected.assert_failed(FailureKind::Internal)),
        }
        rig.wait_until_empty();
        rig.device.sanitizer.assert_clean();
    }
}

/// Resource → lane is a function: a lane's resources belong to no one else.
#[test]
fn invariant_02_a_resource_belongs_to_one_lane() {
    let refuse = |change: fn(&mut FakeModel)| {
        let mut model = FakeModel::new();
        change(&mut model);
        match Engine::start(engine_config(FakeDevice::new(), model, &RigConfig::default())) {
            Err(StartError::Config(why)) => why,
            Err(other) => panic!("{other}"),
            Ok(_) => panic!("it started"),
        }
    };
    let why = refuse(|model| model.declaration.nodes[1].resources.push("talker_state".into()));
    assert!(
        ["talker_state", "Talker", "Codec"]
            .iter()
            .all(|name| why.contains(name)),
        "{why}"
    );
    let why = refuse(|model| {
        let state = &mut model.declaration.resources[2];
        state.report.depends_on.push("talker_kv".into());
    });
    assert!(
        ["codec_state", "talker_kv"].iter().all(|name| why.contains(name)),
        "{why}"
    );
    // What a node does not declare it does not get: the fake model checks that when it builds a node.
    drop(Rig::start(RigConfig::default()));
}

/// Everything that touches a lane's resource is ordered on that lane's stream, the zeroing of a released slot
/// included.
#[test]
fn invariant_03_everything_on_a_lanes_resource_is_ordered_on_its_stream() {
    let churn = |rig: &Rig| {
        for round in 0..4 {
            let request = |seed| submission(&format!("{round}.{seed}"), FakeRequest::new(seed, 6));
            // Refused once the lane is given up.
            let streams: Vec<_> = (0..4).map(|seed| rig.handle.submit(request(seed))).collect();
            for mut stream in streams.into_iter().flatten() {
                rig.collect(&mut stream);
            }
        }
    };
    let rig = Rig::start(RigConfig::default());
    rig.device.log();
    churn(&rig);
    rig.wait_until_empty();
    rig.device.sanitizer.assert_clean();
    let zeros = |stream: &str| {
        let calls = rig.device.calls();
        calls
            .iter()
            .filter(|call| call.stream == stream && call.what == "Zero")
            .count()
    };
    // The chain's pool of states is zeroed there, the codec's here; the pages are not zeroed.
    assert_eq!((zeros("lane1"), zeros("chain")), (16, 16));

    // The free list hands out the last released slot first, so that a zero on any other stream is a race at
    // once.
    let rig = Rig::start(RigConfig::default());
    rig.device.faults(|faults| {
        faults.redirect_zeros.insert("lane1".into(), "chain".into());
    });
    churn(&rig);
    let reports = rig.device.sanitizer.reports();
    let report = reports.iter().find(|report| report.buffer == "codec_state");
    let text = report
        .expect("the zero is not ordered with the lane's steps")
        .to_string();
    assert!(
        text.contains("Zero") && text.contains("lane1") && text.contains("chain"),
        "{text}"
    );
}

/// One step in flight per lane: the next is planned after it landed.
#[test]
fn invariant_04_a_lane_has_one_step_in_flight() {
    let rig = Rig::start(RigConfig::default());
    let lane = rig.device.gate("lane1");
    lane.close();
    let requests: Vec<_> = (0..8).map(|seed| FakeRequest::new(seed, 40)).collect();
    let mut streams: Vec<_> = requests
        .iter()
        .enumerate()
        .map(|(index, request)| rig.submit(&index.to_string(), request.clone()))
        .collect();
    for _ in 0..4 {
        // The chain goes on until every edge is full, and then nothing moves but for the lane.
        let mut quiet = 0;
        let mut steps = 0;
        eventually("the chain has run until the edges are full", || {
            assert!(lane.held() <= 1, "two steps of a lane in flight");
            let now = rig.steps("talker_decode");
            quiet = if now == steps && now > 0 { quiet + 1 } else { 0 };
            steps = now;
            quiet > 20
        });
        assert_eq!(lane.held(), 1);
        lane.allow(1);
    }
    lane.open();
    for (stream, request) in streams.iter_mut().zip(&requests) {
        rig.collect(stream).assert_finished(request);
    }
    // That its buffers are not doubled is asserted in the fake nodes: a lane always plans stage 0.
}

/// A refused lane step goes the same way as the chain's: rows that failed to prepare fail with their error,
/// the rest are put back; nothing is routed or postprocessed; no row hangs.
#[test]
fn invariant_05_a_refused_step_fails_its_rows_and_puts_the_rest_back() {
    let faults = [
        None,
        Some(Fault::Plan(CHUNK, 0)),
        None,
        Some(Fault::Plan(CHUNK, 2)),
        Some(Fault::Open(CHUNK)),
        Some(Fault::Plan(DECODE, 3)),
        Some(Fault::Open(PREFILL)),
        None,
    ];
    for codec_lane in [1, 0] {
        let rig = Rig::start(RigConfig {
            nodes: vec![("Talker", 0), ("Codec", codec_lane)],
            ..RigConfig::default()
        });
        // They all stand in the first steps together.
        rig.device.gate("chain").close();
        let requests: Vec<_> = faults
            .iter()
            .zip(0..)
            .map(|(&fault, seed)| FakeRequest {
                fault,
                ..FakeRequest::new(seed, 20)
            })
            .collect();
        let mut streams: Vec<_> = requests
            .iter()
            .map(|request| rig.submit(&request.seed.to_string(), request.clone()))
            .collect();
        eventually("all of them were planned", || {
            let stats = rig.stats();
            stats.running + stats.failed as usize == requests.len()
        });
        rig.device.gate("chain").open();
        for (stream, request) in streams.iter_mut().zip(&requests) {
            let collected = rig.collect(stream);
            match request.fault {
                None => collected.assert_finished(request),
                Some(fault) => {
                    let failure = collected.assert_failed(FailureKind::Internal);
                    let what = if matches!(fault, Fault::Open(_)) {
                        "open"
                    } else {
                        "plan"
                    };
                    assert_eq!(failure.message, format!("asked to fail in {what}"));
                    collected.assert_samples(request);
                    if fault == Fault::Plan(CHUNK, 2) {
                        assert_eq!(
                            collected.windows,
                            [1, 2],
                            "nothing of the refused window came out"
                        );
                    }
                }
            }
        }
        assert!(rig.stats().refused_steps >= 4);
        rig.wait_until_empty();
        rig.device.sanitizer.assert_clean();
    }
}

/// A full pool parks the row at readiness while the chain goes on scheduling; the row runs once a slot frees.
#[test]
fn invariant_07_a_full_pool_parks_the_row_and_not_the_chain() {
    let rig = Rig::start(RigConfig {
        codec_slots: 1,
        ..RigConfig::default()
    });
    let lane = rig.device.gate("lane1");
    lane.close();
    let (first, second) = (FakeRequest::new(1, 20), FakeRequest::new(2, 60));
    let mut first_stream = rig.submit("first", first.clone());
    eventually("the first holds the slot", || lane.held() == 1);
    let mut second_stream = rig.submit("second", second.clone());
    eventually("the second makes items until its edge is full", || {
        rig.planned(2) >= CAPACITY && rig.stats().parks > 0
    });
    assert_eq!(rig.steps("codec_chunk"), 0, "nothing of the lane has landed");
    lane.open();
    let both = [(&mut first_stream, &first), (&mut second_stream, &second)];
    for (stream, request) in both {
        rig.collect(stream).assert_finished(request);
    }
    rig.wait_until_empty();
}

/// With the chain idle, the loop finishes whichever lane lands first.
#[test]
fn invariant_08_an_idle_chain_takes_lanes_as_they_land() {
    for codec_first in [true, false] {
        let rig = Rig::start(with_reference());
        let (codec, encoder) = (rig.device.gate("lane1"), rig.device.gate("lane2"));
        codec.close();
        encoder.close();
        let made = FakeRequest::new(1, 4);
        let mut made_stream = rig.submit("made", made.clone());
        let cloned = FakeRequest {
            reference: 5,
            ..FakeRequest::new(2, 4)
        };
        let mut cloned_stream = rig.submit("cloned", cloned.clone());
        eventually("both lanes are busy and the chain has nothing to do", || {
            let chain_steps = rig.steps("talker_prefill") + rig.steps("talker_decode");
            codec.held() == 1 && encoder.held() == 1 && chain_steps >= 4
        });
        if codec_first {
            codec.open();
            rig.collect(&mut made_stream).assert_finished(&made);
            assert_eq!(rig.steps("ref_encode"), 0);
            encoder.open();
        } else {
            encoder.open();
            while !matches!(rig.next(&mut cloned_stream), Some(OutputEvent::Result { .. })) {}
            assert_eq!(rig.steps("codec_chunk"), 0);
            codec.open();
            rig.collect(&mut made_stream).assert_finished(&made);
        }
        assert_eq!(rig.collect(&mut cloned_stream).samples, cloned.expected().samples);
    }
}

/// A step waits only on the staged plans of nodes that it shares a resource with: a codec lane never waits on
/// the Talker's plan.
#[test]
fn invariant_09_the_codec_lane_does_not_wait_for_the_chain() {
    let rig = Rig::start(RigConfig::default());
    let chain = rig.device.gate("chain");
    chain.close();
    rig.device.log();
    let mut stream = rig.submit("a", FakeRequest::new(1, 50));
    wait_until_staged(&rig);
    let mut collected = Collected::default();
    for (steps, samples) in [(1, 1), (2, 3), (4, 7), (4, 11)] {
        chain.allow(steps);
        while collected.samples.len() < samples {
            collected.add(rig.next(&mut stream).unwrap());
        }
        wait_until_staged(&rig);
    }
    collected.assert_samples(&FakeRequest::new(1, 50));
    let calls = rig.device.calls();
    let mut waits = calls
        .iter()
        .filter(|call| call.stream == "lane1" && call.what.starts_with("wait"));
    assert!(
        waits.all(|call| call.what.contains("landed")),
        "a lane's step waited for a step that ran"
    );
}

/// Captures of a lane's node are made on that lane's stream.
#[test]
fn invariant_10_captures_are_made_on_the_lanes_own_stream() {
    let device = FakeDevice::new();
    device.log();
    let rig = Rig::start_on(device, with_reference());
    let captures: BTreeSet<_> = rig
        .device
        .calls()
        .into_iter()
        .filter(|call| call.what == "capture")
        .map(|call| (call.thread, call.stream))
        .collect();
    let pair = |thread: &str, stream: &str| (thread.to_string(), stream.to_string());
    let own = [
        pair("engine", "chain"),
        pair("lane1", "lane1"),
        pair("lane2", "lane2"),
    ];
    assert_eq!(captures, BTreeSet::from(own));
}

/// Lane keys are never speculated or chosen as yield-away targets.
#[test]
fn invariant_11_nothing_of_a_lane_is_speculated_or_yielded_to() {
    let rig = Rig::start(RigConfig::default());
    rig.device.log();
    let (chain, lane) = (rig.device.gate("chain"), rig.device.gate("lane1"));
    chain.close();
    lane.close();
    let request = FakeRequest::new(1, 30);
    let mut stream = rig.submit("a", request.clone());
    // The first item is in flight and the second staged: the chain speculates that far, the lane does not.
    wait_until_staged(&rig);
    assert_eq!(lane.held(), 0);
    chain.open();
    lane.open();
    rig.collect(&mut stream).assert_finished(&request);
    rig.wait_until_empty();
    // The engine thread's only calls on a lane are zeros, and a lane's thread knows no stream but its own.
    let strange = |call: &Call| match (call.thread.as_str(), call.stream.as_str()) {
        ("engine", "chain") | ("lane1", "lane1") => false,
        ("engine", "lane1") => call.what != "Zero",
        _ => true,
    };
    let calls = rig.device.calls();
    assert_eq!(calls.iter().find(|call| strange(call)), None);
}

/// The consumer of a chunk waits on the producer step's own event, never on "the whole chain stream".
#[test]
fn invariant_12_a_chunk_waits_for_its_producers_own_event() {
    let rig = Rig::start(RigConfig::default());
    rig.device.log();
    let request = FakeRequest::new(1, 3 * CAPACITY);
    let collected = rig.run("a", request.clone());
    collected.assert_finished(&request);
    rig.device.sanitizer.assert_clean();
    let calls = rig.device.calls();
    let made: Vec<_> = calls
        .iter()
        .filter(|call| call.stream == "chain")
        .filter_map(|call| call.what.strip_prefix("record "))
        .collect();
    let waited: Vec<_> = calls
        .iter()
        .filter(|call| call.stream == "lane1")
        .filter_map(|call| {
            call.what
                .strip_prefix("wait for landed ")?
                .strip_suffix(" on chain")
        })
        .collect();
    // Step k makes item k, so the window that ends with item k waits for the event of step k.
    let mut last_item = 0;
    let own: Vec<_> = collected
        .windows
        .iter()
        .map(|&n_items| {
            last_item += n_items as usize;
            made[last_item - 1]
        })
        .collect();
    assert_eq!(waited, own);

    // Without the wait the window reads ring rows that nothing orders behind their writing; without the
    // producer's the rows are written while nothing orders that behind their reading.
    for (stream, later) in [("lane1", "GatherRows"), ("chain", "ScatterRows")] {
        let rig = Rig::start(RigConfig::default());
        rig.device.faults(|faults| {
            faults.drop_waits_on.insert(stream.into());
        });
        rig.run("a", request.clone()).assert_failed(FailureKind::Internal);
        let reports = rig.device.sanitizer.reports();
        let report = reports
            .iter()
            .find(|report| report.rule == Rule::DeviceOrder && report.buffer == "ring of codes");
        let report = report.unwrap_or_else(|| panic!("no race on the ring: {reports:?}"));
        assert!(report.later.who.contains(later), "{report}");
        assert_eq!(report.later.stream.as_deref(), Some(stream));
    }
}
