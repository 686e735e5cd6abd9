//! What a device does beside operations: order, events, graphs, partitions, refusals.
//!
//! Written over the device traits, so the CPU device is held to the same; what only CUDA has comes last.

use std::sync::Arc;
use std::time::Duration;

use laneway_device::op::{ChannelScale, Copy, Zero};
use laneway_device::{
    Buffer, BufferSpec, DType, Device, DeviceError, Op, Place, Priority, Stream, StreamConfig, Touches, View,
};

mod slots;

use super::caught;
use crate::{CudaDevice, GuardSide};

/// No single wait is longer.
const DEADLINE: Duration = Duration::from_secs(20);

/// Elements of the buffers here.
const LEN: usize = 4096;

type Outcome = Result<(), String>;

/// How one check of the runtime went.
#[derive(Debug, Clone)]
pub struct RuntimeReport {
    /// What was checked.
    pub name: &'static str,
    /// What is wrong.
    pub outcome: Result<(), String>,
}

/// Check `device`; with `cuda`, the same device by its own type, also what only that has.
pub fn check_runtime(device: &Arc<dyn Device>, cuda: Option<&CudaDevice>) -> Vec<RuntimeReport> {
    let kit = || Kit::new(device);
    let mut reports = Vec::new();
    let mut run = |name: &'static str, check: &dyn Fn() -> Outcome| {
        reports.push(RuntimeReport {
            name,
            outcome: caught(check),
        });
    };
    run("new memory is zeroed, and copies arrive", &|| copies(&kit()?));
    run("events order two streams", &|| events(&kit()?));
    run(
        "a replayed graph does what its operations do",
        &|| graphs(&kit()?),
    );
    run("a capture that fails leaves the stream usable", &|| {
        failed_capture(&kit()?)
    });
    run("memory freed while a stream records goes back", &|| {
        freed_in_capture(&kit()?)
    });
    run("a partition runs, records and replays", &|| partitions(&kit()?));
    run(
        "slots freed by one thread are zero for the next owner on another",
        &|| slots::reused(&kit()?),
    );
    if let Some(cuda) = cuda {
        run("timed events measure", &|| timed(&kit()?, cuda));
        run("a write outside a buffer is found", &|| guards(&kit()?, cuda));
    }
    reports
}

fn text(error: DeviceError) -> String {
    error.to_string()
}

fn expect(holds: bool, otherwise: impl FnOnce() -> String) -> Outcome {
    if holds { Ok(()) } else { Err(otherwise()) }
}

struct Kit {
    device: Arc<dyn Device>,
    stream: Arc<dyn Stream>,
    staging: Buffer,
    result: Buffer,
}

impl Kit {
    fn new(device: &Arc<dyn Device>) -> Result<Self, String> {
        Ok(Self {
            device: Arc::clone(device),
            stream: stream(device, "runtime", Priority::High, None)?,
            staging: buffer(device, "staging", Place::Pinned)?,
            result: buffer(device, "result", Place::Pinned)?,
        })
    }

    fn write(&self, value: f32) -> Outcome {
        let bytes: Vec<u8> = [value; LEN].iter().flat_map(|x| x.to_le_bytes()).collect();
        self.device.host_write(&self.staging.view(), &bytes).map_err(text)
    }

    /// Run on `stream` and wait.
    fn run(&self, stream: &dyn Stream, ops: &[Op]) -> Outcome {
        launch(stream, ops)?;
        self.wait(stream)
    }

    fn wait(&self, stream: &dyn Stream) -> Outcome {
        stream
            .record()
            .and_then(|event| event.synchronize(DEADLINE))
            .map_err(text)
    }

    /// Every element of `view` is `value`.
    fn holds(&self, view: &View, value: f32) -> Outcome {
        self.run(&*self.stream, &[copy(view, &self.result.view())])?;
        let mut bytes = [0; 4 * LEN];
        self.device
            .host_read(&self.result.view(), &mut bytes)
            .map_err(text)?;
        let other = bytes
            .chunks_exact(4)
            .map(|x| f32::from_le_bytes([x[0], x[1], x[2], x[3]]));
        match other.enumerate().find(|(_, x)| *x != value) {
            None => Ok(()),
            Some((i, x)) => Err(format!("element {i} of {view:?} is {x}, not {value}")),
        }
    }

    fn buffer(&self, name: &str) -> Result<Buffer, String> {
        buffer(&self.device, name, Place::Device)
    }

    /// A buffer full of `value`.
    fn filled(&self, name: &str, value: f32) -> Result<Buffer, String> {
        let buffer = self.buffer(name)?;
        self.write(value)?;
        self.run(&*self.stream, &[copy(&self.staging.view(), &buffer.view())])?;
        Ok(buffer)
    }
}

