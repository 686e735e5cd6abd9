//! Random programs: the sanitizer's verdict on every call against happens-before by search over all calls.

use std::collections::HashSet;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use proptest::prelude::*;
use proptest::sample::Index;
use proptest::strategy::ValueTree;

use crate::op::{Copy, Zero};
use crate::{
    Buffer, BufferSpec, DType, Device, DeviceError, Event, Op, Place, Stream, StreamConfig, Touches, View,
    testing,
};

const LONG: Duration = Duration::from_secs(60);
const STREAMS: usize = 3;
const BUFFERS: usize = 3;
const LEN: usize = 6;

/// A range of one of the buffers; the last buffer is pinned.
#[derive(Debug, Clone)]
struct Part {
    buffer: usize,
    range: Range<usize>,
}

#[derive(Debug, Clone)]
enum Operation {
    Copy(Part, Part),
    Zero(Part),
}

#[derive(Debug, Clone)]
enum Call {
    Launch(usize, Operation),
    Replay(usize, Vec<Operation>),
    Record(usize),
    Wait(usize, Index),
    Synchronize(Index),
    Poll(Index),
    HostRead(Range<usize>),
    HostWrite(Range<usize>),
    Replace(usize),
}

fn range() -> impl Strategy<Value = Range<usize>> {
    (0..LEN, 1..=LEN).prop_map(|(start, len)| start..(start + len).min(LEN))
}

fn part() -> impl Strategy<Value = Part> {
    (0..BUFFERS, range()).prop_map(|(buffer, range)| Part { buffer, range })
}

fn operation() -> impl Strategy<Value = Operation> {
    prop_oneof![
        part().prop_map(Operation::Zero),
        // A copy of equal lengths that do not overlap: from one buffer to another.
        (0..BUFFERS, 1..BUFFERS, 0..LEN, 0..LEN, 1..=LEN).prop_map(|(from, step, a, b, len)| {
            let len = len.min(LEN - a).min(LEN - b);
            let part = |buffer, start| Part {
                buffer,
                range: start..start + len,
            };
            Operation::Copy(part(from, a), part((from + step) % BUFFERS, b))
        }),
    ]
}

fn call() -> impl Strategy<Value = Call> {
    let stream = || 0..STREAMS;
    prop_oneof![
        6 => (stream(), operation()).prop_map(|(s, op)| Call::Launch(s, op)),
        2 => (stream(), prop::collection::vec(operation(), 0..4)).prop_map(|(s, ops)| Call::Replay(s, ops)),
        5 => stream().prop_map(Call::Record),
        5 => (stream(), any::<Index>()).prop_map(|(s, event)| Call::Wait(s, event)),
        4 => any::<Index>().prop_map(Call::Synchronize),
        1 => any::<Index>().prop_map(Call::Poll),
        1 => range().prop_map(Call::HostRead),
        1 => range().prop_map(Call::HostWrite),
        2 => stream().prop_map(Call::Replace),
    ]
}

/// One use of a range by an accepted operation.
struct Past {
    node: usize,
    part: Part,
    writes: bool,
}

/// Happens-before as a plain graph of everything that was called.
#[derive(Default)]
struct Oracle {
    /// For each node, those directly before it.
    before: Vec<Vec<usize>>,
    past: Vec<Past>,
    /// Last node of each stream.
    last: [Option<usize>; STREAMS],
    /// Events: the node of their record.
    events: Vec<usize>,
    /// Nodes that the host saw complete.
    observed: HashSet<usize>,
    /// Ends of dropped streams.
    ends: Vec<usize>,
}

impl Oracle {
    fn node(&mut self, before: Vec<usize>) -> usize {
        self.before.push(before);
        self.before.len() - 1
    }

    /// Everything before `node`, itself included.
    fn ancestors(&self, node: usize) -> HashSet<usize> {
        let mut seen = HashSet::new();
        let mut stack = vec![node];
        while let Some(node) = stack.pop() {
            if seen.insert(node) {
                stack.extend(&self.before[node]);
            }
        }
        seen
    }

    /// What the next thing on `stream` comes behind: the stream's last, and dropped streams that the host
    /// has waited for.
    fn behind(&self, stream: usize) -> Vec<usize> {
        let is_over = |end: &&usize| {
            let ancestors = self.ancestors(**end);
            self.past
                .iter()
                .all(|past| !ancestors.contains(&past.node) || self.observed.contains(&past.node))
        };
        self.last[stream]
            .iter()
            .chain(self.ends.iter().filter(is_over))
            .copied()
            .collect()
    }

    fn push(&mut self, stream: usize, extra: Option<usize>) -> usize {
        let mut before = self.behind(stream);
        before.extend(extra);
        let node = self.node(before);
        self.last[stream] = Some(node);
        node
    }

    fn observe(&mut self, node: usize) {
        let ancestors = self.ancestors(node);
        self.observed.extend(ancestors);
    }

    fn conflicts(&self, part: &Part, writes: bool, ordered: &HashSet<usize>) -> bool {
        self.past.iter().any(|past| {
            past.part.buffer == part.buffer
                && past.part.range.start < part.range.end
                && part.range.start < past.part.range.end
                && (writes || past.writes)
                && !ordered.contains(&past.node)
        })
    }

