//! The public services of `laneway.v1`: `Speech`, `Models`, `Requests`.
//!
//! A handler refuses or hands over; it never waits for a worker.

use std::sync::Arc;

use laneway_proto::{ErrorCode, Failure, RequestId, v1};
use tonic::{Request, Response, Status};
use v1::models_server::Models;
use v1::requests_server::Requests;
use v1::speech_server::Speech;

use crate::admission::Signal;
use crate::api::Api;
use crate::delivery::Outgoing;
use crate::validate;

#[tonic::async_trait]
impl Speech for Api {
    type SynthesizeStream = Outgoing;

    async fn synthesize(
        &self,
        request: Request<v1::SynthesizeRequest>,
    ) -> Result<Response<Self::SynthesizeStream>, Status> {
        let (metadata, _, request) = request.into_parts();
        Ok(Response::new(self.speak(request, metadata)?))
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
