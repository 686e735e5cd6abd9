//! One request as the engine thread sees it.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::mpsc;

use crate::control::Control;
use crate::edge::{EdgeQueue, Origin};
use crate::node::{EdgeResult, FinishReason, Item, Payload, RequestId, RowState};
use crate::output::{OutputEvent, RequestStats};
use crate::resource::{Ask, Lease};
use crate::step::Held;
use crate::topology::Topology;

/// What one node keeps of a request.
#[derive(Debug, Default)]
pub(crate) struct NodePart {
    /// `None` before the node opened it and while a lane's step has it.
    pub(crate) state: Option<RowState>,
    /// What it was granted; `None` before.
    pub(crate) lease: Option<Arc<Lease>>,
    /// What its rows hold, from the first row after admission on.
    pub(crate) held: Option<Arc<Held>>,
    /// What it asks for.
    pub(crate) needs: Vec<Ask>,
    /// Steps in flight.
    pub(crate) in_flight: u32,
    /// It was ready and its pool was full.
    pub(crate) parked: bool,
}

/// A request edge of the request.
#[derive(Debug)]
pub(crate) enum Delivery {
    /// Its walk does not run for this request.
    NotNeeded,
    /// Its walk has yet to run.
    Pending,
    /// Its walk runs.
    Running,
    /// There it is, and the step that made it, if one of this worker did.
    Done(EdgeResult, Option<Origin>),
}

/// The items of a prime walk.
#[derive(Debug)]
pub(crate) enum Priming {
    /// Waits for results.
    Awaits,
    /// Windows still to run; empty when it is done.
    Items(VecDeque<Item>),
}

/// What a request has on one stream edge.
#[derive(Debug)]
pub(crate) struct EdgePart {
    pub(crate) queue: EdgeQueue,
    /// Ring slot, for an edge with a ring, from admission on.
    pub(crate) ring: Option<Arc<Lease>>,
    pub(crate) priming: Priming,
}

/// A live request.
#[derive(Debug)]
pub(crate) struct Request {
    pub(crate) id: RequestId,
    pub(crate) control: Arc<Control>,
    pub(crate) payload: Payload,
    pub(crate) deadline: Option<Instant>,
    pub(crate) submitted_at: Instant,
    /// It was admitted.
    pub(crate) running: bool,
    pub(crate) nodes: Vec<NodePart>,
    pub(crate) edges: Vec<EdgePart>,
    pub(crate) deliveries: Vec<Delivery>,
    /// The entry walk was launched.
    pub(crate) entered: bool,
    /// Entry and loop steps in flight.
    pub(crate) producing: u32,
    /// Number of the last chain step that it was in, for fair turns among more rows than fit.
    pub(crate) last_step: u64,
    /// It was asked to stop: nothing more is made for it.
    pub(crate) stopping: bool,
    /// Nothing more will be made for it, and why.
    pub(crate) ended: Option<FinishReason>,
    pub(crate) stats: RequestStats,
    output: mpsc::Sender<OutputEvent>,
    /// Places in the output that landings of steps in flight may take.
    output_reserved: usize,
    /// Since when the listener has kept it from running.
    pub(crate) stalled_since: Option<Instant>,
}

impl Request {
    #[allow(clippy::too_many_arguments)] // One caller; each argument is a different part.
    pub(crate) fn new(
        control: Arc<Control>,
        payload: Payload,
        deadline: Option<Instant>,
        submitted_at: Instant,
        nodes: Vec<NodePart>,
        edges: Vec<EdgePart>,
        deliveries: Vec<Delivery>,
        output: mpsc::Sender<OutputEvent>,
    ) -> Self {
        Self {
            id: control.id,
            control,
            payload,
            deadline,
            submitted_at,
            running: false,
            nodes,
            edges,
            deliveries,
            entered: false,
            producing: 0,
            last_step: 0,
            stopping: false,
            ended: None,
            stats: RequestStats::default(),
            output,
            output_reserved: 0,
            stalled_since: None,
        }
    }

    pub(crate) fn age(&self) -> Duration {
        self.submitted_at.elapsed()
    }

