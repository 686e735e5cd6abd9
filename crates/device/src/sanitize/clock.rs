//! Vector clocks: how far the order of each stream is known somewhere.

use std::collections::BTreeMap;

/// For each stream, the number of its last operation that is ordered before this point. A stream that is
/// not listed has none.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Clock(BTreeMap<u64, u64>);

impl Clock {
    pub(super) fn get(&self, stream: u64) -> u64 {
        self.0.get(&stream).copied().unwrap_or(0)
    }

    pub(super) fn set(&mut self, stream: u64, epoch: u64) {
        self.0.insert(stream, epoch);
    }

    pub(super) fn forget(&mut self, stream: u64) {
        self.0.remove(&stream);
    }

    /// Know all that `other` knows of the streams that `keep` lets in.
    pub(super) fn join(&mut self, other: &Clock, keep: impl Fn(u64) -> bool) {
        for (&stream, &epoch) in &other.0 {
            if keep(stream) {
                let known = self.0.entry(stream).or_insert(0);
                *known = epoch.max(*known);
            }
        }
    }

    /// Knows all that `other` knows.
    pub(super) fn covers(&self, other: &Clock) -> bool {
        other.0.iter().all(|(&stream, &epoch)| self.get(stream) >= epoch)
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }
}
