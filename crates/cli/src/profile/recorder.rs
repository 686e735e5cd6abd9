//! A device that keeps the graphs which are replayed on it.

use std::sync::{Arc, Mutex};

use laneway_device::{
    Buffer, BufferSpec, Device, DeviceFacts, Event, Graph, Matrix, MatrixSpec, Op, Result, Stream,
    StreamConfig, Touches, View,
};

/// See the module.
#[derive(Debug)]
pub(super) struct Recorder {
    inner: Arc<dyn Device>,
    replayed: Arc<Mutex<Vec<Replayed>>>,
}

/// A graph, where it ran and how often.
#[derive(Debug, Clone)]
pub(super) struct Replayed {
    pub(super) graph: Graph,
    pub(super) stream: Arc<dyn Stream>,
    pub(super) times: usize,
}

#[derive(Debug)]
struct RecordingStream {
    inner: Arc<dyn Stream>,
    replayed: Arc<Mutex<Vec<Replayed>>>,
}

impl Recorder {
    pub(super) fn new(inner: Arc<dyn Device>) -> Self {
        Self {
            inner,
            replayed: Arc::default(),
        }
    }

    /// Forget what was replayed so far.
    pub(super) fn clear(&self) {
        self.replayed
            .lock()
            .unwrap_or_else(|held| held.into_inner())
            .clear();
    }

    /// Every graph replayed since, most often first.
    pub(super) fn replayed(&self) -> Vec<Replayed> {
        let mut all = self
            .replayed
            .lock()
            .unwrap_or_else(|held| held.into_inner())
            .clone();
        all.sort_by_key(|replayed| std::cmp::Reverse(replayed.times));
        all
    }
}

impl Device for Recorder {
    fn facts(&self) -> DeviceFacts {
        self.inner.facts()
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

    fn activation_dtype(&self, weights: &Matrix) -> laneway_device::DType {
        self.inner.activation_dtype(weights)
    }

    fn create_stream(&self, config: StreamConfig) -> Result<Arc<dyn Stream>> {
        Ok(Arc::new(RecordingStream {
            inner: self.inner.create_stream(config)?,
            replayed: self.replayed.clone(),
        }))
    }

    fn host_write(&self, view: &View, bytes: &[u8]) -> Result<()> {
        self.inner.host_write(view, bytes)
    }

    fn host_read(&self, view: &View, bytes: &mut [u8]) -> Result<()> {
        self.inner.host_read(view, bytes)
    }
}

impl Stream for RecordingStream {
    fn config(&self) -> &StreamConfig {
        self.inner.config()
    }

    fn id(&self) -> u64 {
        self.inner.id()
    }

    fn launch(&self, op: &Op, touches: &Touches) -> Result<()> {
        self.inner.launch(op, touches)
    }

    fn record(&self) -> Result<Event> {
        self.inner.record()
    }

    fn record_timed(&self) -> Result<Event> {
        self.inner.record_timed()
    }

    fn mark(&self) -> Option<Event> {
        self.inner.mark()
    }

    fn wait(&self, event: &Event) -> Result<()> {
        self.inner.wait(event)
    }

    fn capture(&self, build: &mut dyn FnMut(&dyn Stream) -> Result<()>) -> Result<Graph> {
        self.inner.capture(build)
    }

    fn replay(&self, graph: &Graph, touches: &Touches) -> Result<()> {
        let mut all = self.replayed.lock().unwrap_or_else(|held| held.into_inner());
        match all
            .iter_mut()
            .find(|known| Arc::ptr_eq(&known.graph.ops, &graph.ops))
        {
            Some(known) => known.times += 1,
            None => all.push(Replayed {
                graph: graph.clone(),
                stream: self.inner.clone(),
                times: 1,
            }),
        }
        drop(all);
        self.inner.replay(graph, touches)
    }
}
