//! Requests that clone a voice: the clip's encoding is asked of the cache first.

use std::collections::HashMap;
use std::sync::Arc;

use futures::{StreamExt as _, stream};
use laneway_engine::node::{EdgeResult, FinishReason};
use laneway_engine::{
    EngineHandle, Failure, FailureKind, OutputEvent, RequestStats, Submission, SubmitError,
};
use laneway_models::qwen3_tts::reference::ReferenceClip;
use laneway_models_decl::qwen3_tts::REFERENCE;
use parking_lot::Mutex;
use tokio::sync::watch;

use super::references::{Answer, References, Ticket};
use super::{EngineBackend, next};
use crate::backend::{Events, Strength};

/// Requests that wait for a clip which another one has encoded: the engine does not know them yet, so they are
/// cancelled here.
#[derive(Debug, Clone, Default)]
pub(super) struct Waiting(Arc<Mutex<HashMap<String, watch::Sender<Option<Strength>>>>>);

/// A place among those that wait. It frees itself on drop.
struct Wait {
    waiting: Waiting,
    id: String,
    cancelled: watch::Receiver<Option<Strength>>,
}

impl Waiting {
    fn enter(&self, id: &str) -> Wait {
        let (sender, cancelled) = watch::channel(None);
        self.0.lock().insert(id.to_owned(), sender);
        Wait {
            waiting: self.clone(),
            id: id.to_owned(),
            cancelled,
        }
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.0.lock().len()
    }

    /// Whether such a request waits. A kill is not weakened by a stop behind it.
    pub(super) fn cancel(&self, id: &str, strength: Strength) -> bool {
        let waiting = self.0.lock();
        let Some(sender) = waiting.get(id) else {
            return false;
        };
        sender.send_modify(|told| {
            if *told != Some(Strength::Kill) {
                *told = Some(strength);
            }
        });
        true
    }
}

impl Drop for Wait {
    fn drop(&mut self) {
        self.waiting.0.lock().remove(&self.id);
    }
}

impl EngineBackend {
    /// Submit a request with its clip's encoding, or with the duty to encode it, or once another request has.
    pub(super) fn clone_voice(
        &self,
        submission: Submission,
        clip: ReferenceClip,
    ) -> Result<Events, SubmitError> {
        match self.references.ask(&clip) {
            Answer::Ready(result) => submit_with(&self.handle, submission, result),
            Answer::Encode(ticket) => submit_and_deliver(&self.handle, submission, ticket),
            Answer::Wait(encoded) => {
                let wait = self.waiting.enter(&submission.id);
                let deferred = Deferred {
                    handle: self.handle.clone(),
                    references: self.references.clone(),
                    submission,
                    clip,
                    wait,
                };
                Ok(Box::pin(stream::once(deferred.submitted(encoded)).flatten()))
            }
        }
    }
}

fn submit_with(
    handle: &EngineHandle,
    mut submission: Submission,
    result: EdgeResult,
) -> Result<Events, SubmitError> {
    submission.results.push((REFERENCE.to_owned(), result));
    Ok(Box::pin(stream::unfold(handle.submit(submission)?, next)))
}

/// Dropping the events drops the ticket: who waits then encodes the clip.
fn submit_and_deliver(
    handle: &EngineHandle,
    submission: Submission,
    ticket: Ticket,
) -> Result<Events, SubmitError> {
    let events = stream::unfold(handle.submit(submission)?, next);
    let mut ticket = Some(ticket);
    Ok(Box::pin(events.inspect(move |event| match event {
        OutputEvent::Result { edge, result } if **edge == *REFERENCE => {
            if let Some(ticket) = ticket.take() {
                ticket.deliver(result);
            }
        }
        // It did not come to a result, and the events may be kept for as long as their reader likes.
        event if event.is_terminal() => drop(ticket.take()),
        _ => {}
    })))
}

/// A request whose clip is being encoded.
struct Deferred {
    handle: EngineHandle,
    references: References,
    submission: Submission,
    clip: ReferenceClip,
    wait: Wait,
}

impl Deferred {
    async fn submitted(mut self, mut encoded: watch::Receiver<Option<EdgeResult>>) -> Events {
        let deadline = self.submission.deadline;
        loop {
            let over = async {
                match deadline {
                    Some(deadline) => tokio::time::sleep_until(deadline.into()).await,
                    None => std::future::pending().await,
                }
            };
            let told = async {
                let told = self.wait.cancelled.wait_for(Option::is_some).await;
                // The sender is in the place that this request holds.
                told.ok().and_then(|told| *told)
            };
            let ready = tokio::select! {
                biased;
                Some(strength) = told => return ended(match strength {
                    Strength::Kill => failed(FailureKind::Cancelled, "killed while its clip was being encoded"),
                    Strength::Stop => OutputEvent::Finished {
                        reason: FinishReason::Stopped,
                        stats: RequestStats::default(),
                    },
                }),
                () = over => return ended(failed(
                    FailureKind::DeadlineExceeded,
                    "the deadline passed while its clip was being encoded",
                )),
                ready = encoded.wait_for(Option::is_some) => ready.ok().and_then(|ready| ready.clone()),
            };
            let answer = match ready {
                Some(result) => Answer::Ready(result),
                // Who had the duty gave it up.
                None => self.references.ask(&self.clip),
            };
            let submitted = match answer {
                Answer::Ready(result) => submit_with(&self.handle, self.submission, result),
                Answer::Encode(ticket) => submit_and_deliver(&self.handle, self.submission, ticket),
                Answer::Wait(again) => {
                    encoded = again;
                    continue;
                }
            };
            return submitted.unwrap_or_else(|error| ended(refused(error)));
        }
    }
}

fn ended(event: OutputEvent) -> Events {
    Box::pin(stream::iter([event]))
}

fn failed(kind: FailureKind, message: &str) -> OutputEvent {
    OutputEvent::Failed(Failure::new(kind, message))
}

/// A refusal that comes after the request was taken.
fn refused(error: SubmitError) -> OutputEvent {
    match error {
        SubmitError::Invalid(row) => OutputEvent::Failed(row.into()),
        error => failed(FailureKind::Unavailable, &error.to_string()),
    }
}
