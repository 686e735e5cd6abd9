//! What a request holds of the pools, and its way back.

use std::sync::Arc;

use parking_lot::Mutex;

use crate::control::Waker;
use crate::node::Grant;

/// Slots that were dropped and wait for the engine thread. Bounded by the number of slots.
#[derive(Debug)]
pub(crate) struct ReturnBin {
    returned: Mutex<Vec<(usize, Vec<u32>)>>,
    waker: Waker,
}

impl ReturnBin {
    pub(crate) fn new(waker: Waker) -> Self {
        Self {
            returned: Mutex::default(),
            waker,
        }
    }

    pub(crate) fn take(&self) -> Vec<(usize, Vec<u32>)> {
        std::mem::take(&mut *self.returned.lock())
    }
}

/// Slots of one or more pools. The request holds one clone and every launched step that names the slots
/// another, so they come back exactly once, when the last of these steps has landed.
#[derive(Debug)]
pub(crate) struct Lease {
    grants: Vec<Grant>,
    pools: Vec<usize>,
    bin: Arc<ReturnBin>,
}

impl Lease {
    pub(super) fn new(grants: Vec<Grant>, pools: Vec<usize>, bin: Arc<ReturnBin>) -> Self {
        Self { grants, pools, bin }
    }

    pub(crate) fn grants(&self) -> &[Grant] {
        &self.grants
    }

    /// The only slot of the only grant.
    pub(crate) fn slot(&self) -> u32 {
        self.grants[0].slots[0]
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if self.grants.is_empty() {
            return;
        }
        let grants = self.grants.drain(..);
        let slots = self.pools.drain(..).zip(grants.map(|grant| grant.slots));
        self.bin.returned.lock().extend(slots);
        self.bin.waker.wake();
    }
}
