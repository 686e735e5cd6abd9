//! One process under test.

use std::collections::VecDeque;
use std::io::{BufRead as _, BufReader};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Instant;

use anyhow::Context as _;

use crate::PATIENCE;

/// What a process has logged so far.
#[derive(Debug, Default)]
struct Log {
    lines: Mutex<(VecDeque<String>, bool)>,
    grew: Condvar,
}

/// A running binary. Dropping it kills the process and, in a failed test, prints its log.
#[derive(Debug)]
pub struct Process {
    name: String,
    child: Child,
    log: Arc<Log>,
}

/// What a line says that has the address of metrics.
const METRICS_BOUND: &str = "\"message\":\"metrics bound\"";

/// The address that a line tells of.
fn address(line: &str) -> Option<SocketAddr> {
    let (_, after) = line.split_once("\"address\":\"")?;
    after.split_once('"')?.0.parse().ok()
}

/// Where cargo put the workspace's binaries.
///
/// # Errors
/// They are not built.
pub fn binary(name: &str) -> anyhow::Result<PathBuf> {
    let test = std::env::current_exe().context("find this test's own file")?;
    let mut above = test.ancestors().skip(1).map(|directory| directory.join(name));
    above.find(|path| path.is_file()).with_context(|| {
        format!(
            "no binary {name} above {}: run `cargo build --workspace --bins` first",
            test.display()
        )
    })
}

impl Process {
    /// Start a binary of the workspace. It logs JSON lines, and streams are checked by the sanitizer.
    ///
    /// # Errors
    /// It is not built or does not start.
    pub fn start(name: &str, arguments: &[&str]) -> anyhow::Result<Self> {
        Self::start_with(name, arguments, &[])
    }

