//! Every interleaving of the event and of the queue between two or three threads:
//! `RUSTFLAGS="--cfg loom" cargo test -p laneway-device --lib loom_models`.

use std::sync::Arc;
use std::time::Duration;

use loom::thread;

use super::event::CpuEvent;
use super::queue::{Signal, Work, WorkQueue};
use crate::{DeviceError, EventImpl};

fn failure() -> DeviceError {
    DeviceError::StreamFailed {
        stream: "lane1".to_owned(),
        op: "Zero".to_owned(),
        problem: "a test".to_owned(),
    }
}

fn work(queue: &WorkQueue) -> (Arc<CpuEvent>, Work) {
    let event = Arc::new(CpuEvent::pending(Arc::from("lane1")));
    let signal = Signal::new(Arc::clone(&event), Arc::clone(queue.stream()));
    (event, Work::Record(signal))
}

/// What an executor does, without the operations.
fn execute(queue: &WorkQueue, outcome: Result<(), DeviceError>) {
    while let Some(work) = queue.pop() {
        if let Work::Record(signal) = work {
            signal.complete(outcome.clone());
        }
    }
}

#[test]
fn no_waiter_of_an_event_is_left_behind() {
    loom::model(|| {
        let event = Arc::new(CpuEvent::pending(Arc::from("chain")));
        let waiters: Vec<_> = (0..2)
            .map(|_| {
                let event = Arc::clone(&event);
                thread::spawn(move || event.wait(Duration::from_secs(1)).is_err())
            })
            .collect();
        event.complete(Err(failure()));
        event.complete(Ok(()));
        for waiter in waiters {
            assert!(waiter.join().unwrap(), "the first completion counts");
        }
    });
}

#[test]
fn works_run_in_order_through_a_queue_of_one() {
    loom::model(|| {
        let queue = Arc::new(WorkQueue::new(Arc::from("lane1")));
        let executor = thread::spawn({
            let queue = Arc::clone(&queue);
            move || execute(&queue, Ok(()))
        });
        let (first, work_1) = work(&queue);
        let (second, work_2) = work(&queue);
        queue.push(work_1).unwrap();
        queue.push(work_2).unwrap();
        second.wait(Duration::from_secs(1)).unwrap();
        assert!(first.is_done());
        queue.close();
        executor.join().unwrap();
    });
}

#[test]
fn a_failing_stream_lets_go_whoever_waits_for_room() {
    loom::model(|| {
        let queue = Arc::new(WorkQueue::new(Arc::from("lane1")));
        let (event, only) = work(&queue);
        queue.push(only).unwrap();
        let pusher = thread::spawn({
            let queue = Arc::clone(&queue);
            let (event, work) = work(&queue);
            move || (queue.push(work).is_err(), event)
        });
        queue.fail(failure());
        queue.close();
        execute(&queue, Err(failure()));
        let (_, refused) = pusher.join().unwrap();
        // Nothing is lost: what was not refused is run or, once the executor is gone, failed with the queue.
        drop(queue);
        assert!(event.is_done() && refused.is_done());
    });
}
