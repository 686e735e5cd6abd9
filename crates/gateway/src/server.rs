//! A gateway built from its configuration: bound first, served when asked.

use std::net::SocketAddr;
use std::num::NonZeroUsize;
use std::sync::Arc;

use laneway_proto::FILE_DESCRIPTOR_SET;
use laneway_proto::riva::tts::riva_speech_synthesis_server::RivaSpeechSynthesisServer;
use laneway_proto::v1::models_server::ModelsServer;
use laneway_proto::v1::requests_server::RequestsServer;
use laneway_proto::v1::speech_server::SpeechServer;
use laneway_tls::{Incoming, InternalTls, ServerTls};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::{AbortOnDropHandle, TaskTracker};
use tonic::service::Routes;
use tonic_web::GrpcWebLayer;

use crate::admission::Admission;
use crate::api::Api;
use crate::config::Config;
use crate::discovery::{Cluster, ClusterError};
use crate::drain::{Shutdown, drained};
use crate::http::guard::guard;
use crate::http::lanes::Lanes;
use crate::http::stream::Sockets;
use crate::keys::ApiKeys;
use crate::listen::{self, Serving};
use crate::readable::Readable;
use crate::routing::{Roster, Router, run_roster};
use crate::session::UTTERANCES_AT_ONCE;
use crate::{health, http, open_files};

/// Calls of one connection beyond the requests that are admitted. Without this room a caller's excess would wait
/// unanswered in its own library, and so would its health checks and cancels.
const EXTRA_CALLS: u32 = 1024;

/// What reflection lists.
const SERVICES: [&str; 5] = [
    "laneway.v1.Speech",
    "laneway.v1.Models",
    "laneway.v1.Requests",
    "nvidia.riva.tts.RivaSpeechSynthesis",
    "grpc.health.v1.Health",
];

/// Why a gateway could not be built.
#[derive(Debug, thiserror::Error)]
pub enum BuildError {
    /// The address cannot be bound.
    #[error("bind the public address {address}")]
    Bind {
        /// The address.
        address: SocketAddr,
        /// Why.
        source: std::io::Error,
    },
    /// Workers are a cluster's, and it cannot be asked.
    #[error("find the cluster of a k8s:// address")]
    Cluster(#[from] ClusterError),
}

/// Why serving ended other than by a finished drain.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// `Shutdown::now`.
    #[error("told to exit before the drain was done")]
    Aborted,
    /// The reflection service does not take the descriptors.
    #[error("build the reflection service")]
    Reflection(#[from] tonic_reflection::server::Error),
}

/// A bound gateway.
#[derive(Debug)]
pub struct Gateway {
    config: Config,
    listener: TcpListener,
    address: SocketAddr,
    cluster: Option<Cluster>,
    readiness: watch::Sender<bool>,
}

impl Config {
    /// Bind the public address. Nothing is accepted before [`Gateway::serve`].
    ///
    /// # Errors
    /// The address cannot be bound; there is no cluster that could be asked for workers.
    pub async fn build(mut self) -> Result<Gateway, BuildError> {
        let bind = |source| BuildError::Bind {
            address: self.listen,
            source,
        };
        open_files::raise_limit();
        let cluster = self.discovery.cluster().await?;
        let listener = TcpListener::bind(self.listen).await.map_err(bind)?;
        let address = listener.local_addr().map_err(bind)?;
        let at_once = NonZeroUsize::MIN.saturating_add(UTTERANCES_AT_ONCE - 1);
        self.link.max_streams = self.max_in_flight.saturating_mul(at_once);
        Ok(Gateway {
            config: self,
            listener,
            address,
            cluster,
            readiness: watch::Sender::new(false),
        })
    }
}

impl Gateway {
    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Whether it serves, as health tells it, for who runs it in its own process.
    pub fn readiness(&self) -> watch::Receiver<bool> {
        self.readiness.subscribe()
    }

