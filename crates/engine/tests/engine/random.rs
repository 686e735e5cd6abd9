//! Whatever comes, stalls, fails and is cancelled, in whatever order the steps land: every request ends with
//! exactly one terminal event, nobody's memory shows in anybody else's output, and every account returns to
//! zero.

use laneway_engine::node::FinishReason;
use laneway_engine::{AutoConfig, AutoPolicy, FailureKind, Limits, RequestStream, SubmitError};
use proptest::prelude::*;

use crate::support::model::{CHUNK, DECODE, PREFILL, PRIME, REF_ENCODE};
use crate::support::*;

#[derive(Debug, Clone)]
enum Action {
    Submit(FakeRequest),
    Kill(prop::sample::Index),
    Stop(prop::sample::Index),
    Drop(prop::sample::Index),
    /// Take a few events, if there are any.
    Listen(prop::sample::Index, usize),
    /// Hold a stream's landings back, let some pass, or all.
    Close(usize),
    Allow(usize, u64),
    Open(usize),
}

const STREAMS: [&str; 3] = ["chain", "lane1", "lane2"];

fn fault() -> impl Strategy<Value = Option<Fault>> {
    let walk = prop::sample::select(vec![REF_ENCODE, PREFILL, DECODE, PRIME, CHUNK]);
    let fault = (walk, 0u32..6, 0..3).prop_map(|(walk, step, kind)| match kind {
        0 => Fault::Open(walk),
        1 => Fault::Plan(walk, step),
        _ => Fault::Outcome(walk, step),
    });
    prop::option::weighted(0.3, fault)
}

fn request() -> impl Strategy<Value = FakeRequest> {
    (
        0u32..1000,
        1u32..40,
        any::<bool>(),
        prop::sample::select(vec![0, 0, 3, 20]),
        fault(),
    )
        .prop_map(|(seed, frames, end_token, reference, fault)| FakeRequest {
            end_token,
            reference,
            fault,
            ..FakeRequest::new(seed, frames)
        })
}

fn action() -> impl Strategy<Value = Action> {
    let any_request = any::<prop::sample::Index>;
    prop_oneof![
        6 => request().prop_map(Action::Submit),
        1 => any_request().prop_map(Action::Kill),
        1 => any_request().prop_map(Action::Stop),
        1 => any_request().prop_map(Action::Drop),
        4 => (any_request(), 1usize..6).prop_map(|(index, n)| Action::Listen(index, n)),
        1 => (0..STREAMS.len()).prop_map(Action::Close),
        3 => (0..STREAMS.len(), 1u64..5).prop_map(|(stream, n)| Action::Allow(stream, n)),
        2 => (0..STREAMS.len()).prop_map(Action::Open),
    ]
}

struct Listener {
    stream: RequestStream,
    request: FakeRequest,
    collected: Collected,
    killed: bool,
    stopped: bool,
}

impl Listener {
    fn check(&self) {
        let Self {
            request, collected, ..
        } = self;
        assert_eq!(collected.terminals, 1);
        collected.assert_samples(request);
        match (&collected.finished, &collected.failed) {
            (Some((FinishReason::Stopped, stats)), None) => {
                assert!(self.stopped);
                assert_eq!(stats.items as usize, collected.samples.len(), "a stop flushes");
            }
            (Some(_), None) => collected.assert_finished(request),
            (None, Some(failure)) if failure.kind == FailureKind::Cancelled => assert!(self.killed),
            (None, Some(failure)) => {
                assert!(request.fault.is_some(), "{failure:?}");
                assert!(failure.message.starts_with("asked to fail"), "{failure:?}");
            }
            both => panic!("{both:?}"),
        }
    }
}

fn cycle(every: u32) -> AutoConfig {
    AutoConfig {
        sms: Vec::new(),
        policy: AutoPolicy::Cycle(every),
    }
}

fn play(config: RigConfig, actions: Vec<Action>) {
    let rig = Rig::start(config);
    let mut listeners: Vec<Listener> = Vec::new();
    for (number, action) in actions.into_iter().enumerate() {
        let index = |index: &prop::sample::Index, listeners: &[Listener]| {
            (!listeners.is_empty()).then(|| index.index(listeners.len()))
        };
        match &action {
            Action::Submit(request) => {
                match rig
                    .handle
                    .submit(submission(&number.to_string(), request.clone()))
                {
                    Ok(stream) => listeners.push(Listener {
                        stream,
                        request: request.clone(),
                        collected: Collected::default(),
                        killed: false,
                        stopped: false,
                    }),
                    Err(SubmitError::QueueFull { .. }) => {}
                    Err(other) => panic!("{other}"),
                }
            }
            Action::Kill(at) | Action::Stop(at) => {
                if let Some(at) = index(at, &listeners) {
                    let listener = &mut listeners[at];
                    if matches!(action, Action::Kill(_)) {
                        listener.stream.kill();
                        listener.killed = true;
                    } else {
                        listener.stream.stop();
                        listener.stopped = true;
                    }
                }
            }
            Action::Drop(at) => {
                if let Some(at) = index(at, &listeners) {
                    listeners.swap_remove(at);
                }
            }
            Action::Listen(at, n_events) => {
                if let Some(at) = index(at, &listeners) {
                    let listener = &mut listeners[at];
                    for event in (0..*n_events).map_while(|_| listener.stream.try_recv()) {
                        listener.collected.add(event);
                    }
                }
            }
            Action::Close(stream) => rig.device.gate(STREAMS[*stream]).close(),
            Action::Allow(stream, steps) => rig.device.gate(STREAMS[*stream]).allow(*steps),
            Action::Open(stream) => rig.device.gate(STREAMS[*stream]).open(),
        }
    }
    rig.device.open_all();
    // All at once: who is not listened to keeps its slots, and others may wait for those.
    eventually("every request ends", || {
        for listener in &mut listeners {
            while let Some(event) = listener.stream.try_recv() {
                listener.collected.add(event);
            }
        }
        listeners.iter().all(|listener| listener.collected.terminals == 1)
    });
    for listener in &listeners {
        listener.check();
    }
    rig.wait_until_empty();
    assert!(rig.device.second_enters().is_empty());
    rig.device.sanitizer.assert_clean();
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 48,
        max_shrink_iters: 200,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn every_request_ends_once_and_alone(
        actions in prop::collection::vec(action(), 1..60),
        lanes in prop::sample::select(vec![[1, 2], [1, 1], [0, 0], [0, 1]]),
        codec_slots in 1u32..5,
        pages in prop::sample::select(vec![16u32, 40]),
        max_rows in 1usize..5,
        output_events in 1usize..6,
        playback_hz in prop::sample::select(vec![1u32, 24_000]),
        moves in prop::sample::select(vec![None, Some(1u32), Some(3)]),
    ) {
        play(
            RigConfig {
                nodes: vec![("Talker", 0), ("Codec", lanes[0]), ("RefEncoder", lanes[1])],
                auto: moves.filter(|_| lanes[0] > 0).map(|every| ("Codec", cycle(every))),
                max_rows,
                pages,
                talker_slots: 4,
                codec_slots,
                playback_hz,
                limits: Limits {
                    max_running: 6,
                    max_queue: 12,
                    output_events,
                    ..RigConfig::default().limits
                },
            },
            actions,
        );
    }
}
