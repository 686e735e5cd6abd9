//! The CPU device through its traits.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use super::event::CpuEvent;
use super::*;
use crate::op::{Copy, GatherRows, ScatterRows, Zero};
use crate::{DType, Event, EventImpl, Op, Touches};

const LONG: Duration = Duration::from_secs(60);

fn device(memory_bytes: u64) -> Arc<dyn Device> {
    open_cpu(CpuConfig {
        memory_bytes: Some(memory_bytes),
    })
    .unwrap()
}

fn stream(device: &Arc<dyn Device>, name: &str) -> Arc<dyn Stream> {
    device
        .create_stream(StreamConfig {
            name: name.to_owned(),
            priority: Default::default(),
            partition_sms: None,
        })
        .unwrap()
}

fn ints(device: &Arc<dyn Device>, name: &str, len: usize, place: Place) -> Buffer {
    device
        .alloc(BufferSpec {
            name: name.to_owned(),
            dtype: DType::I32,
            len,
            place,
        })
        .unwrap()
}

fn write(device: &Arc<dyn Device>, view: &View, values: &[i32]) {
    device.host_write(view, bytemuck::cast_slice(values)).unwrap();
}

fn read(device: &Arc<dyn Device>, view: &View) -> Vec<i32> {
    let mut values = vec![0; view.len];
    device
        .host_read(view, bytemuck::cast_slice_mut(&mut values))
        .unwrap();
    values
}

fn launch(stream: &Arc<dyn Stream>, op: impl Into<crate::Op>) {
    stream.launch(&op.into(), &Touches::none()).unwrap();
}

#[test]
fn rows_go_out_and_back() {
    let device = device(1 << 20);
    let stream = stream(&device, "chain");
    let [host, index] = ["host", "index"].map(|name| ints(&device, name, 6, Place::Pinned));
    let [rows, pool] = ["rows", "pool"].map(|name| ints(&device, name, 6, Place::Device));
    write(&device, &host.view(), &[1, 2, 3, 4, 5, 6]);
    write(&device, &index.view(), &[2, -1, 0, 0, -1, 2]);
    launch(
        &stream,
        Copy {
            src: host.view(),
            dst: rows.view(),
        },
    );
    launch(
        &stream,
        ScatterRows {
            src: rows.view(),
            index: index.slice(0, 3),
            rows: 3,
            width: 2,
            dst: pool.view(),
        },
    );
    launch(
        &stream,
        GatherRows {
            src: pool.view(),
            indirect: true,
            index: index.slice(3, 3),
            rows: 3,
            width: 2,
            out: rows.view(),
        },
    );
    launch(
        &stream,
        Zero {
            dst: rows.slice(5, 1),
        },
    );
    launch(
        &stream,
        Copy {
            src: rows.view(),
            dst: host.view(),
        },
    );
    stream.record().unwrap().synchronize(LONG).unwrap();
    assert_eq!(read(&device, &host.view()), [5, 6, 0, 0, 1, 0]);
}

fn copy(src: View, dst: View) -> Op {
    Copy { src, dst }.into()
}

fn finish(stream: &Arc<dyn Stream>) {
    stream.record().unwrap().synchronize(LONG).unwrap();
}

/// An event that the test completes itself, to hold a stream.
fn gate() -> (Event, Arc<CpuEvent>) {
    let inner = Arc::new(CpuEvent::pending(Arc::from("gate")));
    let event = Event {
        id: CpuEvent::next_id(),
        stream: Arc::from("gate"),
        inner: Arc::clone(&inner) as Arc<dyn EventImpl>,
    };
    (event, inner)
}

/// Scatters outside its pool, so it fails when it runs.
fn failing(device: &Arc<dyn Device>) -> Op {
    let index = ints(device, "index", 1, Place::Pinned);
    write(device, &index.view(), &[7]);
    ScatterRows {
        src: ints(device, "src", 2, Place::Device).view(),
        index: index.view(),
        rows: 1,
        width: 2,
        dst: ints(device, "pool", 4, Place::Device).view(),
    }
    .into()
}

