//! Signals that more than one test is made of.

/// A sine of half of full scale.
pub(crate) fn sine(hertz: f32, sample_rate: u32, n_samples: usize) -> Vec<f32> {
    let step = f64::from(hertz) / f64::from(sample_rate) * std::f64::consts::TAU;
    (0..n_samples)
        .map(|i| (i as f64 * step).sin() as f32 * 0.5)
        .collect()
}

pub(crate) fn rms(samples: &[f32]) -> f32 {
    (samples.iter().map(|sample| sample * sample).sum::<f32>() / samples.len() as f32).sqrt()
}

/// Cut into chunks of these sizes, over and over.
pub(crate) fn cut<'a>(mut samples: &'a [f32], sizes: &[usize]) -> Vec<&'a [f32]> {
    let mut chunks = Vec::new();
    for size in sizes.iter().cycle() {
        if samples.is_empty() {
            break;
        }
        let (chunk, rest) = samples.split_at(samples.len().min(*size));
        chunks.push(chunk);
        samples = rest;
    }
    chunks
}
