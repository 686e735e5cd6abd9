//! What a voice clone is made from and what the reference encoder makes of it.
//!
//! A request's payload carries a [`ReferenceClip`]; the RefEncoder node turns it into a [`Reference`], which
//! the `reference` request edge delivers to `talker_prefill` and `codec_prime`.

use std::sync::Arc;

/// Codebooks of one frame.
pub const CODES_PER_FRAME: usize = 16;

/// The reference speech of a clone request: mono, decoded, already at the model's rate.
#[derive(Debug, Clone)]
pub struct ReferenceClip {
    /// Samples in -1 ..= 1.
    pub samples: Arc<[f32]>,
    /// Samples a second; only [`ReferenceClip::SAMPLE_RATE_HZ`] is taken.
    pub sample_rate_hz: u32,
    /// Also encode the clip to codes: the in-context clone. Otherwise only the speaker vector is made.
    pub in_context: bool,
}

impl ReferenceClip {
    /// The one rate that the encoders take; whoever builds a payload resamples to it.
    pub const SAMPLE_RATE_HZ: u32 = 24_000;
}

/// A reference encoded: what the `ref_encode` walk delivers as its [`laneway_engine::node::EdgeResult`].
#[derive(Debug, Clone, PartialEq)]
pub struct Reference {
    /// Speaker vector, as wide as the Talker's hidden state.
    pub speaker: Arc<[f32]>,
    /// Codes of the clip's frames, for an in-context clone.
    pub codes: Option<Arc<[[i32; CODES_PER_FRAME]]>>,
}
