//! The public API: admission, validation, routing and the life of a stream between a caller and a worker.
//!
//! A request's path: a shape of the API (`speech`, `http`) hands it to `api`, which refuses or admits it; `validate` makes
//! it a checked request, and `relay` owns it from then on: it asks `routing` for a worker, passes audio on, and ends
//! on whatever comes first of the last message, a failure, the deadline, a cancel, or a caller who left. What the
//! caller has yet to take waits in `delivery`.
//!
//! Must not know: devices, engines, how a worker runs a request.

mod access;
mod admission;
mod api;
mod caller;
pub mod config;
mod delivery;
mod discovery;
mod drain;
mod encode;
mod facts;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
mod health;
mod http;
mod keys;
mod listen;
mod open_files;
mod progress;
mod readable;
mod relay;
mod riva;
mod routing;
mod samples;
mod sentences;
mod server;
mod session;
mod speech;
mod validate;
mod voices;

pub use config::{CallerConfig, Config, DiscoveryConfig, LinkConfig, StreamConfig};
pub use discovery::{ClusterError, DnsName, NotADnsName, NotAService, ServiceName};
pub use drain::Shutdown;
pub use http::origin::Origins;
pub use keys::{ApiKeys, KeyFileError};
pub use server::{BuildError, Gateway, ServeError};
pub use voices::{Voices, VoicesConfig, VoicesError};
