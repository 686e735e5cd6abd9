//! Which slots of a pool are free.

/// A stack of free slots. The slot released last is handed out first, on purpose: the memory is warm, and a
/// missing wait between a release and the next owner shows at once instead of once a day.
#[derive(Debug)]
pub(crate) struct FreeList {
    free: Vec<u32>,
    /// Guards against a second release of the same slot.
    taken: Vec<bool>,
}

impl FreeList {
    pub(crate) fn new(slots: u32) -> Self {
        Self {
            free: (0..slots).rev().collect(),
            taken: vec![false; slots as usize],
        }
    }

    pub(crate) fn available(&self) -> u32 {
        self.free.len() as u32
    }

    pub(crate) fn taken(&self) -> u32 {
        (self.taken.len() - self.free.len()) as u32
    }

    /// # Panics
    /// When fewer than `slots` are free: ask [`Self::available`] first.
    pub(crate) fn take(&mut self, slots: u32) -> Vec<u32> {
        let taken: Vec<u32> = (0..slots)
            .map(|_| {
                self.free
                    .pop()
                    .expect("the caller asked for no more than are free")
            })
            .collect();
        for &slot in &taken {
            self.taken[slot as usize] = true;
        }
        taken
    }

    /// # Panics
    /// When the slot is free already: two owners would follow.
    pub(crate) fn give_back(&mut self, slot: u32) {
        assert!(
            std::mem::replace(&mut self.taken[slot as usize], false),
            "slot {slot} was released twice"
        );
        self.free.push(slot);
    }
}

#[cfg(test)]
mod tests {
    use super::FreeList;

    #[test]
    fn hands_out_the_last_released_slot_first() {
        let mut list = FreeList::new(4);
        let held = list.take(3);
        list.give_back(held[1]);
        assert_eq!(list.take(1), vec![held[1]]);
        assert_eq!((list.taken(), list.available()), (3, 1));
    }

    #[test]
    #[should_panic(expected = "slot 0 was released twice")]
    fn refuses_a_second_release() {
        let mut list = FreeList::new(1);
        let held = list.take(1);
        list.give_back(held[0]);
        list.give_back(held[0]);
    }
}