    /// Serve until a drain is done.
    ///
    /// # Errors
    /// `Aborted` when told to exit now.
    pub async fn serve(self, shutdown: Shutdown) -> Result<(), ServeError> {
        let config = self.config;
        let internal = config.link.internal_tls.clone();
        let (workers_sender, workers) = watch::channel(Vec::new());
        let (roster_sender, roster) = watch::channel(Roster::default());
        // These end with this call, however it ends.
        let spawn = |task| AbortOnDropHandle::new(task);
        let discovery = config.discovery.source(self.cluster, config.link.clone());
        let _discovery = spawn(tokio::spawn(discovery.run(workers_sender)));
        let _roster = spawn(tokio::spawn(run_roster(
            workers,
            config.link.clone(),
            roster_sender,
        )));
        let admission = Arc::new(Admission::new(config.max_in_flight.get()));
        let (reporter, health_service) = tonic_health::server::health_reporter();
        health::set(&reporter, false).await;
        let stopped = CancellationToken::new();
        let _health = spawn(tokio::spawn(health::run(
            reporter,
            roster.clone(),
            admission.clone(),
            shutdown.drain.clone(),
            stopped.clone(),
            self.readiness,
        )));

        if let Some(voices) = &config.voices {
            voices.count();
        }
        let write_timeout = config.stream.caller;
        let api = Api {
            admission: admission.clone(),
            router: Router::new(roster),
            max_text_chars: config.max_text_chars,
            max_request_bytes: config.max_request_bytes,
            voices: config.voices,
            lanes: Lanes::default(),
            stream: config.stream,
            link: config.link,
        };
        let reflection = || {
            // The descriptors are of every service there is; a gateway serves these.
            SERVICES
                .iter()
                .fold(tonic_reflection::server::Builder::configure(), |builder, name| {
                    builder.with_service_name(*name)
                })
                .register_encoded_file_descriptor_set(FILE_DESCRIPTOR_SET)
                .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
        };
        let (v1, v1alpha) = if config.reflection {
            (Some(reflection().build_v1()), Some(reflection().build_v1alpha()))
        } else {
            (None, None)
        };
        let speech = SpeechServer::new(api.clone()).max_decoding_message_size(config.max_request_bytes);
        let riva =
            RivaSpeechSynthesisServer::new(api.clone()).max_decoding_message_size(config.max_request_bytes);
        let grpc = Routes::from(axum::Router::new())
            .add_service(Readable(speech))
            .add_service(Readable(ModelsServer::new(api.clone())))
            .add_service(Readable(RequestsServer::new(api.clone())))
            .add_service(Readable(riva))
            .add_service(health_service);
        let grpc = match v1.transpose()? {
            Some(reflection) => grpc.add_service(reflection),
            None => grpc,
        };
        let grpc = match v1alpha.transpose()? {
            Some(reflection) => grpc.add_service(reflection),
            None => grpc,
        };
        // Browsers speak gRPC-Web to the same services; everything else goes by them.
        let routes = grpc.into_axum_router().layer(GrpcWebLayer::new());
        let sockets = Sockets {
            origins: config.origins.clone(),
            stopped: stopped.clone(),
            open: TaskTracker::new(),
        };
        let open = sockets.open.clone();
        let routes = routes.merge(http::router(api, sockets));
        let _keys = config.api_keys.as_ref().map(ApiKeys::watch);
        let routes = match config.api_keys {
            Some(keys) => routes.layer(axum::middleware::from_fn_with_state(keys, guard)),
            None => routes,
        };
        // Outside the keys: a browser that may not read why it was refused shows nothing at all.
        let routes = match config.origins.layer() {
            Some(cors) => routes.layer(cors),
            None => routes,
        };
        let serving = Serving {
            routes,
            max_streams: admission.n_permits().saturating_add(EXTRA_CALLS),
            write_timeout,
            caller: config.caller,
            stopped: stopped.clone(),
            open,
        };
        // Certificates are read again for as long as this serves.
        let _public = config.tls.as_ref().map(ServerTls::watch);
        let _internal = internal.as_ref().map(InternalTls::watch);
        let server = listen::serve(Incoming::new(self.listener, config.tls), serving);
        let drained = async {
            let close_by = drained(&admission, &shutdown.drain, config.drain_bound).await;
            // Each connection closes as its last stream is read; `server` ends with the last connection.
            stopped.cancel();
            tokio::time::sleep_until(close_by).await;
            tracing::warn!("connections are cut at the drain bound");
        };
        tokio::select! {
            biased;
            () = shutdown.now.cancelled() => Err(ServeError::Aborted),
            () = server => Ok(()),
            () = drained => Ok(()),
        }
    }
}
