//! Products of many rows by the warpgroup products of 9.0 (`kernels/gemm_wgmma.cu`).

use laneway_device::{View, op};

use super::{Narrow, squares};
use crate::launch::{Args, Launch};
use crate::lower::Target;
use crate::lower::kept::{Kept, ROW_BLOCK};

/// Columns of the inputs that are fetched at once.
const FETCH: usize = 128;
/// Fetches that a set of warpgroups has room for at most.
const MOST_BUFFERS: usize = 8;
/// Of the memory of a block, for barriers and the norms of its rows.
const HEAD_BYTES: usize = 512 + ROW_BLOCK * 4;
/// A product of fewer rows than its columns reads past its inputs.
const SLACK_BYTES: usize = 1024;
/// Shared memory of a block of which two fit a multiprocessor.
const HALF_SHARED: usize = 113 << 10;

/// One of the kernels: what its name says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Form {
    /// Outputs of a block.
    outputs: usize,
    /// Blocks of a cluster, which share the eight segments.
    blocks: usize,
    /// Rows of a block.
    columns: usize,
}

/// Whether a kernel is one of these.
pub(super) fn is_one(kernel: &str) -> bool {
    kernel.starts_with("gemm_warpgroup_")
}

/// Rows of a block for so many rows.
fn columns(rows: usize) -> usize {
    match rows {
        ..=16 => 16,
        17..=32 => 32,
        _ => 64,
    }
}

impl Form {
    /// For `rows` rows of a product of `n` outputs: so many blocks that all multiprocessors have work, and no more sums to
    /// send than that takes. Measured on an H200, with weights that come from memory. One row of a long product has so little
    /// else to fetch that two blocks of a multiprocessor, which ask for the next weights early, are worth their sums.
    fn new(n: usize, k: usize, rows: usize) -> Self {
        let (outputs, blocks) = match n.div_ceil(64) * rows.div_ceil(ROW_BLOCK) {
            ..=48 => (64, 4),
            49..=64 if rows == 1 && k >= 2048 => (64, 4),
            49..=96 => (64, 2),
            97..=128 => (64, 1),
            _ => (128, 1),
        };
        Self {
            outputs,
            blocks,
            columns: columns(rows),
        }
    }

    /// Sets of warpgroups of a block, which share its segments.
    fn sets(self) -> usize {
        2
    }

    /// Threads of a block: four warps for each 64 outputs of a set.
    fn threads(self) -> usize {
        self.outputs / 64 * self.sets() * 128
    }

    /// Bytes of shared memory of a block whose sets have room for `buffers` fetches each: barriers, sums that the
    /// cluster's other blocks send, the last set's tree of sums and over it the sums by rows, the other sets' trees, and
    /// the inputs.
    fn shared(self, rows: usize, buffers: usize) -> usize {
        let segments = 8 / self.blocks / self.sets();
        let pitch = self.outputs + 4;
        let received = (self.blocks - 1) * (self.columns / self.blocks) * pitch;
        let tree = segments.ilog2() as usize * (self.outputs / 64 * 128) * (self.columns / 2);
        let sums = received + tree.max(self.columns * pitch) + (self.sets() - 1) * tree;
        let inputs = self.sets() * buffers * FETCH * 2 * rows.min(ROW_BLOCK);
        (HEAD_BYTES + sums * 4).next_multiple_of(128) + inputs + SLACK_BYTES
    }

    /// Fetches that a set has room for, of `most` bytes of shared memory of a block: all that it makes if they fit, but
    /// two where all blocks begin at once only if two share a multiprocessor. `None`: not even two fit, with which a set
    /// waits for one while it works on the other.
    fn buffers(self, n: usize, k: usize, rows: usize, target: Target) -> Option<usize> {
        let chunks = k / (self.blocks * self.sets()) / FETCH;
        let all = n.div_ceil(self.outputs) * self.blocks * rows.div_ceil(self.columns);
        // Clusters of four leave some multiprocessors of a group of them out.
        let alone = target.sms as usize * if self.blocks > 2 { 10 } else { 11 } / 11;
        let least = chunks.min(2);
        let fits = |buffers: usize, bytes: usize| self.shared(rows, buffers) <= bytes;
        // 128 outputs take a multiprocessor's registers alone.
        if all > alone && self.outputs == 64 && fits(least, HALF_SHARED) {
            return Some(least);
        }
        let most = target.shared_memory().1;
        (least..=chunks.min(MOST_BUFFERS))
            .rev()
            .find(|buffers| fits(*buffers, most))
    }

    fn kernel(self, narrow: Narrow) -> &'static str {
        macro_rules! names {
            ($($outputs:literal / $blocks:literal: $($columns:literal)*;)*) => {
                match (self.outputs, self.blocks, self.columns, narrow) {
                    $($(
                        ($outputs, $blocks, $columns, Narrow::Bf16) => concat!(
                            "gemm_warpgroup_", $outputs, "_", $columns, "_", $blocks, "_bf16"
                        ),
                        ($outputs, $blocks, $columns, Narrow::F16) => concat!(
                            "gemm_warpgroup_", $outputs, "_", $columns, "_", $blocks, "_f16"
                        ),
                    )*)*
                    _ => unreachable!("{self:?} is no kernel"),
                }
            };
        }
        names! {
            64 / 4: 16 32 64;
            64 / 2: 16 32 64;
            64 / 1: 16 32 64;
            128 / 1: 16 32 64;
        }
    }
}

