//! Everything that can wake the engine loop.

use laneway_device::DeviceError;

use crate::handle::Accepted;
use crate::lane::Report;

/// One message to the engine thread.
#[derive(Debug)]
pub(crate) enum Event {
    /// A request was accepted.
    Submit(Box<Accepted>),
    /// Flags were set: cancels, items from another worker, room in an output, slots to take back.
    Wake,
    /// The oldest chain step in flight landed, failed or ran out of time.
    ChainLanded {
        /// Its number.
        seq: u64,
        /// What waiting for it gave.
        result: Result<(), DeviceError>,
    },
    /// A lane's step is over.
    LaneLanded(Box<Report>),
    /// End every request and leave.
    Shutdown,
}
