use super::*;
use crate::qwen3_tts::test_support::{Golden, assert_close};

#[test]
fn spectrograms_agree_with_the_reference() {
    let mel = MelSpectrogram::new(128);
    let tiny = Golden::open("tiny/audio_frontend");
    for clip in ["short", "long"] {
        let wav = tiny.floats(&format!("{clip}/wav"));
        let want = tiny.time_major(&format!("{clip}/mel"));
        assert_eq!(mel_frames(wav.len()) * 128, want.len());
        assert_close(clip, &mel.compute(&wav), &want, 1e-3);
    }
}

#[test]
fn a_tone_rises_in_its_own_band() {
    let tone = |hz: f64| -> Vec<f32> {
        (0..24_000)
            .map(|i| (2.0 * std::f64::consts::PI * hz * f64::from(i) / SAMPLE_RATE_HZ).sin() as f32)
            .collect()
    };
    let mel = MelSpectrogram::new(128);
    for hz in [200.0, 1000.0, 4000.0] {
        let frames = mel.compute(&tone(hz));
        let middle = &frames[frames.len() / 256 * 128..][..128];
        let loudest = (0..128).max_by(|a, b| middle[*a].total_cmp(&middle[*b])).unwrap();
        let expected = hz_to_mel(hz) / hz_to_mel(HIGHEST_HZ) * 129.0 - 1.0;
        assert!(
            (loudest as f64 - expected).abs() <= 1.5,
            "{hz} Hz is loudest in band {loudest}, should be near {expected}"
        );
    }
}

#[test]
fn the_scale_is_its_own_inverse() {
    for hz in [0.0, 440.0, 999.9, 1000.0, 7654.3, 12_000.0] {
        assert!((mel_to_hz(hz_to_mel(hz)) - hz).abs() < 1e-6, "{hz}");
    }
}
