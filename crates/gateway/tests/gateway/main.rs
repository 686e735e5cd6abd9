//! The gateway over real gRPC and HTTP, against workers that play scripts. Each row of the behaviour table that applies
//! at the gateway has a test for either.

#![allow(
    clippy::unwrap_used,
    reason = "what fails a test may panic, also in its helpers"
)]

mod binary;
mod cluster;
mod conversation;
mod discovery;
mod failures;
mod fake;
mod harness;
mod hostile;
mod http;
mod keys;
mod lifecycle;
mod overload;
mod riva;
mod sessions;
mod silent;
mod streams;
mod tls;
mod voices;
mod websocket;
