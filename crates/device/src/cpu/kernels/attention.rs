//! Rotary positions, the key/value cache and attention over it.
//!
//! A row's output depends on its query, its position and the cache alone: scores are dot products in the lane
//! pattern of [`super::math::dot`], the maximum and the sum run over keys counted from the oldest visible one,
//! and values are added in that order.

use super::math::{chunks, exp};
use super::norm::rms_norm;
use super::simd::{Kernel, LANES, Simd};

/// See [`crate::op::RopeTable`]. Sine and cosine are of the f32 angle, computed in f64: once a step.
pub(crate) fn rope_table(positions: &[i32], inv_freq: &[f32], out: &mut [f32]) {
    let half = inv_freq.len();
    for (&position, out) in positions.iter().zip(out.chunks_exact_mut(2 * half)) {
        let (cos, sin) = out.split_at_mut(half);
        for i in 0..half {
            let angle = f64::from(position as f32 * inv_freq[i]);
            cos[i] = angle.cos() as f32;
            sin[i] = angle.sin() as f32;
        }
    }
}

/// Where positions lie in the pool, see [`crate::op::KvCache`].
#[derive(Clone, Copy)]
pub(crate) struct Layout<'a> {
    pub(crate) page_stride: usize,
    pub(crate) k_offset: usize,
    pub(crate) v_offset: usize,
    pub(crate) page_size: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) table: &'a [i32],
    pub(crate) blocks_per_sequence: usize,
    pub(crate) ring: bool,
    /// Elements of the pool.
    pub(crate) pool_len: usize,
}

/// Positions side by side in the pool.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Span {
    /// Element of the first position, less the offset of keys or values.
    start: usize,
    positions: usize,
}

impl Layout<'_> {
    fn width(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// The positions from `position` to the end of its page or `limit` (exclusive).
    fn span(&self, sequence: usize, position: usize, limit: usize) -> Result<Span, String> {
        let capacity = self.blocks_per_sequence * self.page_size;
        let i = if self.ring { position % capacity } else { position };
        let column = i / self.page_size;
        if column >= self.blocks_per_sequence {
            return Err(format!(
                "position {position} is past the {capacity} of a sequence"
            ));
        }
        let cell = sequence * self.blocks_per_sequence + column;
        let block = *self.table.get(cell).ok_or_else(|| {
            format!(
                "sequence {sequence} is past the block table of {} cells",
                self.table.len()
            )
        })?;
        let inside = i % self.page_size;
        let end = self.k_offset.max(self.v_offset) + self.page_size * self.width();
        let base = usize::try_from(block)
            .ok()
            .map(|block| block * self.page_stride)
            .filter(|base| base + end <= self.pool_len)
            .ok_or_else(|| {
                format!("sequence {sequence} position {position}: block {block} is not in the pool")
            })?;
        Ok(Span {
            start: base + inside * self.width(),
            positions: (self.page_size - inside).min(limit - position),
        })
    }
}

/// See [`crate::op::QkvRope`].
pub(crate) struct QkvRope<'a> {
    pub(crate) qkv: &'a [f32],
    pub(crate) heads: usize,
    pub(crate) q_norm: Option<&'a [f32]>,
    pub(crate) k_norm: Option<&'a [f32]>,
    pub(crate) eps: f32,
    pub(crate) cos_sin: &'a [f32],
    pub(crate) sequences: &'a [i32],
    pub(crate) positions: &'a [i32],
    pub(crate) layout: Layout<'a>,
    pub(crate) pool: &'a mut [f32],
    pub(crate) q_out: &'a mut [f32],
}

