//! Which windows a step of the codec takes, and when.

use crate::support::*;

/// Windows by policy: the first, the ramp, steady ones, and what is left at the end.
#[test]
fn windows_follow_the_chunk_policy() {
    let rig = Rig::start(RigConfig::default());
    let collected = rig.run("a", FakeRequest::new(1, 13));
    assert_eq!(collected.windows, [1, 2, 4, 4, 2]);
    let mut other = submission("b", FakeRequest::new(1, 13));
    other.chunk = Some(laneway_plan::declaration::ChunkPolicy {
        first: 3,
        ramp: vec![],
        steady: 8,
    });
    let mut stream = rig.handle.submit(other).unwrap();
    assert_eq!(rig.collect(&mut stream).windows, [3, 8, 2]);
}

/// Two who have sound enough share the lane's steps, though their windows are full at different times; with next to none
/// left each window runs as soon as it is full.
#[test]
fn windows_gather_on_a_lane_while_there_is_sound_left() {
    let steps_of_codec = |playback_hz| {
        let rig = Rig::start(RigConfig {
            playback_hz,
            ..RigConfig::default()
        });
        let chain = rig.device.gate("chain");
        chain.close();
        let made = || rig.steps("talker_prefill") + rig.steps("talker_decode");
        let advance = |steps| {
            for _ in 0..steps {
                let next = made() + 1;
                eventually("a step is on its way", || chain.held() > 0);
                chain.allow(1);
                eventually("it landed", || made() == next);
            }
        };
        let submit = |seed: u32| {
            let mut request = submission(&seed.to_string(), FakeRequest::new(seed, 41));
            let (first, ramp, steady) = (1, vec![], 4);
            request.chunk = Some(laneway_plan::declaration::ChunkPolicy { first, ramp, steady });
            rig.handle.submit(request).unwrap()
        };
        let mut streams = vec![submit(1)];
        advance(3);
        streams.push(submit(2));
        // The second is two frames behind, and a prefill.
        advance(30);
        let steps = rig.steps("codec_chunk");
        chain.open();
        for (stream, seed) in streams.iter_mut().zip([1, 2]) {
            rig.collect(stream).assert_samples(&FakeRequest::new(seed, 41));
        }
        steps
    };
    let (in_time, in_a_hurry) = (steps_of_codec(1), steps_of_codec(1_000_000_000));
    // Seven windows of each, and the two first ones.
    assert!(in_time <= 10, "{in_time} steps while there is time");
    assert!(in_a_hurry >= 13, "{in_a_hurry} steps while there is none");
}

/// Where items cost time, a step takes no more windows than a listener can wait for.
#[test]
fn a_costly_step_takes_few_windows() {
    let rig = Rig::start(RigConfig::default());
    let (chain, lane) = (rig.device.gate("chain"), rig.device.gate("lane1"));
    let submit = |seed: u32, first, steady| {
        let mut wide = submission(&seed.to_string(), FakeRequest::new(seed, 9));
        let ramp = vec![];
        wide.chunk = Some(laneway_plan::declaration::ChunkPolicy { first, ramp, steady });
        rig.handle.submit(wide).unwrap()
    };
    // A window of one item takes as long as it takes, one of eight 400 ms more: 50 ms an item.
    chain.close();
    let mut streams = vec![submit(1, 1, 8)];
    eventually("the first item is on its way", || chain.held() > 0);
    chain.allow(1);
    eventually("its window landed", || rig.steps("codec_chunk") == 1);
    lane.close();
    chain.open();
    eventually("the window of eight runs", || lane.held() == 1);
    std::thread::sleep(std::time::Duration::from_millis(400));
    // Behind it four windows are ready.
    streams.extend((2..6).map(|seed| submit(seed, 4, 4)));
    eventually("all items are made", || {
        let walks = rig.stats().walks;
        let rows = walks
            .iter()
            .filter(|walk| &*walk.node == "Talker")
            .map(|walk| walk.rows);
        rows.sum::<u64>() >= 5 * 9
    });
    lane.allow(1);
    eventually("the next step runs", || lane.held() == 1);
    lane.open();
    let landed: Vec<_> = streams.iter_mut().map(|stream| rig.collect(stream)).collect();
    for (seed, collected) in (1..).zip(&landed) {
        collected.assert_samples(&FakeRequest::new(seed, 9));
    }
    let stats = rig.stats();
    let codec = stats
        .walks
        .iter()
        .find(|walk| &*walk.walk == "codec_chunk")
        .unwrap();
    // Two windows of the first, then those of the others (4 + 4 + 1 items), one by one to begin with.
    assert_eq!(codec.rows, 2 + 4 * 3);
    assert!(codec.steps > 2 + 3, "{codec:?}");
}
