//! What a request sends its listener, and the listener's end of it.

use std::fmt;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::sync::mpsc;

use crate::control::Canceller;
use crate::node::{EdgeResult, FinishReason, RequestId, RowError};
use crate::samples::Samples;

/// One message to a listener. A request's stream ends with exactly one `Finished` or `Failed`.
#[derive(Clone)]
pub enum OutputEvent {
    /// It was admitted: its first step is next.
    Started {
        /// Time since it was submitted.
        queued: Duration,
    },
    /// Final output of a window.
    Samples {
        /// Samples in order, without gap or overlap.
        samples: Samples,
        /// Number of the first item that they were made of.
        first_item: u32,
        /// Items that they were made of.
        n_items: u32,
    },
    /// Items of a stream edge whose consumer is in another worker.
    Items {
        /// Edge name.
        edge: Arc<str>,
        /// Number of the first.
        first_item: u32,
        /// Their words.
        items: Vec<Arc<[i32]>>,
    },
    /// The result of a `Once` walk of this request, for a cache or another worker.
    Result {
        /// Request edge name.
        edge: Arc<str>,
        /// The result, in the model's own type.
        result: EdgeResult,
    },
    /// The end, in order.
    Finished {
        /// Why.
        reason: FinishReason,
        /// What it took.
        stats: RequestStats,
    },
    /// The end, otherwise.
    Failed(Failure),
}

impl OutputEvent {
    /// Whether it ends the stream.
    pub fn is_terminal(&self) -> bool {
        matches!(self, Self::Finished { .. } | Self::Failed(_))
    }
}

impl fmt::Debug for OutputEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Started { queued } => write!(f, "Started after {queued:?}"),
            Self::Samples {
                samples,
                first_item,
                n_items,
            } => write!(f, "{} Samples of items {first_item}+{n_items}", samples.len()),
            Self::Items {
                edge,
                first_item,
                items,
            } => write!(f, "Items {first_item}+{} of {edge}", items.len()),
            Self::Result { edge, .. } => write!(f, "Result of {edge}"),
            Self::Finished { reason, stats } => write!(f, "Finished {reason:?} {stats:?}"),
            Self::Failed(failure) => write!(f, "Failed {failure:?}"),
        }
    }
}

/// What went wrong, by what a caller can do about it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FailureKind {
    /// The request itself is at fault.
    InvalidArgument,
    /// It was killed.
    Cancelled,
    /// Its deadline passed.
    DeadlineExceeded,
    /// Its listener took nothing for too long.
    ListenerStalled,
    /// The worker cannot run it any more; another may.
    Unavailable,
    /// Anything else.
    Internal,
}

/// The end of a request that did not finish.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Failure {
    /// What a caller can do about it.
    pub kind: FailureKind,
    /// Which field is at fault, for `InvalidArgument`.
    pub field: Option<String>,
    /// What is wrong.
    pub message: String,
}

impl Failure {
    /// A failure with no field.
    pub fn new(kind: FailureKind, message: impl Into<String>) -> Self {
        Self {
            kind,
            field: None,
            message: message.into(),
        }
    }
}

impl From<RowError> for Failure {
    fn from(error: RowError) -> Self {
        Self {
            kind: if error.invalid_argument {
                FailureKind::InvalidArgument
            } else {
                FailureKind::Internal
            },
            field: error.field,
            message: error.message,
        }
    }
}

/// What a finished request took. Durations are since it was submitted.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RequestStats {
    /// Until it was admitted.
    pub queued: Duration,
    /// Until its entry step landed.
    pub prefill: Option<Duration>,
    /// Until its first item.
    pub first_item: Option<Duration>,
    /// Until its first samples.
    pub first_output: Option<Duration>,
    /// In all.
    pub total: Duration,
    /// Items made, or received from another worker.
    pub items: u32,
    /// Samples made.
    pub samples: u64,
    /// Windows run.
    pub windows: u32,
}

/// A listener's end of a request. Dropping it kills the request.
#[derive(Debug)]
pub struct RequestStream {
    id: RequestId,
    receiver: mpsc::Receiver<OutputEvent>,
    canceller: Canceller,
    ended: bool,
}

impl RequestStream {
    pub(crate) fn new(id: RequestId, receiver: mpsc::Receiver<OutputEvent>, canceller: Canceller) -> Self {
        Self {
            id,
            receiver,
            canceller,
            ended: false,
        }
    }

    /// The engine's own number of the request.
    pub fn id(&self) -> RequestId {
        self.id
    }

    /// The next event; `None` behind the terminal one. Cancellation-safe.
    pub async fn recv(&mut self) -> Option<OutputEvent> {
        std::future::poll_fn(|context| self.poll_recv(context)).await
    }

    /// As [`Self::recv`], polled.
    pub fn poll_recv(&mut self, context: &mut Context<'_>) -> Poll<Option<OutputEvent>> {
        if self.ended {
            return Poll::Ready(None);
        }
        self.receiver
            .poll_recv(context)
            .map(|event| Some(self.received(event)))
    }

    /// As [`Self::recv`], blocking the thread. Not for async code.
    pub fn blocking_recv(&mut self) -> Option<OutputEvent> {
        if self.ended {
            return None;
        }
        let event = self.receiver.blocking_recv();
        Some(self.received(event))
    }

    /// The next event if there is one already.
    pub fn try_recv(&mut self) -> Option<OutputEvent> {
        if self.ended {
            return None;
        }
        match self.receiver.try_recv() {
            Ok(event) => Some(self.received(Some(event))),
            Err(mpsc::error::TryRecvError::Empty) => None,
            Err(mpsc::error::TryRecvError::Disconnected) => Some(self.received(None)),
        }
    }

    fn received(&mut self, event: Option<OutputEvent>) -> OutputEvent {
        // A sender that went away without a terminal event is an engine that died.
        let event = event.unwrap_or_else(|| {
            OutputEvent::Failed(Failure::new(FailureKind::Unavailable, "the engine ended"))
        });
        self.ended = event.is_terminal();
        self.canceller.made_room();
        event
    }

    /// Finish cleanly: no further steps are begun, what was made is flushed. `Finished` follows.
    pub fn stop(&self) {
        self.canceller.stop();
    }

    /// End now: nothing more is launched for it, what is in flight is dropped. `Failed` follows.
    pub fn kill(&self) {
        self.canceller.kill();
    }

    /// A handle that stops or kills the request from anywhere.
    pub fn canceller(&self) -> Canceller {
        self.canceller.clone()
    }
}

impl Drop for RequestStream {
    fn drop(&mut self) {
        if !self.ended {
            self.canceller.kill();
        }
    }
}