impl Kernel for QkvRope<'_> {
    type Output = Result<(), String>;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> Result<(), String> {
        let layout = self.layout;
        let dim = layout.head_dim;
        let (q_width, kv_width) = (self.heads * dim, layout.width());
        let rows = self.qkv.chunks_exact(q_width + 2 * kv_width);
        for (r, (row, q_out)) in rows.zip(self.q_out.chunks_exact_mut(q_width)).enumerate() {
            let Some((sequence, position)) = place(self.sequences[r], self.positions[r]) else {
                q_out.fill(0.0);
                continue;
            };
            let span = layout.span(sequence, position, position + 1)?;
            let cos_sin = &self.cos_sin[r * dim..][..dim];
            let (q, kv) = row.split_at(q_width);
            let (k, v) = kv.split_at(kv_width);
            q_out.copy_from_slice(q);
            for head in q_out.chunks_exact_mut(dim) {
                norm_and_rotate(s, head, self.q_norm, self.eps, cos_sin);
            }
            let k_out = &mut self.pool[span.start + layout.k_offset..][..kv_width];
            k_out.copy_from_slice(k);
            for head in k_out.chunks_exact_mut(dim) {
                norm_and_rotate(s, head, self.k_norm, self.eps, cos_sin);
            }
            self.pool[span.start + layout.v_offset..][..kv_width].copy_from_slice(v);
        }
        Ok(())
    }
}

/// Sequence and position of a row; `None` for a padding row.
fn place(sequence: i32, position: i32) -> Option<(usize, usize)> {
    Some((usize::try_from(sequence).ok()?, usize::try_from(position).ok()?))
}

#[inline(always)]
fn norm_and_rotate<S: Simd>(s: S, head: &mut [f32], weight: Option<&[f32]>, eps: f32, cos_sin: &[f32]) {
    if let Some(weight) = weight {
        rms_norm(s, head, weight, eps);
    }
    let half = head.len() / 2;
    let (cos, sin) = cos_sin.split_at(half);
    let (low, high) = head.split_at_mut(half);
    for (c, n) in chunks(half) {
        let (a, b) = (s.load_part(&low[c..], n, 0.0), s.load_part(&high[c..], n, 0.0));
        let (cos, sin) = (s.load_part(&cos[c..], n, 0.0), s.load_part(&sin[c..], n, 0.0));
        s.store_part(s.sub(s.mul(a, cos), s.mul(b, sin)), &mut low[c..], n);
        s.store_part(s.add(s.mul(b, cos), s.mul(a, sin)), &mut high[c..], n);
    }
}

/// See [`crate::op::Attention`].
pub(crate) struct Attention<'a> {
    pub(crate) q: &'a [f32],
    pub(crate) heads: usize,
    pub(crate) sequences: &'a [i32],
    pub(crate) positions: &'a [i32],
    pub(crate) layout: Layout<'a>,
    pub(crate) pool: &'a [f32],
    pub(crate) window: Option<usize>,
    pub(crate) out: &'a mut [f32],
    /// Room for the scores of one head, and for the pages of one row.
    pub(crate) scores: &'a mut Vec<f32>,
    pub(crate) spans: &'a mut Vec<Span>,
}

impl Kernel for Attention<'_> {
    type Output = Result<(), String>;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> Result<(), String> {
        let layout = self.layout;
        let dim = layout.head_dim;
        let width = self.heads * dim;
        let group = self.heads / layout.kv_heads;
        for (r, (q, out)) in self
            .q
            .chunks_exact(width)
            .zip(self.out.chunks_exact_mut(width))
            .enumerate()
        {
            let Some((sequence, position)) = place(self.sequences[r], self.positions[r]) else {
                out.fill(0.0);
                continue;
            };
            let first = self
                .window
                .map_or(0, |window| (position + 1).saturating_sub(window));
            self.spans.clear();
            let mut next = first;
            while next <= position {
                let span = layout.span(sequence, next, position + 1)?;
                next += span.positions;
                self.spans.push(span);
            }
            self.scores.resize(position + 1 - first, 0.0);
            let (spans, pool) = (&self.spans[..], self.pool);
            let scores = &mut self.scores[..];
            for (h, (q, out)) in q.chunks_exact(dim).zip(out.chunks_exact_mut(dim)).enumerate() {
                let head = Head {
                    pool,
                    spans,
                    width: layout.width(),
                    k: layout.k_offset,
                    v: layout.v_offset,
                    at: h / group * dim,
                };
                macro_rules! vectors {
                    ($($n:literal),*) => {
                        match (dim.div_ceil(LANES), dim % LANES) {
                            $(
                                ($n, 0) => s.vectorize(
                                    #[inline(always)]
                                    || head.attend::<S, $n, true>(s, q, scores, out),
                                ),
                                (..=$n, _) => s.vectorize(
                                    #[inline(always)]
                                    || head.attend::<S, $n, false>(s, q, scores, out),
                                ),
                            )*
                            _ => return Err(format!("head_dim {dim} is above 256")),
                        }
                    };
                }
                vectors!(1, 2, 4, 8, 16);
            }
        }
        Ok(())
    }
}

