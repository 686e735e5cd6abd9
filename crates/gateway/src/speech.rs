//! The public services: `Speech`, `Models`, `Requests`.
//!
//! A handler refuses or hands over; it never waits for a worker.

use std::sync::Arc;

use laneway_proto::{ErrorCode, Failure, RequestId, v1};
use laneway_telemetry::{metric, propagation};
use tokio::time::Instant;
use tonic::{Request, Response, Status};
use tracing::Instrument as _;
use v1::models_server::Models;
use v1::requests_server::Requests;
use v1::speech_server::Speech;

use crate::admission::{Admission, Signal};
use crate::config::{LinkConfig, StreamConfig};
use crate::delivery::{Outgoing, delivery};
use crate::relay::{self, Relay};
use crate::routing::Router;
use crate::validate;

/// All three services share it.
#[derive(Debug, Clone)]
pub(crate) struct Api {
    pub(crate) admission: Arc<Admission>,
    pub(crate) router: Router,
    pub(crate) max_text_chars: Option<usize>,
    pub(crate) stream: StreamConfig,
    pub(crate) link: LinkConfig,
}

impl Api {
    fn begin(&self, request: Request<v1::SynthesizeRequest>) -> Result<Outgoing, Failure> {
        let arrived = Instant::now();
        // Before the work of checking, of which a clip to clone is the most.
        let place = self.admission.enter()?;
        let (metadata, _, request) = request.into_parts();
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

#[tonic::async_trait]
impl Speech for Api {
    type SynthesizeStream = Outgoing;

    async fn synthesize(
        &self,
        request: Request<v1::SynthesizeRequest>,
    ) -> Result<Response<Self::SynthesizeStream>, Status> {
        self.begin(request).map(Response::new).map_err(|failure| {
            metrics::counter!(metric::GATEWAY_REFUSALS, "reason" => failure.code.label()).increment(1);
            tracing::debug!(%failure, "request refused");
            failure.into()
        })
    }

    async fn list_voices(
        &self,
        request: Request<v1::ListVoicesRequest>,
    ) -> Result<Response<v1::ListVoicesResponse>, Status> {
        let mut models = self.router.models();
        let name = request.into_inner().model;
        if !name.is_empty() {
            models = vec![validate::find_model(&name, &models)?];
        }
        let voices_of = |model: Arc<crate::facts::ModelFacts>| v1::ModelVoices {
            model: model.name.clone(),
            voices: model.voices.iter().map(v1::Voice::from).collect(),
            languages: model.languages.clone(),
        };
        Ok(Response::new(v1::ListVoicesResponse {
            models: models.into_iter().map(voices_of).collect(),
        }))
    }
}

#[tonic::async_trait]
impl Models for Api {
    async fn list(
        &self,
        _request: Request<v1::ListModelsRequest>,
    ) -> Result<Response<v1::ListModelsResponse>, Status> {
        let models = self.router.models();
        let models = models
            .iter()
            .map(|model| v1::ModelFacts::from(&**model))
            .collect();
        Ok(Response::new(v1::ListModelsResponse { models }))
    }
}

#[tonic::async_trait]
impl Requests for Api {
    async fn cancel(
        &self,
        request: Request<v1::CancelRequest>,
    ) -> Result<Response<v1::CancelResponse>, Status> {
        let request = request.into_inner();
        let signal = match v1::CancelStrength::try_from(request.strength) {
            Ok(v1::CancelStrength::Unspecified | v1::CancelStrength::Stop) => Signal::Stop,
            Ok(v1::CancelStrength::Kill) => Signal::Kill,
            Err(_) => {
                let problem = format!(
                    "{} is no strength; there are: stop (1), kill (2)",
                    request.strength
                );
                return Err(Failure::of_field(ErrorCode::InvalidArgument, "strength", problem).into());
            }
        };
        let id = RequestId::new(request.request_id).map_err(|error| {
            Failure::of_field(ErrorCode::InvalidArgument, "request_id", error.to_string())
        })?;
        self.admission.signal(&id, signal)?;
        Ok(Response::new(v1::CancelResponse {}))
    }
}
