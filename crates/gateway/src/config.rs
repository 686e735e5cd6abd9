//! What a gateway is built from: the flags as given, and the checked values that the code uses.

mod access;
mod voices;

use std::net::SocketAddr;
use std::num::NonZeroUsize;
use std::time::Duration;

use clap::Args;
use laneway_tls::flags::InternalTlsArgs;
use laneway_tls::{Dial, InternalTls, ServerTls};
use tonic::transport::Uri;

use crate::discovery::{DnsName, ServiceName};
use crate::http::origin::Origins;
use crate::keys::ApiKeys;
use crate::voices::Voices;

pub use access::{Access, AccessArgs};
pub use voices::VoicesArgs;

/// Default address of the public API.
pub const DEFAULT_LISTEN: &str = "127.0.0.1:8080";
/// Default address of the engine-manager.
pub const DEFAULT_ENGINE_MANAGER: &str = "127.0.0.1:7070";
/// Default for requests in flight: far above one worker's rows, low enough to bound memory.
pub const DEFAULT_MAX_IN_FLIGHT: usize = 1024;
/// Default bound on running streams once a drain began.
pub const DEFAULT_DRAIN_SECONDS: u64 = 30;
/// Default for a request's wait in a worker's queue.
pub const DEFAULT_QUEUE_SECONDS: u64 = 120;
/// Default for the text of one request: about twenty minutes of speech.
pub const DEFAULT_MAX_TEXT_CHARS: usize = 20_000;
/// Default for a caller of `StreamSynthesize` who sends nothing.
pub const DEFAULT_IDLE_SECONDS: u64 = 60;
/// Default for the wait for a worker in the place of one that was lost before it made audio: a worker starts again
/// within it.
pub const DEFAULT_REPLACEMENT_SECONDS: u64 = 30;
/// Default for a caller who takes nothing.
pub const DEFAULT_CALLER_SECONDS: u64 = 30;
/// Default for registered voices.
pub const DEFAULT_MAX_VOICES: usize = 100;
/// Default for the MiB of registered voices.
pub const DEFAULT_MAX_VOICES_MIB: u64 = 256;
/// Largest request message: half a minute of reference clip in f32 at 48 kHz, with room.
const MAX_REQUEST_BYTES: usize = 8 * 1024 * 1024;

/// [`DEFAULT_MAX_IN_FLIGHT`] as what it is checked to be.
const DEFAULT_STREAMS: NonZeroUsize = match NonZeroUsize::new(DEFAULT_MAX_IN_FLIGHT) {
    Some(streams) => streams,
    None => NonZeroUsize::MIN,
};

/// Environment variables of the flags.
mod environment {
    pub(super) const LISTEN: &str = "LANEWAY_GATEWAY_LISTEN";
    pub(super) const ENGINE_MANAGER: &str = "LANEWAY_GATEWAY_ENGINE_MANAGER";
    pub(super) const WORKERS: &str = "LANEWAY_GATEWAY_WORKERS";
    pub(super) const MAX_IN_FLIGHT: &str = "LANEWAY_GATEWAY_MAX_IN_FLIGHT";
    pub(super) const MAX_TEXT_CHARS: &str = "LANEWAY_GATEWAY_MAX_TEXT_CHARS";
    pub(super) const DRAIN_SECONDS: &str = "LANEWAY_GATEWAY_DRAIN_SECONDS";
    pub(super) const QUEUE_SECONDS: &str = "LANEWAY_GATEWAY_QUEUE_SECONDS";
    pub(super) const REPLACEMENT_SECONDS: &str = "LANEWAY_GATEWAY_REPLACEMENT_SECONDS";
    pub(super) const CALLER_SECONDS: &str = "LANEWAY_GATEWAY_CALLER_SECONDS";
    pub(super) const IDLE_SECONDS: &str = "LANEWAY_GATEWAY_IDLE_SECONDS";
    pub(super) const API_KEYS: &str = "LANEWAY_GATEWAY_API_KEYS";
    pub(super) const CORS_ORIGINS: &str = "LANEWAY_GATEWAY_CORS_ORIGINS";
    pub(super) const VOICES_DIR: &str = "LANEWAY_GATEWAY_VOICES_DIR";
    pub(super) const MAX_VOICES: &str = "LANEWAY_GATEWAY_MAX_VOICES";
    pub(super) const MAX_VOICES_MIB: &str = "LANEWAY_GATEWAY_MAX_VOICES_MIB";
    pub(super) const NO_REFLECTION: &str = "LANEWAY_GATEWAY_NO_REFLECTION";
}

