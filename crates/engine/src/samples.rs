//! Output samples, in memory that is used again: a step hands out more than half a megabyte, and memory that the
//! allocator got anew each time would cost the engine thread a page fault for every 4 KiB.

use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

use parking_lot::Mutex;

/// Samples of one window. Dropped, by whichever thread, their memory goes back to its pool.
pub struct Samples {
    /// At least `len` long; what lies behind is of no meaning.
    memory: Vec<f32>,
    len: usize,
    pool: Option<Arc<SamplePool>>,
}

impl Samples {
    /// To write them.
    pub fn as_mut_slice(&mut self) -> &mut [f32] {
        &mut self.memory[..self.len]
    }
}

impl Deref for Samples {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        &self.memory[..self.len]
    }
}

impl From<Vec<f32>> for Samples {
    fn from(memory: Vec<f32>) -> Self {
        Self {
            len: memory.len(),
            memory,
            pool: None,
        }
    }
}

impl Clone for Samples {
    fn clone(&self) -> Self {
        self.to_vec().into()
    }
}

impl fmt::Debug for Samples {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} samples", self.len)
    }
}

impl Drop for Samples {
    fn drop(&mut self) {
        if let Some(pool) = self.pool.take() {
            pool.give_back(std::mem::take(&mut self.memory));
        }
    }
}

/// Memory of samples that were dropped.
#[derive(Debug)]
pub struct SamplePool {
    longest: usize,
    most_free: usize,
    free: Mutex<Vec<Vec<f32>>>,
}

impl SamplePool {
    /// For windows of at most `longest` samples. It keeps memory for `most_free` of them: what a burst took
    /// beyond that goes back to the allocator.
    pub fn new(longest: usize, most_free: usize) -> Arc<Self> {
        Arc::new(Self {
            longest,
            most_free,
            free: Mutex::new(Vec::with_capacity(most_free)),
        })
    }

    /// Room for `len` samples, to be written: what is in it is what was there before.
    pub fn take(self: &Arc<Self>, len: usize) -> Samples {
        let used = self.free.lock().pop();
        // Of memory that was never written to the system keeps nothing.
        let mut memory = used.unwrap_or_else(|| vec![0.0; self.longest]);
        if memory.len() < len {
            memory.resize(len, 0.0);
        }
        Samples {
            memory,
            len,
            pool: Some(self.clone()),
        }
    }

    fn give_back(&self, memory: Vec<f32>) {
        let mut free = self.free.lock();
        if free.len() < self.most_free {
            free.push(memory);
        } else {
            // The allocator may take its time.
            drop(free);
            drop(memory);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filled(pool: &Arc<SamplePool>, len: usize, value: f32) -> Samples {
        let mut samples = pool.take(len);
        samples.as_mut_slice().fill(value);
        samples
    }

    #[test]
    fn dropped_samples_leave_their_memory_to_the_next() {
        let pool = SamplePool::new(8, 2);
        let first = filled(&pool, 8, 1.0);
        let address = first.as_ptr();
        drop(first);
        let second = filled(&pool, 3, 2.0);
        assert_eq!((second.as_ptr(), &second[..]), (address, &[2.0; 3][..]));
        assert_eq!(filled(&pool, 20, 3.0)[..], [3.0; 20]);
    }

    #[test]
    fn a_pool_keeps_no_more_than_it_was_told_to() {
        let pool = SamplePool::new(4, 2);
        let burst: Vec<_> = (0..5).map(|i| filled(&pool, 4, i as f32)).collect();
        assert!(
            burst
                .iter()
                .enumerate()
                .all(|(i, samples)| samples[0] == i as f32)
        );
        drop(burst);
        assert_eq!(pool.free.lock().len(), 2);
    }

    #[test]
    fn a_copy_belongs_to_no_pool() {
        let pool = SamplePool::new(4, 2);
        let samples = filled(&pool, 4, 1.0);
        let copy = samples.clone();
        drop(samples);
        filled(&pool, 4, 2.0);
        assert_eq!(copy[..], [1.0; 4]);
    }
}
