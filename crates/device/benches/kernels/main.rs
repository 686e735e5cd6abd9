//! Speed of the CPU device's operations against what one thread of this machine can do.
//!
//! Prints the machine's ceiling (fused multiply-add and memory bandwidth, one thread), single operations as a
//! share of it, and one frame (80 ms of audio) of a small speech model in each of its three parts. Every figure
//! is the best of many repetitions, because other work on the machine only ever adds time.

mod ceiling;
mod frame;
mod operands;

use std::sync::Arc;
use std::time::{Duration, Instant};

use laneway_device::{CpuConfig, Op, Stream, StreamConfig, Touches, open_cpu};

use operands::Operands;

/// Longest wait for a step.
const LONG: Duration = Duration::from_secs(60);

/// Time spent on measuring one figure, after the first few repetitions.
const BUDGET: Duration = Duration::from_millis(150);

fn main() {
    let device = open_cpu(CpuConfig {
        memory_bytes: Some(2 << 30),
    })
    .expect("a limit is given");
    let stream = device
        .create_stream(StreamConfig {
            name: "bench".to_owned(),
            priority: Default::default(),
            partition_sms: None,
        })
        .expect("streams need no partition");
    let operands = Operands::new(device);

    let peak = ceiling::fma_gflops();
    let bandwidth = ceiling::bandwidth_gb();
    println!("ceiling of one thread: {peak:.0} GFLOP/s, {bandwidth:.1} GB/s");

    println!(
        "\n{:<34} {:>9} {:>9} {:>7} {:>8}",
        "operation", "µs", "GFLOP/s", "% peak", "GB/s"
    );
    for (name, op, flops, weight_bytes) in frame::single_operations(&operands) {
        let seconds = best(&stream, std::slice::from_ref(&op), 10);
        let gflops = flops / seconds / 1e9;
        println!(
            "{name:<34} {:>9.2} {gflops:>9.1} {:>6.0}% {:>8.1}",
            seconds * 1e6,
            100.0 * gflops / peak,
            weight_bytes / seconds / 1e9,
        );
    }

    println!("\none frame, ms:");
    for rows in [1, 8] {
        let mut total = 0.0;
        for (name, ops) in frame::parts(&operands, rows) {
            let seconds = best(&stream, &ops, 1);
            total += seconds;
            println!(
                "{name:<10} {rows} rows: {:>8.3} ({} operations)",
                seconds * 1e3,
                ops.len()
            );
            if std::env::args().any(|arg| arg == "--detail") {
                detail(&stream, &ops);
            }
        }
        println!(
            "all        {rows} rows: {:>8.3}, real-time factor {:.4} on one thread",
            total * 1e3,
            total / (0.08 * rows as f64)
        );
    }
}

/// Time by kind of operation.
fn detail(stream: &Arc<dyn Stream>, ops: &[Op]) {
    let mut kinds: Vec<&str> = ops.iter().map(Op::name).collect();
    kinds.sort_unstable();
    kinds.dedup();
    for kind in kinds {
        let of_kind: Vec<Op> = ops.iter().filter(|op| op.name() == kind).cloned().collect();
        let seconds = best(stream, &of_kind, 1);
        println!(
            "    {kind:<14} {:>4} × {:>8.2} µs",
            of_kind.len(),
            seconds * 1e6 / of_kind.len() as f64
        );
    }
}

/// Seconds of one pass over `ops`, the best of many; each measurement runs `repeat` passes.
fn best(stream: &Arc<dyn Stream>, ops: &[Op], repeat: usize) -> f64 {
    let graph = stream
        .capture(&mut |stream| {
            for op in std::iter::repeat_n(ops, repeat).flatten() {
                stream.launch(op, &Touches::none())?;
            }
            Ok(())
        })
        .expect("capturing cannot fail");
    let mut best = f64::INFINITY;
    let began = Instant::now();
    let mut measured = 0;
    while measured < 5 || (measured < 100 && began.elapsed() < BUDGET) {
        let start = Instant::now();
        stream
            .replay(&graph, &Touches::none())
            .expect("the stream is alive");
        let event = stream.record().expect("the stream is alive");
        event.synchronize(LONG).expect("the operations are valid");
        best = best.min(start.elapsed().as_secs_f64() / repeat as f64);
        measured += 1;
    }
    best
}
