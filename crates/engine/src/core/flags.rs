//! What callers flag and what time brings: cancels, items from another worker, deadlines, stalled listeners.

use std::time::Instant;

use super::Core;
use crate::control::Verb;
use crate::node::{FinishReason, RequestId};
use crate::output::{Failure, FailureKind};

impl Core {
    /// Look at every live request's flags.
    pub(super) fn read_flags(&mut self) {
        for place in self.all_places() {
            self.read_flags_of(place);
        }
    }

    fn all_places(&self) -> Vec<usize> {
        self.requests.places().collect()
    }

    /// Act on one request's flags.
    pub(super) fn read_flags_of(&mut self, place: usize) {
        let request = self.requests.at(place);
        let (id, control) = (request.id, request.control.clone());
        match control.verb() {
            Verb::Run => self.take_ingress(place),
            Verb::Stop => {
                self.take_ingress(place);
                self.stop(place, id);
            }
            Verb::Kill => self.fail(
                place,
                Failure::new(FailureKind::Cancelled, "the request was cancelled"),
            ),
        }
    }

    /// Make nothing more; what was made is flushed. The end of what was pushed may have ended the request
    /// already.
    fn stop(&mut self, place: usize, id: RequestId) {
        let Some(request) = self.requests.find(place, id) else {
            return;
        };
        request.stopping = true;
        if request.ended.is_none() && request.producing == 0 {
            self.end_producers(place, FinishReason::Stopped);
        }
    }

    /// Move items that came from another worker to their edge.
    fn take_ingress(&mut self, place: usize) {
        let Some(edge) = self.topology.edges.iter().position(|edge| !edge.produced_here) else {
            return;
        };
        let request = self.requests.at(place);
        let control = request.control.clone();
        let Some(ingress) = &control.ingress else { return };
        let end = {
            let mut ingress = ingress.lock();
            let queue = &mut request.edges[edge].queue;
            for words in ingress.items.drain(..) {
                if request.ended.is_none() {
                    queue.receive(words);
                }
            }
            ingress.end
        };
        let arrived = request.edges[edge].queue.arrived();
        request.stats.items = arrived;
        if arrived > 0 {
            let age = request.age();
            request.stats.first_item.get_or_insert(age);
        }
        if let Some(reason) = end
            && request.ended.is_none()
        {
            self.end_producers(place, reason);
        }
    }

    /// End what ran out of time, and let go of what stuck steps held once they landed after all.
    pub(super) fn tick(&mut self, now: Instant) {
        self.stuck
            .retain(|(event, _)| event.as_ref().is_none_or(|event| !event.is_done()));
        let patience = self.topology.limits.listener_stall;
        for place in self.all_places() {
            let request = self.requests.at(place);
            if request.deadline.is_some_and(|deadline| now >= deadline) {
                let failure = Failure::new(FailureKind::DeadlineExceeded, "its deadline passed");
                self.fail(place, failure);
            } else if request.stalled_since.is_some_and(|since| now - since >= patience) {
                let message = format!("its listener took nothing for {} ms", patience.as_millis());
                self.fail(place, Failure::new(FailureKind::ListenerStalled, message));
            }
        }
    }
}
