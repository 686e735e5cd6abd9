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