fn stream(
    device: &Arc<dyn Device>,
    name: &str,
    priority: Priority,
    partition_sms: Option<u32>,
) -> Result<Arc<dyn Stream>, String> {
    let config = StreamConfig {
        name: name.to_owned(),
        priority,
        partition_sms,
    };
    device.create_stream(config).map_err(text)
}

fn buffer(device: &Arc<dyn Device>, name: &str, place: Place) -> Result<Buffer, String> {
    let spec = BufferSpec {
        name: format!("runtime.{name}"),
        dtype: DType::F32,
        len: LEN,
        place,
    };
    device.alloc(spec).map_err(text)
}

fn launch(stream: &dyn Stream, ops: &[Op]) -> Outcome {
    ops.iter()
        .try_for_each(|op| stream.launch(op, &Touches::none()))
        .map_err(text)
}

fn copy(src: &View, dst: &View) -> Op {
    Op::Copy(Copy {
        src: src.clone(),
        dst: dst.clone(),
    })
}

/// `x = x * scale + x`: what it gives depends on how often it ran.
fn grow(x: &Buffer, scale: &Buffer) -> Op {
    Op::ChannelScale(ChannelScale {
        x: x.view(),
        scale: scale.view(),
        add: Some(x.view()),
        rows: 1,
        channels: LEN,
        out: x.view(),
    })
}

/// `to += x`, where `one` is as long and all ones.
fn add(x: &View, to: &View, one: &View) -> Op {
    Op::ChannelScale(ChannelScale {
        x: x.clone(),
        scale: one.clone(),
        add: Some(to.clone()),
        rows: 1,
        channels: x.len,
        out: to.clone(),
    })
}

fn copies(kit: &Kit) -> Outcome {
    let (a, b) = (kit.buffer("a")?, kit.buffer("b")?);
    kit.holds(&a.view(), 0.0)?;
    kit.write(3.5)?;
    let ops = [copy(&kit.staging.view(), &a.view()), copy(&a.view(), &b.view())];
    kit.run(&*kit.stream, &ops)?;
    kit.holds(&b.view(), 3.5)?;
    kit.run(&*kit.stream, &[Op::Zero(Zero { dst: b.view() })])?;
    kit.holds(&b.view(), 0.0)?;
    let bytes: Vec<u8> = [2.25f32; LEN].iter().flat_map(|x| x.to_le_bytes()).collect();
    let spec = BufferSpec {
        name: "runtime.with".to_owned(),
        dtype: DType::F32,
        len: LEN,
        place: Place::Device,
    };
    let with = kit.device.alloc_with(spec, &bytes).map_err(text)?;
    kit.holds(&with.view(), 2.25)
}

fn events(kit: &Kit) -> Outcome {
    let other = stream(&kit.device, "runtime.other", Priority::Low, None)?;
    let (x, scale) = (kit.filled("x", 1.0)?, kit.filled("scale", 1.0)?);
    // Each stream doubles in turn, behind the other's event: what runs out of turn doubles an older value.
    for _ in 0..40 {
        for (this, next) in [(&kit.stream, &other), (&other, &kit.stream)] {
            launch(&**this, &[grow(&x, &scale)])?;
            let event = this.record().map_err(text)?;
            next.wait(&event).map_err(text)?;
        }
    }
    kit.wait(&*other)?;
    kit.holds(&x.view(), (2.0f32).powi(80))
}

fn graphs(kit: &Kit) -> Outcome {
    let (x, scale) = (kit.filled("x", 1.0)?, kit.filled("scale", 1.0)?);
    let graph = kit
        .stream
        .capture(&mut |stand_in| {
            (0..4).try_for_each(|_| stand_in.launch(&grow(&x, &scale), &Touches::none()))
        })
        .map_err(text)?;
    kit.holds(&x.view(), 1.0)
        .map_err(|problem| format!("a capture ran: {problem}"))?;
    for _ in 0..5 {
        kit.stream.replay(&graph, &Touches::none()).map_err(text)?;
    }
    kit.holds(&x.view(), (2.0f32).powi(20))
}

fn failed_capture(kit: &Kit) -> Outcome {
    let (x, scale) = (kit.filled("x", 1.0)?, kit.filled("scale", 1.0)?);
    let failed = kit.stream.capture(&mut |stand_in| {
        stand_in.launch(&grow(&x, &scale), &Touches::none())?;
        stand_in.record().map(drop)
    });
    expect(failed.is_err(), || {
        "an event was recorded inside a capture".to_owned()
    })?;
    kit.run(&*kit.stream, &[grow(&x, &scale)])?;
    kit.holds(&x.view(), 2.0)
}