    /// Whether a launch of `ops` races; takes it in when not.
    fn launch(&mut self, stream: usize, ops: &[Operation]) -> bool {
        let uses: Vec<(&Part, bool)> = ops
            .iter()
            .flat_map(|op| match op {
                Operation::Copy(src, dst) => vec![(src, false), (dst, true)],
                Operation::Zero(dst) => vec![(dst, true)],
            })
            .collect();
        let ordered: HashSet<usize> = self
            .behind(stream)
            .iter()
            .flat_map(|&node| self.ancestors(node))
            .collect();
        if uses
            .iter()
            .any(|(part, writes)| self.conflicts(part, *writes, &ordered))
        {
            return true;
        }
        let node = self.push(stream, None);
        self.past.extend(uses.into_iter().map(|(part, writes)| Past {
            node,
            part: part.clone(),
            writes,
        }));
        false
    }
}

struct Machine {
    device: Arc<dyn Device>,
    buffers: Vec<Buffer>,
    streams: Vec<Arc<dyn Stream>>,
    events: Vec<Event>,
}

impl Machine {
    fn new() -> Self {
        let (device, _sanitizer) = testing::cpu();
        let buffer = |i| {
            device.alloc(BufferSpec {
                name: format!("buffer{i}"),
                dtype: DType::I32,
                len: LEN,
                place: if i + 1 == BUFFERS {
                    Place::Pinned
                } else {
                    Place::Device
                },
            })
        };
        Self {
            buffers: (0..BUFFERS).map(|i| buffer(i).unwrap()).collect(),
            streams: (0..STREAMS).map(|i| stream(&device, i)).collect(),
            events: Vec::new(),
            device,
        }
    }

    fn view(&self, part: &Part) -> View {
        self.buffers[part.buffer].slice(part.range.start, part.range.len())
    }

    fn op(&self, operation: &Operation) -> Op {
        match operation {
            Operation::Copy(src, dst) => Copy {
                src: self.view(src),
                dst: self.view(dst),
            }
            .into(),
            Operation::Zero(dst) => Zero { dst: self.view(dst) }.into(),
        }
    }
}

fn stream(device: &Arc<dyn Device>, i: usize) -> Arc<dyn Stream> {
    let config = StreamConfig {
        name: format!("stream{i}"),
        priority: Default::default(),
        partition_sms: None,
    };
    device.create_stream(config).unwrap()
}

fn is_race(outcome: Result<(), DeviceError>) -> bool {
    match outcome {
        Ok(()) => false,
        Err(DeviceError::Race(_)) => true,
        Err(other) => panic!("{other}"),
    }
}

/// Make every call on both and compare what each says of it; gives the number of races.
fn compare(calls: &[Call]) -> Result<usize, TestCaseError> {
    let mut machine = Machine::new();
    let mut oracle = Oracle::default();
    let mut races = 0;
    for (i, call) in calls.iter().enumerate() {
        let picked = |event: &Index| match oracle.events.len() {
            0 => None,
            len => Some(event.index(len)),
        };
        let (found, expected) = match call {
            Call::Launch(s, op) => (
                is_race(machine.streams[*s].launch(&machine.op(op), &Touches::none())),
                oracle.launch(*s, std::slice::from_ref(op)),
            ),
            Call::Replay(s, ops) => {
                let mut build = |capture: &dyn Stream| {
                    ops.iter()
                        .try_for_each(|op| capture.launch(&machine.op(op), &Touches::none()))
                };
                let graph = machine.streams[*s].capture(&mut build).unwrap();
                (
                    is_race(machine.streams[*s].replay(&graph, &Touches::none())),
                    oracle.launch(*s, ops),
                )
            }
            Call::Record(s) => {
                machine.events.push(machine.streams[*s].record().unwrap());
                let node = oracle.push(*s, None);
                oracle.events.push(node);
                continue;
            }
            Call::Wait(s, event) => {
                if let Some(event) = picked(event) {
                    machine.streams[*s].wait(&machine.events[event]).unwrap();
                    oracle.push(*s, Some(oracle.events[event]));
                }
                continue;
            }
            Call::Synchronize(event) => {
                if let Some(event) = picked(event) {
                    machine.events[event].synchronize(LONG).unwrap();
                    oracle.observe(oracle.events[event]);
                }
                continue;
            }
            Call::Poll(event) => {
                if let Some(event) = picked(event).filter(|&event| machine.events[event].is_done()) {
                    oracle.observe(oracle.events[event]);
                }
                continue;
            }
            Call::HostRead(range) | Call::HostWrite(range) => {
                let writes = matches!(call, Call::HostWrite(_));
                let part = Part {
                    buffer: BUFFERS - 1,
                    range: range.clone(),
                };
                let view = machine.view(&part);
                let mut bytes = [0u8; 4 * LEN];
                let bytes = &mut bytes[..4 * range.len()];
                let outcome = match writes {
                    true => machine.device.host_write(&view, bytes),
                    false => machine.device.host_read(&view, bytes),
                };
                (
                    is_race(outcome),
                    oracle.conflicts(&part, writes, &oracle.observed),
                )
            }
            Call::Replace(s) => {
                machine.streams[*s] = stream(&machine.device, *s);
                if let Some(end) = oracle.last[*s].take() {
                    oracle.ends.push(end);
                }
                continue;
            }
        };
        prop_assert_eq!(found, expected, "call {} of {:#?}", i, calls);
        races += usize::from(found);
    }
    Ok(races)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn verdicts_are_those_of_the_oracle(calls in prop::collection::vec(call(), 1..60)) {
        compare(&calls)?;
    }
}

/// Random programs must hold both verdicts, or the comparison above says little.
#[test]
fn random_programs_hold_races_and_clean_calls() {
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    let strategy = prop::collection::vec(call(), 60);
    let races: Vec<usize> = (0..20)
        .map(|_| compare(&strategy.new_tree(&mut runner).unwrap().current()).unwrap())
        .collect();
    assert!(
        races.iter().any(|&n| n > 0) && races.iter().any(|&n| n < 20),
        "{races:?}"
    );
}
