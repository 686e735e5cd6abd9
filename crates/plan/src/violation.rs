//! What is wrong with a configuration: reason, place, and what to write instead.

use std::fmt;
use std::path::PathBuf;

/// One reason that a deployment is refused. Its code is stable: scripts and dashboards may match on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Reason {
    /// Row 1: the removed key `side_stream`.
    SideStreamRemoved,
}

impl Reason {
    /// The code, `SIDE_STREAM_REMOVED`.
    pub fn code(self) -> &'static str {
        match self {
            Reason::SideStreamRemoved => "SIDE_STREAM_REMOVED",
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.code())
    }
}

/// Where the value at fault was written.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Location {
    /// In the configuration file.
    File {
        /// As the caller named it.
        path: PathBuf,
        /// From 1.
        line: usize,
        /// From 1, in characters.
        column: usize,
    },
    /// In an environment variable, by its whole name.
    Environment(String),
    /// In a flag, by its key.
    Flag(String),
    /// Nowhere: a default, or something that the file leaves out.
    Default,
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Location::File { path, line, column } => write!(f, "{}:{line}:{column}", path.display()),
            Location::Environment(name) => write!(f, "environment {name}"),
            Location::Flag(key) => write!(f, "flag --set {key}"),
            Location::Default => write!(f, "default"),
        }
    }
}

/// One thing that is wrong.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Violation {
    /// Which rule.
    pub reason: Reason,
    /// Key path of the value at fault, `node_groups[1].lane`.
    pub key: String,
    /// Node concerned, when one is.
    pub node: Option<String>,
    /// Resource concerned, when one is.
    pub resource: Option<String>,
    /// Where it was written.
    pub location: Location,
    /// What is wrong.
    pub message: String,
    /// What to write instead.
    pub remedy: String,
}
