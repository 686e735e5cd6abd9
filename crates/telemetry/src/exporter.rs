//! Prometheus on a port.

use std::net::SocketAddr;
use std::sync::Mutex;
use std::time::Duration;

use anyhow::Context as _;
use axum::Router;
use axum::http::header::CONTENT_TYPE;
use axum::routing::get;
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle, PrometheusRecorder};

use crate::metric::{Kind, METRICS};

/// How often histograms are drained into their buckets when nobody scrapes.
const UPKEEP_INTERVAL: Duration = Duration::from_secs(5);

/// One recorder for a process, also when several roles run in it.
static RECORDER: Mutex<Option<PrometheusHandle>> = Mutex::new(None);

/// Install the recorder that every `metrics` macro writes to, once for the process.
///
/// # Errors
/// Another kind of recorder is installed.
pub fn install_recorder() -> anyhow::Result<PrometheusHandle> {
    let mut recorder = RECORDER
        .lock()
        .expect("nothing panics while it installs the recorder");
    if let Some(handle) = &*recorder {
        return Ok(handle.clone());
    }
    let handle = builder()?
        .install_recorder()
        .context("install the metrics recorder")?;
    describe();
    *recorder = Some(handle.clone());
    Ok(handle)
}

/// A recorder that nobody writes to yet. `metrics::set_default_local_recorder` makes it that of one thread: a test that
/// counts sees nothing of the others.
///
/// # Errors
/// The bounds of a histogram are none.
pub fn recorder() -> anyhow::Result<PrometheusRecorder> {
    Ok(builder()?.build_recorder())
}

fn builder() -> anyhow::Result<PrometheusBuilder> {
    let mut builder = PrometheusBuilder::new();
    for metric in METRICS {
        if let Kind::Histogram(bounds) = metric.kind {
            builder = builder
                .set_buckets_for_metric(Matcher::Full(metric.name.to_string()), bounds)
                .context("set histogram buckets")?;
        }
    }
    Ok(builder)
}

fn describe() {
    for metric in METRICS {
        match metric.kind {
            Kind::Counter => metrics::describe_counter!(metric.name, metric.help),
            Kind::Gauge => metrics::describe_gauge!(metric.name, metric.help),
            Kind::Histogram(_) => metrics::describe_histogram!(metric.name, metric.help),
        }
    }
}

/// Serve `/metrics`. The address is bound when this returns (port 0 chooses one); a task serves it
/// until the runtime ends.
///
/// # Errors
/// The address cannot be bound, or another kind of recorder is installed.
pub async fn serve_metrics(address: SocketAddr) -> anyhow::Result<SocketAddr> {
    let handle = install_recorder()?;
    let listener = tokio::net::TcpListener::bind(address)
        .await
        .with_context(|| format!("bind the metrics address {address}"))?;
    let address = listener.local_addr().context("read the metrics address")?;
    let scraped = handle.clone();
    let page = move || async move { ([(CONTENT_TYPE, "text/plain; version=0.0.4")], scraped.render()) };
    let router = Router::new().route("/metrics", get(page));
    tokio::spawn(async move {
        if let Err(error) = axum::serve(listener, router).await {
            tracing::error!(%error, "metrics endpoint ended");
        }
    });
    tokio::spawn(async move {
        let mut ticks = tokio::time::interval(UPKEEP_INTERVAL);
        loop {
            ticks.tick().await;
            handle.run_upkeep();
        }
    });
    Ok(address)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metric;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    #[tokio::test]
    async fn a_scrape_sees_what_was_recorded_with_our_buckets() {
        let address = serve_metrics(([127, 0, 0, 1], 0).into()).await.unwrap();
        metrics::histogram!(metric::GATEWAY_TTFA).record(0.06);
        metrics::counter!(metric::GATEWAY_REFUSALS, "reason" => "overloaded").increment(2);
        let mut socket = tokio::net::TcpStream::connect(address).await.unwrap();
        socket
            .write_all(b"GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            .await
            .unwrap();
        let mut answer = String::new();
        socket.read_to_string(&mut answer).await.unwrap();
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        for line in [
            "# HELP laneway_gateway_ttfa_seconds Seconds from a request to its first audio.",
            "# TYPE laneway_gateway_ttfa_seconds histogram",
            "laneway_gateway_ttfa_seconds_bucket{le=\"0.05\"} 0",
            "laneway_gateway_ttfa_seconds_bucket{le=\"0.075\"} 1",
            "laneway_gateway_refusals_total{reason=\"overloaded\"} 2",
        ] {
            assert!(answer.contains(line), "{line} is missing from\n{answer}");
        }
        assert!(
            install_recorder()
                .unwrap()
                .render()
                .contains("laneway_gateway_refusals_total")
        );
    }
}
