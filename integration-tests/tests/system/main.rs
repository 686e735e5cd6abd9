//! The real binaries, from text to audio and through everything that may go wrong.

mod behaviour;
mod browser;
mod churn;
mod configuration;
mod dependencies;
mod grpc_clients;
mod life;
mod load;
mod metrics;
mod openai;
mod soak;
mod speech;
mod tls;
mod top;
mod traces;
mod voices;
mod workers;
