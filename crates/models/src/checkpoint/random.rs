//! Generated weights: a pure function of seed, tensor name and element index, so that any machine makes the
//! same true-size checkpoint without a download. `make_golden.py` beside the golden data is the definition.
//!
//! key = FNV-1a-64 of `"{seed}/{name}"`; the element's word is splitmix64 of `key + (i + 1) * golden ratio`;
//! u = its top 24 bits scaled to [-1, 1); value = offset + amplitude * u, both f32, then rounded to the
//! element type.

use half::bf16;
use laneway_device::DType;

use super::parallel::fill;

/// Bytes of one tensor.
pub(crate) fn tensor(seed: u64, name: &str, shape: &[usize], dtype: DType) -> Vec<u8> {
    let values = Values::new(seed, name, shape);
    // Codebook sums are scaled by how often each entry was used, as in a trained checkpoint.
    let usage: Option<Vec<f32>> = name
        .strip_suffix("embedding_sum")
        .or_else(|| name.strip_suffix("embed_sum"))
        .map(|prefix| {
            let usage = Values::new(seed, &format!("{prefix}cluster_usage"), &shape[..1]);
            (0..shape[0]).map(|i| usage.at(i).max(1e-5)).collect()
        });
    let width = shape.get(1).copied().unwrap_or(1);
    let value = |i: usize| match &usage {
        Some(usage) => values.at(i) * usage[i / width],
        None => values.at(i),
    };
    let len = shape.iter().product();
    match dtype {
        DType::Bf16 => fill(len, |i| bf16::from_f32(value(i)).to_le_bytes()),
        _ => fill(len, |i| value(i).to_le_bytes()),
    }
}

/// Elements of one tensor before they are rounded to its type.
struct Values {
    key: u64,
    offset: f32,
    amplitude: f32,
    /// One codebook entry that was never used, so that the lower bound on usage matters.
    unused: Option<usize>,
}

impl Values {
    fn new(seed: u64, name: &str, shape: &[usize]) -> Self {
        let (offset, amplitude) = rule(name, shape);
        Self {
            key: fnv1a64(format!("{seed}/{name}").as_bytes()),
            offset,
            amplitude,
            unused: name.ends_with("cluster_usage").then_some(7),
        }
    }

    fn at(&self, i: usize) -> f32 {
        if self.unused == Some(i) {
            return 0.0;
        }
        if self.amplitude == 0.0 {
            return self.offset;
        }
        let value = self.amplitude * uniform(self.key, i as u64 + 1);
        // Adding no offset would turn -0 into 0.
        if self.offset == 0.0 {
            value
        } else {
            self.offset + value
        }
    }
}

fn fnv1a64(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xCBF2_9CE4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01B3)
    })
}

fn uniform(key: u64, i: u64) -> f32 {
    let mut z = key.wrapping_add(i.wrapping_mul(0x9E37_79B9_7F4A_7C15));
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^= z >> 31;
    (z >> 40) as f32 * (1.0 / 8_388_608.0) - 1.0
}

/// Offset and amplitude of a tensor.
fn rule(name: &str, shape: &[usize]) -> (f32, f32) {
    let r3 = 3f64.sqrt();
    let last = name.rsplit('.').next().unwrap_or(name);
    let amplitude = match last {
        _ if name.ends_with("cluster_usage") => return (5.5, 4.5),
        "embedding_sum" | "embed_sum" => r3 * 0.5,
        "initialized" => return (1.0, 0.0),
        "alpha" | "beta" => 0.5,
        "scale" | "gamma" => return (0.4, 0.1),
        "bias" => 0.1,
        _ if shape.len() == 1 => return (1.0, 0.2),
        _ if name.contains("text_embedding") => r3,
        _ if name.contains("codec_embedding") => r3 * 0.5,
        _ if name.contains("codec_head") || name.contains("lm_head") => r3 * 3.0 / (shape[1] as f64).sqrt(),
        _ => weight_amplitude(name, shape, r3),
    };
    (0.0, amplitude as f32)
}

fn weight_amplitude(name: &str, shape: &[usize], r3: f64) -> f64 {
    let mut fan_in: usize = shape[1..].iter().product();
    let mut gain = 1.0;
    if name.starts_with("decoder.") {
        let latent_upsampling = name.contains(".upsample.");
        if latent_upsampling && name.ends_with(".0.conv.weight") || name.ends_with(".block.1.conv.weight") {
            // A transposed convolution [in, out, k]: each output sees in * k / stride taps.
            let stride = if latent_upsampling { shape[2] } else { shape[2] / 2 };
            fan_in = shape[0] * shape[2] / stride;
        } else if name.ends_with("decoder.6.conv.weight") {
            gain = 0.12;
        } else if name.contains(".block.") && name.contains(".conv2.") {
            gain = 0.35;
        }
    }
    if name.starts_with("encoder.encoder.layers") || name.starts_with("speaker_encoder") {
        gain = 1.4;
    }
    r3 * gain / (fan_in as f64).sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::parallel::ELEMENTS_PER_THREAD;

    #[test]
    fn the_documented_check_values_come_out() {
        let key = fnv1a64(b"7/talker.model.norm.weight");
        assert_eq!(key, 0x1aeb_5d10_f74d_9137);
        let first: Vec<f32> = (1..=4).map(|i| uniform(key, i)).collect();
        assert_eq!(first, [-0.057_558_894, -0.547_684_55, 0.407_955_4, 0.871_623_75]);
    }
    #[test]
    fn a_tensor_made_on_several_threads_has_no_seams() {
        let shape = [3 * ELEMENTS_PER_THREAD / 1000 + 1, 1000];
        let values = Values::new(7, "w.weight", &shape);
        let data = tensor(7, "w.weight", &shape, DType::F32);
        let floats: Vec<f32> = data
            .as_chunks::<4>()
            .0
            .iter()
            .map(|b| f32::from_le_bytes(*b))
            .collect();
        assert_eq!(floats.len(), shape[0] * shape[1]);
        assert!(floats.iter().enumerate().all(|(i, value)| *value == values.at(i)));
        assert_ne!(floats[0], floats[1]);
    }
}
