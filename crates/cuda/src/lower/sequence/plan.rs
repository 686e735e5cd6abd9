//! How attention over a cache is launched.

use laneway_device::DType;
use laneway_device::op::KvCache;

use super::{Target, capacity, check_head, launch};
use crate::launch::{Args, Launch};
use crate::lower::address;

/// Keys of a chunk: what matrix instructions take at a time.
const CHUNK: usize = 16;
/// Streams that a row's chunks are divided into at most.
const MAX_STREAMS: usize = 16;
/// Positions of a cache that are too few for matrix instructions.
const SHORT: usize = 16;
/// Warps of a block at least: some of them bring the row's own heads.
const MIN_WARPS: usize = 4;
/// Warps that a multiprocessor has registers for.
const RESIDENT_WARPS: usize = 16;
/// Without matrix instructions up to so many visible keys a row's attention takes `FEW_WARPS` warps, above it
/// `MANY_WARPS`.
const FEW_KEYS: usize = 128;
const FEW_WARPS: usize = 4;
const MANY_WARPS: usize = 16;
/// Keys of a warp's stream in a batch.
const BATCH: usize = 4;

/// The kernels for one way of holding heads.
#[derive(Debug, PartialEq)]
pub(super) struct Form {
    pub(super) attention: &'static str,
    pub(super) decode: &'static str,
    /// Query heads of a block, which share a key/value head.
    pub(super) group: usize,
    pub(super) keys: Keys,
}

/// How a form takes keys and values.
#[derive(Debug, PartialEq)]
pub(super) enum Keys {
    /// In chunks, by matrix instructions; a block has up to `warps` warps.
    Chunks { warps: usize },
    /// Each warp in turn, as many streams as it loads at a time; `staging` floats of shared memory for one batch of
    /// keys and values of a warp, 0: they do not pass through it.
    Single { streams: usize, staging: usize },
    /// All at once: there are no more than [`SHORT`].
    Short,
}

macro_rules! form {
    ($suffix:literal, $group:literal, $keys:expr) => {
        Form {
            attention: concat!("attention_", $suffix),
            decode: concat!("decode_attention_", $suffix),
            group: $group,
            keys: $keys,
        }
    };
}

impl Form {
    pub(super) fn new(cache: &KvCache, heads: usize) -> Self {
        let pool = &cache.pool;
        let dtype = pool.buffer.dtype();
        // Loads of 16 bytes.
        let whole = |n: usize| (n * dtype.size()).is_multiple_of(16);
        let aligned = whole(cache.page_stride)
            && whole(cache.k_offset)
            && whole(cache.v_offset)
            && address(pool).is_multiple_of(16);
        let even = (heads / cache.kv_heads).is_multiple_of(2);
        let chunks = |warps| Keys::Chunks { warps };
        let single = |streams, staging| Keys::Single { streams, staging };
        let short = !cache.ring && capacity(cache) <= SHORT;
        match (dtype, cache.head_dim, aligned, even) {
            (DType::Bf16, 128, true, true) if short => form!("bf16_short", 2, Keys::Short),
            (DType::F16, 128, true, true) if short => form!("f16_short", 2, Keys::Short),
            (DType::Bf16, 128, true, true) => form!("bf16_128_2", 2, chunks(16)),
            (DType::Bf16, 128, true, false) => form!("bf16_128_1", 1, chunks(8)),
            (DType::Bf16, 64, true, _) => form!("bf16_64_1", 1, chunks(16)),
            (DType::Bf16, ..) => form!("bf16_any", 1, single(1, 0)),
            (DType::F16, 128, true, true) => form!("f16_128_2", 2, chunks(16)),
            (DType::F16, 128, true, false) => form!("f16_128_1", 1, chunks(8)),
            (DType::F16, 64, true, _) => form!("f16_64_1", 1, chunks(16)),
            (DType::F16, ..) => form!("f16_any", 1, single(1, 0)),
            (_, 128, true, true) => form!("f32_128_2", 2, single(1, 1024)),
            (_, 128, true, false) => form!("f32_128_1", 1, single(1, 1024)),
            (_, 64, true, _) => form!("f32_64_1", 1, single(2, 1024)),
            _ => form!("f32_any", 1, single(1, 0)),
        }
    }
}

