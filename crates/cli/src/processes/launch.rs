//! The command that a worker's process is started with.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::Stdio;

use laneway_plan::Deployment;
use laneway_plan::mps::PIPE_VARIABLE;
use tokio::process::Command;
use tracing::level_filters::LevelFilter;

use super::Manager;
use crate::config::ConfigArguments;

/// This program, also when another build has taken the place of its file.
pub(super) const PROGRAM: &str = "/proc/self/exe";

/// Variables of this process that mean something else in a worker.
const NOT_FOR_WORKERS: [&str; 8] = [
    "LANEWAY_METRICS_LISTEN",
    laneway_plan::mps::THREADS_VARIABLE,
    laneway_plan::mps::MEMORY_VARIABLE,
    // Given beside the deployment's own flags below.
    "LANEWAY_CONFIG",
    // Given as flags, where this process has them too: `say` and its like start roles without TLS.
    "LANEWAY_INTERNAL_TLS_CA",
    "LANEWAY_INTERNAL_TLS_CERT",
    "LANEWAY_INTERNAL_TLS_KEY",
    "LANEWAY_INTERNAL_TLS_NAME",
];

/// Everything that the workers of a deployment are started with.
#[derive(Debug, Clone)]
pub(super) struct Launch {
    config: Vec<OsString>,
    engine_manager: String,
    tls: Vec<OsString>,
    /// By rank.
    variables: BTreeMap<u32, Vec<(&'static str, OsString)>>,
    metrics: Option<SocketAddr>,
    /// Where the workers meet.
    sockets: PathBuf,
}

impl Launch {
    pub(super) fn new(
        config: &ConfigArguments,
        deployment: &Deployment,
        manager: &Manager,
        pipe_directory: Option<&Path>,
        metrics: Option<SocketAddr>,
        sockets: PathBuf,
    ) -> Self {
        let of_rank = |spec: &laneway_plan::deployment::RankSpec| {
            let share = spec.mps_variables().into_iter();
            let pipe = pipe_directory.map(|directory| (PIPE_VARIABLE, OsString::from(directory)));
            let all = share.map(|(name, value)| (name, value.into())).chain(pipe);
            (spec.rank, all.collect())
        };
        Launch {
            config: config.flags(),
            engine_manager: manager.address.clone(),
            tls: manager.tls_flags.clone(),
            variables: deployment.ranks.iter().map(of_rank).collect(),
            metrics,
            sockets,
        }
    }

    /// `listen` is where the rank was last, so that its lease is its own again; a free port without one.
    pub(super) fn command(&self, rank: u32, listen: Option<SocketAddr>) -> Command {
        let listen = listen.unwrap_or(SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 0));
        let mut command = Command::new(PROGRAM);
        command
            .arg0("laneway")
            .args(["up", "--role", "worker", "--end-with-parent"])
            .args(["--rank", &rank.to_string(), "--listen", &listen.to_string()])
            .args(["--engine-manager", &self.engine_manager])
            .arg("--socket-directory")
            .arg(&self.sockets)
            .args(&self.tls)
            .args(&self.config);
        if let Some(address) = self.metrics_of(rank) {
            command.args(["--metrics-listen", &address.to_string()]);
        }
        for name in NOT_FOR_WORKERS {
            command.env_remove(name);
        }
        command.envs(
            self.variables
                .get(&rank)
                .into_iter()
                .flatten()
                .map(|(name, value)| (name, value)),
        );
        if std::env::var_os("LANEWAY_LOG").is_none() {
            // As much as this process says, which may be a command that prints results.
            command.env("LANEWAY_LOG", LevelFilter::current().to_string());
        }
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::inherit())
            // A Ctrl-C is for this process, which ends the workers in their order.
            .process_group(0);
        command
    }

    /// Metrics of the workers follow those of this process, port by port.
    fn metrics_of(&self, rank: u32) -> Option<SocketAddr> {
        let mut address = self.metrics?;
        let port = match address.port() {
            0 => 0,
            own => own.checked_add(1 + u16::try_from(rank).ok()?)?,
        };
        address.set_port(port);
        Some(address)
    }
}