    /// The same with more variables in its environment.
    ///
    /// # Errors
    /// As [`Process::start`].
    pub fn start_with(name: &str, arguments: &[&str], variables: &[(&str, &str)]) -> anyhow::Result<Self> {
        let mut command = Command::new(binary(name)?);
        command
            .args(arguments)
            .envs(variables.iter().copied())
            .env("LANEWAY_LOG_FORMAT", "json")
            .env("LANEWAY_SANITIZE", "1");
        command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped());
        let mut child = command.spawn().with_context(|| format!("start {name}"))?;
        let stderr = child.stderr.take().context("take its standard error")?;
        let log = Arc::new(Log::default());
        let reader = log.clone();
        std::thread::Builder::new()
            .name(format!("log of {name}"))
            .spawn(move || {
                let lines = BufReader::new(stderr).lines();
                for line in lines.map_while(Result::ok) {
                    reader
                        .lines
                        .lock()
                        .unwrap_or_else(PoisonError::into_inner)
                        .0
                        .push_back(line);
                    reader.grew.notify_all();
                }
                reader.lines.lock().unwrap_or_else(PoisonError::into_inner).1 = true;
                reader.grew.notify_all();
            })?;
        Ok(Process {
            name: name.to_owned(),
            child,
            log,
        })
    }

    /// Process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Wait for the first log line that `pick` makes something of.
    ///
    /// # Errors
    /// The process ended or the patience ran out before it.
    pub fn wait_for_line<T>(&self, what: &str, pick: impl Fn(&str) -> Option<T>) -> anyhow::Result<T> {
        let deadline = Instant::now() + PATIENCE;
        let mut log = self.log.lines.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(found) = log.0.iter().find_map(|line| pick(line)) {
                return Ok(found);
            }
            anyhow::ensure!(
                !log.1,
                "{} ended before it said {what}:\n{}",
                self.name,
                text(&log.0)
            );
            let left = deadline.saturating_duration_since(Instant::now());
            anyhow::ensure!(
                !left.is_zero(),
                "{} did not say {what} in time:\n{}",
                self.name,
                text(&log.0)
            );
            log = self
                .log
                .grew
                .wait_timeout(log, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    /// The address that it bound for its callers.
    ///
    /// # Errors
    /// As [`Process::wait_for_line`].
    pub fn address(&self) -> anyhow::Result<SocketAddr> {
        let metrics = |line: &str| line.contains(METRICS_BOUND);
        self.wait_for_line("its address", |line| (!metrics(line)).then(|| address(line))?)
    }

    /// The address that it bound for its metrics, which it was asked to.
    ///
    /// # Errors
    /// As [`Process::wait_for_line`].
    pub fn metrics_address(&self) -> anyhow::Result<SocketAddr> {
        let metrics = |line: &str| line.contains(METRICS_BOUND);
        self.wait_for_line("its metrics' address", |line| {
            metrics(line).then(|| address(line))?
        })
    }

    /// Everything logged so far.
    pub fn log(&self) -> String {
        text(&self.log.lines.lock().unwrap_or_else(PoisonError::into_inner).0)
    }

    /// Send a signal by name, `TERM`.
    ///
    /// # Errors
    /// The signal cannot be sent.
    pub fn signal(&self, signal: &str) -> anyhow::Result<()> {
        self::signal(self.id(), signal)
    }

    /// Processes that it started and that run, with their command lines.
    ///
    /// # Errors
    /// The machine does not say.
    pub fn children(&self) -> anyhow::Result<Vec<(u32, String)>> {
        let mut children = Vec::new();
        for entry in std::fs::read_dir("/proc").context("list processes")? {
            let path = entry?.path();
            // One that ends meanwhile is none.
            let (Ok(status), Ok(command)) = (
                std::fs::read_to_string(path.join("status")),
                std::fs::read_to_string(path.join("cmdline")),
            ) else {
                continue;
            };
            let field = |name: &str| {
                let line = status.lines().find_map(|line| line.strip_prefix(name))?;
                line.split_whitespace().next().map(str::to_owned)
            };
            let dead = field("State:").is_none_or(|state| state == "Z");
            if !dead && field("PPid:") == Some(self.id().to_string()) {
                let id = field("Pid:").context("read a process's id")?.parse()?;
                children.push((id, command.replace('\0', " ")));
            }
        }
        Ok(children)
    }

    /// Wait for its end.
    ///
    /// # Errors
    /// It still runs when the patience is over.
    pub async fn ended(&mut self) -> anyhow::Result<ExitStatus> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.child.try_wait().context("wait for a process")? {
                return Ok(status);
            }
            anyhow::ensure!(
                Instant::now() < deadline,
                "{} did not end:\n{}",
                self.name,
                self.log()
            );
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
    }

    /// What the process holds of the machine.
    ///
    /// # Errors
    /// It has ended.
    pub fn holds(&self) -> anyhow::Result<Holdings> {
        let entries = |what: &str| {
            let directory = format!("/proc/{}/{what}", self.id());
            Ok::<_, anyhow::Error>(std::fs::read_dir(&directory).context(directory)?.count())
        };
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.id()))?;
        let resident = status
            .lines()
            .find_map(|line| line.strip_prefix("VmRSS:"))
            .context("read VmRSS")?;
        let resident_kb: u64 = resident
            .trim()
            .trim_end_matches("kB")
            .trim()
            .parse()
            .context("read VmRSS")?;
        Ok(Holdings {
            threads: entries("task")?,
            files: entries("fd")?,
            resident_bytes: resident_kb * 1024,
        })
    }
}

/// Send a signal by name, `KILL`, to any process.
///
/// # Errors
/// The signal cannot be sent.
pub fn signal(process: u32, signal: &str) -> anyhow::Result<()> {
    let arguments = [format!("-{signal}"), process.to_string()];
    let sent = Command::new("kill")
        .args(arguments)
        .status()
        .context("run kill")?;
    anyhow::ensure!(sent.success(), "kill -{signal} {process} failed");
    Ok(())
}

/// Whether a process runs.
pub fn runs(process: u32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).unwrap_or_default();
    let state = status.lines().find_map(|line| line.strip_prefix("State:"));
    state.is_some_and(|state| !state.trim().starts_with('Z'))
}

/// What a process holds of the machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Holdings {
    /// Threads.
    pub threads: usize,
    /// Open files.
    pub files: usize,
    /// Resident memory.
    pub resident_bytes: u64,
}

impl Drop for Process {
    fn drop(&mut self) {
        // Errors mean that it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            eprintln!("--- log of {} ---\n{}", self.name, self.log());
        }
    }
}

fn text(lines: &VecDeque<String>) -> String {
    lines.iter().flat_map(|line| [line.as_str(), "\n"]).collect()
}
