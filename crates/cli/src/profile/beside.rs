//! What replaying a frame's graph takes before, while and after a codec works beside it.
//!
//! A graph that has run beside other work must be as fast afterwards as it was before. This measures it on the graphs of
//! a real engine with the codec on a lane: the frame's graph again and again on the chain's stream, timed by the device.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::Context as _;
use laneway_cuda::bench::touches_of;
use laneway_device::{Device, Graph, Priority, Stream};
use laneway_models::qwen3_tts::Qwen3Tts;
use serde::Serialize;

use super::recorder::{Recorder, Replayed};
use super::{Arguments, speak, stages};
use crate::alone::{Alone, CodecLane};

/// Replays of a phase.
const REPLAYS: usize = 200;
/// Codec passes on their way at once: the next one waits on the device, not on the host.
const ON_THEIR_WAY: usize = 2;
const DEADLINE: Duration = Duration::from_secs(20);

/// One row of the table. Times are of one replay, in milliseconds.
#[derive(Debug, Serialize)]
pub(super) struct Beside {
    rows: usize,
    /// Multiprocessors of the codec's lane; 0 is all of them.
    sms: u32,
    before: Phase,
    during: Phase,
    after: Phase,
    /// Codec passes that ran during the second phase.
    codec_passes: usize,
}

#[derive(Debug, Serialize)]
struct Phase {
    median_ms: f64,
    p99_ms: f64,
}

impl Beside {
    pub(super) const HEAD: &'static str =
        "  codec on   before   during    after, ms a frame (p99)      after / before   codec passes";

    pub(super) fn row(&self) -> String {
        let on = match self.sms {
            0 => "all SMs".to_owned(),
            sms => format!("{sms} SMs"),
        };
        let phase = |phase: &Phase| format!("{:.3} ({:.3})", phase.median_ms, phase.p99_ms);
        format!(
            "  {on:<8} {}  {}  {}  {:.4}  {}",
            phase(&self.before),
            phase(&self.during),
            phase(&self.after),
            self.after.median_ms / self.before.median_ms,
            self.codec_passes,
        )
    }
}

/// Measure with a codec's lane of `sms` multiprocessors, 0 for no partition.
pub(super) fn measure(
    arguments: &Arguments,
    device: &Arc<dyn Device>,
    model: &Arc<Qwen3Tts>,
    rows: usize,
    sms: u32,
) -> anyhow::Result<Beside> {
    let recorder = Arc::new(Recorder::new(device.clone()));
    let alone = Alone {
        rows,
        frames: arguments.frames,
        codec_lane: Some(CodecLane {
            priority: Priority::Low,
            sms: (sms > 0).then_some(sms),
        }),
        buckets: vec![rows],
    };
    let (engine, handle) = alone.start(recorder.clone(), model)?;
    recorder.clear();
    speak(&handle, model, rows, arguments.frames)?;
    drop(engine);
    let replayed = recorder.replayed();
    let graph = |stage: &str| -> anyhow::Result<Replayed> {
        let found = stages(&replayed).into_iter().find(|(name, ..)| *name == stage);
        Ok(found
            .with_context(|| format!("no graph of the stage {stage} was replayed"))?
            .1
            .clone())
    };
    let (frame, codec) = (graph("frame")?, graph("codec")?);
    anyhow::ensure!(
        frame.stream.id() != codec.stream.id(),
        "the codec ran on the chain's stream"
    );
    phase(&*frame.stream, &frame.graph)?;
    let before = phase(&*frame.stream, &frame.graph)?;
    let (during, codec_passes) = beside(&codec, || phase(&*frame.stream, &frame.graph))?;
    let after = phase(&*frame.stream, &frame.graph)?;
    Ok(Beside {
        rows,
        sms,
        before,
        during,
        after,
        codec_passes,
    })
}

/// Run `work` while `codec` is replayed without a break; hands out how many of its passes landed meanwhile.
fn beside<T>(codec: &Replayed, work: impl FnOnce() -> anyhow::Result<T>) -> anyhow::Result<(T, usize)> {
    let (enough, passes) = (AtomicBool::new(false), AtomicUsize::new(0));
    let began = std::sync::Barrier::new(2);
    std::thread::scope(|scope| {
        let replaying = scope.spawn(|| -> anyhow::Result<()> {
            let touches = touches_of(&codec.graph.ops);
            let mut events = std::collections::VecDeque::new();
            let mut waiting = Some(&began);
            while !enough.load(Ordering::Acquire) {
                let event = codec
                    .stream
                    .replay(&codec.graph, &touches)
                    .and_then(|()| codec.stream.record());
                if let Some(began) = waiting.take() {
                    began.wait();
                }
                events.push_back(event?);
                if events.len() == ON_THEIR_WAY
                    && let Some(event) = events.pop_front()
                {
                    event.synchronize(DEADLINE)?;
                    passes.fetch_add(1, Ordering::Relaxed);
                }
            }
            events.iter().try_for_each(|event| event.synchronize(DEADLINE))?;
            Ok(())
        });
        began.wait();
        let done = work();
        let landed = passes.load(Ordering::Relaxed);
        enough.store(true, Ordering::Release);
        match replaying.join() {
            Ok(outcome) => outcome.context("replay the codec's graph")?,
            Err(_) => anyhow::bail!("the thread that replays the codec's graph panicked"),
        }
        Ok((done?, landed))
    })
}

/// Replay `graph` many times; each is timed by the device.
fn phase(stream: &dyn Stream, graph: &Graph) -> anyhow::Result<Phase> {
    let touches = touches_of(&graph.ops);
    let mut events = vec![stream.record_timed()?];
    for _ in 0..REPLAYS {
        stream.replay(graph, &touches)?;
        events.push(stream.record_timed()?);
    }
    // Each, since an event tells no time before somebody has seen it done.
    for event in &events {
        event
            .synchronize(DEADLINE)
            .context("wait for a frame's replays")?;
    }
    let mut times = events
        .windows(2)
        .map(|pair| pair[1].since(&pair[0]).map(|time| time.as_secs_f64() * 1e3))
        .collect::<Option<Vec<f64>>>()
        .context("the device has no clock")?;
    times.sort_by(f64::total_cmp);
    Ok(Phase {
        median_ms: times[times.len() / 2],
        p99_ms: times[times.len() * 99 / 100],
    })
}
