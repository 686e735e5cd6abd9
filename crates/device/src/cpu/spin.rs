//! The short wait before a thread parks.

use std::time::{Duration, Instant};

/// Longer than a host thread needs from one call to the next, far shorter than a step. Waking a parked
/// thread costs more than this on a virtual machine.
const SPIN: Duration = Duration::from_micros(20);

/// Poll `ready` for a moment; whoever calls this then looks again under its lock. Gives the processor to any other runnable thread
/// between polls, so that on two cores a waiting executor does not hold up the one it waits for.
pub(crate) fn until(mut ready: impl FnMut() -> bool) {
    // A model has no clock; it must find the way through the lock anyway.
    if ready() || cfg!(loom) {
        return;
    }
    let end = Instant::now() + SPIN;
    while Instant::now() < end {
        std::thread::yield_now();
        if ready() {
            return;
        }
    }
}
