//! NVIDIA's Multi-Process Service: the control daemon that workers share a GPU through.
//!
//! A daemon is reached through Unix sockets in its pipe directory, and only by NVIDIA's own program. [`Control`] finds
//! one that answers or starts one in a short directory of its own; [`Daemon`] asks it; [`quit`] ends one that was
//! started here. No setting of a GPU is touched, and no daemon that was found is ever ended.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use laneway_plan::deployment::MpsMode;
use laneway_plan::mps::{MEMORY_VARIABLE, PIPE_VARIABLE, THREADS_VARIABLE};
use tokio::io::AsyncWriteExt as _;
use tokio::process::Command;
use tokio::time::Instant;

#[cfg(test)]
mod tests;

/// NVIDIA's program, looked for in PATH.
const PROGRAM: &str = "nvidia-cuda-mps-control";

/// Where a daemon and its servers log.
const LOG_VARIABLE: &str = "CUDA_MPS_LOG_DIRECTORY";

/// Which GPUs a process sees. A daemon with fewer would number them anew for its clients.
const DEVICES_VARIABLE: &str = "CUDA_VISIBLE_DEVICES";

/// The pipe directory of a daemon that was started without one.
const DEFAULT_PIPE_DIRECTORY: &str = "/tmp/nvidia-mps";

/// A Unix socket's path is at most 107 bytes, and the daemon's sockets have names of their own behind the directory.
const MAX_PIPE_DIRECTORY_BYTES: usize = 107 - 40;

/// How long one command may take.
const ANSWER_DEADLINE: Duration = Duration::from_secs(5);

/// How long a daemon or a server may take to be there.
const START_DEADLINE: Duration = Duration::from_secs(15);

/// How long a daemon may take to end, each time that it is told to: what it gives its clients, and some.
const QUIT_PATIENCE: Duration = Duration::from_secs(12);

/// Seconds that it gives clients which have not ended.
const CLIENTS_GRACE_S: u32 = 8;

/// Pause between looks.
const POLL: Duration = Duration::from_millis(50);

/// Bytes of a daemon's log that an error shows.
const LOG_TAIL_BYTES: usize = 600;

/// Why there is no daemon to work with.
#[derive(Debug, thiserror::Error)]
pub enum MpsError {
    /// NVIDIA's program is not installed, or cannot be run.
    #[error(
        "run {program}: {error}; it comes with the NVIDIA driver (in a container: the `utility` capability). Install it, \
         or write `mps: {{ mode: disabled }}` to time-slice the device"
    )]
    Program {
        /// What was run.
        program: String,
        /// Why it could not be.
        error: std::io::Error,
    },
    /// Sockets in the directory would have longer paths than Unix allows.
    #[error(
        "the pipe directory {directory} is {length} bytes long, and the daemon's sockets leave it {max}: set TMPDIR (or \
         CUDA_MPS_PIPE_DIRECTORY, for a daemon of your own) to a shorter path"
    )]
    PathTooLong {
        /// The directory.
        directory: String,
        /// Bytes of it.
        length: usize,
        /// Most bytes of it.
        max: usize,
    },
    /// The directory of a daemon cannot be made.
    #[error("make a directory for the MPS daemon in {parent}: {error}")]
    Directory {
        /// Where.
        parent: String,
        /// Why not.
        error: std::io::Error,
    },
    /// The daemon ended or never answered.
    #[error("no MPS daemon answers in {directory} within {waited:?}: {last}")]
    Silent {
        /// Its pipe directory.
        directory: String,
        /// How long it was asked.
        waited: Duration,
        /// What was said last.
        last: String,
    },
    /// A daemon that someone else is to run is not there.
    #[error(
        "an MPS daemon is to run already, and none answers in {directory}: {why}. Start it, name its directory in \
         CUDA_MPS_PIPE_DIRECTORY, or write `mps: {{ mode: required }}` and let `laneway up` start it with all roles"
    )]
    NoneFound {
        /// Where it was looked for.
        directory: String,
        /// What was said there.
        why: String,
    },
    /// A server that cannot go on.
    #[error(
        "the MPS server {server} reports `{status}`: it has to be ended before anybody can use the GPU through it"
    )]
    Server {
        /// Its process.
        server: u32,
        /// As it says.
        status: String,
    },
    /// Workers that run beside MPS instead of under it.
    #[error(
        "the MPS daemon in {directory} has {n_clients} client(s), and process {missing:?} is none of them: what the \
         deployment says of shares and memory would not hold"
    )]
    NotClients {
        /// Its pipe directory.
        directory: String,
        /// Clients of all its servers.
        n_clients: usize,
        /// Who should be one.
        missing: Vec<u32>,
    },
}