fn failed_op<T: std::fmt::Debug>(outcome: Result<T>) -> (String, String) {
    match outcome {
        Err(DeviceError::StreamFailed { stream, op, .. }) => (stream, op),
        other => panic!("{other:?} is no failed stream"),
    }
}

#[test]
fn a_stream_runs_in_order() {
    let device = device(1 << 20);
    let stream = stream(&device, "chain");
    let n = 3000;
    let [from, log] = ["from", "log"].map(|name| ints(&device, name, n, Place::Pinned));
    let cell = ints(&device, "cell", 1, Place::Device);
    let values: Vec<i32> = (0..n as i32).collect();
    write(&device, &from.view(), &values);
    for i in 0..n {
        launch(&stream, copy(from.slice(i, 1), cell.view()));
        launch(&stream, copy(cell.view(), log.slice(i, 1)));
    }
    finish(&stream);
    assert_eq!(read(&device, &log.view()), values);
}

#[test]
fn a_waiting_stream_runs_behind_the_event() {
    let device = device(1 << 20);
    let [chain, lane] = ["chain", "lane1"].map(|name| stream(&device, name));
    let [from, to] = ["from", "to"].map(|name| ints(&device, name, 1, Place::Pinned));
    let cell = ints(&device, "cell", 1, Place::Device);
    write(&device, &from.view(), &[42]);
    let (closed, gate) = gate();
    chain.wait(&closed).unwrap();
    launch(&chain, copy(from.view(), cell.view()));
    lane.wait(&chain.record().unwrap()).unwrap();
    launch(&lane, copy(cell.view(), to.view()));
    let done = lane.record().unwrap();
    assert!(!done.is_done());
    gate.complete(Ok(()));
    done.synchronize(LONG).unwrap();
    assert_eq!(read(&device, &to.view()), [42]);
}

#[test]
fn events_tell_the_time_between_them() {
    let device = device(1 << 20);
    let stream = stream(&device, "chain");
    let (closed, gate) = gate();
    let before = stream.mark().unwrap();
    stream.wait(&closed).unwrap();
    let behind = stream.record_timed().unwrap();
    before.synchronize(LONG).unwrap();
    assert_eq!(behind.since(&before), None, "it has yet to complete");
    std::thread::sleep(Duration::from_millis(3));
    gate.complete(Ok(()));
    behind.synchronize(LONG).unwrap();
    assert!(behind.since(&before) >= Some(Duration::from_millis(3)));
    assert_eq!(before.since(&behind), None, "the other way round");
}

#[test]
fn a_wait_has_a_deadline() {
    let device = device(1 << 20);
    let stream = stream(&device, "lane1");
    let (closed, gate) = gate();
    stream.wait(&closed).unwrap();
    let event = stream.record().unwrap();
    let error = event.synchronize(Duration::from_millis(2)).unwrap_err();
    assert_eq!(
        error.to_string(),
        "event on stream lane1 did not complete within 2 ms"
    );
    gate.complete(Ok(()));
    event.synchronize(Duration::MAX).unwrap();
    assert!(event.is_done());
}

#[test]
fn a_failed_operation_fails_what_is_behind_it() {
    let device = device(1 << 20);
    let [chain, lane, other] = ["chain", "lane1", "lane2"].map(|name| stream(&device, name));
    let [from, to] = ["from", "to"].map(|name| ints(&device, name, 1, Place::Pinned));
    write(&device, &from.view(), &[42]);
    let (closed, gate) = gate();
    let before = chain.record().unwrap();
    chain.wait(&closed).unwrap();
    launch(&chain, failing(&device));
    launch(&chain, copy(from.view(), to.view()));
    let behind = chain.record().unwrap();
    lane.wait(&behind).unwrap();
    launch(&lane, copy(from.view(), to.view()));
    let waiting = lane.record().unwrap();
    gate.complete(Ok(()));

    before.synchronize(LONG).unwrap();
    let scatter = ("chain".to_owned(), "ScatterRows".to_owned());
    assert_eq!(failed_op(behind.synchronize(LONG)), scatter);
    assert!(behind.is_done());
    let wait = ("lane1".to_owned(), "wait".to_owned());
    let error = waiting.synchronize(LONG).unwrap_err();
    assert!(
        error.to_string().contains("stream chain: ScatterRows failed"),
        "{error}"
    );
    assert_eq!(failed_op::<()>(Err(error)), wait);
    assert_eq!(read(&device, &to.view()), [0], "nothing ran behind the failure");

    // Later calls are refused, other streams go on.
    let none = Touches::none();
    assert_eq!(
        failed_op(chain.launch(&copy(from.view(), to.view()), &none)),
        scatter
    );
    assert_eq!(failed_op(chain.record()), scatter);
    launch(&other, copy(from.view(), to.view()));
    finish(&other);
    assert_eq!(read(&device, &to.view()), [42]);
    other.wait(&behind).unwrap();
    let outcome = other.record().and_then(|event| event.synchronize(LONG));
    assert_eq!(failed_op(outcome).0, "lane2");
}

