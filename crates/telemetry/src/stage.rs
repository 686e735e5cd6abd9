//! Stages of a request as spans: what is known of them only once they are over.

use std::time::SystemTime;

use opentelemetry::trace::{Span as _, TraceContextExt as _, Tracer as _};
use opentelemetry::{KeyValue, global};
use tracing::Span;
use tracing_opentelemetry::OpenTelemetrySpanExt as _;

/// Until its turn came.
pub const QUEUE: &str = "queue";
/// The steps that fill the cache with the prompt.
pub const PREFILL: &str = "prefill";
/// From there to the first frame.
pub const FIRST_STEP: &str = "first_step";
/// Frames become samples, from the first frame to the last sample.
pub const CODEC: &str = "codec";
/// Samples become the caller's format.
pub const ENCODE: &str = "encode";

/// Record a stage that is over as a child of `parent`. Nothing happens when the process exports no traces.
pub fn record(
    parent: &Span,
    stage: &'static str,
    (began, ended): (SystemTime, SystemTime),
    facts: &[(&'static str, i64)],
) {
    let context = parent.context();
    if !context.span().span_context().is_valid() {
        return;
    }
    let tracer = global::tracer(env!("CARGO_PKG_NAME"));
    let facts = facts.iter().map(|(name, value)| KeyValue::new(*name, *value));
    tracer
        .span_builder(stage)
        .with_start_time(began)
        .with_attributes(facts)
        .start_with_context(&tracer, &context)
        .end_with_timestamp(ended.max(began));
}

/// The trace that `span` is part of, for a log line. `None` when the process exports no traces.
pub fn trace_id(span: &Span) -> Option<String> {
    let context = span.context();
    let context = context.span().span_context().clone();
    context.is_valid().then(|| context.trace_id().to_string())
}
