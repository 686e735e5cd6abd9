//! What a request holds of the pools, and its way back.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

use super::pool::Taken;
use crate::control::Waker;
use crate::node::{BlockHash, Grant};

/// Slots that were dropped and wait for the engine thread. Bounded by the number of slots.
#[derive(Debug)]
pub(crate) struct ReturnBin {
    returned: Mutex<Vec<Taken>>,
    waker: Waker,
}

impl ReturnBin {
    pub(crate) fn new(waker: Waker) -> Self {
        Self {
            returned: Mutex::default(),
            waker,
        }
    }

    pub(crate) fn take(&self) -> Vec<Taken> {
        std::mem::take(&mut *self.returned.lock())
    }
}

/// Where one grant came from.
#[derive(Debug)]
pub(super) struct Source {
    pub(super) pool: usize,
    pub(super) prefix: Vec<BlockHash>,
}

/// Slots of one or more pools. The request holds one clone and every launched step that names the slots
/// another, so they come back exactly once, when the last of these steps has landed.
#[derive(Debug)]
pub(crate) struct Lease {
    grants: Vec<Grant>,
    sources: Vec<Source>,
    /// The entry step landed: the pages of the prefix hold what their hashes say.
    filled: AtomicBool,
    bin: Arc<ReturnBin>,
}

impl Lease {
    pub(super) fn new(grants: Vec<Grant>, sources: Vec<Source>, bin: Arc<ReturnBin>) -> Self {
        Self {
            grants,
            sources,
            filled: AtomicBool::new(false),
            bin,
        }
    }

    pub(crate) fn grants(&self) -> &[Grant] {
        &self.grants
    }

    /// The only slot of the only grant.
    pub(crate) fn slot(&self) -> u32 {
        self.grants[0].slots[0]
    }

    /// The entry step landed.
    pub(crate) fn fill(&self) {
        self.filled.store(true, Ordering::Relaxed);
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if self.grants.is_empty() {
            return;
        }
        let filled = *self.filled.get_mut();
        let grants = self.grants.drain(..).zip(self.sources.drain(..));
        let taken = grants.map(|(grant, source)| Taken {
            pool: source.pool,
            slots: grant.slots,
            cached: grant.cached as usize,
            prefix: if filled { source.prefix } else { Vec::new() },
        });
        self.bin.returned.lock().extend(taken);
        self.bin.waker.wake();
    }
}