/// A buffer of some other device: using it panics.
fn foreign(storage: impl std::any::Any + Send + Sync) -> Buffer {
    let spec = BufferSpec {
        name: "foreign".to_owned(),
        dtype: DType::I32,
        len: 1,
        place: Place::Device,
    };
    Buffer::from_storage(Buffer::next_id(), spec, Box::new(storage))
}

#[test]
fn a_panic_fails_the_stream_and_not_the_process() {
    let device = device(1 << 20);
    let stream = stream(&device, "lane1");
    launch(
        &stream,
        Zero {
            dst: foreign(()).view(),
        },
    );
    let outcome = stream.record().and_then(|event| event.synchronize(LONG));
    let text = outcome.unwrap_err().to_string();
    assert_eq!(
        text,
        "stream lane1: Zero failed: panicked: a CPU operation only meets CPU buffers"
    );
}

#[test]
fn dropping_a_stream_runs_what_is_queued() {
    let device = device(1 << 20);
    let stream = stream(&device, "lane1");
    let [from, to] = ["from", "to"].map(|name| ints(&device, name, 1, Place::Pinned));
    write(&device, &from.view(), &[42]);
    let (closed, gate) = gate();
    stream.wait(&closed).unwrap();
    launch(&stream, copy(from.view(), to.view()));
    let event = stream.record().unwrap();
    let dropping = thread::spawn(move || drop(stream));
    gate.complete(Ok(()));
    dropping.join().unwrap();
    assert!(event.is_done());
    event.synchronize(LONG).unwrap();
    assert_eq!(read(&device, &to.view()), [42]);
}

/// The last handle of one stream goes away with an operation that is queued on another (or on itself).
fn check_dropped_by_an_operation(holder: &str, dropped: &str) {
    let device = device(1 << 20);
    let holder_stream = stream(&device, holder);
    let dropped_stream = match holder == dropped {
        true => Arc::clone(&holder_stream),
        false => stream(&device, dropped),
    };
    let (closed, gate) = gate();
    holder_stream.wait(&closed).unwrap();
    let buffer = foreign(Arc::clone(&dropped_stream));
    launch(&holder_stream, Zero { dst: buffer.view() });
    let event = holder_stream.record().unwrap();
    // Joining the dropped stream on the holder's executor would wait for the holder's own event.
    dropped_stream.wait(&event).unwrap();
    drop((dropped_stream, buffer));
    gate.complete(Ok(()));
    assert_eq!(failed_op(event.synchronize(LONG)).1, "Zero");
}

#[test]
fn a_stream_may_be_dropped_on_an_executor() {
    check_dropped_by_an_operation("lane1", "lane1");
    check_dropped_by_an_operation("lane1", "chain");
}

#[test]
fn the_executor_ends_with_its_stream() {
    let stream = CpuStream::start(StreamConfig {
        name: "lane1".to_owned(),
        priority: Default::default(),
        partition_sms: None,
    })
    .unwrap();
    let queue = Arc::downgrade(&stream.queue);
    drop(stream);
    assert!(queue.upgrade().is_none(), "the executor still holds its queue");
}

