//! What one H200 cannot go below: bytes over bandwidth or operations over arithmetic of each stage of a frame,
//! one stage behind the other. And the figures that others have published for it.

use serde::Serialize;

/// Measured large copy, bytes a second.
const BYTES_PER_SECOND: f64 = 4.3e12;
/// Dense bf16 products.
const FLOP_PER_SECOND: f64 = 790e12;
const BF16_BYTES: f64 = 2.0;
const FRAME_MS: f64 = 80.0;

const TALKER_LAYERS: f64 = 28.0;
const PREDICTOR_LAYERS: f64 = 5.0;
/// Codes of a frame that the predictor makes, one pass each.
const PASSES: f64 = 15.0;
const HEADS: f64 = 16.0;
const KV_HEADS: f64 = 8.0;
const HEAD_DIM: f64 = 128.0;
const CODEC_VOCAB: f64 = 3072.0;
const CODEBOOK: f64 = 2048.0;
const PREDICTOR_HIDDEN: f64 = 1024.0;
const PREDICTOR_INNER: f64 = 3072.0;
/// Keys and values of the codec's 8 layers over the 71 past frames of its window, 16 heads of 64.
const CODEC_KV_BYTES: f64 = 8.0 * 2.0 * 16.0 * 64.0 * 71.0 * BF16_BYTES;

/// A released size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Size {
    B0_6,
    B1_7,
}

/// Bytes moved and operations done.
#[derive(Debug, Clone, Copy, Default)]
struct Cost {
    bytes: f64,
    flop: f64,
}

/// The least that a step of a frame for every row takes on one H200.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(super) struct Limit {
    /// Tokens that each row attends over.
    pub(super) context: f64,
    pub(super) rows: usize,
    pub(super) talker_ms: f64,
    pub(super) predictor_ms: f64,
    pub(super) codec_ms: f64,
    pub(super) step_ms: f64,
    pub(super) audio_s_per_s: f64,
    /// Of it that was reached; absent where it was measured on something else.
    pub(super) fraction: Option<f64>,
}

/// Published and wanted, audio-s/s of one H200 in a closed loop.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(super) struct Figures {
    pub(super) to_beat: Option<f64>,
    pub(super) target: Option<f64>,
}

impl Size {
    /// The size that a served model's name tells.
    pub(super) fn of_model(name: &str) -> Option<Self> {
        let name = name.to_ascii_lowercase();
        match (name.contains("0.6b"), name.contains("1.7b")) {
            (true, false) => Some(Size::B0_6),
            (false, true) => Some(Size::B1_7),
            _ => None,
        }
    }

    /// Width of the Talker, and of its feed-forward layers.
    fn widths(self) -> (f64, f64) {
        match self {
            Size::B0_6 => (1024.0, 3072.0),
            Size::B1_7 => (2048.0, 6144.0),
        }
    }

    /// The limit for this many rows at this context.
    pub(super) fn limit(self, rows: usize, context: f64, reached: Option<f64>) -> Limit {
        let n = rows as f64;
        let ms = |cost: Cost| 1e3 * (cost.bytes / BYTES_PER_SECOND).max(cost.flop / FLOP_PER_SECOND);
        let talker_ms = ms(self.talker(n, context));
        let predictor_ms = ms(self.predictor(n));
        let codec_ms = ms(codec(n));
        let step_ms = talker_ms + predictor_ms + codec_ms;
        let audio_s_per_s = n * FRAME_MS / step_ms;
        Limit {
            context,
            rows,
            talker_ms,
            predictor_ms,
            codec_ms,
            step_ms,
            audio_s_per_s,
            fraction: reached.map(|reached| reached / audio_s_per_s),
        }
    }

    fn talker(self, rows: f64, context: f64) -> Cost {
        let (hidden, inner) = self.widths();
        let (products, norms) = layer(hidden, inner);
        let head = CODEC_VOCAB * hidden;
        let weights = TALKER_LAYERS * (products + norms) + hidden + head;
        let kv = TALKER_LAYERS * 2.0 * KV_HEADS * HEAD_DIM * BF16_BYTES;
        let attention = 4.0 * HEADS * HEAD_DIM * context * TALKER_LAYERS;
        Cost {
            bytes: BF16_BYTES * weights + rows * context * kv,
            flop: rows * (2.0 * (TALKER_LAYERS * products + head) + attention),
        }
    }

