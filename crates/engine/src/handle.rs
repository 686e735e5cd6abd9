//! The callers' end of an engine: submit, feed, observe. Every call is answered at once.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{SyncSender, TrySendError};
use std::time::{Duration, Instant};

use laneway_plan::declaration::ChunkPolicy;
use parking_lot::{Condvar, Mutex};
use tokio::sync::{mpsc, watch};

use crate::control::{Canceller, Control, Ingress, Waker};
use crate::event::Event;
use crate::node::{EdgeResult, FinishReason, Payload, RequestId, RowError};
use crate::output::{OutputEvent, RequestStream};
use crate::phase::Recorders;
use crate::stats::EngineStats;
use crate::topology::Topology;

/// What a caller asks for.
pub struct Submission {
    /// The caller's own id, unique among live requests.
    pub id: String,
    /// The model's own request type.
    pub payload: Payload,
    /// Windows of this request's stream edges, in place of the configured policy.
    pub chunk: Option<ChunkPolicy>,
    /// When it must have ended.
    pub deadline: Option<Instant>,
    /// Results of request edges already in hand (a cache, another worker), by edge name.
    pub results: Vec<(String, EdgeResult)>,
}

impl fmt::Debug for Submission {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Submission")
            .field("id", &self.id)
            .field("chunk", &self.chunk)
            .field("deadline", &self.deadline)
            .finish_non_exhaustive()
    }
}

/// Why a submission was not accepted.
#[derive(Debug, Clone, thiserror::Error)]
pub enum SubmitError {
    /// As many requests are live as may run and wait.
    #[error("{live} requests are running or waiting, which is the limit")]
    QueueFull {
        /// Live requests.
        live: usize,
        /// When a place may be free.
        retry_after: Duration,
    },
    /// A live request has this id.
    #[error("request {0} is still running")]
    DuplicateId(String),
    /// The engine finishes what it has and takes nothing new.
    #[error("the engine is draining")]
    Draining,
    /// The engine ended or cannot run any more.
    #[error("the engine does not run: {0}")]
    Stopped(String),
    /// The request can never run here.
    #[error(transparent)]
    Invalid(#[from] RowError),
}

/// Why items from another worker were not taken.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PushError {
    /// No such live request.
    #[error("no live request {0}")]
    UnknownRequest(String),
    /// The request makes its items in this worker, or its items have ended.
    #[error("request {0} takes no items")]
    Closed(String),
    /// Its windows have to catch up first; nothing of the call was taken.
    #[error("request {request} holds {held} of {capacity} items")]
    Full {
        /// The request.
        request: String,
        /// Items held.
        held: usize,
        /// Most that it may hold.
        capacity: usize,
    },
    /// An item of the wrong size.
    #[error("item of {got} words where the edge has {want}")]
    ItemWords {
        /// Words of the item.
        got: usize,
        /// Words of the edge's items.
        want: usize,
    },
}

/// Whether an engine can serve.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Health {
    /// It serves.
    Serving,
    /// It finishes what it has.
    Draining,
    /// A step is stuck or a stream failed: what depended on it was ended, nothing new is taken.
    Unhealthy(String),
    /// It ended.
    Stopped,
}

/// A request on its way to the engine thread.
pub(crate) struct Accepted {
    pub(crate) control: Arc<Control>,
    pub(crate) submission: Submission,
    pub(crate) output: mpsc::Sender<OutputEvent>,
    pub(crate) at: Instant,
}

impl fmt::Debug for Accepted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.submission.fmt(f)
    }
}

/// Whether submissions are taken.
#[derive(Debug, Clone)]
pub(crate) enum Gate {
    Open,
    Draining,
    Stopped(String),
}

/// Live requests by their callers' ids.
#[derive(Debug)]
pub(crate) struct Registry {
    pub(crate) gate: Gate,
    pub(crate) live: HashMap<Arc<str>, Arc<Control>>,
    /// Smoothed duration of a request, for retry hints.
    pub(crate) typical_duration: Duration,
}

/// What handles and the engine thread share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) registry: Mutex<Registry>,
    /// The last live request ended.
    pub(crate) all_ended: Condvar,
    pub(crate) stats: Mutex<EngineStats>,
    pub(crate) recorders: Arc<Recorders>,
    pub(crate) health: watch::Sender<Health>,
    pub(crate) waker: Waker,
    pub(crate) events: SyncSender<Event>,
    pub(crate) topology: Arc<Topology>,
    next_id: AtomicU64,
}

impl Shared {
    pub(crate) fn new(events: SyncSender<Event>, topology: Arc<Topology>) -> Self {
        Self {
            registry: Mutex::new(Registry {
                gate: Gate::Open,
                live: HashMap::new(),
                typical_duration: Duration::from_secs(1),
            }),
            all_ended: Condvar::new(),
            stats: Mutex::default(),
            recorders: Arc::new(Recorders::new(&topology)),
            health: watch::Sender::new(Health::Serving),
            waker: Waker::new(events.clone()),
            events,
            topology,
            next_id: AtomicU64::new(1),
        }
    }
}