/// How attention is launched. The streams that a row's keys are divided into follow from the cache alone; how many
/// warps and blocks they are spread over, from the rows too.
#[derive(Debug, PartialEq)]
pub(super) struct Plan {
    pub(super) form: Form,
    /// Blocks of all rows.
    pub(super) blocks: usize,
    /// Warps of a block.
    pub(super) warps: usize,
    /// Blocks that share a row's keys.
    pub(super) cluster: usize,
    /// Streams of a row.
    pub(super) streams: usize,
    /// Batches of keys and values that a warp has on their way; 0: as many as its registers hold.
    pub(super) depth: usize,
    /// Bytes of shared memory.
    pub(super) shared: usize,
}

impl Plan {
    pub(super) fn new(
        cache: &KvCache,
        heads: usize,
        window: Option<usize>,
        rows: usize,
        target: Target,
    ) -> Self {
        check_head(cache);
        let form = Form::new(cache, heads);
        let units = rows * (heads / form.group);
        let keys = capacity(cache).min(window.unwrap_or(usize::MAX));
        match form.keys {
            Keys::Chunks { warps } => Self::of_chunks(form, warps, cache.head_dim, units, keys, target),
            Keys::Single { streams, staging } => {
                Self::of_single(form, [streams, staging], cache.head_dim, units, keys, target)
            }
            Keys::Short => Self {
                form,
                blocks: units,
                warps: MIN_WARPS,
                cluster: 1,
                streams: 1,
                depth: 0,
                shared: 0,
            },
        }
    }

    /// Blocks that share the keys of each of `units`: as many as there are multiprocessors for.
    fn cluster(units: usize, target: Target) -> usize {
        let fits = |cluster: &usize| target.arch >= 90 && units * cluster <= target.sms as usize;
        [4, 2].into_iter().find(fits).unwrap_or(1)
    }

    fn of_chunks(form: Form, most: usize, dim: usize, units: usize, keys: usize, target: Target) -> Self {
        let streams = keys.div_ceil(CHUNK).next_power_of_two().min(MAX_STREAMS);
        let cluster = match streams {
            MAX_STREAMS => Self::cluster(units, target),
            _ => 1,
        };
        // Blocks of a cluster have a warp for each stream.
        let warps = if cluster > 1 {
            streams / cluster
        } else {
            // All blocks at a time, if there are registers for them.
            let in_one = units.div_ceil(target.sms as usize).next_power_of_two();
            (RESIDENT_WARPS / in_one).clamp(MIN_WARPS, streams.clamp(MIN_WARPS, most))
        };
        // As attend() of attention.cu lays it out: a barrier, sums of values, parts of queries, own heads, scores and
        // sums of weights.
        let heads_held = streams * form.group;
        let shared = 16 + 4 * heads_held * dim + 2 * (7 * (dim + 32) + 2 * dim) + 8 * heads_held;
        Self {
            blocks: units * cluster,
            warps,
            cluster,
            streams,
            depth: 0,
            shared,
            form,
        }
    }

    fn of_single(
        form: Form,
        [streams_in_warp, staging]: [usize; 2],
        dim: usize,
        units: usize,
        keys: usize,
        target: Target,
    ) -> Self {
        let (warps, cluster, depth) = if keys <= FEW_KEYS {
            let one_batch = FEW_WARPS * streams_in_warp * BATCH;
            (FEW_WARPS, 1, if keys <= one_batch { 1 } else { 2 })
        } else {
            // One multiprocessor alone reads a long past slowly. Fewer warps in a block leave room for more of the
            // past to be on its way.
            let cluster = Self::cluster(units, target);
            (MANY_WARPS / cluster, cluster, cluster)
        };
        let heads_held = warps * streams_in_warp * form.group;
        let merging = heads_held * (dim + 2) + (form.group + 2) * dim;
        Self {
            blocks: units * cluster,
            warps,
            cluster,
            streams: warps * cluster * streams_in_warp,
            depth,
            shared: 4 * (warps * depth * staging + merging),
            form,
        }
    }

    /// What the kernels take of the plan.
    pub(super) fn args(&self, args: Args) -> Args {
        match self.form.keys {
            Keys::Chunks { .. } => args.int(self.streams).int(self.cluster),
            Keys::Single { .. } => args.int(self.cluster).int(self.depth),
            Keys::Short => args,
        }
    }

    pub(super) fn launch(&self, kernel: &'static str, args: Args, out: &mut Vec<Launch>) {
        launch(
            kernel,
            self.blocks,
            32 * self.warps as u32,
            self.shared as u32,
            self.cluster as u32,
            args,
            out,
        );
    }
}

#[cfg(test)]
mod tests;
