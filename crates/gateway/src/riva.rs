//! Riva's speech synthesis, for clients that speak it already.
//!
//! A request becomes one of `laneway.v1` (`request`) and goes the same way as any other: `Synthesize` is a call of
//! [`Api::speak`] whose audio is gathered, `SynthesizeOnline` one of [`Api::converse`] in which every message is a
//! text of its own. Failures name Riva's fields.

mod languages;
mod request;

use std::collections::BTreeMap;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::BytesMut;
use futures::{Stream, StreamExt as _, stream};
use laneway_proto::riva::RequestId;
use laneway_proto::riva::tts::riva_speech_synthesis_server::RivaSpeechSynthesis;
use laneway_proto::riva::tts::{
    RivaSynthesisConfigRequest, RivaSynthesisConfigResponse, SynthesizeSpeechRequest,
    SynthesizeSpeechResponse, SynthesizeSpeechResponseMetadata, riva_synthesis_config_response::Config,
};
use laneway_proto::{ErrorCode, Failure, v1};
use tonic::{Request, Response, Status, Streaming};
use v1::stream_synthesize_response::Event as StreamEvent;
use v1::synthesize_response::Event;

use crate::api::Api;
use crate::caller::Caller;
use crate::delivery::Outgoing;
use crate::facts::ModelFacts;
use crate::session::Command;
use crate::speech::{first_message, unreadable};
use crate::validate;

/// Most audio of one answer that is not streamed: about twelve minutes at 44.1 kHz.
const MAX_ANSWER_BYTES: usize = 64 << 20;

#[tonic::async_trait]
impl RivaSpeechSynthesis for Api {
    async fn synthesize(
        &self,
        request: Request<SynthesizeSpeechRequest>,
    ) -> Result<Response<SynthesizeSpeechResponse>, Status> {
        let (caller, asked) = Caller::of(request);
        let (text, id) = (asked.text.clone(), asked.id.clone());
        let begun = request::converted(asked, &self.models())
            .and_then(|request| self.speak(request, caller).map_err(request::in_rivas_words));
        let mut events = begun?;
        let mut audio = BytesMut::new();
        while let Some(message) = events.next().await {
            if let Some(Event::Chunk(chunk)) = message?.event {
                if audio.len() + chunk.audio.len() > MAX_ANSWER_BYTES {
                    let problem = format!(
                        "its audio is more than the {MAX_ANSWER_BYTES} bytes of one answer; use SynthesizeOnline"
                    );
                    return Err(Failure::of_field(ErrorCode::RequestTooLarge, "text", problem).into());
                }
                audio.extend_from_slice(&chunk.audio);
            }
        }
        Ok(Response::new(SynthesizeSpeechResponse {
            audio: audio.freeze(),
            meta: Some(meta(text)),
            id,
        }))
    }

    type SynthesizeOnlineStream = Online;

    async fn synthesize_online(
        &self,
        request: Request<Streaming<SynthesizeSpeechRequest>>,
    ) -> Result<Response<Self::SynthesizeOnlineStream>, Status> {
        let (caller, mut requests) = Caller::of(request);
        let Some(first) = first_message(&mut requests, &caller, self.stream.idle).await? else {
            return Err(Failure::new(ErrorCode::InvalidArgument, "no request came").into());
        };
        let id = first.id.clone();
        let start = request::converted(first.clone(), &self.models())?;
        let settings = SynthesizeSpeechRequest {
            text: String::new(),
            ..first
        };
        let texts = requests.map(move |request| match request {
            Ok(request) => request::next_text(request, &settings),
            Err(status) => Err(unreadable(&status)),
        });
        // The first text is in the start.
        let commands = stream::iter([Ok(Command::Flush)]).chain(texts.flat_map(|text| match text {
            Ok(text) => stream::iter(vec![Ok(Command::Text(text)), Ok(Command::Flush)]),
            Err(failure) => stream::iter(vec![Err(failure)]),
        }));
        let events = self
            .converse(start, caller, Box::pin(commands))
            .map_err(request::in_rivas_words)?;
        Ok(Response::new(Online {
            events,
            id,
            meta: None,
        }))
    }

    async fn get_riva_synthesis_config(
        &self,
        request: Request<RivaSynthesisConfigRequest>,
    ) -> Result<Response<RivaSynthesisConfigResponse>, Status> {
        let mut models = self.models();
        let name = request.into_inner().model_name;
        if !name.is_empty() {
            let found = validate::find_model(&name, &models);
            models = vec![found.map_err(|failure| request::renamed(failure, "model", "model_name"))?];
        }
        let model_config = models.iter().map(|model| config(model)).collect();
        Ok(Response::new(RivaSynthesisConfigResponse { model_config }))
    }
}

fn meta(text: String) -> SynthesizeSpeechResponseMetadata {
    SynthesizeSpeechResponseMetadata {
        processed_text: text.clone(),
        text,
        ..Default::default()
    }
}

/// As Riva's tools read it: a voice is called `voice_name.subvoice`, and subvoices are numbered.
fn config(model: &ModelFacts) -> Config {
    let subvoices: Vec<_> = (0..)
        .zip(&model.voices)
        .map(|(number, voice): (u32, _)| format!("{}:{number}", voice.name))
        .collect();
    let parameters = [
        ("language_code", languages::codes(model).join(",")),
        ("voice_name", model.name.clone()),
        ("subvoices", subvoices.join(",")),
        ("sample_rate", model.sample_rate.to_string()),
    ];
    Config {
        model_name: model.name.clone(),
        parameters: BTreeMap::from(parameters.map(|(key, value)| (key.to_owned(), value))),
    }
}

/// A session's audio in Riva's messages. The first of a sentence says what is spoken.
#[derive(Debug)]
pub(crate) struct Online {
    events: Outgoing<v1::StreamSynthesizeResponse>,
    id: Option<RequestId>,
    /// For the next message.
    meta: Option<SynthesizeSpeechResponseMetadata>,
}

impl Stream for Online {
    type Item = Result<SynthesizeSpeechResponse, Status>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            let event = match self.events.poll_next_unpin(context) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(None) => return Poll::Ready(None),
                Poll::Ready(Some(Err(status))) => return Poll::Ready(Some(Err(status))),
                Poll::Ready(Some(Ok(message))) => message.event,
            };
            match event {
                Some(StreamEvent::Chunk(chunk)) => {
                    let response = SynthesizeSpeechResponse {
                        audio: chunk.audio,
                        meta: self.meta.take(),
                        id: self.id.clone(),
                    };
                    return Poll::Ready(Some(Ok(response)));
                }
                Some(StreamEvent::Sentence(sentence)) => self.meta = Some(meta(sentence.text)),
                // Riva has no message for these.
                Some(StreamEvent::Accepted(_) | StreamEvent::Cancelled(_) | StreamEvent::Finished(_))
                | None => {}
            }
        }
    }
}
