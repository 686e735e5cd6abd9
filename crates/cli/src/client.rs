//! The gateway as a client of this program sees it.

use std::time::Duration;

use anyhow::Context as _;
use clap::Args;
use laneway_proto::v1;
use laneway_proto::v1::speech_client::SpeechClient;
use laneway_tls::Dial;
use laneway_tls::flags::{ClientTlsArgs, Violation};
use tokio::sync::watch;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::service::Interceptor;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::Endpoint;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;

use crate::config::ConfigArguments;
use crate::system::{System, SystemConfig};

/// How long a system in this process may take to load its model.
const START_DEADLINE: Duration = Duration::from_secs(600);

/// How long a service that took a connection may take to answer at all.
const FIRST_ANSWER: Duration = Duration::from_secs(10);

/// Flags that say which gateway a command speaks to.
#[derive(Debug, Clone, Args)]
pub(crate) struct GatewayArguments {
    /// A running gateway, host:port, http://host:port or https://host:port (host:port is https when any flag of TLS is
    /// given); without one the deployment is started here, in all its roles (several workers are processes of their
    /// own).
    #[arg(long, env = "LANEWAY_GATEWAY")]
    gateway: Option<String>,
    /// Key of the API of a running gateway, where it asks for one.
    #[arg(long, env = "LANEWAY_API_KEY", hide_env_values = true)]
    api_key: Option<String>,
    #[command(flatten)]
    tls: ClientTlsArgs,
    #[command(flatten)]
    config: ConfigArguments,
}

/// A connection to a gateway, that says the caller's key with every call.
pub(crate) type Channel = InterceptedService<tonic::transport::Channel, Key>;

/// What is said with every call.
#[derive(Debug, Clone, Default)]
pub(crate) struct Key(Option<MetadataValue<Ascii>>);

impl Key {
    fn of(key: &str) -> anyhow::Result<Self> {
        let mut value: MetadataValue<Ascii> = format!("Bearer {key}")
            .parse()
            .context("send the API key: it holds what no header may")?;
        value.set_sensitive(true);
        Ok(Key(Some(value)))
    }
}

impl Interceptor for Key {
    fn call(&mut self, mut request: tonic::Request<()>) -> Result<tonic::Request<()>, tonic::Status> {
        if let Some(value) = &self.0 {
            request.metadata_mut().insert("authorization", value.clone());
        }
        Ok(request)
    }
}

/// Flags that cannot be used.
#[derive(Debug)]
pub(crate) struct BadFlags(pub(crate) Vec<Violation>);

impl std::fmt::Display for BadFlags {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.iter().try_for_each(|violation| writeln!(f, "{violation}"))
    }
}

impl std::error::Error for BadFlags {}

/// How a gateway is reached.
struct Way {
    address: String,
    dial: Dial,
    key: Key,
}

impl Way {
    async fn connect(&self) -> anyhow::Result<Channel> {
        let channel = self.dial.connect(endpoint(&self.address, &self.dial)?);
        let channel = channel
            .await
            .with_context(|| format!("connect to {}", self.address))?;
        Ok(InterceptedService::new(channel, self.key.clone()))
    }
}

/// A gateway that serves, and the system behind it when it is ours.
pub(crate) struct Connection {
    pub(crate) channel: Channel,
    way: Way,
    system: Option<System>,
}

impl GatewayArguments {
    /// Connect, and start a system first when none is named.
    pub(crate) async fn connect(self) -> anyhow::Result<Connection> {
        if let Some(address) = self.gateway {
            let way = Way {
                dial: self.tls.dial(&address).map_err(BadFlags)?,
                address,
                key: self
                    .api_key
                    .as_deref()
                    .map(Key::of)
                    .transpose()?
                    .unwrap_or_default(),
            };
            let channel = way.connect().await?;
            answers(&channel, &way, FIRST_ANSWER).await?;
            return Ok(Connection {
                channel,
                way,
                system: None,
            });
        }
        let of_no_use = match self.api_key {
            // A key is in no message.
            Some(_) => Some(("--api-key", "...".to_owned())),
            None => self.tls.first(),
        };
        if let Some((flag, value)) = of_no_use {
            let problem = "it is for a running gateway; name one with --gateway, or leave it out".to_owned();
            let violation = Violation { flag, value, problem };
            return Err(BadFlags(vec![violation]).into());
        }
        let mut system = System::start(SystemConfig {
            config: self.config,
            gateway_listen: Some(([127, 0, 0, 1], 0).into()),
            metrics: None,
            ..SystemConfig::default()
        })
        .await?;
        if let Err(error) = system.serving().await {
            system.give_up().await;
            return Err(error);
        }
        let way = Way {
            address: system.gateway.to_string(),
            dial: Dial::default(),
            key: Key::default(),
        };
        let channel = way.connect().await.context("connect to our own gateway")?;
        Ok(Connection {
            channel,
            way,
            system: Some(system),
        })
    }
}

impl Connection {
    pub(crate) fn speech(&self) -> SpeechClient<Channel> {
        SpeechClient::new(self.channel.clone())
    }

    /// One more connection to the same gateway.
    pub(crate) async fn another_channel(&self) -> anyhow::Result<Channel> {
        self.way.connect().await.context("connect once more")
    }

