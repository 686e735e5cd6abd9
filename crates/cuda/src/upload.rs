//! Weights on their way to the device: through pinned memory in pieces, and into the packing that the kernels read.

use std::sync::Arc;

use cudarc::driver::sys;
use laneway_device::{DType, DeviceError, Result};
use parking_lot::Mutex;

use crate::context::{Context, Garbage, Handle, RawEvent, Stream};
use crate::kernels::Kernels;
use crate::launch::{Args, Launch};
use crate::memory::{allocate_pinned_raw, allocate_raw, write_pinned};

/// Bytes of a piece: long enough for the bus to run at full speed, short enough to fill one while the other travels.
const PIECE_BYTES: usize = 16 << 20;

/// Copies from ordinary host memory to the device.
pub(crate) struct Uploader {
    context: Arc<Context>,
    /// Made by the first upload.
    pieces: Mutex<Option<Pieces>>,
}

struct Pieces {
    context: Arc<Context>,
    /// Pinned memory and the event behind the last copy out of it.
    staging: Vec<(u64, RawEvent)>,
    next: usize,
    /// Device memory for what a kernel still has to pack.
    scratch: u64,
}

impl Uploader {
    pub(crate) fn new(context: &Arc<Context>) -> Self {
        Self {
            context: Arc::clone(context),
            pieces: Mutex::default(),
        }
    }

    /// Copy `data` to `address`, a live allocation of at least that many bytes, and wait for it.
    pub(crate) fn upload(&self, address: u64, data: &[u8]) -> Result<()> {
        self.run(|pieces, stream| {
            for (index, piece) in data.chunks(PIECE_BYTES).enumerate() {
                pieces.send(stream, address + (index * PIECE_BYTES) as u64, piece)?;
            }
            Ok(())
        })
    }

    /// Pack row-major `[n, k]` elements of `from` into `address`, which holds [`packed_len`] elements of `to`.
    pub(crate) fn pack(&self, matrix: &Packing<'_>, kernels: &Kernels, address: u64) -> Result<()> {
        let row_bytes = matrix.k * matrix.from.size();
        // Whole tiles of rows, so that every piece is packed as a matrix of its own.
        let rows = PIECE_BYTES / row_bytes.max(1) / TILE * TILE;
        if rows == 0 {
            return Err(DeviceError::BadOperation {
                op: "pack_matrix",
                problem: format!(
                    "rows of {} {:?} are longer than {} bytes: {TILE} of them must fit {PIECE_BYTES} bytes",
                    matrix.k,
                    matrix.from,
                    PIECE_BYTES / TILE
                ),
            });
        }
        self.run(|pieces, stream| {
            let mut address = address;
            for piece in matrix.data.chunks((rows * row_bytes).max(1)) {
                let rows = piece.len() / row_bytes;
                pieces.send(stream, pieces.scratch, piece)?;
                let launch = matrix.launch(rows, pieces.scratch, address);
                kernels
                    .launch(stream, &launch, false)
                    .map_err(|problem| DeviceError::Driver {
                        device: self.context.name.clone(),
                        call: "pack_matrix".to_owned(),
                        problem,
                    })?;
                address += (packed_len(rows, matrix.k, matrix.to) * matrix.to.size()) as u64;
            }
            Ok(())
        })
    }

    fn run(&self, work: impl FnOnce(&mut Pieces, Stream) -> Result<()>) -> Result<()> {
        let mut pieces = self.pieces.lock();
        if pieces.is_none() {
            *pieces = Some(Pieces::new(&self.context)?);
        }
        let Some(pieces) = pieces.as_mut() else {
            return Ok(());
        };
        self.context.serve(|stream| work(pieces, stream))
    }
}

impl Pieces {
    fn new(context: &Arc<Context>) -> Result<Self> {
        let mut pieces = Self {
            context: Arc::clone(context),
            staging: Vec::new(),
            next: 0,
            scratch: allocate_raw(context, "staging of uploads", PIECE_BYTES)?,
        };
        for _ in 0..2 {
            let memory = allocate_pinned_raw(context, PIECE_BYTES)?;
            let address = memory.0.expose_provenance() as u64;
            pieces.staging.push((address, context.take_event(false)?));
        }
        Ok(pieces)
    }

    /// Queue a copy of at most [`PIECE_BYTES`].
    fn send(&mut self, stream: Stream, address: u64, data: &[u8]) -> Result<()> {
        let (staging, sent) = self.staging[self.next % 2];
        self.next += 1;
        // SAFETY: the event is live; one that was never recorded is complete.
        let free = unsafe { sys::cuEventSynchronize(sent.0) };
        self.context.check("cuEventSynchronize", free)?;
        // SAFETY: the staging memory is that long, and the copy out of it has ended.
        unsafe { write_pinned(staging, data) };
        // SAFETY: both ranges are live until the caller has waited for the stream.
        let copied = unsafe { sys::cuMemcpyAsync(address, staging, data.len(), stream.0) };
        self.context.check("cuMemcpyAsync", copied)?;
        // SAFETY: event and stream are live.
        let recorded = unsafe { sys::cuEventRecord(sent.0, stream.0) };
        self.context.check("cuEventRecord", recorded)
    }
}

impl Drop for Pieces {
    fn drop(&mut self) {
        self.context.discard(Garbage::Device(self.scratch));
        for (address, event) in self.staging.drain(..) {
            let memory = crate::context::host_pointer(address).cast();
            self.context.discard(Garbage::Pinned(Handle(memory)));
            self.context.recycle_event(event, false);
        }
    }
}

/// Rows and columns of a tile of bf16 weights.
const TILE: usize = 16;

/// Elements of a packed `[n, k]` matrix: 16-bit types in tiles of 16 by 16, padded with zeros; f32 row-major.
pub(crate) fn packed_len(n: usize, k: usize, to: DType) -> usize {
    match to.size() {
        2 => n.next_multiple_of(TILE) * k.next_multiple_of(TILE),
        _ => n * k,
    }
}

/// A matrix to pack. Element `i` of lane `l` of tile (row tile, column tile) of bf16 weights is what the `A` fragment
/// of mma.m16n8k16 wants there.
pub(crate) struct Packing<'a> {
    pub(crate) k: usize,
    pub(crate) from: DType,
    pub(crate) to: DType,
    /// Row-major `[n, k]`.
    pub(crate) data: &'a [u8],
}

impl Packing<'_> {
    /// Packs `rows` rows from `src` to `dst`: one thread for each element of the result.
    pub(crate) fn launch(&self, rows: usize, src: u64, dst: u64) -> Launch {
        let (kernel, converts) = match self.to {
            DType::Bf16 => ("pack_bf16", self.from == DType::F32),
            DType::F16 => ("pack_f16", true),
            _ => ("pack_f32", self.from == DType::Bf16),
        };
        let blocks = packed_len(rows, self.k, self.to).div_ceil(256);
        Launch {
            kernel,
            // A piece has fewer than 2^24 elements.
            grid: [blocks as u32, 1, 1],
            block: 256,
            shared: 0,
            cluster: 1,
            args: Args::new()
                .address(src)
                .int(usize::from(converts))
                .int(rows)
                .int(self.k)
                .address(dst),
        }
    }
}
