//! Everything that can wake the engine loop.

use crate::handle::Accepted;

/// One message to the engine thread.
#[derive(Debug)]
pub(crate) enum Event {
    /// A request was accepted.
    Submit(Box<Accepted>),
    /// Flags were set: cancels, items from another worker, room in an output.
    Wake,
}