/// Flags of the gateway, with their environment variables.
#[derive(Debug, Clone, Args)]
pub struct GatewayArgs {
    /// Address of the public API; port 0 chooses one.
    #[arg(long, env = environment::LISTEN, default_value = DEFAULT_LISTEN)]
    pub listen: String,
    /// The engine-manager whose workers it routes to, host:port, http://host:port, or https:// with
    /// certificates for it.
    #[arg(long, env = environment::ENGINE_MANAGER, default_value = DEFAULT_ENGINE_MANAGER)]
    pub engine_manager: String,
    /// Workers to route to without an engine-manager, comma separated: host:port, http://host:port, dns://name:port
    /// for all that a name stands for (a headless service's), which is looked up every 3 seconds, or
    /// k8s://namespace/service:port for the endpoints that a cluster's API server lists for a Service, and tells each change of.
    #[arg(long = "worker", env = environment::WORKERS, value_delimiter = ',')]
    pub workers: Vec<String>,
    /// Most requests in flight; more are answered RESOURCE_EXHAUSTED at once.
    #[arg(long, env = environment::MAX_IN_FLIGHT, default_value_t = DEFAULT_MAX_IN_FLIGHT)]
    pub max_in_flight: usize,
    /// Longest text of one request, and most that may wait in a stream of text, in characters. More than a model takes
    /// in one go is spoken in parts of whole sentences.
    #[arg(long, env = environment::MAX_TEXT_CHARS, default_value_t = DEFAULT_MAX_TEXT_CHARS)]
    pub max_text_chars: usize,
    /// Seconds that running streams may take to finish after SIGTERM.
    #[arg(long, env = environment::DRAIN_SECONDS, default_value_t = DEFAULT_DRAIN_SECONDS)]
    pub drain_seconds: u64,
    /// Seconds that a request may wait in a worker's queue; its own deadline may be sooner.
    #[arg(long, env = environment::QUEUE_SECONDS, default_value_t = DEFAULT_QUEUE_SECONDS)]
    pub queue_seconds: u64,
    /// Seconds that a request without audio may wait for a worker in the place of one that was lost; its own deadline
    /// may be sooner. 0 ends it at once when there is no other.
    #[arg(long, env = environment::REPLACEMENT_SECONDS, default_value_t = DEFAULT_REPLACEMENT_SECONDS)]
    pub replacement_seconds: u64,
    /// Seconds after which a caller who takes none of the audio that waits for it is given up.
    #[arg(long, env = environment::CALLER_SECONDS, default_value_t = DEFAULT_CALLER_SECONDS)]
    pub caller_seconds: u64,
    /// Seconds after which a stream of text that nothing comes from, and that has nothing to speak, is ended.
    #[arg(long, env = environment::IDLE_SECONDS, default_value_t = DEFAULT_IDLE_SECONDS)]
    pub idle_seconds: u64,
    /// Registered voices.
    #[command(flatten)]
    pub voices: VoicesArgs,
    /// Who may call, and how.
    #[command(flatten)]
    pub access: AccessArgs,
    /// What is between the roles.
    #[command(flatten)]
    pub internal_tls: InternalTlsArgs,
    /// Do not serve gRPC reflection.
    #[arg(long, env = environment::NO_REFLECTION)]
    pub no_reflection: bool,
}

/// A flag whose value cannot be used.
pub use laneway_tls::flags::Violation as ConfigViolation;

/// Everything a gateway is built from. `Config::build` consumes it.
#[derive(Debug, Clone)]
pub struct Config {
    /// Address to bind; port 0 chooses one.
    pub listen: SocketAddr,
    /// Where workers come from.
    pub discovery: DiscoveryConfig,
    /// Requests admitted at once.
    pub max_in_flight: NonZeroUsize,
    /// Longest text of a request, and most that may wait in a stream of text, in characters.
    pub max_text_chars: usize,
    /// Largest request message in bytes.
    pub max_request_bytes: usize,
    /// How long running streams may go on once a drain began.
    pub drain_bound: Duration,
    /// Who may call; anybody without it.
    pub api_keys: Option<ApiKeys>,
    /// Pages of other origins that may call from a browser.
    pub origins: Origins,
    /// Registered voices; none are kept without it.
    pub voices: Option<Voices>,
    /// What the public API proves itself with. It is served without TLS without it.
    pub tls: Option<ServerTls>,
    /// Serve reflection.
    pub reflection: bool,
    /// Connections to workers.
    pub link: LinkConfig,
    /// Waits inside a stream.
    pub stream: StreamConfig,
    /// Waits for whoever is at the other end of a public connection.
    pub caller: CallerConfig,
}

