//! One pool of equal slots, or of pages with a cache of shared beginnings.

use super::free_list::FreeList;
use super::prefix::PrefixCache;
use crate::node::BlockHash;

/// What is asked of one pool.
#[derive(Debug, Clone, Default)]
pub(crate) struct Ask {
    pub(crate) pool: usize,
    pub(crate) slots: u32,
    /// Hashes of the whole pages that the request begins with.
    pub(crate) prefix: Vec<BlockHash>,
}

/// What was handed out of one pool and comes back.
#[derive(Debug)]
pub(crate) struct Taken {
    pub(crate) pool: usize,
    pub(crate) slots: Vec<u32>,
    /// The first of these came from the cache.
    pub(crate) cached: usize,
    /// Hashes of the first slots, for the cache to keep them; empty if their content is not to be trusted.
    pub(crate) prefix: Vec<BlockHash>,
}

/// Who has which slot.
#[derive(Debug)]
pub(crate) struct Pool {
    free: FreeList,
    /// `None`: every slot is its owner's alone.
    cache: Option<PrefixCache>,
}

impl Pool {
    pub(crate) fn new(slots: u32, keeps_prefixes: bool) -> Self {
        Self {
            free: FreeList::new(slots),
            cache: keeps_prefixes.then(PrefixCache::default),
        }
    }

    fn cached(&self, prefix: &[BlockHash]) -> Vec<u32> {
        self.cache
            .as_ref()
            .map_or_else(Vec::new, |cache| cache.find(prefix))
    }

    /// Whether [`Self::take`] may be called.
    pub(crate) fn has(&self, slots: u32, prefix: &[BlockHash]) -> bool {
        if self.free.available() >= slots {
            return true;
        }
        let hits = self.cached(prefix);
        let evictable = self.cache.as_ref().map_or(0, |cache| cache.evictable(&hits));
        self.free.available() + evictable + hits.len() as u32 >= slots
    }

    /// Take slots, as many as can be from the cache. Returns them with the number of cached ones, which come
    /// first.
    ///
    /// # Panics
    /// When [`Self::has`] would have said no.
    pub(crate) fn take(&mut self, slots: u32, prefix: &[BlockHash]) -> (Vec<u32>, usize) {
        let mut taken = self.cached(prefix);
        taken.truncate(slots as usize);
        let cached = taken.len();
        if let Some(cache) = &mut self.cache {
            for &page in &taken {
                cache.take(page);
            }
            let rest = slots - cached as u32;
            while self.free.available() < rest {
                let page = cache.evict().expect("the caller asked whether there are enough");
                self.free.give_back(page);
            }
        }
        taken.extend(self.free.take(slots - cached as u32));
        (taken, cached)
    }

    /// Slots come back.
    pub(crate) fn give_back(&mut self, taken: Taken) {
        for (index, slot) in taken.slots.into_iter().enumerate() {
            if let Some(cache) = &mut self.cache {
                if index < taken.cached {
                    cache.release(slot);
                    continue;
                }
                if taken
                    .prefix
                    .get(index)
                    .is_some_and(|&hash| cache.keep(hash, slot))
                {
                    continue;
                }
            }
            self.free.give_back(slot);
        }
    }

    /// Slots that requests or steps in flight hold.
    pub(crate) fn used(&self) -> u32 {
        self.free.taken() - self.cache.as_ref().map_or(0, |cache| cache.evictable(&[]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::{HashMap, HashSet};

    fn give(pool: &mut Pool, slots: Vec<u32>, cached: usize, prefix: &[BlockHash]) {
        pool.give_back(Taken {
            pool: 0,
            slots,
            cached,
            prefix: prefix.to_vec(),
        });
    }

    #[test]
    fn a_known_beginning_is_taken_from_the_cache() {
        let mut pool = Pool::new(8, true);
        let (first, cached) = pool.take(4, &[1, 2]);
        assert_eq!(cached, 0);
        give(&mut pool, first.clone(), 0, &[1, 2]);
        assert_eq!(pool.used(), 0, "what is only cached is not in use");
        let (second, cached) = pool.take(4, &[1, 2, 3]);
        assert_eq!((cached, &second[..2]), (2, &first[..2]));
        let (third, cached) = pool.take(2, &[1, 9]);
        assert_eq!((cached, third[0]), (1, first[0]), "two share the page");
        assert_eq!(pool.used(), 5);
    }

    #[test]
    fn unused_pages_are_given_up_before_anybody_waits_and_used_ones_never() {
        let mut pool = Pool::new(4, true);
        let (pages, _) = pool.take(2, &[1, 2]);
        give(&mut pool, pages, 0, &[1, 2]);
        let (held, cached) = pool.take(1, &[1]);
        assert_eq!(cached, 1);
        assert!(pool.has(3, &[]) && !pool.has(4, &[]));
        let (others, cached) = pool.take(3, &[2]);
        assert_eq!(cached, 1, "the page is there as long as nobody needs its place");
        assert!(!others.contains(&held[0]));
        give(&mut pool, others, 1, &[]);
        assert_eq!(pool.take(3, &[]).0.len(), 3);
        assert!(!pool.has(1, &[2]), "it was given up");
        assert!(pool.has(1, &[1]));
    }

    #[test]
    fn pages_that_were_never_filled_are_not_kept() {
        let mut pool = Pool::new(2, true);
        let (pages, _) = pool.take(2, &[1]);
        give(&mut pool, pages, 0, &[]);
        assert_eq!(pool.take(1, &[1]).1, 0);
    }

    proptest! {
        /// No page has two owners unless it is cached under its hash, none is lost, and what is offered can
        /// be taken.
        #[test]
        fn pages_are_neither_lost_nor_shared_by_mistake(
            actions in prop::collection::vec((any::<bool>(), 0u32..6, 0u64..3, any::<bool>(), any::<prop::sample::Index>()), 0..200),
        ) {
            const PAGES: u32 = 12;
            let mut pool = Pool::new(PAGES, true);
            let mut held: Vec<(Vec<u32>, usize, Vec<BlockHash>)> = Vec::new();
            let mut content: HashMap<u32, BlockHash> = HashMap::new();
            for (take, slots, stem, filled, index) in actions {
                if take {
                    // Beginnings of one stem share their hashes.
                    let prefix: Vec<_> = (0..u64::from(slots) / 2).map(|page| stem * 100 + page).collect();
                    if !pool.has(slots, &prefix) {
                        continue;
                    }
                    let (pages, cached) = pool.take(slots, &prefix);
                    for (place, page) in pages.iter().enumerate() {
                        if place < cached {
                            prop_assert_eq!(content[page], prefix[place], "a hit holds what was asked for");
                        } else {
                            prop_assert!(held.iter().all(|(other, ..)| !other.contains(page)));
                            content.insert(*page, prefix.get(place).copied().unwrap_or(u64::MAX));
                        }
                    }
                    held.push((pages, cached, prefix));
                } else if !held.is_empty() {
                    let (pages, cached, prefix) = held.swap_remove(index.index(held.len()));
                    give(&mut pool, pages, cached, if filled { &prefix } else { &[] });
                }
                let in_hand: HashSet<_> = held.iter().flat_map(|(pages, ..)| pages).collect();
                prop_assert_eq!(pool.used() as usize, in_hand.len());
                prop_assert!(pool.has(PAGES - pool.used(), &[]));
            }
        }
    }
}
