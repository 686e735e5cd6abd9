//! Pages of a paged cache that outlive their request because another may begin the same way.
//!
//! A page is found by a hash of its content and of everything before it, which the model makes. A cached page
//! that nobody uses is free memory in waiting: it is given up, the one unused for longest first, before a
//! request is kept waiting. Only what no live request holds is ever given up.

use std::collections::{BTreeSet, HashMap};

use crate::node::BlockHash;

#[derive(Debug)]
struct Cached {
    hash: BlockHash,
    users: u32,
    last_use: u64,
}

/// The cached pages of one pool.
#[derive(Debug, Default)]
pub(crate) struct PrefixCache {
    by_hash: HashMap<BlockHash, u32>,
    pages: HashMap<u32, Cached>,
    /// Pages without users by last use, oldest first.
    unused: BTreeSet<(u64, u32)>,
    /// Counts uses.
    clock: u64,
}

impl PrefixCache {
    /// Cached pages of the longest beginning of `prefix` that is cached, in order.
    pub(crate) fn find(&self, prefix: &[BlockHash]) -> Vec<u32> {
        prefix
            .iter()
            .map_while(|hash| self.by_hash.get(hash).copied())
            .collect()
    }

    /// One more user of a page from [`Self::find`].
    pub(crate) fn take(&mut self, page: u32) {
        let cached = self.pages.get_mut(&page).expect("only cached pages are taken");
        if cached.users == 0 {
            self.unused.remove(&(cached.last_use, page));
        }
        cached.users += 1;
    }

    /// A user of a taken page is gone.
    pub(crate) fn release(&mut self, page: u32) {
        self.clock += 1;
        let cached = self.pages.get_mut(&page).expect("only cached pages are released");
        cached.users -= 1;
        cached.last_use = self.clock;
        if cached.users == 0 {
            self.unused.insert((self.clock, page));
        }
    }

    /// Keep a page that its only user is done with. False: this content is cached already, the page is free.
    pub(crate) fn keep(&mut self, hash: BlockHash, page: u32) -> bool {
        if self.by_hash.contains_key(&hash) {
            return false;
        }
        self.clock += 1;
        self.by_hash.insert(hash, page);
        self.pages.insert(
            page,
            Cached {
                hash,
                users: 0,
                last_use: self.clock,
            },
        );
        self.unused.insert((self.clock, page));
        true
    }

    /// Give up the page unused for longest.
    pub(crate) fn evict(&mut self) -> Option<u32> {
        let (_, page) = self.unused.pop_first()?;
        let cached = self.pages.remove(&page).expect("an unused page is cached");
        self.by_hash.remove(&cached.hash);
        Some(page)
    }

    /// Pages that [`Self::evict`] could give up, not counting those in `but`.
    pub(crate) fn evictable(&self, but: &[u32]) -> u32 {
        let spared = but.iter().filter(|page| self.pages[page].users == 0).count();
        (self.unused.len() - spared) as u32
    }
}
