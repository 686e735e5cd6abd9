//! The gateway over real gRPC, against workers that play scripts. Each row of the behaviour table that applies
//! to gRPC at the gateway has a test here.

#![allow(
    clippy::unwrap_used,
    reason = "what fails a test may panic, also in its helpers"
)]

mod binary;
mod conversation;
mod failures;
mod fake;
mod harness;
mod lifecycle;
mod overload;
mod sessions;
mod streams;
