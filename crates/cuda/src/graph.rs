//! Capture and replay: a graph of the driver's, built from the launches that a stand-in for a stream was given.

use std::ptr::null_mut;
use std::sync::Arc;

use cudarc::driver::sys;
use laneway_device::{DeviceError, Event, Graph, Op, Result, Stream, StreamConfig, Touches};
use parking_lot::Mutex;

use crate::context::{self, CaptureGuard, Context, Garbage, Handle};
use crate::error;
use crate::stream::{CudaStream, Queue};

/// An executable graph, on the device already.
pub(crate) struct CudaGraph {
    context: Arc<Context>,
    exec: Handle<sys::CUgraphExec_st>,
}

impl CudaGraph {
    pub(crate) fn launch(&self, stream: context::Stream, name: &str) -> Result<()> {
        self.context.bind()?;
        // SAFETY: graph and stream are live; the operations that `Graph` keeps hold the buffers.
        let result = unsafe { sys::cuGraphLaunch(self.exec.0, stream.0) };
        error::check_on(name, "replay", result)
    }
}

impl Drop for CudaGraph {
    fn drop(&mut self) {
        self.context.discard(Garbage::Graph(self.exec));
    }
}

/// Record what `build` launches on `capturing`, and prepare it to run on `stream`.
pub(crate) fn capture(
    context: &Arc<Context>,
    capturing: context::Stream,
    stream: context::Stream,
    build: impl FnOnce() -> Result<()>,
) -> Result<CudaGraph> {
    context.bind()?;
    let guard = context.begin_capture();
    // Other threads, and this one, may go on with everything that has nothing to do with the capture.
    let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
    // SAFETY: the stream is live, and no other capture knows it.
    let result = unsafe { sys::cuStreamBeginCapture_v2(capturing.0, mode) };
    context.check("cuStreamBeginCapture", result)?;
    let recording = Recording {
        stream: Some(capturing),
        _guard: guard,
    };
    let built = build();
    context.bind()?;
    let (ended, graph) = recording.end();
    let exec = built.and_then(|()| {
        context.check("cuStreamEndCapture", ended)?;
        instantiate(context, graph, stream)
    });
    if !graph.is_null() {
        // SAFETY: the graph is ours; an executable is a copy.
        let result = unsafe { sys::cuGraphDestroy(graph) };
        context.check("cuGraphDestroy", result)?;
    }
    exec
}

/// A stream that records, until this is ended or dropped (by a panic of what is captured).
struct Recording {
    stream: Option<context::Stream>,
    /// Dropped behind the end.
    _guard: CaptureGuard,
}

impl Recording {
    /// How it ended, and the graph; null when there is none.
    fn end(mut self) -> (sys::CUresult, sys::CUgraph) {
        self.stop()
    }

    fn stop(&mut self) -> (sys::CUresult, sys::CUgraph) {
        let mut graph = null_mut();
        let ended = match self.stream.take() {
            // SAFETY: the stream has recorded since this was made; the address is valid for a write.
            Some(stream) => unsafe { sys::cuStreamEndCapture(stream.0, &mut graph) },
            None => sys::CUresult::CUDA_SUCCESS,
        };
        (ended, graph)
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        let (_, graph) = self.stop();
        if !graph.is_null() {
            // SAFETY: the graph is ours.
            let _ = unsafe { sys::cuGraphDestroy(graph) };
        }
    }
}

fn instantiate(context: &Arc<Context>, graph: sys::CUgraph, stream: context::Stream) -> Result<CudaGraph> {
    let mut exec = null_mut();
    // SAFETY: the graph is live; the address is valid for a write.
    let result = unsafe { sys::cuGraphInstantiateWithFlags(&mut exec, graph, 0) };
    context.check("cuGraphInstantiate", result)?;
    let exec = CudaGraph {
        context: Arc::clone(context),
        exec: Handle(exec),
    };
    // So that the first replay is as fast as the others.
    // SAFETY: graph and stream are live.
    let result = unsafe { sys::cuGraphUpload(exec.exec.0, stream.0) };
    context.check("cuGraphUpload", result)?;
    Ok(exec)
}

/// What a capture launches on.
pub(crate) struct CaptureStream<'a> {
    stream: &'a CudaStream,
    queue: &'a Queue,
    raw: context::Stream,
    ops: Mutex<Vec<Op>>,
}

impl<'a> CaptureStream<'a> {
    pub(crate) fn new(stream: &'a CudaStream, queue: &'a Queue, raw: context::Stream) -> Self {
        Self {
            stream,
            queue,
            raw,
            ops: Mutex::default(),
        }
    }

    pub(crate) fn into_ops(self) -> Vec<Op> {
        self.ops.into_inner()
    }

    fn refuse(&self, what: &str, remedy: &str) -> DeviceError {
        DeviceError::Unsupported {
            device: self.queue.context.name.clone(),
            what: format!("{what} inside a capture on stream {}", self.queue.name),
            remedy: remedy.to_owned(),
        }
    }
}

impl Stream for CaptureStream<'_> {
    fn config(&self) -> &StreamConfig {
        self.stream.config()
    }

    fn id(&self) -> u64 {
        self.stream.id()
    }

    fn launch(&self, op: &Op, _touches: &Touches) -> Result<()> {
        op.validate()?;
        // The lock keeps the launches of one operation together and the operations in the graph's order.
        let mut ops = self.ops.lock();
        self.queue.enqueue(op, self.raw)?;
        ops.push(op.clone());
        Ok(())
    }

    fn record(&self) -> Result<Event> {
        Err(self.refuse("record", "record the event behind the replay of the graph"))
    }

    fn wait(&self, _event: &Event) -> Result<()> {
        Err(self.refuse("wait", "wait for the event ahead of the replay of the graph"))
    }

    fn capture(&self, _build: &mut dyn FnMut(&dyn Stream) -> Result<()>) -> Result<Graph> {
        Err(self.refuse("capture", "capture one graph behind the other"))
    }

    fn replay(&self, _graph: &Graph, _touches: &Touches) -> Result<()> {
        Err(self.refuse("replay", "launch the operations themselves"))
    }
}

impl std::fmt::Debug for CaptureStream<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "capture on {:?}", self.stream)
    }
}