    /// Status of every worker of a system that was started here, by rank; nothing for one elsewhere.
    pub(crate) async fn worker_statuses(&self) -> anyhow::Result<Vec<v1::WorkerStatusResponse>> {
        let mut statuses = Vec::new();
        for address in self.system.iter().flat_map(System::workers) {
            let channel = endpoint(&address, &Dial::default())?
                .connect()
                .await
                .context("connect to our own worker")?;
            let mut worker = v1::worker_client::WorkerClient::new(channel);
            let status = worker
                .status(v1::WorkerStatusRequest {})
                .await
                .context("ask our worker for its status")?;
            statuses.push(status.into_inner());
        }
        Ok(statuses)
    }

    /// The system that was started for this connection; `None` for one elsewhere.
    pub(crate) fn system(&self) -> Option<&System> {
        self.system.as_ref()
    }

    /// Resolves when a role of a system that was started here ends that was not told to; never for one elsewhere.
    pub(crate) async fn failed(&mut self) -> anyhow::Error {
        match &mut self.system {
            Some(system) => system.failed().await,
            None => std::future::pending().await,
        }
    }

    /// End what is left of a system that was started here and failed.
    pub(crate) async fn give_up(self) {
        if let Some(system) = self.system {
            system.give_up().await;
        }
    }

    /// Drain a system that was started here.
    pub(crate) async fn end(self) -> anyhow::Result<()> {
        let Connection { channel, system, .. } = self;
        drop(channel);
        match system {
            Some(system) => system.end().await,
            None => Ok(()),
        }
    }
}

/// Where `host:port` or a whole URI leads, dialled so.
pub(crate) fn endpoint(address: &str, dial: &Dial) -> anyhow::Result<Endpoint> {
    let uri = dial
        .uri(address)
        .with_context(|| format!("read the address {address}"))?;
    let endpoint = Endpoint::from(uri);
    Ok(endpoint.connect_timeout(Duration::from_secs(5)).tcp_nodelay(true))
}

/// Ask for any answer. A connection proves only that someone listens: a client of HTTP/2 need not hear from its
/// server before it sends, so that a call to a silent one would wait for ever.
async fn answers(channel: &Channel, way: &Way, bound: Duration) -> anyhow::Result<()> {
    let address = &way.address;
    let mut health = HealthClient::new(channel.clone());
    let request = HealthCheckRequest {
        service: String::new(),
    };
    let answer = tokio::time::timeout(bound, health.check(request)).await;
    let answer = answer.with_context(|| {
        format!("{address} took the connection and gave no answer within {bound:?}: is a gateway there?")
    })?;
    match answer {
        // Whatever a gRPC server says of itself, it speaks.
        Err(status) if std::error::Error::source(&status).is_some() => {
            anyhow::bail!(
                "{address} does not answer as a gateway does: {}",
                way.dial.why(&status)
            )
        }
        _ => Ok(()),
    }
}

/// Wait until a gateway of this process serves.
pub(crate) async fn until_serving(mut readiness: watch::Receiver<bool>) -> anyhow::Result<()> {
    let serving = readiness.wait_for(|serving| *serving);
    let served = tokio::time::timeout(START_DEADLINE, serving)
        .await
        .context("wait for the gateway to serve")?;
    served.map(drop).context("wait for the gateway, which has ended")
}

/// A status as a person should read it.
pub(crate) fn explain(status: &tonic::Status) -> anyhow::Error {
    match laneway_proto::Failure::from_status(status) {
        Some(failure) if failure.code == laneway_proto::ErrorCode::Unauthenticated => {
            anyhow::anyhow!("{failure}; give one that it knows with --api-key")
        }
        Some(failure) => anyhow::anyhow!("{failure}"),
        None => anyhow::anyhow!(
            "{}: {}",
            status.code(),
            laneway_telemetry::causes_of_status(status)
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_may_leave_its_scheme_out() {
        let check = |given: &str, uri: &str| {
            assert_eq!(endpoint(given, &Dial::default()).unwrap().uri().to_string(), uri)
        };
        check("127.0.0.1:8080", "http://127.0.0.1:8080/");
        check("http://gateway:8080", "http://gateway:8080/");
        check("[::1]:80", "http://[::1]:80/");
        let tls = laneway_tls::ClientTls::read(laneway_tls::ClientFiles::default()).unwrap();
        let encrypted = endpoint("gateway:8080", &Some(tls).into()).unwrap();
        assert_eq!(encrypted.uri().to_string(), "https://gateway:8080/");
        let error = format!("{:#}", endpoint("no address", &Dial::default()).unwrap_err());
        assert!(error.contains("no address"), "{error}");
    }

    #[tokio::test]
    async fn a_port_that_never_answers_is_named() {
        let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = silent.local_addr().unwrap().to_string();
        let way = Way {
            address: address.clone(),
            dial: Dial::default(),
            key: Key::default(),
        };
        let channel = way.connect().await.unwrap();
        let error = answers(&channel, &way, Duration::from_millis(100)).await;
        let error = format!("{:#}", error.unwrap_err());
        assert!(error.contains(&address) && error.contains("no answer"), "{error}");
    }
}