fn freed_in_capture(kit: &Kit) -> Outcome {
    let (x, scale) = (kit.filled("x", 1.0)?, kit.filled("scale", 1.0)?);
    let before = kit.device.facts().used_bytes;
    let mut spare = Some(kit.buffer("spare")?);
    let graph = kit
        .stream
        .capture(&mut |stand_in| {
            drop(spare.take());
            // The stream itself is no part of the capture on its stand-in.
            kit.stream.launch(&grow(&x, &scale), &Touches::none())?;
            stand_in.launch(&grow(&x, &scale), &Touches::none())
        })
        .map_err(text)?;
    kit.holds(&x.view(), 2.0)?;
    kit.stream.replay(&graph, &Touches::none()).map_err(text)?;
    kit.holds(&x.view(), 4.0)?;
    let used = kit.device.facts().used_bytes;
    expect(used == before, || format!("{used} bytes in use, {before} before"))
}

fn partitions(kit: &Kit) -> Outcome {
    let granularity = kit.device.facts().partition_granularity;
    if granularity == 0 {
        let refused = stream(&kit.device, "runtime.partition", Priority::Normal, Some(8));
        return expect(refused.is_err(), || {
            "a device without partitions made one".to_owned()
        });
    }
    let odd = stream(
        &kit.device,
        "runtime.odd",
        Priority::Normal,
        Some(2 * granularity + 1),
    );
    let problem = odd.err().ok_or("a size that is no multiple was not refused")?;
    let nearest = [2 * granularity, 3 * granularity].map(|sms| sms.to_string());
    expect(nearest.iter().all(|sms| problem.contains(sms)), || {
        format!("the refusal does not name {nearest:?}: {problem}")
    })?;
    let (x, scale) = (kit.filled("x", 1.0)?, kit.filled("scale", 1.0)?);
    let make = || {
        stream(
            &kit.device,
            "runtime.partition",
            Priority::Normal,
            Some(2 * granularity),
        )
    };
    let (first, second) = (make()?, make()?);
    let after = |later: &dyn Stream, earlier: &dyn Stream| {
        let event = earlier.record();
        event.and_then(|event| later.wait(&event)).map_err(text)
    };
    for partition in [&first, &second] {
        after(&**partition, &*kit.stream)?;
        kit.run(&**partition, &[grow(&x, &scale)])?;
        let graph = partition
            .capture(&mut |stand_in| stand_in.launch(&grow(&x, &scale), &Touches::none()))
            .map_err(text)?;
        partition.replay(&graph, &Touches::none()).map_err(text)?;
        kit.wait(&**partition)?;
        let elsewhere = kit.stream.replay(&graph, &Touches::none());
        expect(elsewhere.is_err(), || {
            "a graph of another stream was replayed".to_owned()
        })?;
        after(&*kit.stream, &**partition)?;
    }
    kit.holds(&x.view(), 16.0)?;
    drop((first, second));
    // What was given back can be taken again.
    let again = make()?;
    after(&*again, &*kit.stream)?;
    launch(&*again, &[grow(&x, &scale)])?;
    after(&*kit.stream, &*again)?;
    kit.holds(&x.view(), 32.0)
}

fn timed(kit: &Kit, cuda: &CudaDevice) -> Outcome {
    let (x, scale) = (kit.filled("x", 1.0)?, kit.filled("scale", 1.0)?);
    let start = cuda.record_timed(&*kit.stream).map_err(text)?;
    launch(&*kit.stream, &[grow(&x, &scale)])?;
    let end = cuda.record_timed(&*kit.stream).map_err(text)?;
    let milliseconds = end.since(&start, DEADLINE).map_err(text)?;
    expect(milliseconds > 0.0 && milliseconds < 1000.0, || {
        format!("one small operation took {milliseconds} ms")
    })
}

fn guards(kit: &Kit, cuda: &CudaDevice) -> Outcome {
    if !cuda.is_guarded() {
        return Ok(());
    }
    let clean = cuda.check_guards().map_err(text)?;
    expect(clean.is_empty(), || {
        format!("before anything was written: {clean:?}")
    })?;
    let victim = kit.buffer("victim")?;
    cuda.damage(&victim, 4 * LEN as i64 + 7).map_err(text)?;
    cuda.damage(&victim, -3).map_err(text)?;
    let found = cuda.check_guards().map_err(text)?;
    let places: Vec<_> = found
        .iter()
        .map(|damage| (damage.side, damage.offset_bytes))
        .collect();
    let planted = [(GuardSide::Before, -3), (GuardSide::Behind, 4 * LEN as i64 + 7)];
    expect(places == planted, || {
        format!("planted {planted:?}, found {found:?}")
    })
}

#[cfg(test)]
mod tests {
    use laneway_device::testing;

    use super::*;

    #[test]
    fn the_cpu_device_passes() {
        let (device, _) = testing::cpu();
        for report in check_runtime(&device, None) {
            assert_eq!(report.outcome, Ok(()), "{}", report.name);
        }
    }
}
