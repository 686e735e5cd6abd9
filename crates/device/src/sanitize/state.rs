//! The sanitizer's books: the order that is known of every stream, and the past of every buffer.

use std::collections::HashMap;
use std::ops::Range;

use super::clock::Clock;
use super::report::{Party, Report, Rule};
use super::shadow::{Shadow, Use};
use crate::op::PoolAccess;
use crate::{Buffer, DeviceError, Op, Result, TouchKind, Touches, View};

/// Findings kept for [`super::Sanitizer::reports`]; later ones are still returned and logged.
const MAX_REPORTS: usize = 256;

/// Shadows below which a sweep is not worth its while.
const MIN_SWEEP: usize = 64;

/// One use of a range that a launch is about to make.
struct Planned<'a> {
    buffer: &'a Buffer,
    range: Range<usize>,
    kind: TouchKind,
    now: Use,
}

struct StreamOrder {
    name: String,
    /// Number of its last operation.
    epoch: u64,
    /// What is ordered before its next operation.
    clock: Clock,
    dropped: bool,
}

/// Everything the sanitizer knows.
#[derive(Default)]
pub(super) struct State {
    /// Streams that exist, and dropped ones that the host has not waited for.
    streams: HashMap<u64, StreamOrder>,
    /// What the host has waited for.
    host: Clock,
    /// What a new stream runs behind.
    base: Clock,
    shadows: HashMap<u64, Shadow>,
    sweep_at: usize,
    pub(super) reports: Vec<Report>,
}

impl State {
    pub(super) fn add_stream(&mut self, id: u64, name: &str) {
        self.streams.insert(
            id,
            StreamOrder {
                name: name.to_owned(),
                epoch: 0,
                clock: self.base.clone(),
                dropped: false,
            },
        );
    }

    pub(super) fn drop_stream(&mut self, id: u64) {
        if let Some(stream) = self.streams.get_mut(&id) {
            stream.dropped = true;
        }
        self.retire();
    }

    /// Forget dropped streams whose whole past the host has waited for: whatever is launched from now on, on
    /// streams old and new, runs behind that past.
    fn retire(&mut self) {
        let Self {
            streams, host, base, ..
        } = self;
        let is_over = |stream: &StreamOrder, host: &Clock| stream.dropped && host.covers(&stream.clock);
        while let Some((&id, _)) = streams.iter().find(|(_, stream)| is_over(stream, host)) {
            let past = streams.remove(&id).expect("just found").clock;
            let is_live: Vec<u64> = streams.keys().copied().collect();
            for clock in streams
                .values_mut()
                .map(|stream| &mut stream.clock)
                .chain([&mut *base])
            {
                clock.join(&past, |id| is_live.contains(&id));
                clock.forget(id);
            }
            host.forget(id);
        }
    }

    /// What an event recorded now on `stream` carries.
    pub(super) fn snapshot(&self, stream: u64) -> Clock {
        self.streams
            .get(&stream)
            .map(|s| s.clock.clone())
            .unwrap_or_default()
    }

    /// `stream` runs behind `event` from now on.
    pub(super) fn wait(&mut self, stream: u64, event: &Clock) {
        let Some(mut order) = self.streams.remove(&stream) else {
            return;
        };
        order
            .clock
            .join(event, |id| id == stream || self.streams.contains_key(&id));
        self.streams.insert(stream, order);
    }

    /// The host saw `event` complete.
    pub(super) fn observe(&mut self, event: &Clock) {
        let Self { streams, host, .. } = self;
        host.join(event, |id| streams.contains_key(&id));
        self.retire();
    }

    /// Check the operations of one launch and take them into the books, or refuse them all.
    pub(super) fn launch(&mut self, stream: u64, ops: &[Op], touches: &Touches, graph: bool) -> Result<()> {
        let order = &self.streams[&stream];
        let mut planned = Vec::new();
        for (i, op) in ops.iter().enumerate() {
            let now = Use {
                stream,
                epoch: order.epoch + 1 + i as u64,
                op: op.name(),
                role: "",
                graph_index: if graph { i as u32 + 1 } else { 0 },
            };
            if let Err(report) = plan(op, touches, now, &order.name, &mut planned) {
                let problem = report.missing.clone();
                self.keep(*report);
                return Err(DeviceError::BadOperation {
                    op: op.name(),
                    problem,
                });
            }
        }
        for planned in &planned {
            let Some(shadow) = self.shadows.get(&planned.buffer.id()) else {
                continue;
            };
            let is_ordered = |past: &Use| self.is_ordered(past, stream, &order.clock);
            if let Some((past, range, kind)) = shadow.conflict(&planned.range, planned.kind, is_ordered) {
                let known = order.clock.get(past.stream);
                let earlier = self.party(&past, kind);
                let missing = missing_edge(
                    &format!("stream `{}` never waited for", order.name),
                    &self.streams[&past.stream].name,
                    &past,
                    known,
                );
                return Err(self.race(Report {
                    rule: Rule::DeviceOrder,
                    buffer: planned.buffer.name().to_owned(),
                    range,
                    earlier: Some(earlier),
                    later: self.party(&planned.now, planned.kind),
                    missing,
                }));
            }
        }
        let epoch = order.epoch + ops.len() as u64;
        for planned in planned {
            self.note(planned);
        }
        let order = self.streams.get_mut(&stream).expect("looked up above");
        order.epoch = epoch;
        order.clock.set(stream, epoch);
        self.sweep();
        Ok(())
    }

    fn note(&mut self, planned: Planned<'_>) {
        let Planned {
            buffer,
            range,
            kind,
            now,
        } = planned;
        let streams = &self.streams;
        let clock = &streams[&now.stream].clock;
        let is_ordered = |past: &Use| {
            past.stream == now.stream
                || !streams.contains_key(&past.stream)
                || clock.get(past.stream) >= past.epoch
        };
        self.shadows
            .entry(buffer.id())
            .or_insert_with(|| Shadow::new(buffer.watch()))
            .note(&range, kind, now, is_ordered);
    }

