//! The one error type of this crate.

/// What a device call can fail with.
#[derive(Debug, Clone, thiserror::Error)]
pub enum DeviceError {
    /// The device has not enough memory left for an allocation.
    #[error("allocate {what}: {needed_bytes} bytes needed, {free_bytes} free on {device}")]
    OutOfMemory {
        /// Name of the buffer asked for.
        what: String,
        /// Bytes asked for.
        needed_bytes: u64,
        /// Bytes left.
        free_bytes: u64,
        /// Device name.
        device: String,
    },
    /// An operation was built with operands that do not fit each other.
    #[error("{op}: {problem}")]
    BadOperation {
        /// Operation name, as in [`crate::Op::name`].
        op: &'static str,
        /// What does not fit, with the numbers.
        problem: String,
    },
    /// The sanitizer found two conflicting accesses with no ordering between them.
    #[error("stream sanitizer: {0}")]
    Race(String),
    /// An operation failed while it ran on its stream; everything behind it on that stream is failed too.
    #[error("stream {stream}: {op} failed: {problem}")]
    StreamFailed {
        /// Stream name.
        stream: String,
        /// Operation name.
        op: String,
        /// What happened.
        problem: String,
    },
    /// A wait ran past its deadline.
    #[error("event on stream {stream} did not complete within {waited_ms} ms")]
    Deadline {
        /// Stream the event was recorded on.
        stream: String,
        /// How long the caller waited.
        waited_ms: u64,
    },
    /// The machine has no such device, or it cannot be used.
    #[error("{device}: {problem}: {remedy}")]
    Unavailable {
        /// Device name.
        device: String,
        /// What is missing.
        problem: String,
        /// What to do.
        remedy: String,
    },
    /// A call of the device's driver or compiler failed, outside any stream.
    #[error("{device}: {call} failed: {problem}")]
    Driver {
        /// Device name.
        device: String,
        /// The call.
        call: String,
        /// What it answered.
        problem: String,
    },
    /// The device cannot do what was asked of it (a partition on a CPU, say).
    #[error("{device}: {what} is not supported: {remedy}")]
    Unsupported {
        /// Device name.
        device: String,
        /// What was asked.
        what: String,
        /// What to write instead.
        remedy: String,
    },
}

/// Result of a device call.
pub type Result<T, E = DeviceError> = std::result::Result<T, E>;
