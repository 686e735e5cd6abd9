//! Which rows could run now, and the making of a step's rows.

use std::cmp::Reverse;
use std::time::{Duration, Instant};

use laneway_device::Event as DeviceEvent;
use laneway_plan::declaration::WalkKind;

use super::{CHAIN, Core};
use crate::edge::{Origin, Window, newest};
use crate::request::{Delivery, Priming};
use crate::scheduler::{Ready, choose};
use crate::step::Row;

/// A listener with less than this left to play is in a hurry.
const SLACK: Duration = Duration::from_millis(100);
/// About the longest that a step of windows should take where more than one can be had. The second window of a
/// stream is due when its first, of a frame or two, was played (80 ms for Qwen3-TTS): it may have to wait for
/// the step in front of it and then for its own.
const STREAM_STEP: Duration = Duration::from_millis(25);

impl Core {
    /// The walk that `lane` runs next and the rows for it, most urgent first.
    pub(super) fn next_step(&mut self, lane: usize) -> Option<(usize, Vec<Row>)> {
        self.ready.clear();
        for walk in 0..self.topology.walks.len() {
            if self.lane_of(walk) == lane && !self.is_moving(self.topology.walks[walk].node) {
                self.find_ready(walk);
            }
        }
        let Some(chosen) = choose(&self.ready) else {
            self.lanes[lane].gathers_since = None;
            return None;
        };
        if lane != CHAIN && self.gathers(lane) {
            return None;
        }
        let mut places = std::mem::take(&mut self.candidates[chosen]);
        let left_over = self.cut(chosen, &mut places);
        if !left_over {
            self.lanes[lane].gathers_since = None;
        }
        self.lanes[lane].turns.took(chosen, &self.ready, left_over);
        let rows = places.iter().map(|&place| self.begin(chosen, place)).collect();
        self.candidates[chosen] = places;
        Some((chosen, rows))
    }

    /// Whether an idle lane leaves what is ready for later. Whatever the chain has in flight lands, and the lane is asked
    /// again. Windows that a step left behind have gathered: they go on from when those of that step began to.
    fn gathers(&mut self, lane: usize) -> bool {
        let chain = self.lanes[CHAIN].seq;
        let since = chain - *self.lanes[lane].gathers_since.get_or_insert(chain);
        self.chain.makes_items(&self.topology) && self.ready.iter().all(|walk| walk.may_wait(since))
    }

    /// Collect the rows of `walk` that could run.
    fn find_ready(&mut self, walk: usize) {
        let mut places = std::mem::take(&mut self.candidates[walk]);
        places.clear();
        let kind = self.topology.walks[walk].kind;
        if kind == WalkKind::Once {
            // A result is needed before admission.
            for index in 0..self.waiting.len() {
                let place = self.waiting[index];
                if self.is_ready(walk, place) {
                    places.push(place);
                }
            }
        }
        for index in 0..self.running.len() {
            let place = self.running[index];
            if self.is_ready(walk, place) {
                places.push(place);
            }
        }
        if !places.is_empty() {
            let (mut urgent, mut presses) = (false, false);
            if kind == WalkKind::Stream {
                // The next look may be as late as the end of a step that is about to begin.
                let soon = Instant::now() + SLACK + 2 * self.beat;
                for &place in &places {
                    urgent |= self.at_first_window(walk, place) || self.silent_at(place) < soon;
                    presses |= self.presses(walk, place);
                }
            }
            self.ready.push(Ready {
                walk,
                kind,
                urgent,
                presses,
                passed_over: self.lanes[self.lane_of(walk)].turns.passed_over(walk),
            });
        }
        self.candidates[walk] = places;
    }

    fn at_first_window(&mut self, walk: usize, place: usize) -> bool {
        let edge = self.topology.walks[walk].consumes;
        edge.is_some_and(|edge| self.requests.at(place).edges[edge].queue.at_first_window())
    }

    fn presses(&mut self, walk: usize, place: usize) -> bool {
        let edge = self.topology.walks[walk].consumes;
        edge.is_some_and(|edge| self.requests.at(place).edges[edge].queue.presses())
    }

