//! W3C trace context in gRPC metadata.

use opentelemetry::global;
use opentelemetry::propagation::{Extractor, Injector};
use tonic::metadata::{KeyRef, MetadataKey, MetadataMap};
use tracing::Span;
use tracing_opentelemetry::OpenTelemetrySpanExt as _;

/// Headers of the W3C trace context.
const HEADERS: [&str; 2] = ["traceparent", "tracestate"];

struct Reader<'a>(&'a MetadataMap);

impl Extractor for Reader<'_> {
    fn get(&self, key: &str) -> Option<&str> {
        self.0.get(key).and_then(|value| value.to_str().ok())
    }

    fn keys(&self) -> Vec<&str> {
        let ascii = |key| match key {
            KeyRef::Ascii(key) => Some(key.as_str()),
            KeyRef::Binary(_) => None,
        };
        self.0.keys().filter_map(ascii).collect()
    }
}

struct Writer<'a>(&'a mut MetadataMap);

impl Injector for Writer<'_> {
    fn set(&mut self, key: &str, value: String) {
        if let (Ok(key), Ok(value)) = (MetadataKey::from_bytes(key.as_bytes()), value.parse()) {
            self.0.insert(key, value);
        }
    }
}

/// Make `span` a child of the trace that the caller sent. Nothing happens without one, or when no traces are
/// exported.
pub fn extract(span: &Span, metadata: &MetadataMap) {
    let context = global::get_text_map_propagator(|propagator| propagator.extract(&Reader(metadata)));
    // Fails when the process exports no traces, and then there is nothing to link.
    let _ = span.set_parent(context);
}

/// Send the trace of `span` along. When the process exports no traces of its own, the caller's context
/// `received` goes through unchanged, so that the next process still joins it.
pub fn inject(span: &Span, received: &MetadataMap, outgoing: &mut MetadataMap) {
    global::get_text_map_propagator(|propagator| {
        propagator.inject_context(&span.context(), &mut Writer(outgoing));
    });
    if outgoing.contains_key(HEADERS[0]) {
        return;
    }
    for header in HEADERS {
        if let Some(value) = received.get(header) {
            outgoing.insert(header, value.clone());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use opentelemetry::trace::TracerProvider as _;
    use opentelemetry_sdk::propagation::TraceContextPropagator;
    use opentelemetry_sdk::trace::SdkTracerProvider;
    use tracing_subscriber::layer::SubscriberExt as _;

    const PARENT: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

    fn received() -> MetadataMap {
        let mut metadata = MetadataMap::new();
        metadata.insert("traceparent", PARENT.parse().unwrap());
        metadata.insert("tracestate", "vendor=1".parse().unwrap());
        metadata
    }

    #[test]
    fn a_trace_goes_on_in_the_next_process() {
        global::set_text_map_propagator(TraceContextPropagator::new());
        let provider = SdkTracerProvider::builder().build();
        let layer = tracing_opentelemetry::layer().with_tracer(provider.tracer("test"));
        tracing::subscriber::with_default(tracing_subscriber::registry().with(layer), || {
            let span = tracing::info_span!("request");
            extract(&span, &received());
            let mut outgoing = MetadataMap::new();
            inject(&span, &received(), &mut outgoing);
            let sent = outgoing.get("traceparent").unwrap().to_str().unwrap();
            assert_eq!(sent[..36], PARENT[..36], "the trace id is the caller's");
            assert_ne!(sent[36..52], PARENT[36..52], "the span id is ours");
        });
    }

    #[test]
    fn without_traces_of_our_own_the_context_goes_through() {
        tracing::subscriber::with_default(tracing_subscriber::registry(), || {
            let span = tracing::info_span!("request");
            extract(&span, &received());
            let mut outgoing = MetadataMap::new();
            inject(&span, &received(), &mut outgoing);
            assert_eq!(outgoing.get("traceparent").unwrap(), PARENT);
            assert_eq!(outgoing.get("tracestate").unwrap(), "vendor=1");
        });
    }
}
