//! The one subscriber of a process.

use std::io::IsTerminal as _;

use anyhow::Context as _;
use opentelemetry::trace::TracerProvider as _;
use opentelemetry_otlp::WithExportConfig as _;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::propagation::TraceContextPropagator;
use opentelemetry_sdk::trace::SdkTracerProvider;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;
use tracing_subscriber::{EnvFilter, Layer as _};

/// Filter when none is given.
const DEFAULT_FILTER: &str = "info";

/// How log lines look.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogFormat {
    /// For people.
    Text,
    /// One JSON object a line.
    Json,
}

impl std::str::FromStr for LogFormat {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        match name {
            "text" => Ok(Self::Text),
            "json" => Ok(Self::Json),
            _ => Err(format!("unknown log format \"{name}\"; use text or json")),
        }
    }
}

/// What a process logs and where its spans go.
#[derive(Debug, Clone)]
pub struct TelemetryConfig {
    /// `service.name` of its spans, `laneway-gateway`.
    pub service: &'static str,
    /// `tracing` filter directives, `info,laneway_gateway=debug`. `None`: `info`.
    pub filter: Option<String>,
    /// How log lines look. They go to standard error.
    pub format: LogFormat,
    /// OTLP gRPC endpoint, `http://host:4317`. `None`: spans stay in the process.
    pub otlp_endpoint: Option<String>,
}

/// Flushes spans when dropped.
#[derive(Debug)]
#[must_use = "spans that were not exported are lost when this is dropped early"]
pub struct TelemetryGuard {
    provider: Option<SdkTracerProvider>,
}

/// Install the subscriber. With an endpoint it must run inside a Tokio runtime, which the exporter uses.
///
/// # Errors
/// The filter does not parse, the endpoint is not a URI, or a subscriber is installed already.
pub fn init(config: TelemetryConfig) -> anyhow::Result<TelemetryGuard> {
    let directives = config.filter.as_deref().unwrap_or(DEFAULT_FILTER);
    let filter =
        EnvFilter::try_new(directives).with_context(|| format!("parse log filter \"{directives}\""))?;
    let provider = config
        .otlp_endpoint
        .as_deref()
        .map(|endpoint| tracer_provider(config.service, endpoint))
        .transpose()?;
    opentelemetry::global::set_text_map_propagator(TraceContextPropagator::new());
    if let Some(provider) = &provider {
        // For spans that are recorded once they are over.
        opentelemetry::global::set_tracer_provider(provider.clone());
    }

    // Colours are for a terminal; in a file they are noise.
    let lines = tracing_subscriber::fmt::layer()
        .with_ansi(std::io::stderr().is_terminal())
        .with_writer(std::io::stderr);
    let lines = match config.format {
        LogFormat::Text => lines.boxed(),
        LogFormat::Json => lines.json().boxed(),
    };
    let spans = provider
        .as_ref()
        .map(|provider| tracing_opentelemetry::layer().with_tracer(provider.tracer(config.service)));
    tracing_subscriber::registry()
        .with(filter)
        .with(spans)
        .with(lines)
        .try_init()
        .context("install the log subscriber")?;
    Ok(TelemetryGuard { provider })
}

fn tracer_provider(service: &'static str, endpoint: &str) -> anyhow::Result<SdkTracerProvider> {
    let exporter = opentelemetry_otlp::SpanExporter::builder()
        .with_tonic()
        .with_endpoint(endpoint)
        .build()
        .with_context(|| format!("build the OTLP exporter for \"{endpoint}\""))?;
    Ok(SdkTracerProvider::builder()
        .with_batch_exporter(exporter)
        .with_resource(Resource::builder().with_service_name(service).build())
        .build())
}

impl Drop for TelemetryGuard {
    fn drop(&mut self) {
        if let Some(provider) = self.provider.take()
            && let Err(error) = provider.shutdown()
        {
            // The subscriber's own exporter failed, so it is not the place to say so.
            eprintln!("flush spans: {error}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bad_filter_is_named() {
        let config = TelemetryConfig {
            service: "test",
            filter: Some("laneway=loudly".into()),
            format: LogFormat::Text,
            otlp_endpoint: None,
        };
        let error = init(config).unwrap_err();
        assert!(format!("{error:#}").contains("laneway=loudly"), "{error:#}");
    }

    #[test]
    fn log_formats_are_named() {
        assert_eq!("json".parse(), Ok(LogFormat::Json));
        assert!("xml".parse::<LogFormat>().unwrap_err().contains("text or json"));
    }
}