    /// Whether a row of `walk` could run. A row that only its node's pool holds up is parked, and gets its
    /// slot here as soon as there is one.
    fn is_ready(&mut self, walk: usize, place: usize) -> bool {
        let info = &self.topology.walks[walk];
        let request = self.requests.at(place);
        let has_input = match info.kind {
            WalkKind::Entry => !request.entered && !request.stopping,
            WalkKind::Loop => request.entered && request.ended.is_none() && !request.stopping,
            WalkKind::Once => info
                .delivers
                .is_some_and(|edge| matches!(request.deliveries[edge], Delivery::Pending)),
            WalkKind::Prime => info
                .consumes
                .is_some_and(|edge| match &request.edges[edge].priming {
                    Priming::Items(items) => !items.is_empty(),
                    Priming::Awaits => false,
                }),
            WalkKind::Stream => info.consumes.is_some_and(|edge| {
                let part = &request.edges[edge];
                let primed = matches!(&part.priming, Priming::Items(items) if items.is_empty());
                primed && part.queue.window_ready()
            }),
        };
        if !has_input {
            return false;
        }
        let full = info
            .produces
            .is_some_and(|edge| !request.edges[edge].queue.has_room());
        let part = &mut request.nodes[info.node];
        if !full && part.lease.is_none() {
            part.lease = self.resources.reserve(&part.needs);
        }
        let parked = full || part.lease.is_none();
        let newly = parked && !part.parked;
        part.parked = parked;
        if newly {
            self.shared.stats.lock().parks += 1;
        }
        !parked && (!info.may_output || request.output_room())
    }

    /// Leave those of `places` that one step should have, most urgent first. True: windows stay behind.
    fn cut(&mut self, walk: usize, places: &mut Vec<usize>) -> bool {
        let n_ready = places.len();
        let most_rows = self.max_rows[walk];
        let most_items = self.paces[walk].most_items(STREAM_STEP);
        if n_ready <= most_rows
            && most_items.is_none_or(|most| self.first_within(walk, places, most) == n_ready)
        {
            // All of them run, in whatever order.
            return false;
        }
        self.sort_rows(walk, places);
        places.truncate(most_rows);
        if let Some(most) = most_items {
            let within = self.first_within(walk, places, most);
            places.truncate(within);
        }
        self.topology.walks[walk].kind == WalkKind::Stream
    }

    /// How many of the first of `places` have windows of at most `most` items together; one does in any case.
    fn first_within(&mut self, walk: usize, places: &[usize], most: usize) -> usize {
        let Some(edge) = self.topology.walks[walk].consumes else {
            return places.len();
        };
        let mut items = 0;
        let beyond = places.iter().position(|&place| {
            items += self.requests.at(place).edges[edge].queue.window_items();
            items > most
        });
        beyond.map_or(places.len(), |beyond| beyond.max(1))
    }

    /// Most urgent first: first windows, then who runs out of sound first; producers by turns.
    fn sort_rows(&mut self, walk: usize, places: &mut [usize]) {
        match self.topology.walks[walk].kind {
            WalkKind::Loop => {
                let requests = &mut self.requests;
                places.sort_by_key(|&place| requests.at(place).last_step);
            }
            WalkKind::Stream => places.sort_by_key(|&place| {
                let first = self.at_first_window(walk, place);
                (Reverse(first), self.silent_at(place))
            }),
            // In order of arrival.
            WalkKind::Entry | WalkKind::Once | WalkKind::Prime => {}
        }
    }

    /// When the listener has played all that was sent, if it began at once.
    fn silent_at(&mut self, place: usize) -> Instant {
        let hz = self.playback_hz;
        let request = self.requests.at(place);
        let first = request.stats.first_output.unwrap_or_default();
        let played = match hz {
            0 => Duration::ZERO,
            hz => Duration::from_secs_f64(request.stats.samples as f64 / f64::from(hz)),
        };
        request.submitted_at + first + played
    }