    fn is_ordered(&self, past: &Use, stream: u64, clock: &Clock) -> bool {
        past.stream == stream
            || clock.get(past.stream) >= past.epoch
            || !self.streams.contains_key(&past.stream)
    }

    /// Check a host access. It is not noted: it is over when the call returns, so everything that is
    /// launched later comes behind it.
    pub(super) fn host_access(&mut self, who: &str, view: &View, kind: TouchKind) -> Result<()> {
        let Some(shadow) = self.shadows.get(&view.buffer.id()) else {
            return Ok(());
        };
        let range = view.start..view.start + view.len;
        let is_ordered =
            |past: &Use| self.host.get(past.stream) >= past.epoch || !self.streams.contains_key(&past.stream);
        let Some((past, range, past_kind)) = shadow.conflict(&range, kind, is_ordered) else {
            return Ok(());
        };
        let missing = missing_edge(
            "the host never synchronised",
            &self.streams[&past.stream].name,
            &past,
            self.host.get(past.stream),
        );
        Err(self.race(Report {
            rule: Rule::HostOrder,
            buffer: view.buffer.name().to_owned(),
            range,
            earlier: Some(self.party(&past, past_kind)),
            later: Party {
                who: who.to_owned(),
                stream: None,
                kind,
            },
            missing,
        }))
    }

    fn race(&mut self, report: Report) -> DeviceError {
        let error = DeviceError::Race(report.to_string());
        self.keep(report);
        error
    }

    fn keep(&mut self, report: Report) {
        tracing::error!(%report, "stream sanitizer refused a call");
        if self.reports.len() < MAX_REPORTS {
            self.reports.push(report);
        }
    }

    fn party(&self, past: &Use, kind: TouchKind) -> Party {
        party(past, kind, &self.streams[&past.stream].name)
    }

    /// Forget buffers that were freed. Amortised: the books at most double between sweeps.
    fn sweep(&mut self) {
        if self.shadows.len() >= self.sweep_at.max(MIN_SWEEP) {
            self.shadows.retain(|_, shadow| shadow.is_alive());
            self.sweep_at = 2 * self.shadows.len();
        }
    }

    /// Entries in the books, to show that they stay bounded.
    pub(super) fn size(&self) -> usize {
        let cells: usize = self.shadows.values().map(Shadow::cells).sum();
        let clocks: usize = self.streams.values().map(|stream| 1 + stream.clock.len()).sum();
        cells + clocks + self.host.len() + self.base.len()
    }
}

fn party(past: &Use, kind: TouchKind, stream: &str) -> Party {
    let place = match past.graph_index {
        0 => String::new(),
        index => format!(", operation {index} of a graph"),
    };
    Party {
        who: format!("{} ({}{place})", past.op, past.role),
        stream: Some(stream.to_owned()),
        kind,
    }
}

/// In words: who never waited for what. `known` is how far it has waited on that stream.
fn missing_edge(who_never_waited: &str, stream: &str, past: &Use, known: u64) -> String {
    let newest = match known {
        0 => "it knows of no event of that stream".to_owned(),
        known => format!(
            "the newest it knows of stands {} operations too early",
            past.epoch - known
        ),
    };
    format!(
        "{who_never_waited} an event recorded on `{stream}` behind this {} ({newest})",
        past.op
    )
}

/// Every range that `op` uses, with those of its pools taken from the step's touches.
fn plan<'a>(
    op: &'a Op,
    touches: &'a Touches,
    now: Use,
    stream: &str,
    planned: &mut Vec<Planned<'a>>,
) -> Result<(), Box<Report>> {
    let accesses = op.access();
    for access in accesses.direct {
        planned.extend(access.ranges().map(|range| Planned {
            buffer: access.buffer,
            range,
            kind: access.kind,
            now: Use {
                role: access.role,
                ..now
            },
        }));
    }
    for pool in accesses.indirect {
        let now = Use {
            role: pool.role,
            ..now
        };
        let mut named = false;
        for touch in touches
            .0
            .iter()
            .filter(|touch| touch.view.buffer.id() == pool.buffer.id())
        {
            let start = touch.view.start.max(pool.range.start);
            let end = (touch.view.start + touch.view.len).min(pool.range.end);
            if start >= end && touch.view.len > 0 {
                continue;
            }
            named |= pool.kind == TouchKind::Read || touch.kind == TouchKind::Write;
            // An operation that only reads its pool does not write what the step as a whole writes.
            let kind = match pool.kind {
                TouchKind::Read => TouchKind::Read,
                TouchKind::Write => touch.kind,
            };
            if start < end {
                planned.push(Planned {
                    buffer: pool.buffer,
                    range: start..end,
                    kind,
                    now,
                });
            }
        }
        if !named {
            return Err(Box::new(missing_touch(&pool, &now, stream)));
        }
    }
    Ok(())
}

fn missing_touch(pool: &PoolAccess<'_>, now: &Use, stream: &str) -> Report {
    let verb = match pool.kind {
        TouchKind::Read => "read",
        TouchKind::Write => "write",
    };
    let name = pool.buffer.name();
    Report {
        rule: Rule::Touches,
        buffer: name.to_owned(),
        range: pool.range.clone(),
        earlier: None,
        later: party(now, pool.kind, stream),
        missing: format!(
            "{} reaches pool `{name}` through an index, but the step's touches name no range of it to {verb}: \
             add one with Touches::{verb} (an empty range when the step reaches nothing)",
            pool.role
        ),
    }
}
