//! Prompt layouts: which text token and which codec row meet in each row of a prefill, and which text tokens
//! are left for the decode steps.
//!
//! Pure: it works on ids. The device program turns a plan into embeddings.

use crate::checkpoint::config::{ModelConfig, TalkerConfig};

/// What is added to a prompt row's text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CodecPart {
    /// Nothing.
    None,
    /// A row of the codec embedding.
    Id(u32),
    /// The speaker vector.
    Speaker,
    /// All codes of a reference frame.
    Frame(u32),
}

/// One row of a prefill: a text row, plus perhaps a codec row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PromptRow {
    /// Text token.
    pub text: u32,
    /// Added to it.
    pub codec: CodecPart,
}

/// A whole prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prompt {
    /// Prefill rows.
    pub rows: Vec<PromptRow>,
    /// Text token of decode step k; padding behind its end.
    pub trailing: Vec<u32>,
    /// Reference frames that the rows name.
    pub reference_frames: u32,
}

/// Where the text goes. Audio streams either way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TextLayout {
    /// One token with each frame.
    Streamed,
    /// All in the prompt.
    Whole,
}

/// Whose voice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SpeakerPart {
    /// Nobody's (voice design).
    None,
    /// A row of the codec embedding.
    Id(u32),
    /// The speaker encoder's vector.
    Vector,
}

/// An in-context clone's reference.
#[derive(Debug, Clone, Copy)]
pub struct ReferenceText<'a> {
    /// Tokens of what the clip says.
    pub ids: &'a [u32],
    /// Frames of the clip.
    pub frames: u32,
}

/// What a prompt is made of, all as ids.
#[derive(Debug, Clone, Copy)]
pub struct PromptParts<'a> {
    /// The whole instruction turn.
    pub instruct: Option<&'a [u32]>,
    /// `<|im_start|>`, `assistant`, line feed.
    pub role: [u32; 3],
    /// Codec row of the language; `None` lets the model choose.
    pub language: Option<u32>,
    /// Voice.
    pub speaker: SpeakerPart,
    /// Tokens of the text; at least one.
    pub text: &'a [u32],
    /// In-context clone.
    pub reference: Option<ReferenceText<'a>>,
    /// Where the text goes.
    pub layout: TextLayout,
}

/// Lay a prompt out.
pub fn lay_out(config: &ModelConfig, parts: &PromptParts<'_>) -> Prompt {
    let talker = &config.talker_config;
    let (pad, bos, eos) = (
        config.tts_pad_token_id,
        config.tts_bos_token_id,
        config.tts_eos_token_id,
    );
    let row = |text, codec| PromptRow { text, codec };
    let plain = |text: &u32| row(*text, CodecPart::None);
    let (codec_pad, codec_bos) = (
        CodecPart::Id(talker.codec_pad_id),
        CodecPart::Id(talker.codec_bos_id),
    );

    let mut rows: Vec<PromptRow> = parts.instruct.unwrap_or_default().iter().map(plain).collect();
    rows.extend(parts.role.iter().map(plain));
    rows.extend(head(talker, parts).into_iter().map(|codec| row(pad, codec)));
    rows.push(row(bos, codec_pad));

    let mut trailing = Vec::new();
    let reference_frames = parts.reference.map_or(0, |reference| reference.frames);
    let reference_text = parts.reference.map_or(&[][..], |reference| reference.ids);
    // Text and its end, and what is spoken already.
    let text: Vec<u32> = reference_text
        .iter()
        .chain(parts.text)
        .copied()
        .chain([eos])
        .collect();
    let spoken: Vec<CodecPart> = std::iter::once(codec_bos)
        .chain((0..reference_frames).map(CodecPart::Frame))
        .collect();
    match parts.layout {
        TextLayout::Whole => {
            rows.extend(text.iter().map(|id| row(*id, codec_pad)));
            rows.extend(spoken.iter().map(|codec| row(pad, *codec)));
        }
        TextLayout::Streamed => {
            let padded = text.iter().copied().chain(std::iter::repeat(pad));
            rows.extend(spoken.iter().zip(padded).map(|(codec, id)| row(id, *codec)));
            trailing = text.get(spoken.len()..).unwrap_or_default().to_vec();
        }
    }
    Prompt {
        rows,
        trailing,
        reference_frames,
    }
}

/// Codec rows of the head but its last.
fn head(talker: &TalkerConfig, parts: &PromptParts<'_>) -> Vec<CodecPart> {
    let mut ids = match parts.language {
        Some(language) => vec![
            talker.codec_think_id,
            talker.codec_think_bos_id,
            language,
            talker.codec_think_eos_id,
        ],
        None => vec![
            talker.codec_nothink_id,
            talker.codec_think_bos_id,
            talker.codec_think_eos_id,
        ],
    }
    .into_iter()
    .map(CodecPart::Id)
    .collect::<Vec<_>>();
    match parts.speaker {
        SpeakerPart::None => {}
        SpeakerPart::Id(id) => ids.push(CodecPart::Id(id)),
        SpeakerPart::Vector => ids.push(CodecPart::Speaker),
    }
    ids
}

