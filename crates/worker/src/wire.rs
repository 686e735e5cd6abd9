//! Wire messages into this crate's types, with every field either used or refused by name.

use std::sync::Arc;

use laneway_audio::check_samples;
use laneway_plan::declaration::ChunkPolicy;
use laneway_proto::{ErrorCode, Failure, RequestId, rows_from_frames, samples_from_bytes, v1};

use crate::backend::{DecodeStart, FrameShape, ReferenceClip, Sampling, TextLayout, Utterance};

fn invalid(field: &str, description: impl Into<String>) -> Failure {
    Failure::of_field(ErrorCode::InvalidArgument, field, description)
}

/// The id of a request.
pub(crate) fn request_id(id: &str) -> Result<String, Failure> {
    let id = RequestId::new(id).map_err(|error| invalid("request_id", error.to_string()))?;
    Ok(id.into())
}

/// What to speak.
pub(crate) fn utterance(request: v1::WorkerSynthesizeRequest) -> Result<Utterance, Failure> {
    let layout = match request.layout() {
        v1::TextLayout::Unspecified => None,
        v1::TextLayout::Streamed => Some(TextLayout::Streamed),
        v1::TextLayout::Whole => Some(TextLayout::Whole),
    };
    Ok(Utterance {
        layout,
        text: request.text,
        voice: request.voice,
        language: request.language,
        instruct: request.instruct,
        seed: request.seed,
        sampling: request.sampling.map(sampling).transpose()?.unwrap_or_default(),
        chunk: request.chunk.map(chunk).transpose()?,
        max_frames: request.max_frames,
        reference: request.reference.map(reference).transpose()?,
    })
}

/// The smallest temperature above 0 that is taken.
const MIN_TEMPERATURE: f32 = 1e-3;

fn sampling(params: v1::SamplingParams) -> Result<Sampling, Failure> {
    let at_least = |field: &str, value: Option<f32>, bound: f32, open: bool| match value {
        Some(v) if !v.is_finite() || v < bound || (open && v == bound) => {
            let above = if open { "above" } else { "not below" };
            Err(invalid(
                field,
                format!("{v} is not allowed; send a finite number {above} {bound}"),
            ))
        }
        value => Ok(value),
    };
    let temperature = |field: &str, value: Option<f32>| match value {
        // A logit divided by less can overflow: then every token is banned, and the whole step fails with it.
        Some(v) if v > 0.0 && v < MIN_TEMPERATURE => Err(invalid(
            field,
            format!("{v} is not allowed; send 0 for the likeliest code, or at least {MIN_TEMPERATURE}"),
        )),
        value => at_least(field, value, 0.0, false),
    };
    let share = |field: &str, value: Option<f32>| match value {
        Some(v) if !(v > 0.0 && v <= 1.0) => Err(invalid(
            field,
            format!("{v} is not allowed; send a number above 0 and up to 1 (off)"),
        )),
        value => Ok(value),
    };
    Ok(Sampling {
        temperature: temperature("sampling.temperature", params.temperature)?,
        top_k: params.top_k,
        top_p: share("sampling.top_p", params.top_p)?,
        repetition_penalty: at_least(
            "sampling.repetition_penalty",
            params.repetition_penalty,
            0.0,
            true,
        )?,
        predictor_temperature: temperature("sampling.predictor_temperature", params.predictor_temperature)?,
        predictor_top_k: params.predictor_top_k,
        predictor_top_p: share("sampling.predictor_top_p", params.predictor_top_p)?,
        exact_frames: match params.exact_frames {
            Some(0) => {
                let why = "0 frames cannot be made; send at least 1";
                return Err(invalid("sampling.exact_frames", why));
            }
            frames => frames,
        },
    })
}

fn chunk(policy: v1::ChunkPolicy) -> Result<ChunkPolicy, Failure> {
    if policy.first == 0 || policy.steady == 0 || policy.ramp.contains(&0) {
        return Err(invalid(
            "chunk",
            "a window of 0 frames is not allowed; every size is at least 1",
        ));
    }
    Ok(policy.into())
}

fn reference(clip: v1::ReferenceClip) -> Result<ReferenceClip, Failure> {
    if clip.sample_rate == 0 {
        return Err(invalid(
            "reference.sample_rate",
            "a worker takes raw samples only: state their rate",
        ));
    }
    let of_audio = |error: String| invalid("reference.audio", error);
    let samples = samples_from_bytes(&clip.audio).map_err(|error| of_audio(error.to_string()))?;
    check_samples(&samples).map_err(|error| of_audio(error.to_string()))?;
    Ok(ReferenceClip {
        samples,
        sample_rate: clip.sample_rate,
        text: clip.text,
    })
}

/// What a decode stream starts with.
pub(crate) fn decode_start(header: v1::DecodeHeader, shape: FrameShape) -> Result<DecodeStart, Failure> {
    if header.max_frames == 0 {
        return Err(invalid(
            "header.max_frames",
            "0 frames cannot be decoded; state the most that will come",
        ));
    }
    let prime = match header.prime {
        Some(frames) => self::frames("header.prime", &frames, 0, shape)?,
        None => Vec::new(),
    };
    Ok(DecodeStart {
        chunk: header.chunk.map(chunk).transpose()?,
        prime,
        max_frames: header.max_frames,
    })
}

/// Frames that continue a stream at `next_index`, every code inside its codebook: an id out of range would read
/// past a table on the device.
pub(crate) fn frames(
    field: &str,
    message: &v1::Frames,
    next_index: u32,
    shape: FrameShape,
) -> Result<Vec<Arc<[i32]>>, Failure> {
    if message.first_index != next_index {
        return Err(invalid(
            field,
            format!(
                "frame {} came where frame {next_index} was next",
                message.first_index
            ),
        ));
    }
    if let Some(code) = message.codes.iter().find(|code| **code >= shape.codebook_size) {
        let size = shape.codebook_size;
        return Err(invalid(
            field,
            format!("code {code} is outside the codebook of {size} entries"),
        ));
    }
    let rows = rows_from_frames(message, shape.words).map_err(|error| invalid(field, error.to_string()))?;
    Ok(rows.into_iter().map(Into::into).collect())
}
