//! A device for tests that wants captures for buckets, as a GPU does, and counts what is queued on it.

use std::collections::BTreeMap;
use std::sync::Arc;

use laneway_device::sanitize::Sanitizer;
use laneway_device::{
    Buffer, BufferSpec, Device, DeviceFacts, Event, Graph, Matrix, MatrixSpec, Op, Result, Stream,
    StreamConfig, Touches, View, testing,
};
use parking_lot::Mutex;

/// What was queued.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(crate) struct Queued {
    /// Operations outside graphs, by name.
    pub(crate) launches: BTreeMap<&'static str, usize>,
    pub(crate) replays: usize,
    /// Captures that were made.
    pub(crate) captures: usize,
    /// Operations of the graphs that were replayed first and last, by name.
    pub(crate) first_graph: BTreeMap<&'static str, usize>,
    pub(crate) last_graph: BTreeMap<&'static str, usize>,
}

impl Queued {
    /// Operations outside graphs that a node queued: the engine clears what it hands out.
    pub(crate) fn launches_of_nodes(&self) -> usize {
        let of_nodes = self.launches.iter().filter(|(name, _)| **name != "Zero");
        of_nodes.map(|(_, count)| count).sum()
    }
}

/// Counts of all streams of a device, by the stream's name.
#[derive(Debug, Default, Clone)]
pub(crate) struct Counts(Arc<Mutex<BTreeMap<String, Queued>>>);

impl Counts {
    /// What was queued on a stream so far.
    pub(crate) fn of(&self, stream: &str) -> Queued {
        self.0.lock().get(stream).cloned().unwrap_or_default()
    }
}

/// A sanitized CPU device that reports no exact buckets.
pub(crate) fn bucketed() -> (Arc<dyn Device>, Sanitizer, Counts) {
    let (inner, sanitizer) = testing::cpu();
    let counts = Counts::default();
    let device = BucketedDevice {
        inner,
        counts: counts.clone(),
    };
    (Arc::new(device), sanitizer, counts)
}

#[derive(Debug)]
struct BucketedDevice {
    inner: Arc<dyn Device>,
    counts: Counts,
}

impl Device for BucketedDevice {
    fn facts(&self) -> DeviceFacts {
        DeviceFacts {
            exact_buckets: false,
            ..self.inner.facts()
        }
    }

    fn alloc(&self, spec: BufferSpec) -> Result<Buffer> {
        self.inner.alloc(spec)
    }

    fn alloc_with(&self, spec: BufferSpec, data: &[u8]) -> Result<Buffer> {
        self.inner.alloc_with(spec, data)
    }

    fn pack_matrix(&self, spec: MatrixSpec<'_>) -> Result<Matrix> {
        self.inner.pack_matrix(spec)
    }

    fn create_stream(&self, config: StreamConfig) -> Result<Arc<dyn Stream>> {
        Ok(Arc::new(CountedStream {
            inner: self.inner.create_stream(config)?,
            counts: self.counts.clone(),
        }))
    }

    fn host_write(&self, view: &View, bytes: &[u8]) -> Result<()> {
        self.inner.host_write(view, bytes)
    }

    fn host_read(&self, view: &View, bytes: &mut [u8]) -> Result<()> {
        self.inner.host_read(view, bytes)
    }
}

#[derive(Debug)]
struct CountedStream {
    inner: Arc<dyn Stream>,
    counts: Counts,
}

impl CountedStream {
    fn count(&self, count: impl FnOnce(&mut Queued)) {
        let mut counts = self.counts.0.lock();
        count(counts.entry(self.config().name.clone()).or_default());
    }
}

impl Stream for CountedStream {
    fn config(&self) -> &StreamConfig {
        self.inner.config()
    }

    fn id(&self) -> u64 {
        self.inner.id()
    }

    fn launch(&self, op: &Op, touches: &Touches) -> Result<()> {
        self.count(|queued| *queued.launches.entry(op.name()).or_default() += 1);
        self.inner.launch(op, touches)
    }

    fn record(&self) -> Result<Event> {
        self.inner.record()
    }

    fn wait(&self, event: &Event) -> Result<()> {
        self.inner.wait(event)
    }

    fn capture(&self, build: &mut dyn FnMut(&dyn Stream) -> Result<()>) -> Result<Graph> {
        self.count(|queued| queued.captures += 1);
        self.inner.capture(build)
    }

    fn replay(&self, graph: &Graph, touches: &Touches) -> Result<()> {
        self.count(|queued| {
            queued.replays += 1;
            queued.last_graph.clear();
            for op in graph.ops.iter() {
                *queued.last_graph.entry(op.name()).or_default() += 1;
            }
            if queued.replays == 1 {
                queued.first_graph = queued.last_graph.clone();
            }
        });
        self.inner.replay(graph, touches)
    }
}
