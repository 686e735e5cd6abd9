//! The short wait before a thread parks.

use std::time::{Duration, Instant};

/// Longer than a host thread needs from one call to the next, far shorter than a step. Waking a parked
/// thread costs more than this on a virtual machine.
const SPIN: Duration = Duration::from_micros(20);

/// Poll `ready` for a moment; false when it did not come. Gives the processor to any other runnable thread
/// between polls, so that on two cores a waiting executor does not hold up the one it waits for.
pub(crate) fn until(mut ready: impl FnMut() -> bool) -> bool {
    if ready() {
        return true;
    }
    let end = Instant::now() + SPIN;
    loop {
        std::thread::yield_now();
        if ready() {
            return true;
        }
        if Instant::now() >= end {
            return false;
        }
    }
}
