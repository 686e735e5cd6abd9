//! Starts the real binaries on free ports and speaks to them, for the tests of this crate.
//!
//! `cargo build --workspace --bins` must have run before (`make test` does). Everything that a process logs is kept
//! and printed when its test fails; every process ends with its [`Process`].

pub mod client;
pub mod deployment;
pub mod fake_worker;
pub mod load;
pub mod open_files;
pub mod process;
pub mod stamp;
pub mod system;
pub mod tools;

use std::time::Duration;

/// Long enough for a busy machine, short enough to fail.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Samples of a frame of audio.
pub const SAMPLES_PER_FRAME: usize = 1920;
