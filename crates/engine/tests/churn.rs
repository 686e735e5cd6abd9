//! 200 requests at twice the capacity, half of them cancelled at random points: nothing fails, nothing is
//! left. A test binary of its own, because it counts the process's threads and open files.

#[allow(dead_code, unused_imports)] // Shared with the other test binary, which uses the rest.
#[path = "engine/support/mod.rs"]
mod support;

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use laneway_device::Device;
use laneway_engine::{EngineHandle, FailureKind, Health, Limits, RequestStream, SubmitError};
use support::{Collected, FakeDevice, FakeRequest, Rig, RigConfig, eventually, submission};

const REQUESTS: u32 = 200;
const CAPACITY: usize = 16;

/// Threads, open files and resident kilobytes of this process.
fn process() -> (usize, usize, u64) {
    let count = |path| std::fs::read_dir(path).map_or(0, Iterator::count);
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let resident = resident.and_then(|line| line.trim().trim_end_matches(" kB").parse().ok());
    (
        count("/proc/self/task"),
        count("/proc/self/fd"),
        resident.unwrap_or(0),
    )
}

/// Take at most `most` events.
fn listen(stream: &mut RequestStream, collected: &mut Collected, most: usize) {
    for event in (0..most).map_while(|_| stream.blocking_recv()) {
        collected.add(event);
    }
}

/// One client: submit until it is taken, then listen to the end or cancel on the way.
fn client(handle: &EngineHandle, number: u32) {
    let request = FakeRequest {
        reference: if number.is_multiple_of(5) { 9 } else { 0 },
        end_token: number.is_multiple_of(3),
        ..FakeRequest::new(number, 10 + number * 7 % 50)
    };
    let mut stream = loop {
        match handle.submit(submission(&number.to_string(), request.clone())) {
            Ok(stream) => break stream,
            Err(SubmitError::QueueFull { .. }) => std::thread::sleep(Duration::from_millis(1)),
            Err(other) => panic!("{other}"),
        }
    };
    let mut collected = Collected::default();
    if number.is_multiple_of(2) {
        listen(&mut stream, &mut collected, usize::MAX);
        collected.assert_finished(&request);
        return;
    }
    // At a point that differs from request to request, and in each of the three ways.
    listen(&mut stream, &mut collected, (number as usize * 13) % 9);
    match number % 3 {
        0 => return,
        1 => stream.kill(),
        _ => stream.stop(),
    }
    listen(&mut stream, &mut collected, usize::MAX);
    collected.assert_samples(&request);
    assert_eq!(collected.terminals, 1);
    match collected.failed {
        Some(failure) => assert_eq!((failure.kind, number % 3), (FailureKind::Cancelled, 1)),
        None => assert!(collected.finished.is_some()),
    }
}

fn round(handle: &EngineHandle) {
    let next = AtomicU32::new(0);
    std::thread::scope(|scope| {
        for _ in 0..2 * CAPACITY {
            scope.spawn(|| {
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    if number >= REQUESTS {
                        return;
                    }
                    client(handle, number);
                }
            });
        }
    });
}

#[test]
fn churn_leaves_nothing_behind() {
    let device = FakeDevice::new();
    let memory = device.facts().used_bytes;
    let before = process();
    {
        let rig = Rig::start_on(
            device.clone(),
            RigConfig {
                nodes: vec![("Talker", 0), ("Codec", 1), ("RefEncoder", 2)],
                codec_slots: 6,
                limits: Limits {
                    max_running: 8,
                    max_queue: CAPACITY - 8,
                    output_events: 4,
                    ..RigConfig::default().limits
                },
                ..RigConfig::default()
            },
        );
        let (threads, files, _) = process();
        round(&rig.handle);
        rig.wait_until_empty();
        let (_, _, first) = process();
        round(&rig.handle);
        rig.wait_until_empty();
        // A client's thread may take a moment to leave after it was joined.
        eventually("threads and files are as before", || {
            let (threads_after, files_after, _) = process();
            (threads_after, files_after) == (threads, files)
        });
        let (_, _, second) = process();
        let bound = (first / 20).max(16 * 1024);
        assert!(
            second <= first + bound,
            "{first} kB resident after one round, {second} after two"
        );
        assert_eq!(*rig.handle.health().borrow(), Health::Serving);
        assert_eq!(rig.stats().failed, 0);
        assert_eq!(rig.stats().submitted, 2 * u64::from(REQUESTS));
        rig.device.sanitizer.assert_clean();
    }
    eventually("threads, files and memory are back", || {
        let (threads, files, _) = process();
        (threads, files, device.facts().used_bytes) == (before.0, before.1, memory)
    });
}