/// An engine-manager that starts no workers needs a daemon that others run, unless the deployment does without.
///
/// # Errors
/// [`MpsError::NoneFound`] and what else [`Control::find`] refuses.
pub async fn require(mode: MpsMode) -> Result<(), MpsError> {
    match mode {
        MpsMode::Required | MpsMode::Unmanaged => Control::from_environment().find().await.map(drop),
        MpsMode::Unset | MpsMode::Disabled => Ok(()),
    }
}

/// How a daemon is reached. A value of its own, so that tests can stand in for NVIDIA's program.
#[derive(Debug, Clone)]
pub struct Control {
    program: OsString,
    /// As the environment names it.
    pipe_variable: Option<PathBuf>,
    default_pipe: PathBuf,
    /// Where a daemon's own directory is made.
    parent: PathBuf,
    start_deadline: Duration,
}

/// A daemon that answers.
#[derive(Debug, Clone)]
pub struct Daemon {
    control: Control,
    pipe_directory: PathBuf,
    started_here: bool,
}

impl Control {
    /// NVIDIA's program, as the environment of this process says.
    pub fn from_environment() -> Self {
        Control {
            program: PROGRAM.into(),
            pipe_variable: std::env::var_os(PIPE_VARIABLE)
                .filter(|directory| !directory.is_empty())
                .map(PathBuf::from),
            default_pipe: DEFAULT_PIPE_DIRECTORY.into(),
            parent: std::env::temp_dir(),
            start_deadline: START_DEADLINE,
        }
    }

    /// The daemon of `mode: unmanaged`: one that runs already.
    ///
    /// # Errors
    /// [`MpsError::NoneFound`]; [`MpsError::Program`]; [`MpsError::Server`].
    pub async fn find(&self) -> Result<Daemon, MpsError> {
        let directory = self.pipe_variable.clone().unwrap_or(self.default_pipe.clone());
        let daemon = self.daemon(directory, false);
        match daemon.ping().await {
            Ok(()) => {}
            Err(error @ MpsError::Program { .. }) => return Err(error),
            Err(error) => {
                return Err(MpsError::NoneFound {
                    directory: daemon.shown(),
                    why: error.to_string(),
                });
            }
        }
        daemon.check_servers().await?;
        Ok(daemon)
    }

    /// The daemon of `mode: required`: one that runs already, or one of our own.
    ///
    /// # Errors
    /// Whatever keeps it from answering. A daemon that was started and does not answer is told to quit.
    pub async fn find_or_start(&self) -> Result<Daemon, MpsError> {
        match self.find().await {
            Ok(daemon) => {
                tracing::info!(directory = %daemon.pipe_directory.display(), "an MPS daemon answers; it stays its owner's");
                return Ok(daemon);
            }
            Err(MpsError::NoneFound { directory, why }) => {
                tracing::debug!(directory, why, "no MPS daemon yet");
            }
            Err(error) => return Err(error),
        }
        let directory = self.directory()?;
        let daemon = self.daemon(directory, true);
        if let Err(error) = daemon.start().await {
            let log = daemon.log_tail();
            if let Err(error) = quit_with(self, &daemon.pipe_directory).await {
                tracing::debug!(%error, "a daemon that did not come up is not there to quit");
            }
            return Err(match error {
                MpsError::Silent {
                    directory,
                    waited,
                    last,
                } => MpsError::Silent {
                    directory,
                    waited,
                    last: format!("{last}{log}"),
                },
                other => other,
            });
        }
        tracing::info!(directory = %daemon.pipe_directory.display(), "started an MPS daemon");
        Ok(daemon)
    }

    fn daemon(&self, pipe_directory: PathBuf, started_here: bool) -> Daemon {
        Daemon {
            control: self.clone(),
            pipe_directory,
            started_here,
        }
    }

    fn directory(&self) -> Result<PathBuf, MpsError> {
        let made = tempfile::Builder::new()
            .prefix("laneway-mps.")
            .tempdir_in(&self.parent)
            .map_err(|error| MpsError::Directory {
                parent: self.parent.display().to_string(),
                error,
            })?;
        let length = made.path().as_os_str().as_bytes().len();
        if length > MAX_PIPE_DIRECTORY_BYTES {
            return Err(MpsError::PathTooLong {
                directory: made.path().display().to_string(),
                length,
                max: MAX_PIPE_DIRECTORY_BYTES,
            });
        }
        // From here on it is removed behind the daemon that lives in it.
        Ok(made.keep())
    }

