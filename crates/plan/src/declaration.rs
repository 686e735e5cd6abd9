//! What a model says of itself: nodes, walks, edges, and what each resource reports.

/// A model's whole declaration, made from its `config.json`.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelDeclaration {
    /// Registry name, `qwen3_tts`.
    pub model: String,
    /// Pieces that run as one step each.
    pub nodes: Vec<NodeDecl>,
    /// Ways through the graph.
    pub walks: Vec<WalkDecl>,
    /// Producer and consumer walks that run together.
    pub stream_edges: Vec<StreamEdgeDecl>,
    /// Walks whose whole result others wait for.
    pub request_edges: Vec<RequestEdgeDecl>,
    /// State and machinery by key.
    pub resources: Vec<ResourceDecl>,
}

/// One node.
#[derive(Debug, Clone, PartialEq)]
pub struct NodeDecl {
    /// `Talker`, `Codec`, `RefEncoder`.
    pub name: String,
    /// Tensor- or sequence-parallel ranks that it steps over together (1: none).
    pub parallel_ranks: u32,
    /// It decides when a request ends (chain postprocessing).
    pub stop_check: bool,
    /// A step's output is cut into pieces that go to different consumers by position.
    pub output_spans: bool,
    /// Keys of the resources that it declares; it gets no others.
    pub resources: Vec<String>,
    /// Bytes of its weights on the device.
    pub weight_bytes: u64,
    /// Bytes of workspace whatever its batch.
    pub workspace_bytes: u64,
    /// Bytes of workspace for each row of its largest batch.
    pub workspace_bytes_per_row: u64,
}

/// What starts a walk and what keeps it going.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WalkKind {
    /// Runs once when the request is admitted (after its request edges delivered).
    Entry,
    /// Runs once for a request, on demand of a request edge (`ref_encode`).
    Once,
    /// Runs step after step behind the named walk until its stop check ends it.
    Loop,
    /// Runs whenever a window of its stream edge is ready.
    Stream,
    /// Runs in bounded windows before the first window of a stream walk of the same node (`codec_prime`).
    Prime,
}

/// One walk.
#[derive(Debug, Clone, PartialEq)]
pub struct WalkDecl {
    /// `talker_prefill`, `talker_decode`, `codec_chunk`, `codec_prime`, `ref_encode`.
    pub name: String,
    /// Nodes that it steps, in order; more than one, or a repeated one, is a graph or a loop.
    pub nodes: Vec<String>,
    /// What drives it.
    pub kind: WalkKind,
    /// Another walk that it is combined with into one forward.
    pub combined_with: Option<String>,
    /// Its state stays when the request ends (a session).
    pub state_across_requests: bool,
}

/// How windows are cut from a stream of items.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChunkPolicy {
    /// Items in the first window.
    pub first: u32,
    /// Sizes of the windows after it, in order.
    pub ramp: Vec<u32>,
    /// Size of every window after the ramp.
    pub steady: u32,
}

impl ChunkPolicy {
    /// Items wanted in window `index` (0 first). The last window of a stream may be shorter.
    pub fn window(&self, index: usize) -> u32 {
        match index {
            0 => self.first,
            _ => self.ramp.get(index - 1).copied().unwrap_or(self.steady),
        }
    }

    /// The widest window it can ask for.
    pub fn widest(&self) -> u32 {
        self.ramp
            .iter()
            .copied()
            .chain([self.first, self.steady])
            .max()
            .unwrap_or(1)
    }
}

/// Items from producer walks to a consumer walk while both run.
#[derive(Debug, Clone, PartialEq)]
pub struct StreamEdgeDecl {
    /// Name in metrics and plans, `codes`.
    pub name: String,
    /// Producer walks (prefill makes the first item, decode the rest).
    pub from: Vec<String>,
    /// Consumer walk.
    pub to: String,
    /// 4-byte words of an item (16 codes).
    pub item_words: u32,
    /// Default policy.
    pub chunk: ChunkPolicy,
    /// Widest window that a request may ask for.
    pub max_window: u32,
    /// Items held for a request before its producer parks.
    pub capacity: u32,
}

/// A whole result from one walk to others.
#[derive(Debug, Clone, PartialEq)]
pub struct RequestEdgeDecl {
    /// `reference`.
    pub name: String,
    /// The walk that runs once.
    pub from: String,
    /// Walks that wait for it.
    pub to: Vec<String>,
}

/// One resource: its key and what it reports. Whether it may live on a lane is decided from the report alone;
/// `kind` is only a label in messages.
#[derive(Debug, Clone, PartialEq)]
pub struct ResourceDecl {
    /// `talker_kv`, `codec_state`, `sampler`, `positions`.
    pub key: String,
    /// Label: `paged_kv`, `state_pool`, `sampler`, …
    pub kind: String,
    /// Positions of a page, for a paged cache; 0 otherwise. A slot of a paged cache is a page.
    pub page_size: u32,
    /// A released slot is zeroed, on its owner's stream, before it is handed out again.
    pub zero_on_release: bool,
    /// What a slot is an array of.
    pub element: Element,
    /// What it reports.
    pub report: ResourceReport,
}

/// What the slots of a resource are arrays of. The bytes that it reports count these, so that what the validator
/// adds up is what an engine allocates.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Element {
    /// f32; sets of bits and integers take its place.
    #[default]
    F32,
    /// bf16.
    Bf16,
}

impl Element {
    /// Bytes of one.
    pub fn bytes(self) -> u64 {
        match self {
            Element::F32 => 4,
            Element::Bf16 => 2,
        }
    }
}

/// What a resource reports of itself.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct ResourceReport {
    /// Keys of resources that it depends on.
    pub depends_on: Vec<String>,
    /// It keeps a prefix cache.
    pub prefix_cache: bool,
    /// It takes state from a live request under memory pressure.
    pub evicts: bool,
    /// The main thread moves its state outside a step.
    pub moved_outside_step: bool,
    /// It keeps host-written rows across steps.
    pub stages_host_rows: bool,
    /// Workers (ranks) other than the node's own that it is shared with.
    pub shared_with_ranks: Vec<u32>,
    /// Key of the KV cache that its snapshots are keyed on.
    pub snapshots_keyed_on: Option<String>,
    /// Bytes whatever its size.
    pub fixed_bytes: u64,
    /// Bytes of one slot (one page of a paged cache).
    pub bytes_per_slot: u64,
}
