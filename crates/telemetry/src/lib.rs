//! Logs, traces and metrics: how they start, what they are called, how a trace crosses a process boundary.
//!
//! [`init`] runs once, first thing in a binary; the guard it returns flushes spans when the process ends.
//! Libraries only emit: they use `tracing` and `metrics` with the names of [`metric`].

mod causes;
mod exporter;
mod init;
pub mod metric;
pub mod propagation;
mod signals;
pub mod stage;

pub use causes::{causes, causes_of, causes_of_status};
pub use exporter::{install_recorder, recorder, serve_metrics};
pub use init::{LogFormat, TelemetryConfig, TelemetryGuard, init};
pub use signals::drain_on_signal;