    fn predictor(self, rows: f64) -> Cost {
        let (hidden, _) = self.widths();
        let (products, norms) = layer(PREDICTOR_HIDDEN, PREDICTOR_INNER);
        let projection = match self {
            Size::B0_6 => 0.0,
            Size::B1_7 => PREDICTOR_HIDDEN * hidden + PREDICTOR_HIDDEN,
        };
        let heads = PASSES * CODEBOOK * PREDICTOR_HIDDEN;
        let weights =
            PASSES * (PREDICTOR_LAYERS * (products + norms) + PREDICTOR_HIDDEN + projection) + heads;
        // On average a pass sees 8 positions of the frame.
        let kv = PASSES * 8.0 * PREDICTOR_LAYERS * 2.0 * KV_HEADS * HEAD_DIM * BF16_BYTES;
        let attention = PASSES * PREDICTOR_LAYERS * 4.0 * HEADS * HEAD_DIM * 8.0;
        // The first pass has two positions.
        let positions = PASSES + 1.0;
        Cost {
            bytes: BF16_BYTES * weights + rows * kv,
            flop: rows * (2.0 * (positions * (PREDICTOR_LAYERS * products + projection) + heads) + attention),
        }
    }
}

/// Parameters of the products and of the norms of one transformer layer.
fn layer(hidden: f64, inner: f64) -> (f64, f64) {
    let attention = 2.0 * hidden * HEADS * HEAD_DIM + 2.0 * hidden * KV_HEADS * HEAD_DIM;
    (attention + 3.0 * hidden * inner, 2.0 * hidden + 2.0 * HEAD_DIM)
}

/// One part of the codec's decoder: weights, products for a frame, and what it hands on.
struct Part {
    weights: f64,
    products: f64,
    /// Values of its output for a frame.
    output: f64,
    /// Times that an activation of the output's size is read and written.
    passes: f64,
}

fn codec(rows: f64) -> Cost {
    let parts = codec_parts();
    let weights: f64 = parts.iter().map(|part| part.weights).sum();
    let products: f64 = parts.iter().map(|part| part.products).sum();
    let activations: f64 = parts
        .iter()
        .map(|part| 2.0 * BF16_BYTES * part.output * part.passes)
        .sum();
    Cost {
        bytes: BF16_BYTES * weights + rows * (CODEC_KV_BYTES + activations),
        flop: rows * 2.0 * products,
    }
}

fn codec_parts() -> Vec<Part> {
    let simple = |weights: f64, rate: f64, channels: f64| Part {
        weights,
        products: weights * rate,
        output: rate * channels,
        passes: 1.0,
    };
    let mut parts = vec![
        simple(2.0 * 256.0 * 512.0, 1.0, 512.0),
        simple(512.0 * 1024.0 * 3.0, 1.0, 1024.0),
    ];
    let layer = 7.0 * 512.0 * 1024.0;
    let projections = 2.0 * 512.0 * 1024.0;
    parts.push(Part {
        weights: 8.0 * layer + projections,
        products: 8.0 * (layer + 2.0 * 72.0 * 1024.0) + projections,
        output: 1024.0,
        passes: 1.0,
    });
    let mut rate = 1.0;
    for _ in 0..2 {
        let transposed = 1024.0 * 1024.0 * 2.0;
        let convnext = 7.0 * 1024.0 + 2.0 * 1024.0 * 4096.0;
        parts.push(Part {
            weights: transposed + convnext,
            products: (transposed + 2.0 * convnext) * rate,
            output: 2.0 * rate * 1024.0,
            passes: 1.0,
        });
        rate *= 2.0;
    }
    parts.push(simple(1024.0 * 1536.0 * 7.0, rate, 1536.0));
    let mut channels = 1536.0;
    for up in [8.0, 5.0, 4.0, 3.0] {
        let out = channels / 2.0;
        let transposed = channels * out * 2.0 * up;
        let units = 3.0 * (out * out * 7.0 + out * out);
        parts.push(Part {
            weights: transposed + units,
            products: (transposed + units * up) * rate,
            output: rate * up * out,
            passes: 3.0,
        });
        rate *= up;
        channels = out;
    }
    parts.push(simple(96.0 * 7.0, rate, 1.0));
    parts
}

