//! The public listener: every connection that comes is served on a task of its own, until the gateway stops.
//!
//! [`serve`] owns the socket and ends with the last connection. HTTP/1.1 and HTTP/2 are told apart by what a connection
//! says first; one that asks for a WebSocket leaves HTTP, and counts as open until it has closed.

use std::sync::Arc;
use std::time::Duration;

use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto::Builder;
use hyper_util::service::TowerToHyperService;
use laneway_tls::{Accepted, Incoming};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::config::CallerConfig;
use crate::http::connection::Connection;
use crate::http::headers::MAX_HEADER_BYTES;

/// What connections are served with.
#[derive(Debug, Clone)]
pub(crate) struct Serving {
    pub(crate) routes: axum::Router,
    /// Calls of one connection at once.
    pub(crate) max_streams: u32,
    /// Until a caller takes something of what is written.
    pub(crate) write_timeout: Duration,
    /// Until it says something.
    pub(crate) caller: CallerConfig,
    /// Close every connection as its last call ends.
    pub(crate) stopped: CancellationToken,
    /// Those that are open.
    pub(crate) open: TaskTracker,
}

/// Serve until `stopped`, and then until the last connection has closed.
pub(crate) async fn serve(mut incoming: Incoming, serving: Serving) {
    let builder = Arc::new(builder(&serving));
    while let Some(stream) = serving.stopped.run_until_cancelled(incoming.next()).await {
        let (serving, builder) = (serving.clone(), builder.clone());
        let open = serving.open.clone();
        open.spawn(async move { connection(stream, &serving, &builder).await });
    }
    // A caller that comes now is refused by the kernel, and does not wait for somebody to take it.
    drop(incoming);
    serving.open.close();
    serving.open.wait().await;
}

fn builder(serving: &Serving) -> Builder<TokioExecutor> {
    let mut builder = Builder::new(TokioExecutor::new());
    builder
        .http2()
        .timer(TokioTimer::new())
        .max_concurrent_streams(serving.max_streams)
        .max_header_list_size(MAX_HEADER_BYTES)
        .keep_alive_interval(serving.caller.keep_alive_interval)
        .keep_alive_timeout(serving.caller.keep_alive_timeout);
    // Headers that do not come are waited for only with a timer.
    builder.http1().timer(TokioTimer::new());
    builder
}

async fn connection(stream: Accepted, serving: &Serving, builder: &Builder<TokioExecutor>) {
    let stream = Connection::new(stream, serving.caller.greeting, serving.write_timeout);
    let service = TowerToHyperService::new(serving.routes.clone());
    let connection = builder.serve_connection_with_upgrades(TokioIo::new(stream), service);
    let mut connection = std::pin::pin!(connection);
    let served = tokio::select! {
        served = connection.as_mut() => served,
        () = serving.stopped.cancelled() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = served {
        tracing::debug!(%error, "connection ended");
    }
}
