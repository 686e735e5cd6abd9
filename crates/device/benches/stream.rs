//! What a stream costs apart from the arithmetic: a submit, a round trip to the host, a hop from one stream
//! to another, and the sanitizer on top.

use std::sync::Arc;
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use laneway_device::op::{Copy, RmsNorm};
use laneway_device::{
    BufferSpec, CpuConfig, CpuDevice, DType, Device, Graph, Op, Place, Priority, Result, Stream,
    StreamConfig, Touches, sanitize,
};

const LONG: Duration = Duration::from_secs(60);

struct Machine {
    streams: [Arc<dyn Stream>; 2],
    copy: Op,
    /// As many operations as one decode step of a small model.
    graph: Graph,
}

impl Machine {
    fn new(device: &dyn Device) -> Result<Self> {
        let stream = |name: &str| {
            device.create_stream(StreamConfig {
                name: name.to_owned(),
                priority: Priority::Normal,
                partition_sms: None,
            })
        };
        let buffer = |name: &str| {
            device.alloc(BufferSpec {
                name: name.to_owned(),
                dtype: DType::F32,
                len: 8,
                place: Place::Device,
            })
        };
        let [a, b, weight] = ["a", "b", "weight"].map(|name| buffer(name).expect("small"));
        let streams = [stream("chain")?, stream("lane1")?];
        let norm = Op::from(RmsNorm {
            x: a.view(),
            rows: 1,
            width: 8,
            weight: weight.view(),
            eps: 1e-6,
            out: b.view(),
        });
        let copy = Op::from(Copy {
            src: a.view(),
            dst: b.view(),
        });
        let graph = streams[0]
            .capture(&mut |capture| (0..300).try_for_each(|_| capture.launch(&norm, &Touches::none())))?;
        Ok(Self { streams, copy, graph })
    }

    fn launch(&self, stream: usize) {
        self.streams[stream]
            .launch(&self.copy, &Touches::none())
            .expect("a copy is launched");
    }

    fn finish(&self, stream: usize) {
        let event = self.streams[stream].record().expect("an event is recorded");
        event.synchronize(LONG).expect("the stream works");
    }
}

fn stream(criterion: &mut Criterion) {
    let cpu = || {
        Arc::new(
            CpuDevice::new(CpuConfig {
                memory_bytes: Some(1 << 20),
            })
            .expect("the limit is given"),
        ) as Arc<dyn Device>
    };
    for (name, device) in [("plain", cpu()), ("sanitized", sanitize::wrap(cpu()).0)] {
        let machine = Machine::new(&*device).expect("a small machine");

        let mut group = criterion.benchmark_group("submit");
        group.throughput(Throughput::Elements(1));
        group.bench_function(BenchmarkId::from_parameter(name), |bench| {
            // Timed in runs that fit the queue, without the wait for the executor behind each.
            bench.iter_custom(|n| {
                let mut total = Duration::ZERO;
                let mut left = n;
                while left > 0 {
                    let run = left.min(500);
                    let start = Instant::now();
                    (0..run).for_each(|_| machine.launch(0));
                    total += start.elapsed();
                    machine.finish(0);
                    left -= run;
                }
                total
            });
        });
        group.finish();

        criterion.bench_function(&format!("round_trip/{name}"), |bench| {
            bench.iter(|| {
                machine.launch(0);
                machine.finish(0);
            });
        });

        criterion.bench_function(&format!("two_streams/{name}"), |bench| {
            bench.iter(|| {
                machine.launch(0);
                let event = machine.streams[0].record().expect("an event is recorded");
                machine.streams[1]
                    .wait(&event)
                    .expect("the event is of this device");
                machine.launch(1);
                machine.finish(1);
                // Order the next round behind this one for the sanitizer.
                let event = machine.streams[1].record().expect("an event is recorded");
                machine.streams[0]
                    .wait(&event)
                    .expect("the event is of this device");
            });
        });

        criterion.bench_function(&format!("graph_of_300/{name}"), |bench| {
            bench.iter(|| {
                machine.streams[0]
                    .replay(&machine.graph, &Touches::none())
                    .expect("a graph is replayed");
                machine.finish(0);
            });
        });
    }
}

criterion_group!(benches, stream);
criterion_main!(benches);