    /// Take what a row of `walk` needs out of the request.
    fn begin(&mut self, walk: usize, place: usize) -> Row {
        let topology = &self.topology;
        let info = &topology.walks[walk];
        let request = self.requests.at(place);
        let held = request.hold(topology, info.node);
        let part = &mut request.nodes[info.node];
        part.in_flight += 1;
        let state = part.state.take();
        let mut window = Window::default();
        let mut ring_row = None;
        match info.kind {
            WalkKind::Entry | WalkKind::Loop => {
                request.entered = true;
                request.producing += 1;
                request.last_step = self.lanes[info.lane].seq;
                if let Some(edge) = info.produces {
                    ring_row = request.edges[edge].queue.launch_producer();
                }
            }
            WalkKind::Once => {
                let edge = info.delivers.expect("a walk that is ready once delivers");
                request.deliveries[edge] = Delivery::Running;
            }
            WalkKind::Prime => {
                let edge = info.consumes.expect("a ready prime walk has an edge");
                let most = topology.edges[edge].max_window as usize;
                if let Priming::Items(items) = &mut request.edges[edge].priming {
                    let n_items = items.len().min(most);
                    window.items = items.drain(..n_items).collect();
                    window.last = items.is_empty();
                }
            }
            WalkKind::Stream => {
                let part = &mut request.edges[info.consumes.expect("a ready stream walk has an edge")];
                window = part.queue.take_window().expect("a ready row has a window");
            }
        }
        if info.may_output {
            request.reserve_output();
        }
        let results = request.results(&info.awaits).map(|(result, _)| result.clone());
        Row {
            place,
            request: request.id,
            results: results.collect(),
            held,
            state,
            window,
            ring_row,
        }
    }

    /// A row's step did not run: everything is as before [`Self::begin`].
    pub(super) fn put_back(&mut self, walk: usize, row: Row) {
        let info = &self.topology.walks[walk];
        let Some(request) = self.requests.find(row.place, row.request) else {
            return;
        };
        let part = &mut request.nodes[info.node];
        part.in_flight -= 1;
        part.state = row.state.or(part.state.take());
        if info.may_output {
            request.unreserve_output();
        }
        match info.kind {
            WalkKind::Entry | WalkKind::Loop => {
                request.producing -= 1;
                if info.kind == WalkKind::Entry {
                    request.entered = false;
                }
                if let Some(edge) = info.produces {
                    request.edges[edge].queue.unlaunch_producer(row.ring_row);
                }
            }
            WalkKind::Once => {
                let edge = info.delivers.expect("a walk that runs once delivers");
                request.deliveries[edge] = Delivery::Pending;
            }
            WalkKind::Prime => {
                let edge = info.consumes.expect("a prime walk has an edge");
                if let Priming::Items(items) = &mut request.edges[edge].priming {
                    for item in row.window.items.into_iter().rev() {
                        items.push_front(item);
                    }
                }
            }
            WalkKind::Stream => {
                let edge = info.consumes.expect("a stream walk has an edge");
                request.edges[edge].queue.put_back(row.window);
            }
        }
        // A stop that waited for this row's step need not wait any more.
        let (place, id) = (row.place, row.request);
        self.settle_stop(place, id);
    }

    /// The events that a step on `lane` must wait for on its stream: each from the step itself that made an
    /// input or last read a ring row that is written again, never from a whole stream.
    pub(super) fn waits(&mut self, lane: usize, walk: usize, rows: &[Row]) -> Vec<DeviceEvent> {
        let info = &self.topology.walks[walk];
        let mut origins = Vec::new();
        // What ran on the same stream is in front anyway.
        let mut wait_for = |origin: &Origin| {
            if origin.lane != lane {
                newest(&mut origins, origin.clone());
            }
        };
        for row in rows {
            row.window.origins.iter().for_each(&mut wait_for);
            if !info.awaits.is_empty()
                && let Some(request) = self.requests.find(row.place, row.request)
            {
                let origins = request.results(&info.awaits).filter_map(|(_, origin)| origin);
                origins.for_each(&mut wait_for);
            }
        }
        // Rows are free again once their window landed, so the consumer's newest landed step is behind every
        // read of them; it has completed, and the wait only says so to the stream.
        let consumer = info.produces.and_then(|edge| self.topology.edges[edge].consumer);
        if let Some(consumer) = consumer {
            wait_for(&self.lanes[self.lane_of(consumer)].landed);
        }
        origins.iter().map(|origin| origin.event.clone()).collect()
    }
}
