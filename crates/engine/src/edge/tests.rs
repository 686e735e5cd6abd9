use std::any::Any;
use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use laneway_device::{Event, EventImpl};
use laneway_plan::declaration::ChunkPolicy;
use proptest::prelude::*;

use super::*;

const CAPACITY: u32 = 8;

struct Done;

impl EventImpl for Done {
    fn is_done(&self) -> bool {
        true
    }

    fn wait(&self, _timeout: Duration) -> laneway_device::Result<()> {
        Ok(())
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

fn origin(lane: usize, seq: u64) -> Origin {
    Arc::new(OriginStep {
        lane,
        seq,
        event: Event {
            id: seq,
            stream: "chain".into(),
            inner: Arc::new(Done),
        },
    })
}

fn queue() -> EdgeQueue {
    let chunk = ChunkPolicy {
        first: 1,
        ramp: vec![2],
        steady: 4,
    };
    EdgeQueue::new(chunk, CAPACITY)
}

fn words(value: i32) -> Arc<[i32]> {
    [value].into()
}

fn make(queue: &mut EdgeQueue, value: i32) {
    let row = queue.launch_producer();
    queue.arrive([words(value)].into_iter(), row, Some(&origin(0, value as u64)));
}

fn sizes(queue: &mut EdgeQueue) -> Vec<(usize, bool)> {
    std::iter::from_fn(|| queue.take_window())
        .map(|window| (window.items.len(), window.last))
        .collect()
}

#[test]
fn the_last_window_is_what_is_left() {
    let mut queue = queue();
    queue.use_ring(3);
    for value in 0..8 {
        make(&mut queue, value);
    }
    assert_eq!(sizes(&mut queue), [(1, false), (2, false), (4, false)]);
    queue.close();
    assert_eq!(sizes(&mut queue), [(1, true)]);
    assert!(queue.drained());
}

#[test]
fn a_full_edge_takes_no_step_until_a_window_landed() {
    let mut queue = queue();
    queue.use_ring(2);
    for value in 0..CAPACITY as i32 {
        assert!(queue.has_room());
        make(&mut queue, value);
    }
    assert!(!queue.has_room());
    let window = queue.take_window().expect("eight items are waiting");
    assert!(!queue.has_room(), "its row is still read");
    queue.window_landed(&window.items);
    assert!(queue.has_room());
    assert_eq!(
        queue.launch_producer(),
        Some(2 * CAPACITY),
        "the row that came back"
    );
}

#[test]
fn a_step_without_an_item_gives_its_row_back() {
    let mut queue = queue();
    queue.use_ring(0);
    let row = queue.launch_producer();
    queue.arrive([].into_iter(), row, None);
    for value in 0..CAPACITY as i32 {
        assert!(queue.has_room());
        make(&mut queue, value);
    }
    assert!(!queue.has_room());
}

#[test]
fn a_refused_window_comes_again_as_it_was() {
    let mut queue = queue();
    queue.use_ring(0);
    for value in 0..3 {
        make(&mut queue, value);
    }
    for _ in 0..2 {
        let window = queue.take_window().expect("the first window");
        assert_eq!((window.items.len(), window.items[0].index), (1, 0));
        assert_eq!(window.origins[0].seq, 0);
        queue.put_back(window);
        assert!(queue.at_first_window());
    }
}

#[test]
fn a_window_names_the_newest_step_of_each_lane() {
    let mut origins = Vec::new();
    for (lane, seq) in [(0, 3), (1, 9), (0, 5), (0, 4), (1, 2)] {
        newest(&mut origins, origin(lane, seq));
    }
    let named: Vec<_> = origins.iter().map(|origin| (origin.lane, origin.seq)).collect();
    assert_eq!(named, [(0, 5), (1, 9)]);
}

#[derive(Debug, Clone)]
enum Action {
    Launch,
    /// The oldest launched step lands, with an item or without.
    Land(bool),
    /// The newest launched step did not run after all.
    Unlaunch,
    TakeWindow,
    /// The oldest window in flight lands.
    LandWindow,
    /// The newest window in flight was refused.
    PutBack,
}

proptest! {
    /// Whatever the order: items come out in theirs, no ring row is in two hands, and no more are out than
    /// there are.
    #[test]
    fn rows_are_in_one_hand_and_items_in_order(
        actions in prop::collection::vec(
            prop::sample::select(vec![
                Action::Launch, Action::Launch, Action::Land(true), Action::Land(true), Action::Land(false),
                Action::Unlaunch, Action::TakeWindow, Action::LandWindow, Action::PutBack,
            ]),
            0..300,
        ),
    ) {
        let mut queue = queue();
        queue.use_ring(1);
        let (mut launched, mut windows) = (VecDeque::new(), VecDeque::<Window>::new());
        let (mut made, mut next) = (0, 0);
        for action in actions {
            match action {
                Action::Launch if queue.has_room() => launched.push_back(queue.launch_producer()),
                Action::Land(with_item) => if let Some(row) = launched.pop_front() {
                    let items: Vec<_> = with_item.then(|| words(made)).into_iter().collect();
                    made += i32::from(with_item);
                    queue.arrive(items.into_iter(), row, None);
                },
                Action::Unlaunch => if let Some(row) = launched.pop_back() {
                    queue.unlaunch_producer(row);
                },
                Action::TakeWindow => windows.extend(queue.take_window()),
                Action::LandWindow => if let Some(window) = windows.pop_front() {
                    for item in &window.items {
                        prop_assert_eq!((item.index, item.words[0]), (next, next as i32));
                        next += 1;
                    }
                    queue.window_landed(&window.items);
                },
                Action::PutBack => if let Some(window) = windows.pop_back() {
                    queue.put_back(window);
                },
                Action::Launch => {}
            }
            let in_windows = windows.iter().flat_map(|window| &window.items).map(|item| item.ring_row);
            let in_queue = queue.queue.iter().map(|queued| queued.item.ring_row);
            let out: Vec<_> = launched.iter().copied().chain(in_windows).chain(in_queue).collect();
            let rows: HashSet<_> = out.iter().map(|row| row.expect("the edge has a ring")).collect();
            prop_assert_eq!(rows.len(), out.len(), "a row is in two hands");
            prop_assert!(rows.iter().all(|row| (CAPACITY..2 * CAPACITY).contains(row)));
            prop_assert_eq!(queue.held, out.len());
            prop_assert_eq!(queue.has_room(), out.len() < CAPACITY as usize);
        }
    }
}