    /// What a row of `node` holds until its step has landed. The node has its lease.
    pub(crate) fn hold(&mut self, topology: &Topology, node: usize) -> Arc<Held> {
        if let Some(held) = &self.nodes[node].held {
            return held.clone();
        }
        let lease = self.nodes[node].lease.clone();
        let rings = topology
            .edges_of(node)
            .filter_map(|edge| self.edges[edge].ring.clone());
        let held = Arc::new(Held {
            payload: self.payload.clone(),
            lease: lease.expect("a ready row holds its node's lease"),
            _rings: rings.collect(),
        });
        // Rings come with admission; a walk that runs before it holds none.
        if self.running {
            self.nodes[node].held = Some(held.clone());
        }
        held
    }

    /// Whether one more step whose landing may send an event can be launched. When not, the listener is asked
    /// to say so as soon as it has taken something.
    pub(crate) fn output_room(&mut self) -> bool {
        // One place is kept for the terminal event, and one for `Started` until that was sent.
        let room = |request: &Self| {
            let kept = 1 + usize::from(!request.running);
            request.output.capacity() > request.output_reserved + kept
        };
        if !room(self) {
            self.control.want_room();
            if !room(self) {
                // A full output that steps in flight have yet to fill is not the listener's fault.
                if self.output_reserved == 0 {
                    self.stalled_since.get_or_insert_with(Instant::now);
                }
                return false;
            }
        }
        self.control.got_room();
        self.stalled_since = None;
        true
    }

    /// Keep a place for the event of a step about to be launched.
    pub(crate) fn reserve_output(&mut self) {
        self.output_reserved += 1;
    }

    /// The step landed; its event, if any, follows.
    pub(crate) fn unreserve_output(&mut self) {
        self.output_reserved -= 1;
    }

    /// Send an event for which there is room. A listener that went away is a kill that is on its way.
    pub(crate) fn send(&self, event: OutputEvent) {
        if let Err(mpsc::error::TrySendError::Full(event)) = self.output.try_send(event) {
            tracing::error!(
                request = &*self.control.name,
                ?event,
                "no place was kept for an event"
            );
        }
    }

    /// Every request edge of `awaits` that runs for this request has delivered.
    pub(crate) fn delivered(&self, awaits: &[usize]) -> bool {
        awaits
            .iter()
            .all(|&edge| matches!(self.deliveries[edge], Delivery::NotNeeded | Delivery::Done(..)))
    }

    /// The results of `awaits`.
    pub(crate) fn results<'a>(
        &'a self,
        awaits: &'a [usize],
    ) -> impl Iterator<Item = (&'a EdgeResult, Option<&'a Origin>)> {
        awaits.iter().filter_map(|&edge| match &self.deliveries[edge] {
            Delivery::Done(result, origin) => Some((result, origin.as_ref())),
            _ => None,
        })
    }
}

/// Live requests by place. A place is used again, so whoever kept one also names who must still sit there.
#[derive(Debug, Default)]
pub(crate) struct Table {
    places: Vec<Option<Box<Request>>>,
    free: Vec<usize>,
}

impl Table {
    pub(crate) fn insert(&mut self, request: Request) -> usize {
        let place = self.free.pop().unwrap_or_else(|| {
            self.places.push(None);
            self.places.len() - 1
        });
        self.places[place] = Some(Box::new(request));
        place
    }

    pub(crate) fn remove(&mut self, place: usize) -> Box<Request> {
        self.free.push(place);
        self.places[place].take().expect("only live requests are removed")
    }

    /// The request at a place that the engine's own lists name.
    pub(crate) fn at(&mut self, place: usize) -> &mut Request {
        self.places[place]
            .as_mut()
            .expect("the engine's lists name live requests only")
    }

    /// The request that a step was launched with, if it is still live.
    pub(crate) fn find(&mut self, place: usize, id: RequestId) -> Option<&mut Request> {
        self.places[place]
            .as_deref_mut()
            .filter(|request| request.id == id)
    }

    pub(crate) fn places(&self) -> impl Iterator<Item = usize> + use<'_> {
        (0..self.places.len()).filter(|&place| self.places[place].is_some())
    }
}