/// Where workers come from.
#[derive(Debug, Clone)]
pub enum DiscoveryConfig {
    /// The engine-manager's topology.
    EngineManager(Uri),
    /// A fixed list, each asked for its status.
    Static(Vec<Uri>),
    /// The same, and the workers behind names that are looked up again and again, and behind a cluster's Services.
    Named {
        /// Fixed ones.
        fixed: Vec<Uri>,
        /// Names.
        names: Vec<DnsName>,
        /// Services, whose endpoints the API server of the cluster tells.
        services: Vec<ServiceName>,
    },
}

/// Connections to workers and to the engine-manager.
#[derive(Debug, Clone)]
pub struct LinkConfig {
    /// Until a connection stands.
    pub connect_timeout: Duration,
    /// Between HTTP/2 pings, which find a peer that is gone without a word.
    pub keep_alive_interval: Duration,
    /// Until a ping counts as lost.
    pub keep_alive_timeout: Duration,
    /// Between questions for a status, and between attempts to reach a peer that was lost.
    pub poll_interval: Duration,
    /// Until a status or a cancel counts as unanswered.
    pub unary_timeout: Duration,
    /// Streams that may wait for their readers in one connection. [`Config::build`] makes it what is
    /// admitted may have.
    pub max_streams: NonZeroUsize,
    /// What every connection to a worker or the engine-manager is encrypted with; none is without it.
    pub internal_tls: Option<InternalTls>,
}

impl LinkConfig {
    /// How a peer is dialled.
    pub(crate) fn dial(&self) -> Dial {
        self.internal_tls.as_ref().map(|tls| tls.client.clone()).into()
    }
}

/// Waits for the other end of a public connection. Each ends the connection, and every call on it.
#[derive(Debug, Clone)]
pub struct CallerConfig {
    /// Until a new connection has said what it speaks.
    pub greeting: Duration,
    /// Between HTTP/2 pings, which find a caller that is gone without a word, also one that has no call.
    pub keep_alive_interval: Duration,
    /// Until a ping counts as lost.
    pub keep_alive_timeout: Duration,
}

/// Waits inside a stream. Each ends the stream (or the attempt) when it runs out; the caller's own deadline ends it
/// at any time.
#[derive(Debug, Clone)]
pub struct StreamConfig {
    /// In a worker's queue. It says nothing of the worker: the request is tried on another, or told that there is
    /// too much to do.
    pub queue: Duration,
    /// Until a worker takes or refuses a request, and from its start to its first audio.
    pub first_audio: Duration,
    /// Between messages of a worker after that.
    pub stall: Duration,
    /// From the loss of a worker that had made no audio to another that serves, or the same one again. Zero ends the
    /// stream when there is no other at once.
    pub replacement: Duration,
    /// Until the caller takes a message: while the stream is full, and behind its end.
    pub caller: Duration,
    /// Until a caller who sends a text in pieces sends one, with nothing left to speak.
    pub idle: Duration,
}

impl Default for LinkConfig {
    fn default() -> Self {
        Self {
            connect_timeout: Duration::from_secs(2),
            keep_alive_interval: Duration::from_secs(2),
            keep_alive_timeout: Duration::from_secs(3),
            poll_interval: Duration::from_millis(500),
            unary_timeout: Duration::from_secs(2),
            max_streams: DEFAULT_STREAMS,
            internal_tls: None,
        }
    }
}

impl Default for CallerConfig {
    fn default() -> Self {
        Self {
            greeting: Duration::from_secs(15),
            keep_alive_interval: Duration::from_secs(10),
            // A caller behind a line that is full of its own audio answers late.
            keep_alive_timeout: Duration::from_secs(20),
        }
    }
}

impl Default for StreamConfig {
    fn default() -> Self {
        Self {
            queue: Duration::from_secs(DEFAULT_QUEUE_SECONDS),
            first_audio: Duration::from_secs(60),
            stall: Duration::from_secs(10),
            replacement: Duration::from_secs(DEFAULT_REPLACEMENT_SECONDS),
            caller: Duration::from_secs(DEFAULT_CALLER_SECONDS),
            idle: Duration::from_secs(DEFAULT_IDLE_SECONDS),
        }
    }
}

