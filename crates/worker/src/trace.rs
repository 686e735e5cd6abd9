//! A request's span, and its stages as the engine timed them.
//!
//! The engine knows nothing of traces: it tells of its stages in the events of a request, which all pass here on their
//! way to the caller. The span lives as long as the events do.

use std::time::{Duration, SystemTime};

use futures::StreamExt as _;
use laneway_engine::{OutputEvent, RequestStats};
use laneway_telemetry::{propagation, stage};
use tonic::metadata::MetadataMap;
use tracing::Span;

use crate::backend::Events;

/// One request in the trace of its caller.
#[derive(Debug, Clone)]
pub(crate) struct Trace {
    span: Span,
    /// What came with the request.
    metadata: MetadataMap,
}

impl Trace {
    /// Join the trace that the caller sent.
    pub(crate) fn new(span: Span, metadata: &MetadataMap) -> Self {
        propagation::extract(&span, metadata);
        Self {
            span,
            metadata: metadata.clone(),
        }
    }

    pub(crate) fn span(&self) -> Span {
        self.span.clone()
    }

    /// Send the trace along to the next worker.
    pub(crate) fn inject(&self, outgoing: &mut MetadataMap) {
        propagation::inject(&self.span, &self.metadata, outgoing);
    }

    /// The same events, seen on their way. The request was submitted just now.
    pub(crate) fn watch(&self, events: Events) -> Events {
        let mut stages = Stages {
            span: self.span(),
            submitted: SystemTime::now(),
        };
        Box::pin(events.inspect(move |event| stages.saw(event)))
    }
}

struct Stages {
    span: Span,
    /// By the engine's count.
    submitted: SystemTime,
}

impl Stages {
    fn saw(&mut self, event: &OutputEvent) {
        match event {
            // A request that waited for another one's clip was submitted later.
            OutputEvent::Started { queued } => {
                if let Some(submitted) = SystemTime::now().checked_sub(*queued) {
                    self.submitted = self.submitted.max(submitted);
                }
            }
            OutputEvent::Finished { stats, .. } => self.record(stats),
            _ => {}
        }
    }

    fn record(&self, stats: &RequestStats) {
        // The engine's count began a moment before ours, and nothing of a request is over later than now.
        let now = SystemTime::now();
        let at = |since: Duration| (self.submitted + since).min(now);
        let stage = |name, began: Duration, ended: Duration, facts: &[(&'static str, i64)]| {
            stage::record(&self.span, name, (at(began), at(ended)), facts);
        };
        stage(stage::QUEUE, Duration::ZERO, stats.queued, &[]);
        let prefill = stats.prefill.unwrap_or(stats.queued);
        if stats.prefill.is_some() {
            stage(stage::PREFILL, stats.queued, prefill, &[]);
        }
        let Some(first_item) = stats.first_item else {
            return;
        };
        if stats.prefill.is_some() {
            stage(stage::FIRST_STEP, prefill, first_item, &[]);
        }
        if stats.windows > 0 {
            let facts = [
                ("frames", i64::from(stats.items)),
                ("windows", i64::from(stats.windows)),
                ("samples", i64::try_from(stats.samples).unwrap_or(i64::MAX)),
            ];
            stage(stage::CODEC, first_item, stats.total, &facts);
        }
    }
}