    fn command(&self, pipe_directory: &Path) -> Command {
        let mut command = Command::new(&self.program);
        command
            .env(PIPE_VARIABLE, pipe_directory)
            .env(LOG_VARIABLE, pipe_directory.join("log"))
            // Those of a client, which a daemon would take for everybody's.
            .env_remove(THREADS_VARIABLE)
            .env_remove(MEMORY_VARIABLE)
            .env_remove(DEVICES_VARIABLE)
            .kill_on_drop(true);
        command
    }

    fn not_run(&self, error: std::io::Error) -> MpsError {
        MpsError::Program {
            program: self.program.display().to_string(),
            error,
        }
    }
}

impl Daemon {
    /// Where its clients find it: the value of `CUDA_MPS_PIPE_DIRECTORY`.
    pub fn pipe_directory(&self) -> &Path {
        &self.pipe_directory
    }

    /// It is ours to end.
    pub fn started_here(&self) -> bool {
        self.started_here
    }

    /// Processes that use a GPU through it.
    ///
    /// # Errors
    /// It does not answer.
    pub async fn clients(&self) -> Result<BTreeSet<u32>, MpsError> {
        let mut clients = BTreeSet::new();
        for server in self.servers().await? {
            clients.extend(numbers(&self.ask(&format!("get_client_list {server}")).await?));
        }
        Ok(clients)
    }

    /// Hold these processes to being clients. A process that cannot reach the daemon runs beside it without a word.
    ///
    /// # Errors
    /// [`MpsError::NotClients`]; it does not answer.
    pub async fn check_clients(&self, processes: &[u32]) -> Result<(), MpsError> {
        let clients = self.clients().await?;
        let missing: Vec<u32> = processes
            .iter()
            .copied()
            .filter(|id| !clients.contains(id))
            .collect();
        // In a container the daemon may number processes as another name space does; then the count has to do.
        if !missing.is_empty() && clients.len() < processes.len() {
            return Err(MpsError::NotClients {
                directory: self.shown(),
                n_clients: clients.len(),
                missing,
            });
        }
        Ok(())
    }

    /// End what a client has on the GPU, as has to be done before it is killed: work of a killed client that is still
    /// in flight may take the server with it.
    ///
    /// # Errors
    /// The daemon does not answer.
    pub async fn terminate_client(&self, process: u32) -> Result<(), MpsError> {
        for server in self.servers().await? {
            let clients = numbers(&self.ask(&format!("get_client_list {server}")).await?);
            if clients.contains(&process) {
                self.ask(&format!("terminate_client {server} {process}")).await?;
            }
        }
        Ok(())
    }

    async fn servers(&self) -> Result<Vec<u32>, MpsError> {
        Ok(numbers(&self.ask("get_server_list").await?))
    }

    async fn start(&self) -> Result<(), MpsError> {
        let log = self.pipe_directory.join("log");
        std::fs::create_dir(&log).map_err(|error| MpsError::Directory {
            parent: self.shown(),
            error,
        })?;
        let mut command = self.control.command(&self.pipe_directory);
        // The daemon keeps what it inherits: a pipe of ours would never end.
        command
            .arg("-d")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        let mut child = command.spawn().map_err(|error| self.control.not_run(error))?;
        let began = Instant::now();
        let until = began + self.control.start_deadline;
        let silent = |last: String| MpsError::Silent {
            directory: self.shown(),
            waited: began.elapsed(),
            last,
        };
        match tokio::time::timeout_at(until, child.wait()).await {
            Ok(Ok(status)) if status.success() => {}
            Ok(Ok(status)) => return Err(silent(format!("it ended with {status}"))),
            Ok(Err(error)) => return Err(self.control.not_run(error)),
            Err(_) => return Err(silent("it did not go into the background".into())),
        }
        while let Err(error) = self.ping().await {
            if Instant::now() + POLL > until {
                return Err(silent(error.to_string()));
            }
            tokio::time::sleep(POLL).await;
        }
        self.start_server(until).await
    }

    /// A server comes with the first client; one that cannot come is better found before models are loaded.
    async fn start_server(&self, until: Instant) -> Result<(), MpsError> {
        let user = std::fs::metadata("/proc/self").map_or(0, |process| process.uid());
        self.ask(&format!("start_server -uid {user}")).await?;
        while self.servers().await?.is_empty() {
            if Instant::now() + POLL > until {
                tracing::warn!(
                    "the MPS daemon started no server ahead of its clients; they are checked once they run"
                );
                return Ok(());
            }
            tokio::time::sleep(POLL).await;
        }
        self.check_servers().await
    }

