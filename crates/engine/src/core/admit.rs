//! From accepted to running.

use super::Core;
use crate::edge::EdgeQueue;
use crate::handle::Accepted;
use crate::node::Item;
use crate::output::{Failure, FailureKind, OutputEvent};
use crate::request::{Delivery, EdgePart, NodePart, Priming, Request};
use crate::resource::Ask;

impl Core {
    /// A submission arrived: it waits for admission.
    pub(super) fn accept(&mut self, accepted: Accepted) {
        let Accepted {
            control,
            submission,
            output,
            at,
        } = accepted;
        let topology = &self.topology;
        let payload = submission.payload;
        let nodes = (0..topology.nodes.len())
            .map(|node| NodePart {
                needs: topology.needs(node, &payload),
                ..NodePart::default()
            })
            .collect();
        let edges = topology
            .edges
            .iter()
            .map(|edge| {
                let chunk = submission.chunk.as_ref().unwrap_or(&edge.chunk).clone();
                EdgePart {
                    queue: EdgeQueue::new(chunk, edge.capacity),
                    ring: None,
                    priming: match edge.prime {
                        Some(_) => Priming::Awaits,
                        None => Priming::Items(Default::default()),
                    },
                }
            })
            .collect();
        let mut given = submission.results;
        let deliveries = topology
            .request_edges
            .iter()
            .map(|edge| {
                if let Some(index) = given.iter().position(|(name, _)| **name == *edge.name) {
                    return Delivery::Done(given.swap_remove(index).1, None);
                }
                match edge.from {
                    Some(walk) if topology.model.runs_once(topology.walks[walk].id, &payload) => {
                        Delivery::Pending
                    }
                    _ => Delivery::NotNeeded,
                }
            })
            .collect();
        let request = Request::new(
            control,
            payload,
            submission.deadline,
            at,
            nodes,
            edges,
            deliveries,
            output,
        );
        let place = self.requests.insert(request);
        self.waiting.push_back(place);
        self.shared.stats.lock().submitted += 1;
        if let Some(why) = self.lanes.iter().find_map(|lane| lane.lost.clone()) {
            // It was accepted before the gate closed.
            self.fail(place, Failure::new(FailureKind::Unavailable, why));
            return;
        }
        self.prime_if_delivered(place);
        // Its flags may have been set before its place existed.
        self.read_flags_of(place);
    }

    /// Admit in order of arrival as long as all that a request needs for its life is free. Who still waits
    /// for a result is passed; who does not fit is not.
    pub(super) fn admit(&mut self) {
        let mut index = 0;
        while index < self.waiting.len() && self.running.len() < self.topology.limits.max_running {
            let place = self.waiting[index];
            let awaits = self
                .topology
                .entry
                .map(|walk| self.topology.walks[walk].awaits.as_slice());
            if !self.requests.at(place).delivered(awaits.unwrap_or_default()) {
                index += 1;
                continue;
            }
            if !self.reserve_for_life(place) {
                return;
            }
            self.waiting.remove(index);
            self.running.push(place);
            let request = self.requests.at(place);
            request.running = true;
            request.stats.queued = request.age();
            request.send(OutputEvent::Started {
                queued: request.stats.queued,
            });
        }
    }

    /// Reserve what the entry and loop nodes need, and ring slots; all of it or nothing.
    fn reserve_for_life(&mut self, place: usize) -> bool {
        let topology = &self.topology;
        let request = self.requests.at(place);
        // The rings' pools lie behind the resources'.
        let ring_slot = |edge| Ask {
            pool: topology.pools.len() + edge,
            slots: 1,
            prefix: Vec::new(),
        };
        let rings = || (0..topology.edges.len()).filter(|&edge| topology.edges[edge].has_ring());
        let nodes = || (0..topology.nodes.len()).filter(|&node| topology.nodes[node].reserves_at_admission);
        // Pools belong to one node each, so that asking one by one is asking for all at once.
        let fits = nodes().all(|node| self.resources.available(&request.nodes[node].needs))
            && rings().all(|edge| self.resources.available(&[ring_slot(edge)]));
        if !fits {
            return false;
        }
        for node in nodes() {
            request.nodes[node].lease = self.resources.reserve(&request.nodes[node].needs);
        }
        for edge in rings() {
            let part = &mut request.edges[edge];
            part.ring = self.resources.reserve(&[ring_slot(edge)]);
            let lease = part.ring.as_ref().expect("a slot was just seen to be free");
            part.queue.use_ring(lease.slot());
        }
        true
    }

    /// Results came: make the items of the prime walks that have all of theirs.
    pub(super) fn prime_if_delivered(&mut self, place: usize) {
        let topology = self.topology.clone();
        let request = self.requests.at(place);
        for (index, edge) in topology.edges.iter().enumerate() {
            let Some(prime) = edge.prime else { continue };
            let walk = &topology.walks[prime];
            if !matches!(request.edges[index].priming, Priming::Awaits) || !request.delivered(&walk.awaits) {
                continue;
            }
            let results: Vec<_> = request
                .results(&walk.awaits)
                .map(|(result, _)| result.clone())
                .collect();
            let words = topology.model.prime_items(walk.id, &request.payload, &results);
            let items = words.into_iter().enumerate().map(|(index, words)| Item {
                index: index as u32,
                words,
                ring_row: None,
            });
            request.edges[index].priming = Priming::Items(items.collect());
        }
    }
}
