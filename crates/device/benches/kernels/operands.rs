//! Buffers filled with random numbers.

use std::cell::Cell;
use std::sync::Arc;

use laneway_device::op::{KvCache, StateSlice, Windows};
use laneway_device::{Buffer, BufferSpec, DType, Device, Matrix, MatrixSpec, Place, View};

pub(crate) struct Operands {
    device: Arc<dyn Device>,
    random: Cell<u32>,
}

impl Operands {
    pub(crate) fn new(device: Arc<dyn Device>) -> Self {
        Self {
            device,
            random: Cell::new(1),
        }
    }

    /// In -1..1.
    fn next(&self) -> f32 {
        let word = self
            .random
            .get()
            .wrapping_mul(1_664_525)
            .wrapping_add(1_013_904_223);
        self.random.set(word);
        (word >> 8) as f32 / 8_388_608.0 - 1.0
    }

    fn buffer(&self, dtype: DType, len: usize, bytes: &[u8]) -> Buffer {
        let spec = BufferSpec {
            name: "operand".to_owned(),
            dtype,
            len,
            place: Place::Device,
        };
        self.device.alloc_with(spec, bytes).expect("it fits the limit")
    }

    pub(crate) fn floats(&self, len: usize) -> View {
        let values: Vec<f32> = (0..len).map(|_| self.next()).collect();
        self.buffer(DType::F32, len, bytemuck::cast_slice(&values)).view()
    }

    pub(crate) fn ints(&self, values: &[i32]) -> View {
        self.buffer(DType::I32, values.len(), bytemuck::cast_slice(values))
            .view()
    }

    pub(crate) fn words(&self, values: &[u32]) -> View {
        self.buffer(DType::U32, values.len(), bytemuck::cast_slice(values))
            .view()
    }

    /// `[n, k]` of a size that keeps activations from growing.
    pub(crate) fn matrix(&self, n: usize, k: usize, dtype: DType) -> Matrix {
        let values: Vec<f32> = (0..n * k).map(|_| self.next() / (k as f32).sqrt()).collect();
        let halves: Vec<u16> = values.iter().map(|x| (x.to_bits() >> 16) as u16).collect();
        let data = match dtype {
            DType::Bf16 => bytemuck::cast_slice(&halves),
            _ => bytemuck::cast_slice(&values),
        };
        let spec = MatrixSpec {
            name: "matrix",
            n,
            k,
            dtype,
            data,
        };
        self.device.pack_matrix(spec).expect("it fits the limit")
    }

    pub(crate) fn state(&self, slots: usize, slot_stride: usize) -> StateSlice {
        StateSlice {
            pool: self.floats(slots * slot_stride),
            slot_stride,
            offset: 0,
        }
    }

    /// One window of one frame for each stream.
    pub(crate) fn windows(&self, streams: usize, rate: usize) -> Windows {
        let windows: Vec<i32> = (0..streams as i32).flat_map(|i| [i, 1, i]).collect();
        Windows {
            windows: self.ints(&windows),
            count: streams,
            rate,
        }
    }

    /// Pages of 32 positions for `sequences` of up to `positions`.
    pub(crate) fn cache(
        &self,
        sequences: usize,
        positions: usize,
        kv_heads: usize,
        head_dim: usize,
    ) -> KvCache {
        let page_size = 32;
        let pages = positions.div_ceil(page_size);
        let page_stride = 2 * page_size * kv_heads * head_dim;
        let table: Vec<i32> = (0..(sequences * pages) as i32).collect();
        KvCache {
            pool: self.floats(table.len() * page_stride),
            page_stride,
            k_offset: 0,
            v_offset: page_stride / 2,
            page_size,
            kv_heads,
            head_dim,
            table: self.ints(&table),
            blocks_per_sequence: pages,
            ring: false,
        }
    }
}
