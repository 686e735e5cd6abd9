//! Device memory for timing: random contents, and weights of which several copies differ in nothing but their
//! place.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::Arc;

use laneway_device::op::{KvCache, SampleRow, StateSlice, Windows};
use laneway_device::{BufferSpec, DType, Device, Matrix, MatrixSpec, Place, Result, View};

use crate::check::data::Data;
use crate::check::random::Random;

/// See the module.
pub(crate) struct Operands {
    device: Arc<dyn Device>,
    random: RefCell<Random>,
    /// Host contents by shape.
    matrices: RefCell<HashMap<(usize, usize), Data>>,
    /// As `matrices`, by elements of a page and pages.
    pools: RefCell<HashMap<(usize, usize), Data>>,
    /// Element type of key/value caches.
    cache_dtype: DType,
    /// Element type of weights in the checkpoint.
    given: DType,
}

impl Operands {
    pub(crate) fn new(device: Arc<dyn Device>, cache_dtype: DType, given: DType) -> Self {
        Self {
            device,
            random: RefCell::new(Random::new(1)),
            matrices: RefCell::default(),
            pools: RefCell::default(),
            cache_dtype,
            given,
        }
    }

    fn buffer(&self, data: &Data) -> Result<View> {
        let spec = BufferSpec {
            name: "operand".to_owned(),
            dtype: data.dtype,
            len: data.len(),
            place: Place::Device,
        };
        Ok(self.device.alloc_with(spec, &data.bytes)?.view())
    }

    /// In -1..1.
    pub(crate) fn floats(&self, len: usize) -> Result<View> {
        let values = self.random.borrow_mut().floats(len, 1.0);
        self.buffer(&Data::floats(&values))
    }

    /// In 0.5..1.5.
    pub(crate) fn ones(&self, len: usize) -> Result<View> {
        let values: Vec<f32> = self
            .random
            .borrow_mut()
            .floats(len, 0.5)
            .iter()
            .map(|x| 1.0 + x)
            .collect();
        self.buffer(&Data::floats(&values))
    }

    /// An embedding table.
    pub(crate) fn table(&self, entries: usize, width: usize) -> Result<View> {
        let values = self.random.borrow_mut().floats(entries * width, 1.0);
        self.buffer(&Data::real(&values, DType::Bf16))
    }

    pub(crate) fn ints(&self, values: &[i32]) -> Result<View> {
        self.buffer(&Data::ints(values))
    }

    /// Output of an operation: what it holds does not matter.
    pub(crate) fn out(&self, len: usize) -> Result<View> {
        self.out_of(len, DType::F32)
    }

    /// Output that goes into a product with `weights` and nowhere else.
    pub(crate) fn out_for(&self, weights: &Matrix, len: usize) -> Result<View> {
        self.out_of(len, self.device.activation_dtype(weights))
    }

    fn out_of(&self, len: usize, dtype: DType) -> Result<View> {
        let spec = BufferSpec {
            name: "output".to_owned(),
            dtype,
            len,
            place: Place::Device,
        };
        Ok(self.device.alloc(spec)?.view())
    }

    /// `[n, k]` of a size that keeps activations from growing, given as `self.given`.
    pub(crate) fn matrix(&self, n: usize, k: usize) -> Result<Matrix> {
        let mut matrices = self.matrices.borrow_mut();
        let data = matrices.entry((n, k)).or_insert_with(|| {
            let scale = 1.7 / (k as f32).sqrt();
            Data::real(&self.random.borrow_mut().floats(n * k, scale), self.given)
        });
        self.device.pack_matrix(MatrixSpec {
            name: "matrix",
            n,
            k,
            dtype: data.dtype,
            data: &data.bytes,
        })
    }

    pub(crate) fn state(&self, slots: usize, words: usize) -> Result<StateSlice> {
        Ok(StateSlice {
            pool: self.floats(slots * words)?,
            slot_stride: words,
            offset: 0,
        })
    }

    /// One window of one frame for each stream.
    /// Windows of at most `width` frames over so many in all; room for one a frame, as a captured step has it.
    pub(crate) fn windows(&self, frames: usize, width: usize) -> Result<View> {
        let window = |i: usize| match i * width {
            first if first < frames => [first as i32, width.min(frames - first) as i32, i as i32],
            _ => [0; 3],
        };
        let windows: Vec<i32> = (0..frames).flat_map(window).collect();
        self.ints(&windows)
    }

    pub(crate) fn windows_at(windows: &View, streams: usize, rate: usize) -> Windows {
        Windows {
            windows: windows.clone(),
            count: streams,
            rate,
        }
    }

    /// A cache for `sequences` of up to `positions`, of one layer.
    pub(crate) fn cache(&self, shape: CacheShape) -> Result<KvCache> {
        let pages = if shape.ring {
            1
        } else {
            shape.positions.div_ceil(shape.page_size)
        };
        let page_stride = 2 * shape.page_size * shape.kv_heads * shape.head_dim;
        let blocks = shape.sequences * pages;
        // Pages of a sequence lie anywhere.
        let table: Vec<i32> = self
            .random
            .borrow_mut()
            .choose(blocks, blocks)
            .into_iter()
            .map(|block| block as i32)
            .collect();
        let dtype = if shape.ring { DType::F32 } else { self.cache_dtype };
        // Layers differ in nothing but their place.
        let mut pools = self.pools.borrow_mut();
        let data = pools.entry((page_stride, blocks)).or_insert_with(|| {
            let page = self.random.borrow_mut().floats(page_stride, 1.0);
            Data::new(dtype, Data::real(&page, dtype).bytes.repeat(blocks))
        });
        Ok(KvCache {
            pool: self.buffer(data)?,
            page_stride,
            k_offset: 0,
            v_offset: page_stride / 2,
            page_size: shape.page_size,
            kv_heads: shape.kv_heads,
            head_dim: shape.head_dim,
            table: self.ints(&table)?,
            blocks_per_sequence: pages,
            ring: shape.ring,
        })
    }

    /// Sampling as the released models do it.
    pub(crate) fn sampling(&self, rows: usize, seen: bool) -> Result<View> {
        let records: Vec<SampleRow> = (0..rows)
            .map(|r| SampleRow {
                temperature: 0.9,
                top_p: 1.0,
                repetition_penalty: if seen { 1.05 } else { 1.0 },
                top_k: 50,
                seed_lo: r as u32,
                seed_hi: 7,
                frame: 100,
                eos: -1,
                ban_eos: 0,
                slot: if seen { r as i32 } else { -1 },
                reserved: [0; 2],
            })
            .collect();
        self.buffer(&Data::words(bytemuck::cast_slice(&records)))
    }

    pub(crate) fn words(&self, len: usize) -> Result<View> {
        let words: Vec<u32> = (0..len)
            .map(|_| self.random.borrow_mut().word() as u32 & 0x1111_1111)
            .collect();
        self.buffer(&Data::words(&words))
    }
}

/// See [`Operands::cache`].
#[derive(Debug, Clone, Copy)]
pub(crate) struct CacheShape {
    pub(crate) sequences: usize,
    pub(crate) positions: usize,
    pub(crate) page_size: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) ring: bool,
}
