//! Logits processors and the choice of a token.

use crate::op::SampleRow;

/// What all rows of a step have in common, see [`crate::op::Sample`].
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rules {
    pub(crate) live: usize,
    pub(crate) extra_live: i32,
    pub(crate) group: u32,
}

/// Working memory of [`sample`].
#[derive(Default)]
pub(crate) struct Room {
    live: Vec<f32>,
    order: Vec<u32>,
}

/// Process the logits in `z` in place (banned: -inf) and choose a token. `seen` is the row's bit set.
///
/// # Errors
/// When no token is left, or a logit is not a number.
pub(crate) fn sample(
    z: &mut [f32],
    rules: Rules,
    row: &SampleRow,
    seen: Option<&[u32]>,
    room: &mut Room,
) -> Result<u32, String> {
    if let Some(seen) = seen
        && row.repetition_penalty != 1.0
    {
        penalise(z, seen, row.repetition_penalty);
    }
    ban(z, rules, row);
    if row.temperature > 0.0 {
        for z in z.iter_mut() {
            *z /= row.temperature;
        }
        if let Ok(k) = usize::try_from(row.top_k)
            && k > 0
        {
            keep_top_k(z, k, &mut room.live);
        }
        if row.top_p < 1.0 {
            keep_top_p(z, row.top_p, &mut room.order);
        }
    }
    let seed = [row.seed_lo, row.seed_hi];
    let mut best: Option<(u32, f64)> = None;
    for (id, &z) in (0u32..).zip(z.iter()) {
        if z == f32::NEG_INFINITY {
            continue;
        }
        let mut score = f64::from(z);
        if row.temperature > 0.0 {
            score += gumbel(seed, row.frame, rules.group, id);
        }
        if score.is_nan() {
            return Err(format!("the logit of token {id} is not a number"));
        }
        if best.is_none_or(|(_, best)| score > best) {
            best = Some((id, score));
        }
    }
    best.map(|(id, _)| id)
        .ok_or_else(|| "every token is banned".to_owned())
}

/// Repetition penalty over a set of tokens.
fn penalise(z: &mut [f32], seen: &[u32], penalty: f32) {
    for (word, &bits) in seen.iter().enumerate() {
        let mut bits = bits;
        while bits != 0 {
            let id = word * 32 + bits.trailing_zeros() as usize;
            bits &= bits - 1;
            if let Some(z) = z.get_mut(id) {
                *z = if *z < 0.0 { *z * penalty } else { *z / penalty };
            }
        }
    }
}

/// Ban what is not live, and the end token where the row says so.
fn ban(z: &mut [f32], rules: Rules, row: &SampleRow) {
    let eos = usize::try_from(row.eos).ok();
    let extra = usize::try_from(rules.extra_live).ok();
    let live = rules.live.min(z.len());
    for (id, z) in z.iter_mut().enumerate().skip(live) {
        if Some(id) != eos && Some(id) != extra {
            *z = f32::NEG_INFINITY;
        }
    }
    if row.ban_eos != 0
        && let Some(z) = eos.and_then(|eos| z.get_mut(eos))
    {
        *z = f32::NEG_INFINITY;
    }
}

/// Ban what is below the k-th score; ties with it stay.
fn keep_top_k(z: &mut [f32], k: usize, live: &mut Vec<f32>) {
    live.clear();
    live.extend(z.iter().filter(|z| **z != f32::NEG_INFINITY));
    if live.len() <= k {
        return;
    }
    let (_, threshold, _) = live.select_nth_unstable_by(k - 1, |a, b| b.total_cmp(a));
    for z in z.iter_mut() {
        if *z < *threshold {
            *z = f32::NEG_INFINITY;
        }
    }
}

/// Ban what is outside the smallest set of the most probable tokens that reaches `top_p`; of equals the lower
/// id is taken first. At least one stays.
fn keep_top_p(z: &mut [f32], top_p: f32, order: &mut Vec<u32>) {
    order.clear();
    order.extend(
        (0u32..)
            .zip(z.iter())
            .filter(|(_, z)| **z != f32::NEG_INFINITY)
            .map(|(id, _)| id),
    );
    order.sort_unstable_by(|&a, &b| z[b as usize].total_cmp(&z[a as usize]).then(a.cmp(&b)));
    let Some(&first) = order.first() else { return };
    let max = f64::from(z[first as usize]);
    let weight = |id: u32| (f64::from(z[id as usize]) - max).exp();
    let target = f64::from(top_p) * order.iter().map(|&id| weight(id)).sum::<f64>();
    let mut reached = 0.0;
    let kept = order
        .iter()
        .position(|&id| {
            reached += weight(id);
            reached >= target
        })
        .map_or(order.len(), |last| last + 1);
    for &id in &order[kept..] {
        z[id as usize] = f32::NEG_INFINITY;
    }
}

/// Gumbel noise of one token.
fn gumbel(seed: [u32; 2], frame: u32, group: u32, id: u32) -> f64 {
    let word = philox4x32_10([id, frame, group, 0], seed)[0];
    let u = (f64::from(word) + 0.5) * 2f64.powi(-32);
    -(-u.ln()).ln()
}

/// The counter-based generator Philox4x32 with ten rounds (Salmon et al., 2011).
fn philox4x32_10(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    let wide = |a: u32, b: u32| {
        let product = u64::from(a) * u64::from(b);
        ((product >> 32) as u32, product as u32)
    };
    for _ in 0..10 {
        let (high0, low0) = wide(0xD251_1F53, counter[0]);
        let (high1, low1) = wide(0xCD9E_8D57, counter[2]);
        counter = [
            high1 ^ counter[1] ^ key[0],
            low1,
            high0 ^ counter[3] ^ key[1],
            low0,
        ];
        key = [key[0].wrapping_add(0x9E37_79B9), key[1].wrapping_add(0xBB67_AE85)];
    }
    counter
}

#[cfg(test)]
mod tests;
