//! What a model's node implements: the seam between the engine and a model.
//!
//! A node runs as one batched step. The engine decides which rows are in it; the node turns rows into index
//! buffers and operations, and after the step landed turns its results into outcomes. A node is owned by the
//! one thread that launches it (the chain's, or its lane's launch thread).

use std::any::Any;
use std::sync::Arc;

use laneway_device::{Buffer, Device, Launcher, Stream, Touches};
use laneway_plan::declaration::ModelDeclaration;

use crate::samples::Samples;

/// A request inside this worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(pub u64);

/// Index of a walk in the model's declaration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WalkId(pub usize);

/// What the caller submitted, in the model's own type. Nodes downcast it.
pub type Payload = Arc<dyn Any + Send + Sync>;

/// A node's own state of one request, made by [`Node::open`].
pub type RowState = Box<dyn Any + Send>;

/// The result a request edge delivers, in the model's own type.
pub type EdgeResult = Arc<dyn Any + Send + Sync>;

/// How much of a resource a request needs for its whole life in this worker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Need {
    /// Resource key.
    pub resource: String,
    /// How much.
    pub amount: Amount,
    /// For a paged cache that reports a prefix cache: hashes of the whole pages that the request begins with,
    /// each over the content of its page and of all before it. Leave at least the prompt's last position out:
    /// something must be left to run. Empty: nothing is shared.
    pub prefix: Vec<BlockHash>,
}

/// Stands for the content of a page and of everything before it.
pub type BlockHash = u64;

/// Slots, or positions of a paged cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Amount {
    /// Whole slots.
    Slots(u32),
    /// Positions, which the engine turns into pages: prompt, frame budget and one overrun step.
    Positions(u32),
}

/// What a request holds of one resource. The engine frees it when the last step that names it has landed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Grant {
    /// Resource key.
    pub resource: String,
    /// Slot or page numbers, in position order.
    pub slots: Vec<u32>,
    /// This many pages, the first ones, hold the beginning of the prompt already and belong to others too:
    /// the node reads them and does not write them.
    pub cached: u32,
}

/// One item of a stream edge.
#[derive(Debug, Clone)]
pub struct Item {
    /// Its number in the stream, from 0.
    pub index: u32,
    /// `item_words` words.
    pub words: Arc<[i32]>,
    /// Row of the edge's device ring that holds it (`[slots * capacity, item_words]`); `None` when it came
    /// from outside this worker or from a prime walk, and the consumer must copy `words` in.
    pub ring_row: Option<u32>,
}

/// One row of a step.
#[derive(Debug)]
pub struct StepRow<'a> {
    /// Whose.
    pub request: RequestId,
    /// What was submitted.
    pub payload: &'a Payload,
    /// The node's state for it.
    pub state: &'a mut RowState,
    /// What it holds of the resources that the node declares.
    pub grants: &'a [Grant],
    /// Stream and prime walks: the window. Others: empty.
    pub items: &'a [Item],
    /// Stream walks: this is the last window of the stream.
    pub last: bool,
    /// Producer walks: row of the edge's device ring that this step's item goes to.
    pub ring_row: Option<u32>,
    /// Results of the request edges that lead to this walk.
    pub results: &'a [EdgeResult],
}

/// A row that cannot run, with the reason its caller sees. It never fails its neighbours.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{message}")]
pub struct RowError {
    /// Whether the caller's input is at fault.
    pub invalid_argument: bool,
    /// Which field, when one is at fault.
    pub field: Option<String>,
    /// What is wrong and what to send instead.
    pub message: String,
}

/// What a landed step did for one row.
#[derive(Debug, Default)]
pub struct RowOutcome {
    /// Items made (words each), for the walk's stream edge.
    pub items: Vec<Arc<[i32]>>,
    /// Samples or other final output for the caller.
    pub output: Option<Samples>,
    /// Result for the walk's request edges.
    pub result: Option<EdgeResult>,
    /// The walk ends here, and why.
    pub finish: Option<FinishReason>,
    /// The row failed; everything else in this outcome is ignored.
    pub error: Option<RowError>,
}

/// Why a request's stream ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FinishReason {
    /// The end token.
    Stop,
    /// The frame budget.
    Length,
    /// A `stop`: what was made is flushed.
    Stopped,
}

/// Index into a node's double-buffered plan: the chain stages step N+1 while N runs, so it uses 0 and 1 in
/// turn (its pinned rings are deeper where results are read later still). Lanes always use 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Stage(pub usize);

/// One node of a model.
pub trait Node: Send {
    /// Name in the declaration.
    fn name(&self) -> &str;

    /// Most rows of one step of `walk`. For `Entry` walks also bounded by [`Node::fits`].
    fn max_rows(&self, walk: WalkId) -> usize;

    /// Make the node's state for a request. Runs on the node's own thread, before its first step, with
    /// whatever walk comes first (a prime walk shares the state of the stream walk behind it).
    fn open(&mut self, walk: WalkId, payload: &Payload) -> Result<RowState, RowError>;

    /// Whether one more row (by payload) fits beside those already chosen (packed prefill tokens, say).
    fn fits(&self, walk: WalkId, chosen: &[Payload], next: &Payload) -> bool {
        let _ = (walk, chosen, next);
        true
    }

