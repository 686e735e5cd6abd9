//! One request's end of a stream edge: items on their way from a producer to windows of a consumer.

use std::collections::VecDeque;
use std::sync::Arc;

use laneway_device::Event;
use laneway_plan::declaration::ChunkPolicy;

use crate::node::Item;

/// The step that made an item: whose lane it ran on, its place in that lane's order, and its own event.
#[derive(Debug)]
pub(crate) struct OriginStep {
    pub(crate) lane: usize,
    pub(crate) seq: u64,
    pub(crate) event: Event,
}

/// Shared by every item that the step made.
pub(crate) type Origin = Arc<OriginStep>;

/// An item that waits for its window.
#[derive(Debug)]
struct Queued {
    item: Item,
    origin: Option<Origin>,
}

/// A window on its way through a step.
#[derive(Debug, Default)]
pub(crate) struct Window {
    pub(crate) items: Vec<Item>,
    /// The newest step that made one of the items, for each lane that made any.
    pub(crate) origins: Vec<Origin>,
    /// Nothing follows it.
    pub(crate) last: bool,
}

/// Items of one request on one edge.
///
/// A place is taken when a producing step is launched and comes back when the window that read its item has
/// landed; a producer without a free place parks. With a ring, each place is also a row on the device.
#[derive(Debug)]
pub(crate) struct EdgeQueue {
    queue: VecDeque<Queued>,
    chunk: ChunkPolicy,
    /// Ring rows that may be written, the one free for longest first; `None`: items carry their words only.
    free_rows: Option<VecDeque<u32>>,
    capacity: usize,
    /// Places taken.
    held: usize,
    /// Items that arrived so far.
    arrived: u32,
    /// Windows taken so far.
    windows: usize,
    closed: bool,
}

impl EdgeQueue {
    pub(crate) fn new(chunk: ChunkPolicy, capacity: u32) -> Self {
        Self {
            queue: VecDeque::new(),
            chunk,
            free_rows: None,
            capacity: capacity as usize,
            held: 0,
            arrived: 0,
            windows: 0,
            closed: false,
        }
    }

    /// Items pass through the rows of ring slot `slot` from now on.
    pub(crate) fn use_ring(&mut self, slot: u32) {
        let capacity = self.capacity as u32;
        self.free_rows = Some((slot * capacity..(slot + 1) * capacity).collect());
    }

    /// Whether one more producing step may be launched.
    pub(crate) fn has_room(&self) -> bool {
        self.held < self.capacity && self.free_rows.as_ref().is_none_or(|rows| !rows.is_empty())
    }

    /// A producing step is launched: the ring row for its item.
    pub(crate) fn launch_producer(&mut self) -> Option<u32> {
        self.held += 1;
        self.free_rows.as_mut().map(|rows| {
            rows.pop_front()
                .expect("a step is launched only while there is room")
        })
    }

    /// A producing step was refused before it ran.
    pub(crate) fn unlaunch_producer(&mut self, ring_row: Option<u32>) {
        self.held -= 1;
        if let (Some(rows), Some(row)) = (&mut self.free_rows, ring_row) {
            rows.push_front(row);
        }
    }

    /// A producing step landed with these items; `ring_row` is what it was given. `origin` is what a consumer
    /// on another stream waits for.
    pub(crate) fn arrive(
        &mut self,
        items: impl ExactSizeIterator<Item = Arc<[i32]>>,
        ring_row: Option<u32>,
        origin: Option<&Origin>,
    ) {
        // Items beyond the first hold a place as well, though not a row.
        self.held = self.held - 1 + items.len();
        if items.len() == 0
            && let (Some(rows), Some(row)) = (&mut self.free_rows, ring_row)
        {
            // Nobody will read the row, so no window will free it.
            rows.push_back(row);
        }
        for (number, words) in items.enumerate() {
            self.queue.push_back(Queued {
                item: Item {
                    index: self.arrived,
                    words,
                    ring_row: ring_row.filter(|_| number == 0),
                },
                origin: origin.cloned(),
            });
            self.arrived += 1;
        }
    }

    /// An item came from another worker; it has no ring row.
    pub(crate) fn receive(&mut self, words: Arc<[i32]>) {
        self.held += 1;
        self.arrive(std::iter::once(words), None, None);
    }

    /// Nothing more will arrive.
    pub(crate) fn close(&mut self) {
        self.closed = true;
    }

    /// Items of the next window, if it is ready.
    fn ready_items(&self) -> Option<usize> {
        let wanted = self.chunk.window(self.windows) as usize;
        if self.queue.len() >= wanted {
            return Some(wanted);
        }
        (self.closed && !self.queue.is_empty()).then_some(self.queue.len())
    }

    pub(crate) fn window_ready(&self) -> bool {
        self.ready_items().is_some()
    }

    /// Items of the window that is ready.
    pub(crate) fn window_items(&self) -> usize {
        self.ready_items().unwrap_or_default()
    }

    /// The next window is the first.
    pub(crate) fn at_first_window(&self) -> bool {
        self.windows == 0
    }

    /// The window that is ready should not wait: nothing more arrives, so only windows are left of the request, or another
    /// window is full behind it, and a step takes one.
    pub(crate) fn presses(&self) -> bool {
        let next_two = self.chunk.window(self.windows) + self.chunk.window(self.windows + 1);
        self.closed || self.queue.len() >= next_two as usize
    }

    /// Cut the next window.
    pub(crate) fn take_window(&mut self) -> Option<Window> {
        let n_items = self.ready_items()?;
        let mut window = Window {
            items: Vec::with_capacity(n_items),
            ..Window::default()
        };
        for queued in self.queue.drain(..n_items) {
            if let Some(origin) = queued.origin {
                newest(&mut window.origins, origin);
            }
            window.items.push(queued.item);
        }
        window.last = self.closed && self.queue.is_empty();
        self.windows += 1;
        Some(window)
    }

    /// A window's step was refused: it is the next one again.
    pub(crate) fn put_back(&mut self, window: Window) {
        self.windows -= 1;
        for item in window.items.into_iter().rev() {
            self.queue.push_front(Queued {
                item,
                origin: window.origins.first().cloned(),
            });
        }
    }

    /// A window landed: its places are free, its rows may be written again.
    pub(crate) fn window_landed(&mut self, items: &[Item]) {
        self.held -= items.len();
        if let Some(rows) = &mut self.free_rows {
            rows.extend(items.iter().filter_map(|item| item.ring_row));
        }
    }

    /// The oldest items went to another worker instead of a window.
    pub(crate) fn leave(&mut self, n_items: usize) {
        self.queue.drain(..n_items);
        self.held -= n_items;
    }

    /// Closed, and every window taken.
    pub(crate) fn drained(&self) -> bool {
        self.closed && self.queue.is_empty()
    }

    pub(crate) fn arrived(&self) -> u32 {
        self.arrived
    }
}

/// Keep one origin a lane: a stream runs in order, so the newest stands for all before it.
pub(crate) fn newest(origins: &mut Vec<Origin>, origin: Origin) {
    match origins.iter_mut().find(|known| known.lane == origin.lane) {
        Some(known) if known.seq < origin.seq => *known = origin,
        Some(_) => {}
        None => origins.push(origin),
    }
}

#[cfg(test)]
mod tests;
