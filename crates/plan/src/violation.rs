//! What is wrong with a configuration: reason, place, and what to write instead.

#[cfg(test)]
mod tests;

use std::fmt;
use std::path::PathBuf;

macro_rules! reasons {
    ($($(#[$doc:meta])* $name:ident = $code:literal,)*) => {
        /// Why a deployment is refused. Codes are stable: scripts and dashboards may match on them.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[non_exhaustive]
        pub enum Reason { $($(#[$doc])* $name,)* }

        impl Reason {
            /// Every reason there is.
            pub const ALL: &'static [Reason] = &[$(Reason::$name),*];

            /// The code, `SIDE_STREAM_REMOVED`.
            pub fn code(self) -> &'static str {
                match self { $(Reason::$name => $code),* }
            }
        }
    };
}

reasons! {
    /// Row 1 of the lane table: the removed key `side_stream`.
    SideStreamRemoved = "SIDE_STREAM_REMOVED",
    /// Row 2: a node on a lane steps over several ranks together.
    LaneParallelNode = "LANE_PARALLEL_NODE",
    /// Row 3: a walk of a lane's node steps other nodes too, or loops.
    LaneWalkIsGraph = "LANE_WALK_IS_GRAPH",
    /// Row 4: a walk of a lane's node is combined with another into one forward.
    LaneWalkCombined = "LANE_WALK_COMBINED",
    /// Row 5: a node on a lane has a stop check or output spans.
    LaneChainPostprocessing = "LANE_CHAIN_POSTPROCESSING",
    /// Row 6: nothing runs on the chain of a lane's worker.
    LaneWithoutChain = "LANE_WITHOUT_CHAIN",
    /// Row 7: neither a stream edge feeds a lane's node nor a request edge starts it.
    LaneNeverScheduled = "LANE_NEVER_SCHEDULED",
    /// Row 8: a lane's resource is shared with the chain, another lane or another worker.
    LaneResourceShared = "LANE_RESOURCE_SHARED",
    /// Row 9: a resource depends on another lane's, directly or through others.
    LaneResourceDepends = "LANE_RESOURCE_DEPENDS",
    /// Row 10: a lane's resource keeps a prefix cache.
    LanePrefixCache = "LANE_PREFIX_CACHE",
    /// Row 11: a lane's resource evicts, or the main thread moves its state outside a step.
    LaneEvictsOrMoved = "LANE_EVICTS_OR_MOVED",
    /// Row 12: a lane's resource stages host rows.
    LaneStagesHostRows = "LANE_STAGES_HOST_ROWS",
    /// Row 13: a lane's state pool has snapshots keyed on a KV cache.
    LaneSnapshotPool = "LANE_SNAPSHOT_POOL",
    /// Row 14: a walk of a lane's node keeps its state across requests.
    LaneStateAcrossRequests = "LANE_STATE_ACROSS_REQUESTS",

    /// The file cannot be read.
    FileUnreadable = "FILE_UNREADABLE",
    /// The file is not YAML.
    YamlSyntax = "YAML_SYNTAX",
    /// YAML that a configuration may not use: anchors, tags, several documents, keys that are no names.
    YamlUnsupported = "YAML_UNSUPPORTED",
    /// A key is written twice in one mapping.
    DuplicateKey = "DUPLICATE_KEY",
    /// An environment variable or a flag that names no key.
    OverrideMalformed = "OVERRIDE_MALFORMED",
    /// A key that does not exist.
    UnknownKey = "UNKNOWN_KEY",
    /// A value of the wrong type, form or range.
    InvalidValue = "INVALID_VALUE",
    /// A required key is left out.
    MissingKey = "MISSING_KEY",

    /// No such model.
    UnknownModel = "UNKNOWN_MODEL",
    /// The model's sizes are not known from the weights alone.
    ModelConfigRequired = "MODEL_CONFIG_REQUIRED",
    /// `model_config` beside weights that carry their own.
    ModelConfigUnused = "MODEL_CONFIG_UNUSED",
    /// The model's configuration cannot be read or does not describe the model.
    ModelConfigInvalid = "MODEL_CONFIG_INVALID",
    /// A weight file or a vocabulary of the checkpoint is not there, or cut short.
    CheckpointIncomplete = "CHECKPOINT_INCOMPLETE",
    /// A preset's vocabulary, which comes apart from it, is not there.
    VocabularyMissing = "VOCABULARY_MISSING",
    /// A prefill step has no room for the shortest prompt.
    PromptTooLong = "PROMPT_TOO_LONG",
    /// `max_seq_len` is beyond what the model was made for.
    SequenceTooLong = "SEQUENCE_TOO_LONG",

    /// A node that the model does not have.
    UnknownNode = "UNKNOWN_NODE",
    /// A node in two groups, or twice in one.
    NodeInTwoGroups = "NODE_IN_TWO_GROUPS",
    /// A node of the model is in no group.
    NodeUnassigned = "NODE_UNASSIGNED",
    /// A group has more ranks, or fewer, than its node steps over together.
    NodeRanks = "NODE_RANKS",
    /// A group's walks are not those of its nodes.
    WalksDoNotMatch = "WALKS_DO_NOT_MATCH",

    /// Lane ids of a worker are not contiguous from 1.
    LaneIdSkips = "LANE_ID_SKIPS",
    /// `lane: auto` without a `lane_id`.
    LaneIdRequired = "LANE_ID_REQUIRED",
    /// A key that has no effect where the group runs.
    LaneKeyUnused = "LANE_KEY_UNUSED",
    /// Two groups give one lane different settings.
    LaneSettingsConflict = "LANE_SETTINGS_CONFLICT",
    /// An SM partition that the device cannot make.
    SmPartition = "SM_PARTITION",

    /// Ranks are not contiguous from 0.
    RankSkips = "RANK_SKIPS",
    /// A rank that no node group uses.
    UnknownRank = "UNKNOWN_RANK",
    /// A precision that the device does not compute in.
    PrecisionUnsupported = "PRECISION_UNSUPPORTED",
    /// A device that the machine does not have.
    DeviceMissing = "DEVICE_MISSING",
    /// Two workers on one device, and nothing said about MPS.
    MpsNotStated = "MPS_NOT_STATED",
    /// MPS where it has no effect.
    MpsUnused = "MPS_UNUSED",

    /// Two services have one address.
    AddressTaken = "ADDRESS_TAKEN",

    /// A resource that the model does not have.
    UnknownResource = "UNKNOWN_RESOURCE",
    /// Pages for a pool of slots, or slots for a paged cache.
    ResourceUnits = "RESOURCE_UNITS",
    /// A resource of nodes in different workers.
    ResourceAcrossWorkers = "RESOURCE_ACROSS_WORKERS",
    /// A lane needs more than its own memory budget.
    LaneMemoryExceeded = "LANE_MEMORY_EXCEEDED",
    /// The workers on a device need more memory than it has.
    DeviceMemoryExceeded = "DEVICE_MEMORY_EXCEEDED",

    /// A stream edge that the model does not have.
    UnknownStreamEdge = "UNKNOWN_STREAM_EDGE",
    /// A window that is wider than the edge allows.
    ChunkPolicy = "CHUNK_POLICY",
    /// Capture buckets that do not cover the row counts.
    CaptureBuckets = "CAPTURE_BUCKETS",
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
    /// Key path of the value at fault, `node_groups[1].lane`; empty for the file as a whole.
    pub key: String,
    /// Node concerned, when one is.
    pub node: Option<String>,
    /// Resource concerned, when one is.
    pub resource: Option<String>,
    /// Where it was written.
    pub location: Location,
    /// The line of the file that `location` names.
    pub source_line: Option<String>,
    /// What is wrong.
    pub message: String,
    /// What to write instead.
    pub remedy: String,
}

impl Violation {
    /// A violation at `key`. Its location is filled in by the [`crate::Loaded`] that it is added to.
    pub fn new(
        reason: Reason,
        key: impl Into<String>,
        message: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        Self {
            reason,
            key: key.into(),
            node: None,
            resource: None,
            location: Location::Default,
            source_line: None,
            message: message.into(),
            remedy: remedy.into(),
        }
    }

    /// With the node concerned.
    pub fn node(mut self, node: impl Into<String>) -> Self {
        self.node = Some(node.into());
        self
    }

    /// With the resource concerned.
    pub fn resource(mut self, resource: impl Into<String>) -> Self {
        self.resource = Some(resource.into());
        self
    }
}

/// Violations as text for a person, in the manner of a compiler.
pub fn render(violations: &[Violation]) -> String {
    let mut text = String::new();
    for violation in violations {
        render_one(&mut text, violation);
    }
    let plural = if violations.len() == 1 { "" } else { "s" };
    text.push_str(&format!("{} violation{plural}\n", violations.len()));
    text
}

fn render_one(text: &mut String, violation: &Violation) {
    let mut lines = vec![format!("error[{}]: {}", violation.reason, violation.message)];
    lines.push(format!("  --> {}", violation.location));
    if let (Location::File { line, column, .. }, Some(source)) = (&violation.location, &violation.source_line)
    {
        let number = line.to_string();
        let gutter = " ".repeat(number.len());
        lines.push(format!("{gutter} |"));
        lines.push(format!("{number} | {}", source.trim_end()));
        lines.push(format!("{gutter} | {}^", " ".repeat(column.saturating_sub(1))));
    }
    let concerns = [("key", Some(&violation.key)), ("node", violation.node.as_ref())];
    let concerns = concerns
        .into_iter()
        .chain([("resource", violation.resource.as_ref())]);
    let concerns: Vec<String> = concerns
        .filter_map(|(what, name)| Some(format!("{what} {}", name.filter(|name| !name.is_empty())?)))
        .collect();
    if !concerns.is_empty() {
        lines.push(format!("  = {}", concerns.join(", ")));
    }
    lines.push(format!("  = help: {}", violation.remedy));
    text.push_str(&lines.join("\n"));
    text.push_str("\n\n");
}
