//! A chain that produces items into an edge ring and a lane that consumes them, with faults put in.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use crate::op::{Copy, GatherRows, ScatterRows, Zero};
use crate::sanitize::{Report, Rule};
use crate::{
    Buffer, BufferSpec, DType, Device, Event, Graph, Op, Place, Priority, Result, Stream, StreamConfig,
    Touches, testing,
};

const LONG: Duration = Duration::from_secs(60);
/// Items of the edge ring and words of an item.
const CAPACITY: usize = 4;
const WORDS: usize = 8;
/// State slots and words of a slot.
const SLOTS: usize = 3;
const STATE: usize = 8;
/// Depth of the chain's pinned staging ring.
const STAGES: usize = 2;
/// Steps that the chain is ahead of the lane.
const AHEAD: usize = 2;

/// What is wrong with the program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    None,
    NoWaitForProducer,
    NoWaitForConsumer,
    ZeroOnChain,
    StagingReusedEarly,
    ResultReadEarly,
    NoTouchOfState,
    StateTouchedReadOnly,
}

struct Program {
    fault: Fault,
    device: Arc<dyn Device>,
    chain: Arc<dyn Stream>,
    lane: Arc<dyn Stream>,
    /// Pinned, `[STAGES, WORDS + 1]`: an item and the ring row that it goes to.
    staging: Buffer,
    item: Buffer,
    ring: Buffer,
    /// Pinned and device: ring row and slot of the lane's step.
    lane_staging: Buffer,
    lane_index: Buffer,
    window: Buffer,
    state: Buffer,
    result: Buffer,
    /// The lane's step as a graph, when the program replays instead of launching.
    graph: Option<Graph>,
    staged: Vec<Event>,
    consumed: Vec<Event>,
}

impl Program {
    fn new(fault: Fault, device: Arc<dyn Device>, graphs: bool) -> Self {
        let stream = |name: &str, priority| {
            device
                .create_stream(StreamConfig {
                    name: name.to_owned(),
                    priority,
                    partition_sms: None,
                })
                .unwrap()
        };
        let buffer = |name: &str, len, place| {
            device
                .alloc(BufferSpec {
                    name: name.to_owned(),
                    dtype: DType::I32,
                    len,
                    place,
                })
                .unwrap()
        };
        let mut program = Self {
            fault,
            chain: stream("chain", Priority::High),
            lane: stream("lane1", Priority::Low),
            staging: buffer("staging", STAGES * (WORDS + 1), Place::Pinned),
            item: buffer("item", WORDS + 1, Place::Device),
            ring: buffer("ring", CAPACITY * WORDS, Place::Device),
            lane_staging: buffer("lane_staging", 2, Place::Pinned),
            lane_index: buffer("lane_index", 2, Place::Device),
            window: buffer("window", WORDS, Place::Device),
            state: buffer("state", SLOTS * STATE, Place::Device),
            result: buffer("result", STATE, Place::Pinned),
            device,
            graph: None,
            staged: Vec::new(),
            consumed: Vec::new(),
        };
        if graphs {
            let lane = Arc::clone(&program.lane);
            let ops = program.lane_step();
            let mut build =
                |capture: &dyn Stream| ops.iter().try_for_each(|op| capture.launch(op, &Touches::none()));
            program.graph = Some(lane.capture(&mut build).unwrap());
        }
        program
    }

    fn write(&self, buffer: &Buffer, start: usize, values: &[i32]) -> Result<()> {
        let view = buffer.slice(start, values.len());
        self.device.host_write(&view, bytemuck::cast_slice(values))
    }

    /// The chain makes item `step` and puts it into the ring.
    fn produce(&mut self, step: usize) -> Result<Event> {
        let row = step % CAPACITY;
        let start = step % STAGES * (WORDS + 1);
        if step >= STAGES && self.fault != Fault::StagingReusedEarly {
            self.staged[step - STAGES].synchronize(LONG)?;
        }
        let mut values = [step as i32; WORDS + 1];
        values[WORDS] = row as i32;
        self.write(&self.staging, start, &values)?;
        let copy = Copy {
            src: self.staging.slice(start, WORDS + 1),
            dst: self.item.view(),
        };
        self.chain.launch(&copy.into(), &Touches::none())?;
        self.staged.push(self.chain.record()?);
        if step >= CAPACITY && self.fault != Fault::NoWaitForConsumer {
            self.chain.wait(&self.consumed[step - CAPACITY])?;
        }
        let mut touches = Touches::none();
        touches.write(self.ring.slice(row * WORDS, WORDS));
        let scatter = ScatterRows {
            src: self.item.slice(0, WORDS),
            index: self.item.slice(WORDS, 1),
            rows: 1,
            width: WORDS,
            dst: self.ring.view(),
        };
        self.chain.launch(&scatter.into(), &touches)?;
        self.chain.record()
    }

