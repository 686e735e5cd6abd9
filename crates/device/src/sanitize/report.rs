//! What the sanitizer says.

use std::fmt;
use std::ops::Range;

use crate::TouchKind;

/// Which rule was broken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Rule {
    /// Two operations use a range, at least one writes it, and neither stream order nor an event orders them.
    DeviceOrder,
    /// The host uses pinned memory that an operation uses which it has not waited for.
    HostOrder,
    /// An operation reaches a pool through an index, and the step's touches do not say where.
    Touches,
}

/// One of the two sides of a report.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Party {
    /// Operation with its operand, e.g. `ScatterRows (dst)`, or `host_write`, `host_read`.
    pub who: String,
    /// Stream; `None` for the host.
    pub stream: Option<String>,
    /// What it does with the range.
    pub kind: TouchKind,
}

/// One finding.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Report {
    /// Which rule was broken.
    pub rule: Rule,
    /// Name of the buffer.
    pub buffer: String,
    /// Elements of it.
    pub range: Range<usize>,
    /// The use that came first, by the host's order of calls. `None` for [`Rule::Touches`].
    pub earlier: Option<Party>,
    /// The use that was refused.
    pub later: Party,
    /// What is missing: the edge that would order the two, or the touch.
    pub missing: String,
}

impl fmt::Display for Party {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.who)?;
        match &self.stream {
            Some(stream) => write!(f, " on stream `{stream}`"),
            None => Ok(()),
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Report {
            buffer,
            range,
            later,
            missing,
            ..
        } = self;
        let does = match later.kind {
            TouchKind::Read => "reads",
            TouchKind::Write => "writes",
        };
        write!(f, "{later} {does} {buffer}[{}..{}]", range.start, range.end)?;
        if let Some(earlier) = &self.earlier {
            let did = match earlier.kind {
                TouchKind::Read => "reads",
                TouchKind::Write => "writes",
            };
            write!(f, ", which {earlier} {did}, and nothing orders the two")?;
        }
        write!(f, ": {missing}")
    }
}
