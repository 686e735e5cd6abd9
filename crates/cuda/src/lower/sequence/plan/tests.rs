use laneway_device::DType;

use super::super::tests::{ADA, HOPPER, cache};
use super::*;
use crate::lower::testing::view;

fn plan(cache: &KvCache, window: Option<usize>, rows: usize, target: Target) -> Plan {
    Plan::new(cache, 16, window, rows, target)
}

/// The same cache, of elements of 16 bits.
fn half(blocks: usize, kv_heads: usize, head_dim: usize) -> KvCache {
    let cache = cache(blocks, kv_heads, head_dim);
    let len = cache.pool.len;
    KvCache {
        pool: view(DType::Bf16, len),
        ..cache
    }
}

const TARGETS: [Target; 3] = [HOPPER, ADA, Target { sms: 16, ..HOPPER }];
const ROWS: [usize; 9] = [1, 2, 4, 8, 9, 33, 64, 128, 1000];

#[test]
fn the_streams_of_a_row_depend_on_the_cache_alone() {
    for (blocks, window, singles, chunks) in [
        (1, None, 4, 1),
        (2, None, 4, 2),
        (8, None, 4, 8),
        (9, None, 16, 16),
        (64, None, 16, 16),
        (64, Some(72), 4, 8),
    ] {
        for (cache, streams) in [(cache(blocks, 8, 128), singles), (half(blocks, 8, 128), chunks)] {
            for target in TARGETS {
                for rows in ROWS {
                    let plan = plan(&cache, window, rows, target);
                    let what = format!("{blocks} blocks, {rows} rows, {target:?}: {plan:?}");
                    assert_eq!(plan.streams, streams, "{what}");
                    assert_eq!(plan.blocks, rows * 8 * plan.cluster, "{what}");
                    if plan.cluster > 1 && plan.depth == 0 {
                        assert_eq!(plan.warps * plan.cluster, streams, "{what}");
                    }
                    assert!(
                        (MIN_WARPS..=16).contains(&plan.warps),
                        "a block has at most 512 threads: {what}"
                    );
                }
            }
        }
    }
}

#[test]
fn blocks_share_a_long_past_while_multiprocessors_are_idle() {
    for long in [cache(64, 8, 128), half(64, 8, 128)] {
        for (rows, cluster) in [(1, 4), (4, 4), (5, 2), (8, 2), (9, 1), (128, 1)] {
            assert_eq!(plan(&long, None, rows, HOPPER).cluster, cluster, "{rows} rows");
            assert_eq!(
                plan(&long, None, rows, ADA).cluster,
                1,
                "no clusters before Hopper"
            );
        }
    }
    assert_eq!(plan(&cache(1, 8, 128), None, 1, HOPPER).cluster, 1);
    assert_eq!(plan(&half(1, 8, 128), None, 1, HOPPER).cluster, 1);
}

#[test]
fn fewer_warps_have_more_batches_on_their_way() {
    let long = cache(64, 8, 128);
    for (rows, depth) in [(1, 4), (8, 2), (128, 1)] {
        let plan = plan(&long, None, rows, HOPPER);
        assert_eq!(plan.depth, depth, "{rows} rows");
        assert_eq!(
            plan.warps * plan.depth,
            16,
            "as much shared memory for {rows} rows as for one"
        );
    }
    // 16 keys are one batch of each stream, 72 in twice as many streams are not.
    assert_eq!(plan(&cache(1, 8, 128), None, 1, HOPPER).depth, 1);
    assert_eq!(plan(&cache(6, 16, 64), Some(72), 1, HOPPER).depth, 2);
}

#[test]
fn many_rows_have_few_warps_each() {
    let long = half(64, 8, 128);
    for (rows, warps) in [(1, 4), (8, 8), (16, 16), (32, 8), (64, 4), (1000, 4)] {
        assert_eq!(plan(&long, None, rows, HOPPER).warps, warps, "{rows} rows");
    }
    let unshared = half(64, 16, 128);
    assert_eq!(
        plan(&unshared, None, 8, HOPPER).warps,
        8,
        "its kernel takes no more"
    );
    let short = half(1, 8, 128);
    assert_eq!(
        plan(&short, None, 1, HOPPER).warps,
        MIN_WARPS,
        "16 keys are one chunk"
    );
}

#[test]
fn heads_of_any_shape_find_a_form() {
    let of = |cache: &KvCache| Form::new(cache, 16);
    let wide = Keys::Single {
        streams: 1,
        staging: 1024,
    };
    let any = || Keys::Single {
        streams: 1,
        staging: 0,
    };
    assert_eq!(of(&cache(1, 8, 128)), form!("f32_128_2", 2, wide));
    assert_eq!(of(&cache(1, 16, 128)).attention, "attention_f32_128_1");
    assert_eq!(of(&cache(1, 16, 64)).attention, "attention_f32_64_1");
    assert_eq!(of(&cache(1, 4, 8)), form!("f32_any", 1, any()));
    let mut shifted = cache(1, 8, 128);
    shifted.k_offset = 2;
    assert_eq!(of(&shifted), form!("f32_any", 1, any()), "no 16-byte loads there");
    shifted.k_offset = 0;
    shifted.pool = shifted.pool.slice(1, shifted.pool.len - 1);
    assert_eq!(of(&shifted), form!("f32_any", 1, any()), "nor there");

    let chunks = || Keys::Chunks { warps: 16 };
    assert_eq!(of(&half(2, 8, 128)), form!("bf16_128_2", 2, chunks()));
    assert_eq!(of(&half(1, 8, 128)), form!("bf16_short", 2, Keys::Short));
    let mut ring = half(1, 8, 128);
    ring.ring = true;
    assert_eq!(
        of(&ring),
        form!("bf16_128_2", 2, chunks()),
        "what wraps round has any positions"
    );
    let mut long = half(1, 8, 128);
    long.page_size += 1;
    assert_eq!(of(&long), form!("bf16_128_2", 2, chunks()), "17 keys");
    assert_eq!(
        of(&half(1, 16, 128)),
        form!("bf16_128_1", 1, Keys::Chunks { warps: 8 })
    );
    assert_eq!(of(&half(1, 16, 64)), form!("bf16_64_1", 1, chunks()));
    assert_eq!(of(&half(1, 4, 8)), form!("bf16_any", 1, any()));
    let mut shifted = half(1, 8, 128);
    shifted.v_offset += 4;
    assert_eq!(of(&shifted), form!("bf16_any", 1, any()), "8 bytes are no 16");
    let mut half = half(1, 16, 64);
    half.pool = view(DType::F16, half.pool.len);
    assert_eq!(of(&half), form!("f16_64_1", 1, chunks()));
}
