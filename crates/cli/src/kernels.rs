//! `laneway kernels`: whether a device computes what the CPU device does, and how fast.

mod bench;
mod check;

use std::process::ExitCode;

use clap::{Args, Subcommand};

/// Flags of `kernels`.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Compare every operation with the CPU device, and rows with themselves in other batches.
    Check(check::Arguments),
    /// Time the operations of one frame with the sizes of the released models.
    Bench(bench::Arguments),
}

pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    match &arguments.command {
        Command::Check(arguments) => check::run(arguments),
        Command::Bench(arguments) => bench::run(arguments),
    }
}
