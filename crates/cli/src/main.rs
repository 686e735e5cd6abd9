//! `laneway`: the command-line program. Each command is a module; this file only picks one.

mod alone;
mod bench;
mod client;
mod config;
mod health;
mod kernels;
mod parent;
mod processes;
mod profile;
mod repeat;
mod say;
mod soak;
mod stdout;
mod system;
mod top;
mod up;
mod validate;
mod verify;
mod voices;

use std::process::ExitCode;

use clap::{ArgMatches, CommandFactory as _, FromArgMatches as _, Parser, Subcommand};
use laneway_telemetry::{LogFormat, TelemetryConfig};
use laneway_worker::RegisterError;

/// Exit code of a configuration that cannot be used.
const EXIT_CONFIG: u8 = 2;

/// Serve speech models, and speak with them.
#[derive(Debug, Parser)]
#[command(name = "laneway", version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
    /// Log lines: text or json.
    #[arg(long, global = true, env = "LANEWAY_LOG_FORMAT", default_value = "text")]
    log_format: LogFormat,
    /// Log filter directives; each command has its own default.
    #[arg(long, global = true, env = "LANEWAY_LOG")]
    log: Option<String>,
    /// OTLP gRPC endpoint for traces.
    #[arg(long, global = true, env = "LANEWAY_OTLP_ENDPOINT")]
    otlp_endpoint: Option<String>,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Start a deployment: all roles in this process, or one of them.
    Up(up::Arguments),
    /// Speak a text into a WAV file.
    Say(say::Arguments),
    /// Check a deployment's configuration and print every violation.
    Validate(validate::Arguments),
    /// Compare this build with golden tensors of the reference.
    Verify(verify::Arguments),
    /// List the voices and languages that are served.
    Voices(voices::Arguments),
    /// Measure throughput and latency through the gateway.
    Bench(bench::Arguments),
    /// Load a system for minutes, with cancels and deaths, and judge it.
    Soak(soak::Arguments),
    /// Compare or time the operations of a device.
    Kernels(kernels::Arguments),
    /// Run a model and time the stages of its steps.
    Profile(profile::Arguments),
    /// Speak the same thing again and again, in changing company, and compare every sample.
    Repeat(repeat::Arguments),
    /// Watch a running system: rates, queue, slots, phases of steps.
    Top(top::Arguments),
    /// Ask a service whether it serves.
    Health(health::Arguments),
    /// End an MPS daemon once the process that started it is gone.
    #[command(hide = true)]
    KeepMps(processes::keeper::Arguments),
}

impl Command {
    /// A server tells what it does; a command that prints results keeps quiet otherwise.
    fn default_filter(&self) -> &'static str {
        match self {
            Command::Up(_) => "info",
            _ => "warn",
        }
    }
}

#[tokio::main]
async fn main() -> ExitCode {
    let arguments = read(&Arguments::command().get_matches()).unwrap_or_else(|error| error.exit());
    match run(arguments).await {
        Ok(code) => code,
        Err(error) => report(&error),
    }
}

fn read(matches: &ArgMatches) -> Result<Arguments, clap::Error> {
    if let Some(("up", flags)) = matches.subcommand() {
        up::refuse_misplaced(flags)?;
    }
    Arguments::from_arg_matches(matches)
}

/// Print why it failed, and tell a configuration that cannot be used from every other failure.
fn report(error: &anyhow::Error) -> ExitCode {
    if let Some(refused) = error.downcast_ref::<config::Refused>() {
        eprint!("{refused}");
        return ExitCode::from(EXIT_CONFIG);
    }
    if let Some(flags) = error.downcast_ref::<client::BadFlags>() {
        eprint!("{flags}");
        return ExitCode::from(EXIT_CONFIG);
    }
    if error.is::<stdout::ReaderLeft>() {
        return ExitCode::from(stdout::EXIT_READER_LEFT);
    }
    // Found too late for the parser, and told as it would.
    if let Some(usage) = error.downcast_ref::<clap::Error>() {
        eprint!("{usage}");
        return ExitCode::from(EXIT_CONFIG);
    }
    eprintln!("laneway: {}", laneway_telemetry::causes(error));
    if error.is::<processes::Refused>() {
        return ExitCode::from(EXIT_CONFIG);
    }
    // What only a worker can tell: the devices of its machine.
    let Some(RegisterError::Refused { violations, .. }) = error.downcast_ref() else {
        return ExitCode::FAILURE;
    };
    for violation in violations {
        eprintln!("  {}: {}", violation.field, violation.description);
    }
    ExitCode::from(EXIT_CONFIG)
}

async fn run(arguments: Arguments) -> anyhow::Result<ExitCode> {
    let filter = arguments
        .log
        .unwrap_or_else(|| arguments.command.default_filter().to_owned());
    let _telemetry = laneway_telemetry::init(TelemetryConfig {
        service: "laneway",
        filter: Some(filter),
        format: arguments.log_format,
        otlp_endpoint: arguments.otlp_endpoint,
    })?;
    match arguments.command {
        Command::Up(arguments) => up::run(arguments).await,
        Command::Say(arguments) => say::run(arguments).await,
        Command::Validate(arguments) => validate::run(&arguments),
        // The engine's threads are its own; nothing else runs in this program meanwhile.
        Command::Verify(arguments) => tokio::task::spawn_blocking(move || verify::run(&arguments)).await?,
        Command::Voices(arguments) => voices::run(arguments).await,
        Command::Bench(arguments) => bench::run(arguments).await,
        Command::Soak(arguments) => soak::run(arguments).await,
        Command::Kernels(arguments) => tokio::task::spawn_blocking(move || kernels::run(&arguments)).await?,
        Command::Profile(arguments) => tokio::task::spawn_blocking(move || profile::run(&arguments)).await?,
        Command::Repeat(arguments) => tokio::task::spawn_blocking(move || repeat::run(&arguments)).await?,
        Command::Top(arguments) => top::run(arguments).await,
        Command::Health(arguments) => health::run(arguments).await,
        Command::KeepMps(arguments) => processes::keeper::run(arguments).await,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_role_refuses_flags_of_the_public_api() {
        let read = |line: &str| {
            let matches = Arguments::command().try_get_matches_from(line.split(' '));
            matches.and_then(|matches| read(&matches))
        };
        for (line, word) in [
            (
                "laneway up --role worker --tls-cert c --tls-key k",
                Some("--tls-cert"),
            ),
            (
                "laneway up --role engine-manager --api-keys k",
                Some("--api-keys"),
            ),
            ("laneway up --role worker --cors-origin *", Some("--cors-origin")),
            ("laneway up --role worker --internal-tls-cert c", None),
            ("laneway up --role gateway --tls-cert c --tls-key k", None),
            ("laneway up --tls-cert c --tls-key k --api-keys k", None),
        ] {
            let said = read(line).err().map(|error| error.to_string());
            match word {
                None => assert_eq!(said, None, "{line}"),
                Some(word) => assert!(
                    said.as_ref().is_some_and(|said| said.contains(word)),
                    "{line}: {said:?}"
                ),
            }
        }
    }

    #[test]
    fn no_two_flags_of_a_command_are_one() {
        Arguments::command().debug_assert();
    }
}