impl Config {
    /// A gateway of `discovery` on `listen`, everything else at its default.
    pub fn new(listen: SocketAddr, discovery: DiscoveryConfig) -> Self {
        Self {
            listen,
            discovery,
            max_in_flight: DEFAULT_STREAMS,
            max_text_chars: DEFAULT_MAX_TEXT_CHARS,
            max_request_bytes: MAX_REQUEST_BYTES,
            drain_bound: Duration::from_secs(DEFAULT_DRAIN_SECONDS),
            api_keys: None,
            origins: Origins::default(),
            voices: None,
            tls: None,
            reflection: true,
            link: LinkConfig::default(),
            stream: StreamConfig::default(),
            caller: CallerConfig::default(),
        }
    }

    /// The same gateway for those who may call it.
    #[must_use]
    pub fn with(self, access: Access) -> Self {
        let Access {
            api_keys,
            origins,
            tls,
        } = access;
        Self {
            api_keys,
            origins,
            tls,
            ..self
        }
    }
}

impl TryFrom<GatewayArgs> for Config {
    type Error = Vec<ConfigViolation>;

    /// Check the flags. All violations are returned at once.
    fn try_from(args: GatewayArgs) -> Result<Self, Vec<ConfigViolation>> {
        let mut violations = Vec::new();
        let mut refuse = |flag, value: &str, problem: String| {
            violations.push(ConfigViolation {
                flag,
                value: value.to_string(),
                problem,
            });
        };
        let listen = args.listen.parse::<SocketAddr>();
        if listen.is_err() {
            refuse(
                "--listen",
                &args.listen,
                "not an address; write it like 0.0.0.0:8080".into(),
            );
        }
        let internal = args.internal_tls.read();
        let link = LinkConfig {
            internal_tls: internal.as_ref().ok().cloned().flatten(),
            ..LinkConfig::default()
        };
        let dial = link.dial();
        let discovery = if args.workers.is_empty() {
            let uri = dial.uri(&args.engine_manager);
            let uri =
                uri.map_err(|error| refuse("--engine-manager", &args.engine_manager, error.to_string()));
            uri.ok().map(DiscoveryConfig::EngineManager)
        } else {
            let (mut fixed, mut names, mut services) = (Vec::new(), Vec::new(), Vec::new());
            for worker in &args.workers {
                let read = if worker.starts_with("dns://") {
                    let name = worker.parse::<DnsName>();
                    name.map(|name| names.push(name))
                        .map_err(|error| error.to_string())
                } else if worker.starts_with("k8s://") {
                    let service = worker.parse::<ServiceName>();
                    service
                        .map(|service| services.push(service))
                        .map_err(|error| error.to_string())
                } else {
                    let uri = dial.uri(worker);
                    uri.map(|uri| fixed.push(uri)).map_err(|error| error.to_string())
                };
                if let Err(problem) = read {
                    refuse("--worker", worker, problem);
                }
            }
            Some(match names.is_empty() && services.is_empty() {
                true => DiscoveryConfig::Static(fixed),
                false => DiscoveryConfig::Named {
                    fixed,
                    names,
                    services,
                },
            })
        };
        let max_in_flight = NonZeroUsize::new(args.max_in_flight);
        if max_in_flight.is_none() {
            refuse(
                "--max-in-flight",
                "0",
                "nothing would be admitted; write 1 or more".into(),
            );
        }
        if args.max_text_chars == 0 {
            refuse(
                "--max-text-chars",
                "0",
                "no text would be accepted; write 1 or more".into(),
            );
        }
        for (flag, seconds) in [
            ("--queue-seconds", args.queue_seconds),
            ("--caller-seconds", args.caller_seconds),
            ("--idle-seconds", args.idle_seconds),
        ] {
            if seconds == 0 {
                refuse(
                    flag,
                    "0",
                    "every stream would end at once; write 1 or more".into(),
                );
            }
        }
        let voices = args.voices.read();
        let access = args.access.read();
        violations.extend(voices.as_ref().err().into_iter().cloned());
        violations.extend(internal.err().into_iter().flatten());
        violations.extend(access.as_ref().err().into_iter().flatten().cloned());
        match (listen, discovery, max_in_flight, voices, access) {
            (Ok(listen), Some(discovery), Some(max_in_flight), Ok(voices), Ok(access))
                if violations.is_empty() =>
            {
                Ok(Self {
                    max_in_flight,
                    max_text_chars: args.max_text_chars,
                    drain_bound: Duration::from_secs(args.drain_seconds),
                    voices,
                    reflection: !args.no_reflection,
                    link,
                    stream: StreamConfig {
                        queue: Duration::from_secs(args.queue_seconds),
                        replacement: Duration::from_secs(args.replacement_seconds),
                        caller: Duration::from_secs(args.caller_seconds),
                        idle: Duration::from_secs(args.idle_seconds),
                        ..StreamConfig::default()
                    },
                    ..Self::new(listen, discovery).with(access)
                })
            }
            _ => Err(violations),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Flags {
        #[command(flatten)]
        gateway: GatewayArgs,
    }

    fn checked(flags: &[&str]) -> Result<Config, Vec<ConfigViolation>> {
        let flags = Flags::parse_from(std::iter::once("gateway").chain(flags.iter().copied()));
        Config::try_from(flags.gateway)
    }

    #[test]
    fn defaults_are_valid() {
        let config = checked(&[]).unwrap();
        assert_eq!(config.listen.to_string(), DEFAULT_LISTEN);
        assert!(
            matches!(config.discovery, DiscoveryConfig::EngineManager(uri) if uri == "http://127.0.0.1:7070")
        );
    }

    #[test]
    fn workers_replace_the_engine_manager() {
        let config = checked(&["--worker", "http://a:1,b:2", "--no-reflection"]).unwrap();
        assert!(matches!(config.discovery, DiscoveryConfig::Static(workers) if workers.len() == 2));
        assert!(!config.reflection);
    }

    #[test]
    fn names_of_workers_stand_beside_addresses() {
        let config = checked(&["--worker", "dns://worker:7071,b:2,k8s://speech/worker:grpc"]).unwrap();
        let DiscoveryConfig::Named {
            fixed,
            names,
            services,
        } = config.discovery
        else {
            panic!("{:?}", config.discovery);
        };
        assert_eq!((fixed.len(), names.len(), services.len()), (1, 1, 1));
        assert_eq!(names[0].to_string(), "dns://worker:7071");
        assert_eq!(services[0].to_string(), "k8s://speech/worker:grpc");
        for wrong in ["dns://worker", "k8s://worker:7071"] {
            let violations = checked(&["--worker", wrong]).unwrap_err();
            assert_eq!(
                (violations[0].flag, violations[0].value.as_str()),
                ("--worker", wrong)
            );
        }
    }

    #[test]
    fn waits_are_as_stated() {
        let flags = [
            "--queue-seconds",
            "7",
            "--caller-seconds",
            "9",
            "--idle-seconds",
            "11",
        ];
        let stream = checked(&flags).unwrap().stream;
        let seconds = Duration::from_secs;
        assert_eq!(
            (stream.queue, stream.caller, stream.idle),
            (seconds(7), seconds(9), seconds(11))
        );
    }

    #[test]
    fn every_violation_is_named_at_once() {
        let flags = [
            "--listen",
            "here",
            "--worker",
            "http://a:1,https://b:2",
            "--max-in-flight",
            "0",
            "--max-text-chars",
            "0",
            "--queue-seconds",
            "0",
            "--caller-seconds",
            "0",
            "--idle-seconds",
            "0",
            "--api-keys",
            "/nowhere/keys",
            "--cors-origin",
            "https://a.example,b.example",
            "--max-voices",
            "0",
            "--tls-cert",
            "/nowhere/cert",
            "--internal-tls-name",
            "all",
        ];
        let violations = checked(&flags).unwrap_err();
        let named: Vec<_> = violations
            .iter()
            .map(|each| (each.flag, each.value.as_str()))
            .collect();
        let want = [
            ("--listen", "here"),
            ("--worker", "https://b:2"),
            ("--max-in-flight", "0"),
            ("--max-text-chars", "0"),
            ("--queue-seconds", "0"),
            ("--caller-seconds", "0"),
            ("--idle-seconds", "0"),
            ("--max-voices", "0"),
            ("--internal-tls-cert", ""),
            ("--api-keys", "/nowhere/keys"),
            ("--cors-origin", "b.example"),
            ("--tls-key", ""),
        ];
        assert_eq!(named, want);
    }
}