/// The launch of `op` on `x`, the inputs, if it is one for warpgroups. `normed`: x is the first part of this split norm;
/// `next`: to leave that of the product behind.
pub(super) fn warpgroup(
    op: &op::Gemm,
    (x, x_kept): (&View, Kept),
    (normed, next): (Option<&op::InputNorm>, Option<&op::InputNorm>),
    out_kept: Kept,
    narrow: Narrow,
    target: Target,
) -> Option<Launch> {
    // Outputs leave in fours.
    if x_kept != Kept::Blocked || !op.out_width().is_multiple_of(4) {
        return None;
    }
    let (n, k) = (op.w.n, op.w.k);
    let form = Form::new(n, k, op.rows);
    let buffers = form.buffers(n, k, op.rows, target)?;
    Some(Launch {
        kernel: form.kernel(narrow),
        grid: [
            (n.div_ceil(form.outputs) * form.blocks) as u32,
            op.rows.div_ceil(form.columns) as u32,
            1,
        ],
        block: form.threads() as u32,
        shared: form.shared(op.rows, buffers) as u32,
        cluster: form.blocks as u32,
        args: Args::new()
            .view(x)
            .optional(normed.map(|norm| squares(norm, op.rows, k)).as_ref())
            .float(normed.map_or(0.0, |norm| norm.eps))
            .view(&op.w.packed.view())
            .int(n)
            .int(k)
            .int(op.rows)
            .int(usize::from(op.gated.is_some()))
            .int(buffers)
            .optional(next.map(|norm| &norm.weight))
            .optional(next.map(|norm| &norm.scratch))
            .optional(next.map(|norm| squares(norm, op.rows, n)).as_ref())
            .optional(op.bias.as_ref())
            .optional(op.scale.as_ref())
            .view(&op.out)
            .int(op.activation as usize)
            .int(usize::from(op.accumulate))
            .int(out_kept as usize),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const H200: Target = Target { sms: 132, arch: 90 };

    #[test]
    fn forms_fill_the_multiprocessors() {
        // Rows, outputs of the matrix, outputs of a block, blocks of a cluster, rows of a block.
        for (rows, n, form) in [
            (1, 4096, (64, 4, 16)),
            (2, 4096, (64, 2, 16)),
            (9, 512, (64, 4, 16)),
            (16, 1024, (64, 4, 16)),
            (17, 2048, (64, 4, 32)),
            (32, 3072, (64, 4, 32)),
            (33, 4096, (64, 2, 64)),
            (64, 6144, (64, 2, 64)),
            (64, 8192, (64, 1, 64)),
            (9, 12288, (128, 1, 16)),
            (64, 151_936, (128, 1, 64)),
            (128, 1024, (64, 4, 64)),
            (128, 2048, (64, 2, 64)),
            (128, 4096, (64, 1, 64)),
            (128, 6144, (128, 1, 64)),
            (300, 1024, (64, 2, 64)),
            (300, 4096, (128, 1, 64)),
        ] {
            let Form {
                outputs,
                blocks,
                columns,
            } = Form::new(n, 2048, rows);
            assert_eq!((outputs, blocks, columns), form, "{rows} rows of {n} outputs");
        }
        assert_eq!(
            Form::new(4096, 1024, 1).blocks,
            2,
            "a short product has fewer sums to send"
        );
    }

    #[test]
    fn buffers_are_no_more_than_fit_and_never_one_of_several() {
        for n in [64, 1024, 2048, 3072, 4096, 6144, 8192, 12288] {
            for k in (1024..=8192).step_by(1024) {
                for rows in (9..300).step_by(7) {
                    let form = Form::new(n, k, rows);
                    let chunks = k / form.blocks / form.sets() / FETCH;
                    let buffers = form.buffers(n, k, rows, H200).unwrap();
                    let what = format!("{form:?} of {rows} rows, k {k}: {buffers}");
                    assert!(
                        (chunks.min(2)..=MOST_BUFFERS.min(chunks)).contains(&buffers),
                        "{what}"
                    );
                    assert!(form.shared(rows, buffers) <= H200.shared_memory().1, "{what}");
                    // Every form that the table names has a kernel, of both types.
                    let [bf16, f16] = [Narrow::Bf16, Narrow::F16].map(|narrow| form.kernel(narrow));
                    assert_eq!(bf16.strip_suffix("_bf16"), f16.strip_suffix("_f16"), "{what}");
                }
            }
        }
        // Outputs, k, rows: 128 clusters' blocks need halves of multiprocessors, 128 in pairs have one each.
        for (n, k, rows, buffers) in [(2048, 6144, 64, 2), (4096, 2048, 64, 4), (12288, 2048, 64, 3)] {
            assert_eq!(
                Form::new(n, k, rows).buffers(n, k, rows, H200),
                Some(buffers),
                "{n}x{k}"
            );
        }
    }

    #[test]
    fn shared_memory_is_what_the_kernel_lays_out() {
        // 64 outputs of 64 rows, four blocks: barriers and norms, 3 * 16 rows of 68 sums from the others, 64 of its own,
        // no tree, two buffers of 64 rows for each of two sets.
        let sums = (3 * 16 + 64) * 68 * 4;
        assert_eq!(
            Form::new(1024, 1024, 64).shared(64, 2),
            (768usize + sums).next_multiple_of(128) + 2 * 2 * 128 * 2 * 64 + 1024
        );
        // 128 outputs of 16 rows, one block: two levels of 8 sums of 256 threads, for each of two sets.
        let tree = 2 * 256 * 8 * 4;
        assert_eq!(
            Form::new(12288, 2048, 9).shared(9, 1),
            768 + 2 * tree + 2 * 128 * 2 * 9 + 1024
        );
    }
}