    /// Fill this stage's index buffers and say what the step touches, its rows of edge rings included. Must
    /// not change row states: a refused plan fails the rows that it names, and the others come again in a
    /// later step.
    fn plan(
        &mut self,
        walk: WalkId,
        stage: Stage,
        rows: &mut [StepRow<'_>],
        touches: &mut Touches,
    ) -> Result<(), PlanError>;

    /// Queue the planned step. The events of the steps that made its inputs were already waited for on this
    /// stream. Captures, if the node uses any, were made in [`Node::warm_up`] on this same stream.
    fn forward(
        &mut self,
        walk: WalkId,
        stage: Stage,
        n_rows: usize,
        launcher: &Launcher<'_>,
    ) -> laneway_device::Result<()>;

    /// Advance lengths and offsets of the rows: right after a successful forward, before it lands.
    fn commit(&mut self, walk: WalkId, rows: &mut [StepRow<'_>]);

    /// Turn a landed step into outcomes, one for each row, in order. `None` in `rows`: the row went away
    /// meanwhile (cancelled, or overrun after its end); skip it and return a default outcome.
    fn postprocess(
        &mut self,
        walk: WalkId,
        stage: Stage,
        rows: &mut [Option<StepRow<'_>>],
    ) -> Vec<RowOutcome>;

    /// Make captures for the buckets and run every walk once on zeros, on the given launcher's stream. A node that may
    /// move is asked once for each of its streams, and keeps the captures of all.
    fn warm_up(&mut self, launcher: &Launcher<'_>) -> laneway_device::Result<()>;
}

/// Why a plan did not come about.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    /// These rows (by index) cannot run; the others can.
    #[error("{} rows cannot run", .0.len())]
    Rows(Vec<(usize, RowError)>),
    /// The device refused.
    #[error(transparent)]
    Device(#[from] laneway_device::DeviceError),
}

/// A device ring of a stream edge that producers write and consumers read on the device.
#[derive(Debug, Clone)]
pub struct EdgeRing {
    /// `[slots * capacity, item_words]` i32.
    pub buffer: laneway_device::Buffer,
    /// Requests that can hold a ring at once.
    pub slots: u32,
    /// Items of one request.
    pub capacity: u32,
    /// Words of an item.
    pub item_words: u32,
}

/// A resource as a node sees it: one pool of equal slots (state slots or KV pages).
#[derive(Debug, Clone)]
pub struct BoundResource {
    /// Resource key.
    pub key: String,
    /// `[slots, slot_elements]`, of the type that the resource declares (bit sets reuse words of `F32`).
    pub pool: Buffer,
    /// Slots or pages.
    pub slots: u32,
    /// Elements of a slot.
    pub slot_elements: usize,
    /// Positions of a page, for a paged cache; 0 otherwise.
    pub page_size: u32,
}

/// What a node is built with. It gets the resources that it declares and no others.
#[derive(Debug, Clone)]
pub struct NodeContext {
    /// Where to allocate weights and workspaces.
    pub device: Arc<dyn Device>,
    /// The stream it will run on: the chain's or its lane's. A node that moves between the two is warmed up on every
    /// stream that it may run on, and launched on the one that it is given.
    pub stream: Arc<dyn Stream>,
    /// Declared resources.
    pub resources: Vec<BoundResource>,
    /// Rings of the stream edges that its walks produce to or consume from, by edge name. Empty for an edge
    /// whose other end is in another worker.
    pub rings: Vec<(String, EdgeRing)>,
    /// Most rows of a decode or stream step.
    pub max_rows: usize,
    /// Most packed tokens of a prefill step.
    pub max_prefill_tokens: usize,
    /// Longest sequence in positions.
    pub max_seq_len: usize,
    /// Row counts that captures are made for, ascending.
    pub capture_buckets: Vec<usize>,
}

/// A model that an engine can run.
pub trait Model: Send + Sync {
    /// What it declares.
    fn declaration(&self) -> &ModelDeclaration;

    /// Load the node's weights and allocate its workspace on the device.
    ///
    /// # Errors
    /// Anything that keeps it from running, with the tensor or buffer named.
    fn build_node(
        &self,
        name: &str,
        context: NodeContext,
    ) -> Result<Box<dyn Node>, Box<dyn std::error::Error + Send + Sync>>;

    /// What a request needs of the resources of `node` for its whole life. Called from any thread; what
    /// exceeds a whole pool is refused when the request is submitted.
    fn needs(&self, node: &str, payload: &Payload) -> Vec<Need>;

    /// Whether a `Once` walk runs for this request (no reference audio: no reference encoder). Requests that
    /// were submitted with the result already in hand are not asked about.
    fn runs_once(&self, walk: WalkId, payload: &Payload) -> bool {
        let _ = (walk, payload);
        false
    }

    /// Items that a `Prime` walk runs through the stream's state before its first window, in order; none: it
    /// does not run. `results` are those of the request edges that lead to the walk.
    fn prime_items(&self, walk: WalkId, payload: &Payload, results: &[EdgeResult]) -> Vec<Arc<[i32]>> {
        let _ = (walk, payload, results);
        Vec::new()
    }
}
