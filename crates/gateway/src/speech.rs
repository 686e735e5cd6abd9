//! The public services of `laneway.v1`: `Speech`, `Models`, `Requests`.
//!
//! A handler refuses or hands over; it never waits for a worker.

use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use laneway_proto::{ErrorCode, Failure, RequestId, grpc_timeout, v1};
use tonic::{Request, Response, Status, Streaming};
use v1::models_server::Models;
use v1::requests_server::Requests;
use v1::speech_server::Speech;
use v1::stream_synthesize_request::Message as Sent;

use crate::admission::Signal;
use crate::api::Api;
use crate::caller::Caller;
use crate::delivery::Outgoing;
use crate::session::Command;
use crate::validate;

#[tonic::async_trait]
impl Speech for Api {
    type SynthesizeStream = Outgoing;

    async fn synthesize(
        &self,
        request: Request<v1::SynthesizeRequest>,
    ) -> Result<Response<Self::SynthesizeStream>, Status> {
        let (caller, request) = Caller::of(request);
        Ok(Response::new(self.speak(request, caller)?))
    }

    type StreamSynthesizeStream = Outgoing<v1::StreamSynthesizeResponse>;

    async fn stream_synthesize(
        &self,
        request: Request<Streaming<v1::StreamSynthesizeRequest>>,
    ) -> Result<Response<Self::StreamSynthesizeStream>, Status> {
        let (caller, mut requests) = Caller::of(request);
        let first = first_message(&mut requests, &caller, self.stream.idle).await?;
        let Some(Sent::Start(start)) = first.and_then(|first| first.message) else {
            return Err(of_message("the first message has to be a `start`").into());
        };
        let commands = requests.map(|request| match request {
            Ok(request) => command(request),
            Err(status) => Err(unreadable(&status)),
        });
        Ok(Response::new(self.converse(start, caller, Box::pin(commands))?))
    }

    async fn list_voices(
        &self,
        request: Request<v1::ListVoicesRequest>,
    ) -> Result<Response<v1::ListVoicesResponse>, Status> {
        let mut models = self.models();
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

    async fn register_voice(
        &self,
        request: Request<v1::RegisterVoiceRequest>,
    ) -> Result<Response<v1::RegisterVoiceResponse>, Status> {
        let (caller, request) = Caller::of(request);
        let place = self.enter_registration(caller.key)?;
        let registered = self.register_voice(place, request).await?;
        let voice = v1::Voice::from(&crate::facts::Voice::from(&registered));
        Ok(Response::new(v1::RegisterVoiceResponse { voice: Some(voice) }))
    }

    async fn delete_voice(
        &self,
        request: Request<v1::DeleteVoiceRequest>,
    ) -> Result<Response<v1::DeleteVoiceResponse>, Status> {
        let (caller, request) = Caller::of(request);
        let deleted = self.delete_voice(request.voice, &caller.key).await?;
        let id = deleted.id.clone();
        Ok(Response::new(v1::DeleteVoiceResponse { id }))
    }
}

#[tonic::async_trait]
impl Models for Api {
    async fn list(
        &self,
        _request: Request<v1::ListModelsRequest>,
    ) -> Result<Response<v1::ListModelsResponse>, Status> {
        let models = self.models();
        let facts = |model: &Arc<crate::facts::ModelFacts>| {
            let mut facts = v1::ModelFacts::from(&**model);
            if let Some(limits) = &mut facts.limits {
                // What a request may hold is the gateway's to say: it parts what a model does not take in one go.
                limits.max_text_chars = u32::try_from(self.max_text_chars).unwrap_or(u32::MAX);
            }
            facts
        };
        let models = models.iter().map(facts).collect();
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

/// The message that says what a stream of them is about, which has to come soon: until then nothing is admitted.
///
/// # Errors
/// `InvalidArgument`, `DeadlineExceeded`.
pub(crate) async fn first_message<M>(
    requests: &mut Streaming<M>,
    caller: &Caller,
    patience: Duration,
) -> Result<Option<M>, Failure> {
    let deadline = grpc_timeout(&caller.metadata).filter(|deadline| *deadline < patience);
    match tokio::time::timeout(deadline.unwrap_or(patience), requests.message()).await {
        Ok(Ok(first)) => Ok(first),
        Ok(Err(status)) => Err(unreadable(&status)),
        Err(_) if deadline.is_some() => Err(Failure::new(ErrorCode::DeadlineExceeded, "the deadline passed")),
        Err(_) => {
            let message = format!("no message came for {} seconds", patience.as_secs_f64());
            Err(Failure::new(ErrorCode::DeadlineExceeded, message))
        }
    }
}

/// What a stream of requests that cannot be read on means.
pub(crate) fn unreadable(status: &Status) -> Failure {
    match status.code() {
        tonic::Code::Cancelled => Failure::new(ErrorCode::Cancelled, "the caller left"),
        tonic::Code::OutOfRange => Failure::new(
            ErrorCode::RequestTooLarge,
            format!("a message cannot be read: {}", status.message()),
        ),
        _ => Failure::new(
            ErrorCode::InvalidArgument,
            "a message of the stream cannot be read",
        ),
    }
}

fn of_message(problem: &str) -> Failure {
    Failure::of_field(ErrorCode::InvalidArgument, "message", problem)
}

fn command(request: v1::StreamSynthesizeRequest) -> Result<Command, Failure> {
    match request.message {
        Some(Sent::Text(text)) => Ok(Command::Text(text)),
        Some(Sent::Flush(_)) => Ok(Command::Flush),
        Some(Sent::Cancel(_)) => Ok(Command::Cancel),
        Some(Sent::End(_)) => Ok(Command::End),
        Some(Sent::Start(_)) => Err(of_message("only the first message is a `start`")),
        None => Err(of_message("nothing is set; there are: text, flush, cancel, end")),
    }
}
