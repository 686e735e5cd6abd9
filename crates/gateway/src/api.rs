//! The one way in for a request to speak, whatever the shape it came in.
//!
//! Every shape of the public API turns what it was sent into a [`v1::SynthesizeRequest`] and hands it to
//! [`Api::speak`], which refuses it at once or gives back the stream of its audio. Admission, validation,
//! routing and the relay are behind that call and nowhere else, so no shape can do them differently.

use std::sync::Arc;

use laneway_proto::{Failure, v1};
use laneway_telemetry::{metric, propagation};
use tokio::time::Instant;
use tonic::metadata::MetadataMap;
use tracing::Instrument as _;

use crate::admission::Admission;
use crate::config::{LinkConfig, StreamConfig};
use crate::delivery::{Outgoing, delivery};
use crate::relay::{self, Relay};
use crate::routing::Router;
use crate::validate;

/// What all shapes of the public API share. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Api {
    pub(crate) admission: Arc<Admission>,
    pub(crate) router: Router,
    pub(crate) max_text_chars: Option<usize>,
    pub(crate) stream: StreamConfig,
    pub(crate) link: LinkConfig,
}

impl Api {
    /// Begin to speak, or refuse at once; never waits for a worker. `metadata` is what the caller sent beside the
    /// request: `grpc-timeout` is the deadline of the whole stream, and the trace context goes on to the worker.
    ///
    /// The stream is one `accepted`, the chunks in order and one `finished`, or ends with a status that
    /// `Failure::from_status` reads. Dropping it kills the work. A refusal is counted here, by its code.
    ///
    /// # Errors
    /// Everything that [`validate::check`] refuses, `Overloaded`, `Draining`, `NoWorker`, `DuplicateRequest`.
    pub(crate) fn speak(
        &self,
        request: v1::SynthesizeRequest,
        metadata: MetadataMap,
    ) -> Result<Outgoing, Failure> {
        self.begin(request, metadata).inspect_err(|failure| {
            metrics::counter!(metric::GATEWAY_REFUSALS, "reason" => failure.code.label()).increment(1);
            tracing::debug!(%failure, "request refused");
        })
    }

    fn begin(&self, request: v1::SynthesizeRequest, metadata: MetadataMap) -> Result<Outgoing, Failure> {
        let arrived = Instant::now();
        // Before the work of checking, of which a clip to clone is the most.
        let place = self.admission.enter()?;
        self.router.check_room(&request.model)?;
        let checked = validate::check(request, &self.router.models(), self.max_text_chars)?;
        let ticket = place.admit(checked.id.clone())?;

        let span = tracing::info_span!("synthesize", request_id = %checked.id, model = checked.model.name);
        propagation::extract(&span, &metadata);
        let (out, outgoing) = delivery();
        let relay = Relay {
            ticket,
            router: self.router.clone(),
            stream: self.stream.clone(),
            link: self.link.clone(),
            arrived,
            metadata,
            out,
        };
        tokio::spawn(relay::run(relay, checked).instrument(span));
        Ok(outgoing)
    }
}
