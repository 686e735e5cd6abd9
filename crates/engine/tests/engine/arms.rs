//! A node that moves between the chain and its lane while everything runs.

use laneway_engine::{AutoConfig, AutoPolicy, Engine, FailureKind};

use crate::support::model::CHUNK;
use crate::support::*;

fn moving(policy: AutoPolicy) -> RigConfig {
    RigConfig {
        auto: Some((
            "Codec",
            AutoConfig {
                sms: Vec::new(),
                policy,
            },
        )),
        ..RigConfig::default()
    }
}

fn flips(rig: &Rig) -> u64 {
    rig.stats().autos[0].flips.iter().map(|flip| flip.count).sum()
}

/// Every output is what the request makes alone, and the sanitizer finds every access ordered.
fn check(config: RigConfig, requests: &[FakeRequest], least_flips: u64) {
    let rig = Rig::start(config);
    let submitted = requests.iter().enumerate();
    let mut streams: Vec<_> = submitted
        .map(|(index, request)| rig.submit(&index.to_string(), request.clone()))
        .collect();
    for (stream, request) in streams.iter_mut().zip(requests) {
        rig.collect(stream).assert_finished(request);
    }
    assert!(flips(&rig) >= least_flips, "{:?}", rig.stats().autos);
    rig.wait_until_empty();
    assert!(rig.device.second_enters().is_empty());
    rig.device.sanitizer.assert_clean();
}

#[test]
fn forced_flips_change_no_byte() {
    let requests: Vec<_> = (0..8).map(|seed| FakeRequest::new(seed, 20 + 3 * seed)).collect();
    // The longest alone has a dozen windows; how many share a step depends on who is ready when.
    for (every, least) in [(1, 6), (2, 4), (5, 2)] {
        check(moving(AutoPolicy::Cycle(every)), &requests, least);
    }
}

#[test]
fn forced_flips_change_no_byte_of_a_clone() {
    let requests: Vec<_> = (0..6)
        .map(|seed| FakeRequest {
            reference: 3 + 5 * (seed % 3),
            ..FakeRequest::new(seed, 24)
        })
        .collect();
    for ref_lane in [1, 2] {
        let config = RigConfig {
            nodes: vec![("Talker", 0), ("Codec", 1), ("RefEncoder", ref_lane)],
            ..moving(AutoPolicy::Cycle(1))
        };
        check(config, &requests, 3);
    }
}

/// Two slots for all, handed out again as soon as they were zeroed, on whichever stream that was.
#[test]
fn a_slot_that_was_zeroed_on_one_arm_is_clean_on_another() {
    let requests: Vec<_> = (0..12).map(|seed| FakeRequest::new(seed, 9)).collect();
    let config = RigConfig {
        codec_slots: 2,
        ..moving(AutoPolicy::Cycle(1))
    };
    check(config, &requests, 8);
}

/// What is in flight lands before the node moves, and the chain goes on meanwhile.
#[test]
fn a_node_in_flight_is_waited_for_without_holding_up_the_chain() {
    let rig = Rig::start(moving(AutoPolicy::Cycle(1)));
    let lane = rig.device.gate("lane1");
    lane.close();
    let request = FakeRequest::new(5, 40);
    let mut stream = rig.submit("a", request.clone());
    // The first window hangs on the lane; the Talker fills its ring behind it.
    eventually("the lane holds a window", || lane.held() == 1);
    eventually("the chain goes on", || rig.steps("talker_decode") >= 8);
    assert_eq!(flips(&rig), 0);
    lane.open();
    rig.collect(&mut stream).assert_finished(&request);
    assert!(flips(&rig) > 2);
    let walks = rig.stats().walks;
    let autos = &rig.stats().autos[0];
    let on_chain = autos.in_force == 0;
    let chunk = walks.iter().find(|walk| &*walk.walk == "codec_chunk");
    assert_eq!(
        chunk.map(|walk| walk.lane == 0),
        Some(on_chain),
        "the walk is told where it is"
    );
}

#[test]
fn a_step_that_fails_takes_only_its_rows_along_on_any_arm() {
    for step in 0..4 {
        let rig = Rig::start(moving(AutoPolicy::Cycle(1)));
        let broken = FakeRequest {
            fault: Some(Fault::Outcome(CHUNK, step)),
            ..FakeRequest::new(1, 24)
        };
        let sound = FakeRequest::new(2, 24);
        let mut streams = [rig.submit("broken", broken), rig.submit("sound", sound.clone())];
        rig.collect(&mut streams[0]).assert_failed(FailureKind::Internal);
        rig.collect(&mut streams[1]).assert_finished(&sound);
        rig.wait_until_empty();
        rig.device.sanitizer.assert_clean();
    }
}

#[test]
fn a_measured_node_starts_on_its_lane_and_tries_the_chain() {
    let rig = Rig::start(moving(AutoPolicy::Measured));
    let autos = rig.stats().autos;
    assert_eq!(
        autos[0].arms.iter().map(|arm| &**arm).collect::<Vec<_>>(),
        ["chain", "lane1"]
    );
    assert_eq!(autos[0].in_force, 1);
    for round in 0..40 {
        let requests: Vec<_> = (0..8)
            .map(|seed| FakeRequest::new(round * 8 + seed, 60))
            .collect();
        let submit = |request: &FakeRequest| rig.submit(&request.seed.to_string(), request.clone());
        let mut streams: Vec<_> = requests.iter().map(submit).collect();
        for (stream, request) in streams.iter_mut().zip(&requests) {
            rig.collect(stream).assert_finished(request);
        }
        if flips(&rig) > 0 {
            break;
        }
    }
    let autos = rig.stats().autos;
    let tried = autos[0].flips.iter().find(|flip| flip.reason == "try");
    assert!(tried.is_some_and(|flip| flip.to == 0), "{autos:?}");
    rig.device.sanitizer.assert_clean();
}

#[test]
fn what_a_node_cannot_choose_among_is_refused() {
    let refusal = |lane: usize, sms: &[u32]| {
        let config = RigConfig {
            nodes: vec![("Talker", 0), ("Codec", lane)],
            auto: Some((
                "Codec",
                AutoConfig {
                    sms: sms.into(),
                    policy: AutoPolicy::Measured,
                },
            )),
            ..RigConfig::default()
        };
        let started = Engine::start(support_config(config));
        started.map(drop).expect_err("it is refused").to_string()
    };
    let text = refusal(0, &[]);
    assert!(text.contains("Codec") && text.contains("lane 0"), "{text}");
    let text = refusal(1, &[0, 16, 16]);
    assert!(text.contains("16 is named twice"), "{text}");
    // The CPU device has no partitions.
    let text = refusal(1, &[0, 16]);
    assert!(text.contains("lane1-sms16"), "{text}");
}

fn support_config(config: RigConfig) -> laneway_engine::EngineConfig {
    engine_config(FakeDevice::new(), FakeModel::new(), &config)
}
