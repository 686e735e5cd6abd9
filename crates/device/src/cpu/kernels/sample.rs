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
mod tests {
    use super::*;

    const B: f32 = f32::NEG_INFINITY;

    fn plain() -> SampleRow {
        SampleRow {
            temperature: 0.0,
            top_p: 1.0,
            repetition_penalty: 1.0,
            top_k: 0,
            seed_lo: 1,
            seed_hi: 2,
            frame: 3,
            eos: -1,
            ban_eos: 0,
            slot: 0,
            reserved: [0; 2],
        }
    }

    fn all_live(n: usize) -> Rules {
        Rules {
            live: n,
            extra_live: -1,
            group: 0,
        }
    }

    /// Token and processed scores.
    fn run(z: &[f32], rules: Rules, row: SampleRow, seen: &[u32]) -> (u32, Vec<f32>) {
        let mut z = z.to_vec();
        let token = sample(&mut z, rules, &row, Some(seen), &mut Room::default()).expect("a token");
        (token, z)
    }

    #[test]
    fn philox_known_answers() {
        // From the Random123 distribution's kat_vectors, philox4x32 with 10 rounds.
        assert_eq!(
            philox4x32_10([0; 4], [0; 2]),
            [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]
        );
        assert_eq!(
            philox4x32_10([u32::MAX; 4], [u32::MAX; 2]),
            [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]
        );
        assert_eq!(
            philox4x32_10(
                [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
                [0xa409_3822, 0x299f_31d0]
            ),
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
        );
    }

    #[test]
    fn processors_run_in_their_order() {
        let row = SampleRow {
            temperature: 0.5,
            repetition_penalty: 2.0,
            top_k: 3,
            eos: 5,
            ban_eos: 1,
            ..plain()
        };
        let rules = Rules {
            live: 5,
            extra_live: 6,
            group: 0,
        };
        // Penalised: token 0 from 4 to 2, token 1 from -1 to -2. Banned: 5 (the end token, in this step) and
        // 7 (not live); 6 is the extra live token. Then divided by 0.5; the third highest is 3.
        let z = [4.0, -1.0, 3.0, 1.5, 0.0, 9.0, 1.0, 9.0];
        let (_, scores) = run(&z, rules, row, &[0b11]);
        assert_eq!(scores, [4.0, B, 6.0, 3.0, B, B, B, B]);
        let (_, scores) = run(&z, rules, SampleRow { top_k: 0, ..row }, &[0b11]);
        assert_eq!(scores, [4.0, -4.0, 6.0, 3.0, 0.0, B, 2.0, B]);
        let (token, _) = run(
            &z,
            rules,
            SampleRow {
                ban_eos: 0,
                temperature: 0.0,
                ..row
            },
            &[0],
        );
        assert_eq!(token, 5, "the row's end token is live beyond the range");
    }

    #[test]
    fn greedy_takes_the_lowest_of_equals() {
        let (token, scores) = run(
            &[1.0, 5.0, 5.0, 2.0],
            all_live(4),
            SampleRow { top_k: 1, ..plain() },
            &[0],
        );
        assert_eq!((token, scores), (1, vec![1.0, 5.0, 5.0, 2.0]));
    }

    #[test]
    fn ties_with_the_kth_stay() {
        let row = SampleRow {
            temperature: 1.0,
            top_k: 2,
            ..plain()
        };
        let (_, scores) = run(&[3.0, 2.0, 2.0, 1.0, 2.0], all_live(5), row, &[0]);
        assert_eq!(scores, [3.0, 2.0, 2.0, B, 2.0]);
    }

    #[test]
    fn top_p_keeps_the_smallest_set_that_reaches_it() {
        let z: Vec<f32> = [0.2f32, 0.4, 0.1, 0.3].iter().map(|p| p.ln()).collect();
        for (top_p, kept) in [(0.01, 1), (0.39, 1), (0.41, 2), (0.69, 2), (0.71, 3), (0.95, 4)] {
            let row = SampleRow {
                temperature: 1.0,
                top_p,
                ..plain()
            };
            let (_, scores) = run(&z, all_live(4), row, &[0]);
            let live: Vec<usize> = (0..4).filter(|&i| scores[i] > B).collect();
            let mut want = [1, 3, 0, 2][..kept].to_vec();
            want.sort_unstable();
            assert_eq!(live, want, "top_p {top_p}");
        }
        let row = SampleRow {
            temperature: 1.0,
            top_p: 0.5,
            ..plain()
        };
        let (_, scores) = run(&[1.0; 4], all_live(4), row, &[0]);
        assert_eq!(scores, [1.0, 1.0, B, B], "of equals the lower ids stay");
    }

    #[test]
    fn tokens_follow_the_distribution_and_the_counter_alone() {
        let p = [0.5f32, 0.0, 0.3, 0.2];
        let z: Vec<f32> = p.iter().map(|p| p.ln()).collect();
        let mut counts = [0u32; 4];
        let n = 20_000;
        for frame in 0..n {
            let row = SampleRow {
                temperature: 1.0,
                frame,
                ..plain()
            };
            let (token, _) = run(&z, all_live(4), row, &[0]);
            assert_eq!(token, run(&z, all_live(4), row, &[0]).0);
            counts[token as usize] += 1;
        }
        for (count, p) in counts.iter().zip(p) {
            let off = f64::from(*count) / f64::from(n) - f64::from(p);
            assert!(off.abs() < 0.015, "{counts:?}");
        }
    }

    #[test]
    fn nothing_to_choose_is_an_error() {
        let mut room = Room::default();
        let e = sample(&mut [B, B], all_live(2), &plain(), None, &mut room).unwrap_err();
        assert!(e.contains("banned"), "{e}");
        let e = sample(&mut [0.0, f32::NAN], all_live(2), &plain(), None, &mut room).unwrap_err();
        assert!(e.contains("not a number"), "{e}");
    }
}