    fn lane_step(&self) -> [Op; 5] {
        let gather = |src: &Buffer, index, out: &Buffer| GatherRows {
            src: src.view(),
            indirect: true,
            index: self.lane_index.slice(index, 1),
            rows: 1,
            width: WORDS,
            out: out.view(),
        };
        [
            Copy {
                src: self.lane_staging.view(),
                dst: self.lane_index.view(),
            }
            .into(),
            gather(&self.ring, 0, &self.window).into(),
            ScatterRows {
                src: self.window.view(),
                index: self.lane_index.slice(1, 1),
                rows: 1,
                width: STATE,
                dst: self.state.view(),
            }
            .into(),
            gather(&self.state, 1, &self.window).into(),
            Copy {
                src: self.window.view(),
                dst: self.result.view(),
            }
            .into(),
        ]
    }

    /// The lane reads item `step` from the ring through the state of a slot, and the host takes the result.
    fn consume(&mut self, step: usize, produced: &Event) -> Result<[i32; STATE]> {
        let (row, slot) = (step % CAPACITY, step % SLOTS);
        self.write(&self.lane_staging, 0, &[row as i32, slot as i32])?;
        if self.fault != Fault::NoWaitForProducer {
            self.lane.wait(produced)?;
        }
        let mut touches = Touches::none();
        touches.read(self.ring.slice(row * WORDS, WORDS));
        let state = self.state.slice(slot * STATE, STATE);
        match self.fault {
            Fault::NoTouchOfState => {}
            Fault::StateTouchedReadOnly => touches.read(state.clone()),
            _ => touches.write(state.clone()),
        }
        match &self.graph {
            Some(graph) => self.lane.replay(graph, &touches)?,
            None => self
                .lane_step()
                .iter()
                .try_for_each(|op| self.lane.launch(op, &touches))?,
        }
        let done = self.lane.record()?;
        let mut result = [0; STATE];
        if self.fault != Fault::ResultReadEarly {
            done.synchronize(LONG)?;
        }
        self.device
            .host_read(&self.result.view(), bytemuck::cast_slice_mut(&mut result))?;
        self.consumed.push(done);
        // The slot is released after each step.
        let stream = if self.fault == Fault::ZeroOnChain {
            &self.chain
        } else {
            &self.lane
        };
        stream.launch(&Zero { dst: state }.into(), &Touches::none())?;
        Ok(result)
    }

    fn consume_next(&mut self, produced: &mut VecDeque<(usize, Event)>) -> Result<()> {
        let Some((step, event)) = produced.pop_front() else {
            return Ok(());
        };
        assert_eq!(self.consume(step, &event)?, [step as i32; STATE]);
        Ok(())
    }

    fn run(&mut self, steps: std::ops::Range<usize>) -> Result<()> {
        let mut produced = VecDeque::new();
        for step in steps {
            produced.push_back((step, self.produce(step)?));
            if produced.len() > AHEAD {
                self.consume_next(&mut produced)?;
            }
        }
        while !produced.is_empty() {
            self.consume_next(&mut produced)?;
        }
        Ok(())
    }
}

/// The program with `fault` in it must be refused with one report, in both ways of launching.
fn check(fault: Fault, expected: &str) {
    for graphs in [false, true] {
        let (device, sanitizer) = testing::cpu();
        let outcome = Program::new(fault, device, graphs).run(0..20);
        let error = outcome.expect_err("the fault must be found").to_string();
        let reports = sanitizer.reports();
        let [report] = &reports[..] else {
            panic!("one report, not {reports:?}")
        };
        assert!(error.contains(&report.missing), "{error} is not {report}");
        assert_eq!(normal(report), expected, "{fault:?} with graphs: {graphs}");
    }
}

/// The report without the operation's number in a graph.
fn normal(report: &Report) -> String {
    let text = report.to_string();
    let (mut out, mut rest) = (String::new(), text.as_str());
    while let Some((before, after)) = rest.split_once(", operation ") {
        out += before;
        rest = after.split_once(" of a graph").unwrap().1;
    }
    out + rest
}

