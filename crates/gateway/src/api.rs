//! The one way in for a request to speak, whatever the shape it came in.
//!
//! Every shape of the public API turns what it was sent into a [`v1::SynthesizeRequest`] and hands it to
//! [`Api::speak`], or to [`Api::converse`] where the text comes in pieces; they refuse it at once or give back the
//! stream of its audio. A text that its model does not take in one go becomes a session too. Admission, validation,
//! routing and the relay are behind these calls and nowhere else, so no shape can do them differently.

use std::sync::Arc;

use laneway_proto::{ErrorCode, Failure, grpc_timeout, v1};
use laneway_telemetry::{metric, propagation};
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::Instant;
use tracing::Instrument as _;

use crate::access;
use crate::admission::{Admission, Ticket};
use crate::caller::{Caller, KeyName};
use crate::config::{LinkConfig, StreamConfig};
use crate::delivery::{Delivery, Outgoing, delivery};
use crate::facts::ModelFacts;
use crate::http::lanes::Lanes;
use crate::relay::{self, Relay};
use crate::routing::Router;
use crate::session::{Commands, Session, SessionConfig, Shape, Voice};
use crate::validate::{self, Checked};
use crate::voices::{self, Registered, Voices};

/// What all shapes of the public API share. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Api {
    pub(crate) admission: Arc<Admission>,
    pub(crate) router: Router,
    /// Longest text of a request, and most that may wait in a session.
    pub(crate) max_text_chars: usize,
    /// Largest request message in bytes.
    pub(crate) max_request_bytes: usize,
    pub(crate) stream: StreamConfig,
    pub(crate) link: LinkConfig,
    /// None where the gateway keeps none.
    pub(crate) voices: Option<Voices>,
    /// As they were told last.
    pub(crate) lanes: Lanes,
}

impl Api {
    /// Models that can be asked for, each with the registered voices that it clones.
    pub(crate) fn models(&self) -> Vec<Arc<ModelFacts>> {
        let models = self.router.models();
        match &self.voices {
            None => models,
            Some(voices) => models.iter().map(|model| voices.known_to(model)).collect(),
        }
    }

    /// A place for a registration, which is taken before its clip is read where that can be.
    ///
    /// # Errors
    /// `VoicesNotKept`, `Overloaded`.
    pub(crate) fn enter_registration(&self, key: KeyName) -> Result<RegistrationPlace, Failure> {
        let entered = self
            .kept_voices()
            .and_then(|voices| Ok((voices.clone(), voices.enter()?)));
        let (voices, place) = entered.inspect_err(|failure| count_refusal(failure, &key))?;
        Ok(RegistrationPlace {
            voices,
            key,
            _place: place,
        })
    }

    /// Check a voice and keep it.
    ///
    /// # Errors
    /// Everything that [`voices::checked`] refuses, `VoiceExists`, `VoicesFull`.
    pub(crate) async fn register_voice(
        &self,
        place: RegistrationPlace,
        request: v1::RegisterVoiceRequest,
    ) -> Result<Arc<Registered>, Failure> {
        let models = self.router.models();
        let key = place.key.clone();
        let kept = off_the_async_threads(move || {
            // Held until it is written, also when the caller is gone by then.
            let RegistrationPlace { voices, key, _place } = place;
            voices.register(voices::checked(request, key, &models)?)
        });
        kept.await.inspect_err(|failure| count_refusal(failure, &key))
    }

    /// Forget the registered voice of this name or id.
    ///
    /// # Errors
    /// `VoicesNotKept`, `UnknownVoice`, `VoiceOfAnother`.
    pub(crate) async fn delete_voice(&self, name: String, key: &KeyName) -> Result<Arc<Registered>, Failure> {
        let refused = |failure: &Failure| count_refusal(failure, key);
        let voices = self.kept_voices().cloned().inspect_err(refused)?;
        let owner = key.clone();
        let deleted = off_the_async_threads(move || voices.delete(&name, &owner));
        deleted.await.inspect_err(refused)
    }

    fn kept_voices(&self) -> Result<&Voices, Failure> {
        self.voices.as_ref().ok_or_else(|| {
            let problem = "this gateway keeps no voices: it was started without --voices-dir";
            Failure::new(ErrorCode::VoicesNotKept, problem)
        })
    }

    /// Begin to speak, or refuse at once; never waits for a worker.
    ///
    /// The stream is one `accepted`, the chunks in order and one `finished`, or ends with a status that
    /// `Failure::from_status` reads. Dropping it kills the work. A refusal is counted here, by its code.
    ///
    /// # Errors
    /// Everything that [`validate::check`] refuses, `Overloaded`, `Draining`, `NoWorker`, `DuplicateRequest`.
    pub(crate) fn speak(&self, request: v1::SynthesizeRequest, caller: Caller) -> Result<Outgoing, Failure> {
        let key = caller.key.clone();
        self.begin(request, caller)
            .inspect_err(|failure| count_refusal(failure, &key))
    }

