//! What happened last to every range of one buffer.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::TouchKind;
use crate::buffer::BufferWatch;

/// One past operation's use of a range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Use {
    pub(super) stream: u64,
    /// Number of the operation on its stream, from 1.
    pub(super) epoch: u64,
    pub(super) op: &'static str,
    /// Operand of the operation.
    pub(super) role: &'static str,
    /// Number in its graph, from 1; 0 when it was launched alone.
    pub(super) graph_index: u32,
}

/// A range whose elements all have the same past.
#[derive(Debug, Clone)]
struct Cell {
    end: usize,
    /// The last write: every use before it is ordered before it.
    write: Option<Use>,
    /// Reads since, none of which is ordered before another. At most one a stream.
    reads: Vec<Use>,
}

/// The past of one buffer, as cells that do not overlap. Ranges that were never used have no cell. A write
/// makes its range one cell again, so there are never more cells than the ranges in use have ends.
pub(super) struct Shadow {
    cells: BTreeMap<usize, Cell>,
    watch: BufferWatch,
}

impl Shadow {
    pub(super) fn new(watch: BufferWatch) -> Self {
        Self {
            cells: BTreeMap::new(),
            watch,
        }
    }

    pub(super) fn is_alive(&self) -> bool {
        self.watch.is_alive()
    }

    pub(super) fn cells(&self) -> usize {
        self.cells.len()
    }

    /// The first use in `range` that conflicts with a use of `kind` and is not ordered before it, with the
    /// elements concerned and whether it wrote.
    pub(super) fn conflict(
        &self,
        range: &Range<usize>,
        kind: TouchKind,
        is_ordered: impl Fn(&Use) -> bool,
    ) -> Option<(Use, Range<usize>, TouchKind)> {
        for (start, cell) in self.overlapping(range) {
            let write = cell.write.iter().map(|past| (past, TouchKind::Write));
            let reads = cell.reads.iter().map(|past| (past, TouchKind::Read));
            let reads = reads.filter(|_| kind == TouchKind::Write);
            if let Some((past, past_kind)) = write.chain(reads).find(|(past, _)| !is_ordered(past)) {
                return Some((*past, start.max(range.start)..cell.end.min(range.end), past_kind));
            }
        }
        None
    }

    fn overlapping(&self, range: &Range<usize>) -> impl Iterator<Item = (usize, &Cell)> {
        let first = self
            .cells
            .range(..=range.start)
            .next_back()
            .filter(|(_, cell)| cell.end > range.start)
            .map_or(range.start, |(&start, _)| start);
        self.cells
            .range(first..range.end.max(first))
            .map(|(&start, cell)| (start, cell))
    }

    /// Note a use that `conflict` found nothing against. `is_ordered` says of a past read whether it is
    /// ordered before this use: whoever comes behind this one then comes behind that one too.
    pub(super) fn note(
        &mut self,
        range: &Range<usize>,
        kind: TouchKind,
        now: Use,
        is_ordered: impl Fn(&Use) -> bool,
    ) {
        self.split(range.start);
        self.split(range.end);
        match kind {
            TouchKind::Write => {
                let inside: Vec<usize> = self.cells.range(range.clone()).map(|(&start, _)| start).collect();
                for start in inside {
                    self.cells.remove(&start);
                }
                self.fill(range.clone(), Some(now), Vec::new());
            }
            TouchKind::Read => {
                let mut at = range.start;
                let mut gaps = Vec::new();
                for (&start, cell) in self.cells.range_mut(range.clone()) {
                    if at < start {
                        gaps.push(at..start);
                    }
                    cell.reads.retain(|past| !is_ordered(past));
                    cell.reads.push(now);
                    at = cell.end;
                }
                if at < range.end {
                    gaps.push(at..range.end);
                }
                for gap in gaps {
                    self.fill(gap, None, vec![now]);
                }
            }
        }
    }

    fn fill(&mut self, range: Range<usize>, write: Option<Use>, reads: Vec<Use>) {
        let end = range.end;
        self.cells.insert(range.start, Cell { end, write, reads });
    }

    /// Make sure that no cell reaches across `at`.
    fn split(&mut self, at: usize) {
        let Some((_, cell)) = self.cells.range_mut(..at).next_back() else {
            return;
        };
        if cell.end > at {
            let right = cell.clone();
            cell.end = at;
            self.cells.insert(at, right);
        }
    }
}