/// One query head's keys and values.
struct Head<'a> {
    pool: &'a [f32],
    spans: &'a [Span],
    /// Elements from one position to the next.
    width: usize,
    /// Offset of the layer's keys in a page.
    k: usize,
    /// Offset of the layer's values in a page.
    v: usize,
    /// First element of the head in a position.
    at: usize,
}

impl Head<'_> {
    /// Attention of one query. `N` vectors hold a head; all of them are full when `FULL`.
    #[inline(always)]
    fn attend<S: Simd, const N: usize, const FULL: bool>(
        &self,
        s: S,
        q: &[f32],
        scores: &mut [f32],
        out: &mut [f32],
    ) {
        let dim = if FULL { N * LANES } else { q.len() };
        let scale = s.splat(1.0 / (dim as f32).sqrt());
        let query = load_head::<S, N, FULL>(s, q);
        let mut rest = &mut *scores;
        for span in self.spans {
            let (now, behind) = rest.split_at_mut(span.positions);
            rest = behind;
            for (key, score) in self.positions(span, self.k).zip(now) {
                let key = load_head::<S, N, FULL>(s, &key[self.at..][..dim]);
                let mut sum = s.splat(0.0);
                for (query, key) in query.iter().zip(&key) {
                    sum = s.fma(*query, *key, sum);
                }
                *score = s.sum(sum);
            }
        }
        let inverse = softmax(s, scores, scale);
        let mut acc = [s.splat(0.0); N];
        let mut rest = &*scores;
        for span in self.spans {
            let (now, behind) = rest.split_at(span.positions);
            rest = behind;
            for (value, p) in self.positions(span, self.v).zip(now) {
                let value = load_head::<S, N, FULL>(s, &value[self.at..][..dim]);
                let p = s.splat(*p);
                for (acc, value) in acc.iter_mut().zip(&value) {
                    *acc = s.fma(p, *value, *acc);
                }
            }
        }
        for (acc, (start, n)) in acc.iter().zip(chunks(dim)) {
            s.store_part(s.mul(*acc, inverse), &mut out[start..], n);
        }
    }

    /// The positions of a span, keys or values by `offset`.
    #[inline(always)]
    fn positions(&self, span: &Span, offset: usize) -> std::slice::ChunksExact<'_, f32> {
        self.pool[span.start + offset..][..span.positions * self.width].chunks_exact(self.width)
    }
}

/// A head in vectors; lanes behind its end are zero.
#[inline(always)]
fn load_head<S: Simd, const N: usize, const FULL: bool>(s: S, head: &[f32]) -> [S::V; N] {
    let mut vectors = [s.splat(0.0); N];
    if FULL {
        for (v, x) in vectors.iter_mut().zip(head.chunks_exact(LANES)) {
            *v = s.load(x);
        }
    } else {
        for (v, (start, n)) in vectors.iter_mut().zip(chunks(head.len())) {
            *v = s.load_part(&head[start..], n, 0.0);
        }
    }
    vectors
}

/// `e^(x · scale - max)` in place, and one over the sum.
#[inline(always)]
fn softmax<S: Simd>(s: S, scores: &mut [f32], scale: S::V) -> S::V {
    let mut max = s.splat(f32::NEG_INFINITY);
    for (c, n) in chunks(scores.len()) {
        let x = s.mul(s.load_part(&scores[c..], n, f32::NEG_INFINITY), scale);
        s.store_part(x, &mut scores[c..], n);
        max = s.max(max, x);
    }
    let max = s.splat(s.max_lane(max));
    let mut total = s.splat(0.0);
    for (c, n) in chunks(scores.len()) {
        let x = s.load_part(&scores[c..], n, 0.0);
        s.store_part(exp(s, s.sub(x, max)), &mut scores[c..], n);
        total = s.add(total, s.load_part(&scores[c..], n, 0.0));
    }
    s.splat(1.0 / s.sum(total))
}

#[cfg(test)]
mod tests;