/// Frames that a text may take before it is stopped as a runaway, bounded by `cap`.
///
/// Four times what a slow reader needs, and four seconds: the released models miss their end token in a few of
/// a thousand requests and then go on in near silence. A digit is a word, a CJK character a syllable.
pub fn frame_budget(text: &str, cap: u32) -> u32 {
    const FRAMES_PER_SECOND: f64 = 12.5;
    let seconds: f64 = text
        .chars()
        .map(|c| match c {
            _ if c.is_numeric() => 0.4,
            // Hangul Jamo upwards: scripts whose characters are syllables or words.
            '\u{1100}'..='\u{11ff}' | '\u{2e80}'..='\u{d7ff}' | '\u{f900}'..='\u{faff}' | '\u{20000}'.. => {
                0.25
            }
            _ if c.is_alphabetic() => 0.07,
            _ if c.is_whitespace() => 0.02,
            _ => 0.15,
        })
        .sum();
    let frames = (4.0 * (seconds + 1.0) * FRAMES_PER_SECOND).ceil();
    (frames as u32).min(cap)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::checkpoint::Configs;

    fn config() -> ModelConfig {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../../integration-tests/golden/tiny/model-custom_voice");
        Configs::read(&dir).unwrap().model
    }

    fn parts<'a>(text: &'a [u32], layout: TextLayout) -> PromptParts<'a> {
        PromptParts {
            instruct: None,
            role: [321, 263, 10],
            language: Some(130),
            speaker: SpeakerPart::Id(1141),
            text,
            reference: None,
            layout,
        }
    }

    #[test]
    fn streamed_text_has_ten_rows_and_trails_the_rest() {
        let config = config();
        let prompt = lay_out(&config, &parts(&[65, 66, 67], TextLayout::Streamed));
        let codec = &config.talker_config;
        let (pad, bos) = (config.tts_pad_token_id, config.tts_bos_token_id);
        let expected = [
            (321, CodecPart::None),
            (263, CodecPart::None),
            (10, CodecPart::None),
            (pad, CodecPart::Id(codec.codec_think_id)),
            (pad, CodecPart::Id(codec.codec_think_bos_id)),
            (pad, CodecPart::Id(130)),
            (pad, CodecPart::Id(codec.codec_think_eos_id)),
            (pad, CodecPart::Id(1141)),
            (bos, CodecPart::Id(codec.codec_pad_id)),
            (65, CodecPart::Id(codec.codec_bos_id)),
        ];
        let rows: Vec<_> = prompt.rows.iter().map(|row| (row.text, row.codec)).collect();
        assert_eq!(rows, expected);
        assert_eq!(prompt.trailing, [66, 67, config.tts_eos_token_id]);
    }

    #[test]
    fn whole_text_is_in_the_prompt() {
        let config = config();
        let prompt = lay_out(&config, &parts(&[65, 66, 67], TextLayout::Whole));
        assert_eq!(prompt.rows.len(), 3 + 6 + 3 + 2);
        assert!(prompt.trailing.is_empty());
        let last = prompt.rows.last().unwrap();
        assert_eq!(last.codec, CodecPart::Id(config.talker_config.codec_bos_id));
        assert_eq!(last.text, config.tts_pad_token_id);
    }

    #[test]
    fn an_in_context_clone_pads_the_shorter_side() {
        let config = config();
        for (frames, rows, trailing) in [(2, 3, 3), (9, 10, 0)] {
            let mut parts = parts(&[65, 66, 67], TextLayout::Streamed);
            parts.speaker = SpeakerPart::Vector;
            parts.reference = Some(ReferenceText {
                ids: &[70, 71],
                frames,
            });
            let prompt = lay_out(&config, &parts);
            assert_eq!(prompt.rows.len(), 3 + 6 + rows, "{frames} frames");
            assert_eq!(prompt.trailing.len(), trailing, "{frames} frames");
            parts.layout = TextLayout::Whole;
            let prompt = lay_out(&config, &parts);
            assert_eq!(
                prompt.rows.len(),
                3 + 6 + 6 + frames as usize + 1,
                "{frames} frames"
            );
        }
    }

    #[test]
    fn without_language_and_speaker_the_head_has_four_rows() {
        let mut parts = parts(&[65], TextLayout::Streamed);
        parts.language = None;
        parts.speaker = SpeakerPart::None;
        parts.instruct = Some(&[1, 2]);
        assert_eq!(lay_out(&config(), &parts).rows.len(), 2 + 3 + 4 + 1);
    }

    /// A decode step begins with codes, which is how it takes the last row; and a prefill's buckets are cut for
    /// prompts of at least seven rows in front of it.
    #[test]
    fn every_prompt_ends_with_codes_behind_seven_rows_or_more() {
        let check = |parts: &PromptParts<'_>| {
            let prompt = lay_out(&config(), parts);
            let (last, front) = prompt.rows.split_last().unwrap();
            assert!(
                matches!(last.codec, CodecPart::Id(_) | CodecPart::Frame(_)),
                "{parts:?}: {last:?}"
            );
            assert!(front.len() >= 7, "{parts:?}: {}", front.len());
        };
        for layout in [TextLayout::Streamed, TextLayout::Whole] {
            for speaker in [SpeakerPart::None, SpeakerPart::Id(1141), SpeakerPart::Vector] {
                for frames in [None, Some(0), Some(1), Some(20)] {
                    let ids: &[u32] = &[70, 71];
                    check(&PromptParts {
                        speaker,
                        language: None,
                        reference: frames.map(|frames| ReferenceText { ids, frames }),
                        ..parts(&[65], layout)
                    });
                }
            }
        }
    }

    #[test]
    fn the_budget_grows_with_what_must_be_said() {
        let budget = |text: &str| frame_budget(text, 8192);
        // About 75 characters take 5 seconds.
        let sentence = "The birch canoe slid on the smooth planks while the boy watched it go by.";
        assert!((200..400).contains(&budget(sentence)), "{}", budget(sentence));
        assert!(budget("你好，世界。") > budget("Hi, you."));
        assert!(budget("1234567890") > budget("abcdefghij"));
        assert_eq!(frame_budget(&sentence.repeat(100), 500), 500);
    }
}