#[test]
fn an_unrun_event_fails_with_its_executor() {
    let (event, inner) = gate();
    drop(queue::Signal::new(inner, Arc::from("lane1")));
    assert_eq!(
        failed_op(event.synchronize(LONG)),
        ("lane1".to_owned(), "record".to_owned())
    );
}

#[test]
fn the_account_returns_once_operations_in_flight_let_go() {
    let device = device(1 << 16);
    let stream = stream(&device, "chain");
    let (closed, gate) = gate();
    stream.wait(&closed).unwrap();
    let spec = BufferSpec {
        name: "work".to_owned(),
        dtype: DType::F32,
        len: 1 << 14,
        place: Place::Device,
    };
    let buffer = device.alloc(spec.clone()).unwrap();
    let operation = Op::from(Zero { dst: buffer.view() });
    let mut build = |capture: &dyn Stream| capture.launch(&operation, &Touches::none());
    let graph = stream.capture(&mut build).unwrap();
    launch(&stream, operation.clone());
    stream.replay(&graph, &Touches::none()).unwrap();
    let event = stream.record().unwrap();
    drop((buffer, operation, graph));
    assert_eq!(device.facts().used_bytes, 1 << 16);
    let error = device.alloc(spec.clone()).unwrap_err().to_string();
    assert_eq!(error, "allocate work: 65536 bytes needed, 0 free on cpu");
    gate.complete(Ok(()));
    event.synchronize(LONG).unwrap();
    assert_eq!(device.facts().used_bytes, 0);
    device.alloc(spec).unwrap();
}

#[test]
fn a_token_passes_through_many_streams() {
    let device = device(1 << 20);
    let streams: Vec<_> = (0..12).map(|i| stream(&device, &format!("lane{i}"))).collect();
    let rounds = 40;
    let n = streams.len() * rounds;
    let [from, log] = ["from", "log"].map(|name| ints(&device, name, n, Place::Pinned));
    let cell = ints(&device, "cell", 1, Place::Device);
    let values: Vec<i32> = (0..n as i32).collect();
    write(&device, &from.view(), &values);
    let mut last: Option<Event> = None;
    for i in 0..n {
        let stream = &streams[i % streams.len()];
        if let Some(last) = &last {
            stream.wait(last).unwrap();
        }
        launch(stream, copy(from.slice(i, 1), cell.view()));
        launch(stream, copy(cell.view(), log.slice(i, 1)));
        last = Some(stream.record().unwrap());
    }
    last.unwrap().synchronize(LONG).unwrap();
    assert_eq!(read(&device, &log.view()), values);
}

#[test]
fn many_threads_launch_on_the_same_streams_past_their_queues() {
    let device = device(1 << 20);
    let streams = ["chain", "lane1"].map(|name| stream(&device, name));
    let (threads, each) = (6, 700);
    let from = ints(&device, "from", threads * each, Place::Pinned);
    let to = ints(&device, "to", threads * each, Place::Pinned);
    let values: Vec<i32> = (0..(threads * each) as i32).collect();
    write(&device, &from.view(), &values);
    let (closed, gate) = gate();
    for stream in &streams {
        stream.wait(&closed).unwrap();
    }
    let launched = AtomicUsize::new(0);
    thread::scope(|scope| {
        for t in 0..threads {
            let (streams, from, to, launched) = (&streams, &from, &to, &launched);
            scope.spawn(move || {
                for i in t * each..(t + 1) * each {
                    launch(&streams[i % 2], copy(from.slice(i, 1), to.slice(i, 1)));
                    launched.fetch_add(1, Ordering::Relaxed);
                }
                streams.iter().for_each(finish);
            });
        }
        // More than both queues hold, so some launches are waiting for room.
        while launched.load(Ordering::Relaxed) < 2 * 1000 {
            thread::yield_now();
        }
        gate.complete(Ok(()));
    });
    assert_eq!(read(&device, &to.view()), values);
}

