//! The real binaries, from text to audio and through everything that may go wrong.

mod churn;
mod configuration;
mod dependencies;
mod life;
mod soak;
mod speech;
mod top;
mod workers;
