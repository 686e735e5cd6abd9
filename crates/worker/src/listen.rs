//! Where a worker listens: at its address, and, where workers of one host share a directory, at a Unix socket in it.
//! Frames and audio between them then pass through the kernel's memory and no network stack.

use std::net::SocketAddr;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use laneway_proto::v1::worker_server::WorkerServer as GrpcWorker;
use laneway_proto::{CALLER_PATIENCE, CALLER_PING};
use laneway_tls::{Incoming, ServerTls};
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::watch;
use tokio_stream::wrappers::UnixListenerStream;
use tokio_util::sync::CancellationToken;
use tonic::transport::Server;
use tonic::transport::server::Router;
use tonic_health::ServingStatus;

use crate::service::WorkerService;
use crate::state::State;

/// Largest request: a reference clip of a minute as raw samples, and some.
const MAX_REQUEST_BYTES: usize = 16 << 20;

/// Bound sockets, not served yet.
#[derive(Debug)]
pub(crate) struct Listeners {
    tcp: TcpListener,
    unix: Option<Socket>,
}

/// A Unix socket. Its file goes with it, and so does the directory with its last socket.
#[derive(Debug)]
struct Socket {
    listener: Option<UnixListener>,
    path: PathBuf,
}

/// The socket of a rank in the directory that the workers of a host share.
pub(crate) fn socket(directory: &Path, rank: u32) -> PathBuf {
    directory.join(format!("rank-{rank}.sock"))
}

impl Listeners {
    pub(crate) async fn bind(listen: SocketAddr, unix: Option<PathBuf>) -> anyhow::Result<Self> {
        let tcp = TcpListener::bind(listen)
            .await
            .with_context(|| format!("bind {listen}"))?;
        Ok(Listeners {
            tcp,
            unix: unix.map(Socket::bind).transpose()?,
        })
    }

    pub(crate) fn local_addr(&self) -> anyhow::Result<SocketAddr> {
        self.tcp.local_addr().context("read the bound address")
    }
}

impl Socket {
    fn bind(path: PathBuf) -> anyhow::Result<Self> {
        let bind = || {
            if let Some(directory) = path.parent() {
                // For this user alone, as the one who made it first meant it.
                std::fs::DirBuilder::new()
                    .recursive(true)
                    .mode(0o700)
                    .create(directory)?;
            }
            // A worker of this rank that was killed has left its own.
            if let Err(error) = std::fs::remove_file(&path)
                && error.kind() != std::io::ErrorKind::NotFound
            {
                return Err(error);
            }
            UnixListener::bind(&path)
        };
        let listener = bind().with_context(|| format!("bind the Unix socket {}", path.display()))?;
        Ok(Socket {
            listener: Some(listener),
            path,
        })
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        // What is gone already, or not empty yet, is not this socket's affair.
        let _ = std::fs::remove_file(&self.path);
        if let Some(directory) = self.path.parent() {
            let _ = std::fs::remove_dir(directory);
        }
    }
}

/// Serve until `close` is cancelled. `tls` is for the address; a socket is for this user of this host alone.
pub(crate) async fn serve(
    listeners: Listeners,
    tls: Option<ServerTls>,
    service: WorkerService,
    state: watch::Receiver<State>,
    close: CancellationToken,
) -> anyhow::Result<()> {
    let (reporter, health) = tonic_health::server::health_reporter();
    let descriptors = laneway_proto::FILE_DESCRIPTOR_SET;
    let reflection =
        || tonic_reflection::server::Builder::configure().register_encoded_file_descriptor_set(descriptors);
    let grpc = GrpcWorker::new(service).max_decoding_message_size(MAX_REQUEST_BYTES);
    let router = || -> anyhow::Result<Router> {
        Ok(Server::builder()
            // Admission bounds what runs; the transport's own default would hold callers back without a word.
            .max_concurrent_streams(u32::MAX)
            .http2_keepalive_interval(Some(CALLER_PING))
            .http2_keepalive_timeout(Some(CALLER_PATIENCE))
            .add_service(health.clone())
            .add_service(reflection().build_v1().context("build reflection")?)
            .add_service(reflection().build_v1alpha().context("build reflection")?)
            .add_service(grpc.clone()))
    };
    let Listeners { tcp, unix } = listeners;
    let tcp = router()?
        .serve_with_incoming_shutdown(Incoming::new(tcp, tls).stream(), close.clone().cancelled_owned());
    let (mut unix, unix_router) = (unix, router()?);
    let unix = async {
        match unix.as_mut().and_then(|socket| socket.listener.take()) {
            Some(listener) => {
                let incoming = UnixListenerStream::new(listener);
                unix_router
                    .serve_with_incoming_shutdown(incoming, close.clone().cancelled_owned())
                    .await
            }
            None => Ok(()),
        }
    };
    let server = async { tokio::try_join!(tcp, unix) };
    let health = async {
        close
            .run_until_cancelled(report_health(reporter.clone(), state))
            .await;
        // A health watch would hold its connection open for ever.
        let mut reporter = reporter;
        for service in HEALTH_SERVICES {
            reporter.clear_service_status(service).await;
        }
        std::future::pending::<()>().await;
    };
    tokio::select! {
        served = server => served.map(drop).context("serve gRPC"),
        () = health => Ok(()),
    }
}

/// Names whose health is told: the server as a whole, and the service.
const HEALTH_SERVICES: [&str; 2] = ["", "laneway.v1.Worker"];

/// Health says what the state says. Never returns.
async fn report_health(reporter: tonic_health::server::HealthReporter, mut state: watch::Receiver<State>) {
    loop {
        let status = match *state.borrow_and_update() {
            State::Serving => ServingStatus::Serving,
            State::Loading | State::Draining | State::Failed => ServingStatus::NotServing,
        };
        for service in HEALTH_SERVICES {
            reporter.set_service_status(service, status).await;
        }
        if state.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_socket_takes_the_place_of_a_dead_one_and_leaves_nothing() {
        let directory = tempfile::tempdir().unwrap().keep();
        let path = socket(&directory, 1);
        let bind = || Listeners::bind(([127, 0, 0, 1], 0).into(), Some(path.clone()));
        // Killed: nobody removed its file.
        std::mem::forget(bind().await.unwrap());
        assert!(path.exists());
        let again = bind().await.unwrap();
        tokio::net::UnixStream::connect(&path).await.unwrap();
        let other = Listeners::bind(([127, 0, 0, 1], 0).into(), Some(socket(&directory, 0)));
        let other = other.await.unwrap();
        drop(again);
        assert!(!path.exists() && directory.exists());
        drop(other);
        assert!(!directory.exists());
        // All of them died: the next one begins anew.
        drop(bind().await.unwrap());
        let long = directory.join("d".repeat(120));
        let error = Listeners::bind(([127, 0, 0, 1], 0).into(), Some(long))
            .await
            .unwrap_err();
        assert!(format!("{error:#}").contains("bind the Unix socket"), "{error:#}");
    }
}
