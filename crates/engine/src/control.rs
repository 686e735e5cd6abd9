//! The part of a request that its callers share with the engine: cancel verbs, items from another worker, and
//! the wish for room in its output. Callers set a flag and wake the engine; they never wait for it.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering, fence};
use std::sync::mpsc::SyncSender;

use parking_lot::Mutex;

use crate::event::Event;
use crate::node::{FinishReason, RequestId};

/// How strongly a request was cancelled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Verb {
    Run,
    Stop,
    Kill,
}

/// Wakes the engine loop, at most one message outstanding, never blocking.
#[derive(Debug, Clone)]
pub(crate) struct Waker {
    events: SyncSender<Event>,
    pending: Arc<AtomicBool>,
}

impl Waker {
    pub(crate) fn new(events: SyncSender<Event>) -> Self {
        Self {
            events,
            pending: Arc::default(),
        }
    }

    /// Make the engine look at every flag once more. A full channel is no loss: the engine is about to run,
    /// and it looks whenever `pending` is set.
    pub(crate) fn wake(&self) {
        if !self.pending.swap(true, Ordering::AcqRel) {
            let _ = self.events.try_send(Event::Wake);
        }
    }

    /// Whether anything was flagged since the last call. The flags are read after this.
    pub(crate) fn take(&self) -> bool {
        self.pending.swap(false, Ordering::AcqRel)
    }
}

/// Items that came from another worker and wait for their window.
#[derive(Debug)]
pub(crate) struct Ingress {
    /// Not yet taken by the engine.
    pub(crate) items: VecDeque<Arc<[i32]>>,
    /// Taken or not, but not yet consumed by a landed window.
    pub(crate) held: usize,
    /// Most that may be held.
    pub(crate) capacity: usize,
    /// Words of an item.
    pub(crate) item_words: usize,
    /// Set once the producer ended.
    pub(crate) end: Option<FinishReason>,
}

/// One request's flags.
#[derive(Debug)]
pub(crate) struct Control {
    pub(crate) id: RequestId,
    pub(crate) name: Arc<str>,
    verb: AtomicU8,
    /// The engine wants to hear of the next event that its listener takes.
    wants_room: AtomicBool,
    /// `None`: its items are made in this worker.
    pub(crate) ingress: Option<Mutex<Ingress>>,
    waker: Waker,
}

impl Control {
    pub(crate) fn new(id: RequestId, name: Arc<str>, ingress: Option<Ingress>, waker: Waker) -> Self {
        Self {
            id,
            name,
            verb: AtomicU8::new(0),
            wants_room: AtomicBool::new(false),
            ingress: ingress.map(Mutex::new),
            waker,
        }
    }

    pub(crate) fn verb(&self) -> Verb {
        match self.verb.load(Ordering::Acquire) {
            0 => Verb::Run,
            1 => Verb::Stop,
            _ => Verb::Kill,
        }
    }

    fn ask(&self, verb: Verb) {
        if self.verb.fetch_max(verb as u8, Ordering::AcqRel) < verb as u8 {
            self.waker.wake();
        }
    }

    /// Called by the engine when a full output keeps the request from being scheduled. The engine must look
    /// at the output once more afterwards.
    pub(crate) fn want_room(&self) {
        self.wants_room.store(true, Ordering::Relaxed);
        // Pairs with the fence in `made_room`: either the listener sees the wish or the engine sees the room.
        fence(Ordering::SeqCst);
    }

    pub(crate) fn wants_room(&self) -> bool {
        self.wants_room.load(Ordering::Relaxed)
    }

    pub(crate) fn got_room(&self) {
        self.wants_room.store(false, Ordering::Relaxed);
    }
}

/// Stops or kills one request, from any thread.
#[derive(Clone)]
pub struct Canceller(pub(crate) Arc<Control>);

impl Canceller {
    /// Finish cleanly: no further steps are begun, what was made is flushed.
    pub fn stop(&self) {
        self.0.ask(Verb::Stop);
    }

    /// End now.
    pub fn kill(&self) {
        self.0.ask(Verb::Kill);
    }

    pub(crate) fn made_room(&self) {
        fence(Ordering::SeqCst);
        if self.0.wants_room() {
            self.0.waker.wake();
        }
    }
}

impl fmt::Debug for Canceller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Canceller of {}", self.0.name)
    }
}