#[test]
fn a_graph_runs_as_one_and_names_its_failing_operation() {
    let device = device(1 << 20);
    let stream = stream(&device, "chain");
    let [from, to] = ["from", "to"].map(|name| ints(&device, name, 1, Place::Pinned));
    let cell = ints(&device, "cell", 1, Place::Device);
    let none = Touches::none();
    let ops = [
        copy(from.view(), cell.view()),
        copy(cell.view(), to.view()),
        failing(&device),
    ];
    let capture =
        |ops: &[Op]| stream.capture(&mut |capture| ops.iter().try_for_each(|op| capture.launch(op, &none)));
    let (good, bad) = (capture(&ops[..2]).unwrap(), capture(&ops).unwrap());
    assert_eq!((good.ops.len(), good.captured_on), (2, stream.id()));
    for value in [1, 2] {
        write(&device, &from.view(), &[value]);
        stream.replay(&good, &none).unwrap();
        finish(&stream);
        assert_eq!(read(&device, &to.view()), [value]);
    }
    stream.replay(&bad, &none).unwrap();
    let outcome = stream.record().and_then(|event| event.synchronize(LONG));
    assert_eq!(failed_op(outcome).1, "ScatterRows (operation 3 of 3)");
}

#[test]
fn a_capture_takes_operations_only() {
    let device = device(1 << 20);
    let stream = stream(&device, "chain");
    let event = stream.record().unwrap();
    let graph = stream.capture(&mut |_| Ok(())).unwrap();
    type Call<'a> = &'a dyn Fn(&dyn Stream) -> Result<()>;
    let calls: [(&str, Call<'_>); 4] = [
        ("record", &|capture| capture.record().map(drop)),
        ("wait", &|capture| capture.wait(&event)),
        ("replay", &|capture| capture.replay(&graph, &Touches::none())),
        ("capture", &|capture| capture.capture(&mut |_| Ok(())).map(drop)),
    ];
    for (name, call) in calls {
        let error = stream
            .capture(&mut |capture| call(capture))
            .unwrap_err()
            .to_string();
        assert!(
            error.starts_with(&format!("cpu: {name} inside a capture on stream chain")),
            "{error}"
        );
    }
    let bad = ints(&device, "bad", 2, Place::Device);
    let bad = copy(bad.slice(0, 1), bad.view());
    let error = stream.capture(&mut |capture| capture.launch(&bad, &Touches::none()));
    assert!(matches!(error, Err(DeviceError::BadOperation { op: "Copy", .. })));
    let error = stream.launch(&bad, &Touches::none());
    assert!(matches!(error, Err(DeviceError::BadOperation { op: "Copy", .. })));
}

#[test]
fn refusals_say_what_to_write_instead() {
    let device = device(64);
    let partition = device.create_stream(StreamConfig {
        name: "lane1".to_owned(),
        priority: Default::default(),
        partition_sms: Some(32),
    });
    assert_eq!(
        partition.unwrap_err().to_string(),
        "cpu: a partition of 32 SMs for stream lane1 is not supported: leave out `sms` on this device"
    );
    let [host, work] =
        [("host", Place::Pinned), ("work", Place::Device)].map(|(name, place)| ints(&device, name, 2, place));
    let check = |outcome: Result<()>, expected: &str| {
        assert_eq!(outcome.unwrap_err().to_string(), expected);
    };
    check(
        device.host_write(&work.view(), &[0; 8]),
        "host_write: work[0..2] is device memory: copy it to a pinned buffer and access that",
    );
    check(
        device.host_read(&host.view(), &mut [0; 4]),
        "host_read: host[0..2] holds 2 elements of 4 bytes = 8 bytes, 4 bytes given",
    );
    let spec = BufferSpec {
        name: "table".to_owned(),
        dtype: DType::F32,
        len: 1,
        place: Place::Device,
    };
    check(
        device.alloc_with(spec, &[0; 3]).map(drop),
        "alloc_with: table[0..1] holds 1 elements of 4 bytes = 4 bytes, 3 bytes given",
    );
    assert_eq!(
        device.facts().used_bytes,
        16,
        "a refused allocation is given back"
    );
    assert!(device.facts().exact_buckets);
}
