//! Key/value caches of cases: shapes, block tables, and what lies where nobody may look.

use laneway_device::DType;
use laneway_device::op::KvCache;

use crate::check::data::{Data, narrowed};
use crate::check::experiment::{Experiment, Placed, Slot};
use crate::check::random::Random;

/// f32 throughout, in another order of sums.
const BOUND: f64 = 1e-5;
/// The last bit decides how some outputs round to 16 bits.
const NARROW_BOUND: f64 = 1e-3;
/// Keys and values rounded as they are written.
const BF16_BOUND: f64 = 4e-3;
const F16_BOUND: f64 = 5e-4;

/// What positions that nobody may see hold.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Stale {
    Large,
    Nan,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Shape {
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
    pub(super) dim: usize,
    /// Norm of queries and keys.
    pub(super) norm: bool,
    pub(super) page_size: usize,
    /// One block a sequence, positions wrap round.
    pub(super) ring: bool,
    /// The table has no more cells than the longest sequence needs.
    pub(super) exact: bool,
    pub(super) window: Option<usize>,
    pub(super) pool: DType,
    /// Of what attention hands on.
    pub(super) out: DType,
    pub(super) stale: Stale,
}

pub(super) const TALKER: Shape = Shape {
    heads: 16,
    kv_heads: 8,
    dim: 128,
    norm: true,
    page_size: 32,
    ring: false,
    exact: false,
    window: None,
    pool: DType::F32,
    out: DType::F32,
    stale: Stale::Large,
};

pub(super) const PREDICTOR: Shape = Shape {
    page_size: 16,
    exact: true,
    ..TALKER
};

pub(super) const CODEC: Shape = Shape {
    heads: 16,
    kv_heads: 16,
    dim: 64,
    norm: false,
    page_size: 95,
    ring: true,
    window: Some(72),
    ..TALKER
};

pub(super) const TINY: Shape = Shape {
    heads: 4,
    kv_heads: 2,
    dim: 40,
    page_size: 4,
    ..TALKER
};

pub(super) const TINY_RING: Shape = Shape {
    heads: 3,
    kv_heads: 3,
    dim: 16,
    norm: false,
    page_size: 10,
    ring: true,
    window: Some(5),
    ..TALKER
};

impl Shape {
    pub(super) fn kv_width(&self) -> usize {
        self.kv_heads * self.dim
    }

    pub(super) fn width(&self) -> usize {
        self.heads * self.dim
    }

    pub(super) fn qkv_width(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.dim
    }

    /// Keys or values of a block in one of its two layers; the case is about the second.
    pub(super) fn part(&self) -> usize {
        self.page_size * self.kv_width()
    }

    /// Blocks do not touch each other.
    pub(super) fn page_stride(&self) -> usize {
        4 * self.part() + 8
    }

    pub(super) fn bound(&self) -> f64 {
        match self.pool {
            DType::Bf16 => BF16_BOUND,
            DType::F16 => F16_BOUND,
            _ => BOUND,
        }
    }

    pub(super) fn out_bound(&self) -> f64 {
        match self.out {
            DType::F32 => self.bound(),
            DType::Bf16 => self.bound().max(BF16_BOUND),
            _ => self.bound().max(NARROW_BOUND),
        }
    }

    pub(super) fn label(&self) -> String {
        let mut label = format!("{}/{}h{}", self.heads, self.kv_heads, self.dim);
        if let Some(window) = self.window {
            label += &format!(" w{window}");
        }
        if self.ring {
            label += " ring";
        }
        if self.stale == Stale::Nan {
            label += " nan";
        }
        if self.out != DType::F32 {
            label += &format!(" to {:?}", self.out).to_lowercase();
        }
        label
    }

    pub(super) fn dtype(&self) -> &'static str {
        match self.pool {
            DType::Bf16 => "bf16",
            DType::F16 => "f16",
            _ => "f32",
        }
    }
}

/// Block table and pool. Of sequence s the positions below `filled[s]` hold something that may be read.
pub(super) struct Cache {
    pub(super) shape: Shape,
    pub(super) blocks_per_sequence: usize,
    pub(super) table: Vec<i32>,
    pub(super) pool: Vec<f32>,
}

impl Cache {
    pub(super) fn new(shape: Shape, filled: &[usize], room: &[usize], random: &mut Random) -> Self {
        let pages = |positions: usize| match shape.ring {
            true => 1,
            false => positions.div_ceil(shape.page_size),
        };
        let blocks_per_sequence = room.iter().map(|r| pages(*r)).max().unwrap_or(1).max(1)
            + usize::from(!shape.ring && !shape.exact);
        let needed: usize = room.iter().map(|r| pages(*r)).sum();
        // One block belongs to nobody: tables name it where a sequence has no page.
        let blocks = random.choose(needed + 1, needed + 1);
        let spare = blocks[needed] as i32;
        let (mut next, mut table) = (0, Vec::new());
        for room in room {
            for column in 0..blocks_per_sequence {
                table.push(if column < pages(*room) {
                    blocks[next + column] as i32
                } else {
                    spare
                });
            }
            next += pages(*room);
        }
        let stale = match shape.stale {
            Stale::Large => 1e4,
            Stale::Nan => f32::NAN,
        };
        let mut pool = vec![stale; (needed + 1) * shape.page_stride()];
        for (s, filled) in filled.iter().enumerate() {
            let positions = if shape.ring {
                (*filled).min(shape.page_size)
            } else {
                *filled
            };
            for i in 0..positions {
                // A ring's oldest positions come last in time, but any content will do.
                let block = table[s * blocks_per_sequence + i / shape.page_size] as usize;
                for part in [2, 3] {
                    let at = block * shape.page_stride()
                        + part * shape.part()
                        + i % shape.page_size * shape.kv_width();
                    pool[at..][..shape.kv_width()].copy_from_slice(&random.floats(shape.kv_width(), 1.0));
                }
            }
        }
        for x in &mut pool {
            *x = narrowed(*x, shape.pool);
        }
        Self {
            shape,
            blocks_per_sequence,
            table,
            pool,
        }
    }

    pub(super) fn data(&self) -> Data {
        Data::real(&self.pool, self.shape.pool)
    }

    pub(super) fn view(
        shape: Shape,
        blocks_per_sequence: usize,
        p: &Placed,
        pool: Slot,
        table: Slot,
    ) -> KvCache {
        KvCache {
            pool: p.view(pool),
            page_stride: shape.page_stride(),
            k_offset: 2 * shape.part(),
            v_offset: 3 * shape.part(),
            page_size: shape.page_size,
            kv_heads: shape.kv_heads,
            head_dim: shape.dim,
            table: p.view(table),
            blocks_per_sequence,
            ring: shape.ring,
        }
    }

    /// The reference keeps keys and values, and what attention hands on, in f32.
    pub(super) fn in_f32(&self, e: Experiment, pool: Slot, out: Option<(Slot, usize)>) -> Experiment {
        let mut replaced = vec![(pool, Data::floats(&self.pool))];
        replaced.extend(out.map(|(out, len)| (out, Data::poison(DType::F32, len))));
        e.reference_data(replaced)
    }
}