#[cfg(test)]
mod tests {
    use laneway_engine_manager::Served;
    use laneway_plan::Sources;

    use super::*;

    fn launch(yaml: &str, metrics: Option<&str>) -> Launch {
        let served = Served::load(Sources::text("test.yaml", yaml));
        let served = served.unwrap_or_else(|violations| panic!("{}", laneway_plan::render(&violations)));
        let config = ConfigArguments::of_file("test.yaml".into(), vec!["limits.max_rows=8".into()]);
        Launch::new(
            &config,
            served.deployment(),
            &Manager {
                address: "http://127.0.0.1:7070".into(),
                dial: laneway_tls::Dial::default(),
                tls_flags: vec!["--internal-tls-ca".into(), "ca.pem".into()],
            },
            Some(Path::new("/tmp/mps")),
            metrics.map(|address| address.parse().unwrap()),
            "/tmp/sockets".into(),
        )
    }

    const SPLIT: &str = "
model: qwen3_tts
weights: random:7
model_config: 0.6b-custom_voice
device: cuda
node_groups:
  - nodes: [Talker]
    ranks: [0]
  - nodes: [Codec]
    ranks: [1]
rank_devices: { 0: 0, 1: 0 }
mps:
  mode: required
  ranks:
    0: { active_thread_percentage: 100 }
    1: { active_thread_percentage: 30, pinned_device_memory: 20GiB }
";

    fn variable(command: &Command, name: &str) -> Option<Option<String>> {
        let mut all = command.as_std().get_envs();
        let (_, value) = all.find(|(key, _)| *key == name)?;
        Some(value.map(|value| value.to_str().unwrap().to_owned()))
    }

    #[test]
    fn each_worker_is_started_with_its_own_share() {
        let launch = launch(SPLIT, None);
        let check = |rank, name, expected: Option<&str>| {
            let found = variable(&launch.command(rank, None), name);
            assert_eq!(found, Some(expected.map(str::to_owned)), "rank {rank}, {name}");
        };
        check(0, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", Some("100"));
        check(1, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", Some("30"));
        // What this process was started with is not the first rank's.
        check(0, "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", None);
        check(1, "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", Some("0=20480M"));
        check(0, "CUDA_MPS_PIPE_DIRECTORY", Some("/tmp/mps"));
        check(1, "CUDA_MPS_PIPE_DIRECTORY", Some("/tmp/mps"));
        check(1, "LANEWAY_METRICS_LISTEN", None);
        check(1, "LANEWAY_INTERNAL_TLS_CERT", None);
    }

    #[test]
    fn a_worker_started_again_listens_where_it_did_and_metrics_have_ports_of_their_own() {
        let arguments = |metrics, rank, listen: Option<&str>| {
            let launch = launch(SPLIT, metrics);
            let command = launch.command(rank, listen.map(|address| address.parse().unwrap()));
            let all = command
                .as_std()
                .get_args()
                .map(|argument| argument.to_str().unwrap().to_owned());
            all.collect::<Vec<_>>().join(" ")
        };
        let first = arguments(None, 1, None);
        assert!(first.contains("--rank 1 --listen 127.0.0.1:0"), "{first}");
        assert!(
            first.contains("--config test.yaml --set limits.max_rows=8"),
            "{first}"
        );
        assert!(first.contains("--socket-directory /tmp/sockets"), "{first}");
        assert!(first.contains("--internal-tls-ca ca.pem"), "{first}");
        assert!(!first.contains("metrics"), "{first}");
        let again = arguments(Some("0.0.0.0:9464"), 1, Some("127.0.0.1:4711"));
        assert!(again.contains("--listen 127.0.0.1:4711"), "{again}");
        assert!(again.contains("--metrics-listen 0.0.0.0:9466"), "{again}");
        assert!(arguments(Some("127.0.0.1:0"), 1, None).contains("--metrics-listen 127.0.0.1:0"));
    }
}