    async fn check_servers(&self) -> Result<(), MpsError> {
        for server in self.servers().await? {
            // Old drivers do not know the question, and refuse it.
            let Ok(status) = self.ask(&format!("get_server_status {server}")).await else {
                continue;
            };
            if status.to_uppercase().contains("FAULT") {
                return Err(MpsError::Server { server, status });
            }
        }
        Ok(())
    }

    async fn ping(&self) -> Result<(), MpsError> {
        let answer = self.ask("get_default_active_thread_percentage").await?;
        match answer.trim().parse::<f64>() {
            Ok(_) => Ok(()),
            Err(_) => Err(self.silent(ANSWER_DEADLINE, answer)),
        }
    }

    /// One command and what is answered.
    async fn ask(&self, question: &str) -> Result<String, MpsError> {
        let mut command = self.control.command(&self.pipe_directory);
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = command.spawn().map_err(|error| self.control.not_run(error))?;
        let stdin = child.stdin.take();
        let answer = async {
            if let Some(mut stdin) = stdin {
                // One that ended before it read has said why.
                let _ = stdin.write_all(format!("{question}\n").as_bytes()).await;
            }
            child.wait_with_output().await
        };
        let output = match tokio::time::timeout(ANSWER_DEADLINE, answer).await {
            Ok(output) => output.map_err(|error| self.control.not_run(error))?,
            Err(_) => return Err(self.silent(ANSWER_DEADLINE, format!("no answer to `{question}`"))),
        };
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
        let (said, complained) = (text(&output.stdout), text(&output.stderr));
        // It has answered with this and the exit code of a success.
        let absent = said.contains("Cannot find") || complained.contains("Cannot find");
        if output.status.success() && !absent {
            return Ok(said);
        }
        let all = [said, complained].concat();
        Err(self.silent(
            Duration::ZERO,
            if all.is_empty() {
                output.status.to_string()
            } else {
                all
            },
        ))
    }

    fn silent(&self, waited: Duration, last: String) -> MpsError {
        MpsError::Silent {
            directory: self.shown(),
            waited,
            last,
        }
    }

    fn shown(&self) -> String {
        self.pipe_directory.display().to_string()
    }

    /// The end of what it logged, for an error.
    fn log_tail(&self) -> String {
        let log = std::fs::read_to_string(self.pipe_directory.join("log/control.log")).unwrap_or_default();
        let begin = log.len().saturating_sub(LOG_TAIL_BYTES);
        match log.get(begin..).map(str::trim) {
            None | Some("") => String::new(),
            Some(tail) => format!("; its log ends: {tail}"),
        }
    }
}

/// End the daemon that was started in this directory, once its clients have ended or had their time, and remove the
/// directory.
///
/// # Errors
/// It does not end; the directory then stays, so that it can still be reached.
pub async fn quit(pipe_directory: &Path) -> Result<(), MpsError> {
    quit_with(&Control::from_environment(), pipe_directory).await
}

async fn quit_with(control: &Control, pipe_directory: &Path) -> Result<(), MpsError> {
    let daemon = control.daemon(pipe_directory.to_owned(), true);
    // With a bound for clients first; a daemon that does not know one understands the second.
    for words in [format!("quit -t {CLIENTS_GRACE_S}"), "quit".to_owned()] {
        if daemon.ping().await.is_err() {
            break;
        }
        // It may be gone before it answers.
        if let Err(error) = daemon.ask(&words).await {
            tracing::debug!(%error, words, "the MPS daemon was told to quit");
        }
        let told = Instant::now();
        while told.elapsed() < QUIT_PATIENCE && daemon.ping().await.is_ok() {
            tokio::time::sleep(POLL).await;
        }
    }
    if daemon.ping().await.is_ok() {
        return Err(daemon.silent(2 * QUIT_PATIENCE, "it was told to quit and did not".into()));
    }
    if let Err(error) = std::fs::remove_dir_all(pipe_directory)
        && error.kind() != std::io::ErrorKind::NotFound
    {
        tracing::warn!(directory = %pipe_directory.display(), %error, "a daemon's directory stays");
    }
    Ok(())
}

fn numbers(answer: &str) -> Vec<u32> {
    answer
        .split_whitespace()
        .filter_map(|word| word.parse().ok())
        .collect()
}
