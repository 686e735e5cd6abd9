//! The keeper of a Multi-Process Service daemon that was started here: a process that does nothing until the one
//! that started it ends, however that comes about, and then ends the daemon and removes its directory.

use std::path::{Path, PathBuf};
use std::process::{ExitCode, Stdio};
use std::time::Duration;

use anyhow::Context as _;
use clap::Args;
use laneway_engine_manager::mps::{self, Daemon};
use tokio::process::{Child, Command};

use super::launch::PROGRAM;
use crate::parent;

/// How long the keeper may take to end its daemon.
const DEADLINE: Duration = Duration::from_secs(40);

/// Flags of `keep-mps`.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// The daemon's pipe directory.
    directory: PathBuf,
}

/// `laneway keep-mps`: be a keeper. Started by [`Keeper::start`] only.
pub(crate) async fn run(arguments: Arguments) -> anyhow::Result<ExitCode> {
    parent::ended().await;
    mps::quit(&arguments.directory)
        .await
        .context("end the MPS daemon")?;
    Ok(ExitCode::SUCCESS)
}

/// A running keeper. Dropping it lets it do its work with nobody waiting for it.
#[derive(Debug)]
pub(super) struct Keeper(Child);

impl Keeper {
    pub(super) fn start(daemon: &Daemon) -> anyhow::Result<Self> {
        let child = Command::new(PROGRAM)
            .arg0("laneway")
            .arg("keep-mps")
            .arg(daemon.pipe_directory())
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::inherit())
            // A Ctrl-C must not end it before its work.
            .process_group(0)
            .spawn()
            .context("start the keeper of the MPS daemon")?;
        Ok(Keeper(child))
    }

    /// End the daemon. Its clients have ended before.
    pub(super) async fn end(mut self, directory: &Path) -> anyhow::Result<()> {
        drop(self.0.stdin.take());
        let ended = tokio::time::timeout(DEADLINE, self.0.wait()).await;
        let status = ended
            .with_context(|| {
                format!(
                    "wait {DEADLINE:?} for the MPS daemon in {} to end",
                    directory.display()
                )
            })?
            .context("wait for the keeper of the MPS daemon")?;
        anyhow::ensure!(
            status.success(),
            "the MPS daemon in {} did not end: the keeper ended with {status}",
            directory.display()
        );
        Ok(())
    }
}