    /// Begin to speak what comes in pieces, or refuse at once. `start` says how, and `commands` what; `text` of
    /// `start` is the first piece. Otherwise as [`Api::speak`], with sentences and cancels between the chunks.
    ///
    /// # Errors
    /// As [`Api::speak`].
    pub(crate) fn converse(
        &self,
        start: v1::SynthesizeRequest,
        caller: Caller,
        commands: Commands,
    ) -> Result<Outgoing<v1::StreamSynthesizeResponse>, Failure> {
        let key = caller.key.clone();
        self.begin_session(start, caller, commands)
            .inspect_err(|failure| count_refusal(failure, &key))
    }

    fn begin(&self, request: v1::SynthesizeRequest, caller: Caller) -> Result<Outgoing, Failure> {
        let mut admitted = self.admit(request, caller, validate::check)?;
        let parts = std::mem::take(&mut admitted.checked.parts);
        let span = admitted.span();
        let (out, outgoing) = delivery();
        if parts.is_empty() {
            let relay = Relay {
                ticket: admitted.ticket,
                router: self.router.clone(),
                stream: self.stream.clone(),
                link: self.link.clone(),
                arrived: admitted.arrived,
                deadline: admitted.deadline,
                metadata: admitted.caller.metadata,
                out,
            };
            let request = async move {
                if let Some(ended) = relay::run(relay, admitted.checked).await {
                    ended.log();
                }
            };
            tokio::spawn(request.instrument(span));
        } else {
            let config = self.session(admitted, out);
            let session = span.in_scope(|| Session::of_parts(config, parts))?;
            tokio::spawn(session.run().instrument(span));
        }
        Ok(outgoing)
    }

    fn begin_session(
        &self,
        start: v1::SynthesizeRequest,
        caller: Caller,
        commands: Commands,
    ) -> Result<Outgoing<v1::StreamSynthesizeResponse>, Failure> {
        let mut admitted = self.admit(start, caller, validate::check_start)?;
        let text = std::mem::take(&mut admitted.checked.wire.text);
        let span = admitted.span();
        let (out, outgoing) = delivery();
        let config = self.session(admitted, out);
        let session = span.in_scope(|| Session::of_commands(config, &text, commands))?;
        tokio::spawn(session.run().instrument(span));
        Ok(outgoing)
    }

    /// Past the door, with every field checked by `check`.
    fn admit(
        &self,
        request: v1::SynthesizeRequest,
        caller: Caller,
        check: impl FnOnce(v1::SynthesizeRequest, &[Arc<ModelFacts>], usize) -> Result<Checked, Failure>,
    ) -> Result<Admitted, Failure> {
        let arrived = Instant::now();
        // Before the work of checking, of which a clip to clone is the most.
        let place = self.admission.enter()?;
        self.router.check_room(&request.model)?;
        let checked = check(request, &self.models(), self.max_text_chars)?;
        let ticket = place.admit(checked.id.clone(), caller.key.clone())?;
        Ok(Admitted {
            checked,
            ticket,
            arrived,
            deadline: grpc_timeout(&caller.metadata).map(|timeout| arrived + timeout),
            caller,
        })
    }

    fn session<M: Shape>(&self, admitted: Admitted, out: Delivery<M>) -> SessionConfig<M> {
        SessionConfig {
            voice: Voice {
                router: self.router.for_stream(),
                stream: self.stream.clone(),
                link: self.link.clone(),
                metadata: admitted.caller.metadata,
                deadline: admitted.deadline,
                request: admitted.checked,
            },
            ticket: admitted.ticket,
            arrived: admitted.arrived,
            out,
            caller: self.stream.caller,
            idle: self.stream.idle,
            max_waiting_chars: self.max_text_chars,
        }
    }
}

/// A request past the door.
struct Admitted {
    checked: Checked,
    ticket: Ticket,
    arrived: Instant,
    deadline: Option<Instant>,
    caller: Caller,
}

impl Admitted {
    fn span(&self) -> tracing::Span {
        let (id, model, key) = (
            &self.checked.id,
            &self.checked.model.name,
            self.caller.key.as_str(),
        );
        let span = tracing::info_span!("synthesize", request_id = %id, model, key);
        propagation::extract(&span, &self.caller.metadata);
        span
    }
}

/// A registration that may go on, until it is dropped.
#[derive(Debug)]
pub(crate) struct RegistrationPlace {
    voices: Voices,
    key: KeyName,
    _place: OwnedSemaphorePermit,
}

async fn off_the_async_threads<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Failure> + Send + 'static,
) -> Result<T, Failure> {
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => done,
        Err(error) => {
            tracing::error!(%error, "work on a voice ended early");
            Err(Failure::internal())
        }
    }
}

fn count_refusal(failure: &Failure, key: &KeyName) {
    let reason = failure.code.label();
    metrics::counter!(metric::GATEWAY_REFUSALS, "reason" => reason, "key" => key.label()).increment(1);
    access::refused(failure.code, key);
    tracing::debug!(%failure, "request refused");
}