/// What there is to compare a closed loop of this many callers with: the best that was published for one H200, on
/// the chain or on a lane, and what this project aims at.
pub(super) fn figures(size: Size, concurrency: usize) -> Figures {
    let (to_beat, target) = match (size, concurrency) {
        (Size::B0_6, 1) => (Some(26.2), Some(42.0)),
        (Size::B0_6, 8) => (Some(120.4), Some(260.0)),
        (Size::B0_6, 32) => (Some(328.0), Some(850.0)),
        (Size::B0_6, 64) => (None, Some(1250.0)),
        (Size::B0_6, 128) => (None, Some(1700.0)),
        (Size::B1_7, 1) => (Some(22.6), Some(32.0)),
        (Size::B1_7, 8) => (Some(110.8), Some(190.0)),
        (Size::B1_7, 32) => (Some(313.5), Some(620.0)),
        (Size::B1_7, 64) => (Some(540.9), Some(1000.0)),
        (Size::B1_7, 128) => (Some(673.1), Some(1400.0)),
        _ => (None, None),
    };
    Figures { to_beat, target }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The table of the model's description: rows, context, ms of each stage, audio-s/s.
    #[test]
    fn limits_are_those_of_the_models_description() {
        let table = [
            (Size::B0_6, 1, 200.0, [0.21, 0.56, 0.05], 97.0),
            (Size::B0_6, 8, 200.0, [0.25, 0.57, 0.06], 728.0),
            (Size::B0_6, 32, 200.0, [0.38, 0.58, 0.20], 2208.0),
            (Size::B0_6, 64, 200.0, [0.55, 0.60, 0.40], 3304.0),
            (Size::B0_6, 128, 200.0, [0.89, 0.64, 0.80], 4396.0),
            (Size::B1_7, 1, 200.0, [0.66, 0.58, 0.05], 62.0),
            (Size::B1_7, 8, 200.0, [0.70, 0.58, 0.06], 475.0),
            (Size::B1_7, 32, 200.0, [0.83, 0.60, 0.20], 1574.0),
            (Size::B1_7, 64, 200.0, [1.00, 0.62, 0.40], 2539.0),
            (Size::B1_7, 128, 200.0, [1.34, 0.65, 0.80], 3662.0),
            (Size::B1_7, 256, 200.0, [2.02, 0.86, 1.61], 4560.0),
        ];
        for (size, rows, context, stages, audio) in table {
            let limit = size.limit(rows, context, None);
            let found = [limit.talker_ms, limit.predictor_ms, limit.codec_ms];
            for (found, wanted) in found.iter().zip(stages) {
                assert!((found - wanted).abs() <= 0.006, "{size:?} {rows}: {limit:?}");
            }
            assert!(
                (limit.audio_s_per_s - audio).abs() <= 0.6,
                "{size:?} {rows}: {limit:?}"
            );
        }
        let at_600 = |size: Size, rows| size.limit(rows, 600.0, None).audio_s_per_s;
        assert!((at_600(Size::B0_6, 64) - 2293.0).abs() <= 0.6);
        assert!((at_600(Size::B1_7, 128) - 2460.0).abs() <= 0.6);
    }

    #[test]
    fn a_fraction_is_of_the_limit() {
        let limit = Size::B1_7.limit(64, 200.0, Some(1000.0));
        assert!((limit.fraction.unwrap() - 1000.0 / 2539.0).abs() < 1e-3);
    }

    #[test]
    fn a_size_is_told_by_the_name() {
        assert_eq!(
            Size::of_model("Qwen3-TTS-12Hz-1.7B-CustomVoice"),
            Some(Size::B1_7)
        );
        assert_eq!(Size::of_model("0.6b-custom_voice"), Some(Size::B0_6));
        assert_eq!(Size::of_model("nano"), None);
    }
}
