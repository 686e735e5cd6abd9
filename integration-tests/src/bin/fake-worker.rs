//! A worker without a model: see [`laneway_integration_tests::fake_worker`].

use clap::Parser as _;
use laneway_integration_tests::fake_worker::{Arguments, FakeWorker};
use tokio::signal::unix::{SignalKind, signal};

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let mut terminate = signal(SignalKind::terminate())?;
    let worker = FakeWorker::bind(Arguments::parse()).await?;
    // As the real ones log it.
    eprintln!("{{\"address\":\"{}\"}}", worker.address());
    worker
        .serve(async move {
            terminate.recv().await;
        })
        .await
}