/// Submits requests to an engine. Cloning is cheap; any thread may call.
#[derive(Debug, Clone)]
pub struct EngineHandle {
    pub(crate) shared: Arc<Shared>,
}

impl EngineHandle {
    /// Accept a request or say at once why not.
    ///
    /// # Errors
    /// [`SubmitError`]; `Invalid` names the field when the payload can never fit this worker.
    pub fn submit(&self, submission: Submission) -> Result<RequestStream, SubmitError> {
        let shared = &self.shared;
        let topology = &shared.topology;
        topology.check(&submission)?;
        let name: Arc<str> = submission.id.as_str().into();
        let mut registry = shared.registry.lock();
        match &registry.gate {
            Gate::Open => {}
            Gate::Draining => return Err(SubmitError::Draining),
            Gate::Stopped(why) => return Err(SubmitError::Stopped(why.clone())),
        }
        if registry.live.contains_key(&name) {
            return Err(SubmitError::DuplicateId(submission.id));
        }
        let live = registry.live.len();
        if live >= topology.limits.max_running + topology.limits.max_queue {
            return Err(SubmitError::QueueFull {
                live,
                retry_after: registry.typical_duration / 2,
            });
        }
        let ingress = topology.ingress_edge().map(|edge| Ingress {
            items: Default::default(),
            held: 0,
            capacity: edge.capacity as usize,
            item_words: edge.item_words as usize,
            end: None,
        });
        let id = RequestId(shared.next_id.fetch_add(1, Ordering::Relaxed));
        let control = Arc::new(Control::new(id, name.clone(), ingress, shared.waker.clone()));
        // Two places more than may be used: the first and the terminal event always fit.
        let (output, receiver) = mpsc::channel(topology.limits.output_events.max(1) + 2);
        let accepted = Box::new(Accepted {
            control: control.clone(),
            submission,
            output,
            at: Instant::now(),
        });
        // The channel holds one message for each live request and more, so it is full only when the engine
        // thread does not run.
        match shared.events.try_send(Event::Submit(accepted)) {
            Ok(()) => {}
            Err(TrySendError::Full(_)) => {
                return Err(SubmitError::QueueFull {
                    live,
                    retry_after: registry.typical_duration / 2,
                });
            }
            Err(TrySendError::Disconnected(_)) => {
                return Err(SubmitError::Stopped("its thread ended".into()));
            }
        }
        registry.live.insert(name, control.clone());
        Ok(RequestStream::new(id, receiver, Canceller(control)))
    }

    /// Hand over items of a stream edge whose producer is in another worker, in order.
    ///
    /// # Errors
    /// [`PushError::Full`] is backpressure: nothing was taken, try again after the next output.
    pub fn push_items(&self, request: &str, items: &[Arc<[i32]>]) -> Result<(), PushError> {
        let control = self.control(request)?;
        let Some(ingress) = &control.ingress else {
            return Err(PushError::Closed(request.into()));
        };
        let mut ingress = ingress.lock();
        if ingress.end.is_some() {
            return Err(PushError::Closed(request.into()));
        }
        if let Some(item) = items.iter().find(|item| item.len() != ingress.item_words) {
            return Err(PushError::ItemWords {
                got: item.len(),
                want: ingress.item_words,
            });
        }
        if ingress.held + items.len() > ingress.capacity {
            return Err(PushError::Full {
                request: request.into(),
                held: ingress.held,
                capacity: ingress.capacity,
            });
        }
        ingress.held += items.len();
        ingress.items.extend(items.iter().cloned());
        drop(ingress);
        self.shared.waker.wake();
        Ok(())
    }

    /// No more items will come; the request finishes with `reason` once its windows have run.
    ///
    /// # Errors
    /// When there is no such request or it takes no items.
    pub fn end_items(&self, request: &str, reason: FinishReason) -> Result<(), PushError> {
        let control = self.control(request)?;
        let Some(ingress) = &control.ingress else {
            return Err(PushError::Closed(request.into()));
        };
        ingress.lock().end.get_or_insert(reason);
        self.shared.waker.wake();
        Ok(())
    }

    /// A handle that stops or kills the live request with this id.
    pub fn canceller(&self, request: &str) -> Option<Canceller> {
        self.control(request).ok().map(Canceller)
    }

    /// Numbers as of the engine's last turn.
    pub fn stats(&self) -> EngineStats {
        let mut stats = self.shared.stats.lock().clone();
        stats.phases = self.shared.recorders.phases();
        self.shared.recorders.fill(&mut stats.walks);
        stats
    }

    /// Whether it can serve, now and whenever that changes.
    pub fn health(&self) -> watch::Receiver<Health> {
        self.shared.health.subscribe()
    }

    fn control(&self, request: &str) -> Result<Arc<Control>, PushError> {
        let registry = self.shared.registry.lock();
        registry
            .live
            .get(request)
            .cloned()
            .ok_or_else(|| PushError::UnknownRequest(request.into()))
    }
}