#[test]
fn the_right_program_is_clean_and_its_books_stay_bounded() {
    for graphs in [false, true] {
        let (device, sanitizer) = testing::cpu();
        let mut program = Program::new(Fault::None, device, graphs);
        program.run(0..24).unwrap();
        let size = sanitizer.size();
        program.run(24..1200).unwrap();
        sanitizer.assert_clean();
        assert_eq!(sanitizer.size(), size);
    }
}

#[test]
fn a_missing_wait_for_the_producer_is_found() {
    check(
        Fault::NoWaitForProducer,
        "GatherRows (src) on stream `lane1` reads ring[0..8], which ScatterRows (dst) on stream `chain` writes, \
         and nothing orders the two: stream `lane1` never waited for an event recorded on `chain` behind this \
         ScatterRows (it knows of no event of that stream)",
    );
}

#[test]
fn a_missing_wait_for_the_consumer_is_found() {
    check(
        Fault::NoWaitForConsumer,
        "ScatterRows (dst) on stream `chain` writes ring[0..8], which GatherRows (src) on stream `lane1` reads, \
         and nothing orders the two: stream `chain` never waited for an event recorded on `lane1` behind this \
         GatherRows (it knows of no event of that stream)",
    );
}

#[test]
fn a_slot_zeroed_on_the_wrong_stream_is_found() {
    check(
        Fault::ZeroOnChain,
        "Zero (dst) on stream `chain` writes state[0..8], which ScatterRows (dst) on stream `lane1` writes, and \
         nothing orders the two: stream `chain` never waited for an event recorded on `lane1` behind this \
         ScatterRows (it knows of no event of that stream)",
    );
}

#[test]
fn a_staging_buffer_reused_early_is_found() {
    check(
        Fault::StagingReusedEarly,
        "host_write writes staging[0..9], which Copy (src) on stream `chain` reads, and nothing orders the two: \
         the host never synchronised an event recorded on `chain` behind this Copy (it knows of no event of \
         that stream)",
    );
}

#[test]
fn a_result_read_before_it_is_there_is_found() {
    check(
        Fault::ResultReadEarly,
        "host_read reads result[0..8], which Copy (dst) on stream `lane1` writes, and nothing orders the two: \
         the host never synchronised an event recorded on `lane1` behind this Copy (it knows of no event of \
         that stream)",
    );
}

#[test]
fn a_missing_touch_is_found() {
    let expected = "ScatterRows (dst) on stream `lane1` writes state[0..24]: dst reaches pool `state` through an \
                    index, but the step's touches name no range of it to write: add one with Touches::write (an \
                    empty range when the step reaches nothing)";
    check(Fault::NoTouchOfState, expected);
    check(Fault::StateTouchedReadOnly, expected);
}

#[test]
fn a_wait_for_too_early_an_event_says_by_how_much() {
    let (device, sanitizer) = testing::cpu();
    let mut program = Program::new(Fault::None, device, false);
    let early = program.produce(0).unwrap();
    program.produce(1).unwrap();
    program.consume(0, &early).unwrap();
    let error = program.consume(1, &early).unwrap_err().to_string();
    assert!(
        error.contains(
            "`chain` behind this ScatterRows (the newest it knows of stands 2 operations too early)"
        ),
        "{error}"
    );
    assert_eq!(sanitizer.reports()[0].rule, Rule::DeviceOrder);
}

#[test]
fn freed_buffers_and_dropped_streams_leave_the_books() {
    let (device, sanitizer) = testing::cpu();
    let rounds = |n: usize| {
        (0..n)
            .map(|_| {
                let mut program = Program::new(Fault::None, Arc::clone(&device), false);
                program.run(0..8).unwrap();
                let last = [&program.chain, &program.lane].map(|stream| stream.record().unwrap());
                drop(program);
                for event in last {
                    event.synchronize(LONG).unwrap();
                }
                sanitizer.size()
            })
            .max()
    };
    let before = rounds(50);
    assert!(rounds(150) <= before, "books grow past {before:?}");
    sanitizer.assert_clean();
}

#[test]
fn events_of_another_device_are_refused() {
    let (device, _sanitizer) = testing::cpu();
    let program = Program::new(Fault::None, device, false);
    let (other, _other_sanitizer) = testing::cpu();
    let other = Program::new(Fault::None, other, false);
    // Both are sanitized, so only the books could tell; a bare device's event cannot be followed at all.
    let bare = crate::CpuDevice::new(crate::CpuConfig {
        memory_bytes: Some(0),
    })
    .unwrap();
    let bare = bare.create_stream(other.lane.config().clone()).unwrap();
    let error = program
        .lane
        .wait(&bare.record().unwrap())
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("was not recorded on a stream of this sanitized device"),
        "{error}"
    );
}
