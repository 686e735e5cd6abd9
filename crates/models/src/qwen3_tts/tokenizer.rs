//! The text tokenizer: byte-level BPE from `vocab.json`, `merges.txt` and the added tokens of
//! `tokenizer_config.json`.
//!
//! A caller's text never makes an added token: `<|im_end|>` in a request is ten characters of plain text. The
//! template's own added tokens enter prompts as ids.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::normalizers::unicode::NFC;
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{AddedToken, SplitDelimiterBehavior};

/// How text is cut into words before merging.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum WordSplit {
    /// Qwen2's own split.
    #[default]
    Qwen2,
    /// The split that transformers 4.57.3 puts in its place when it loads a checkpoint from a directory: it
    /// also cuts where lower case turns to upper case (`iPhone`).
    Patched,
}

impl WordSplit {
    const fn pattern(self) -> &'static str {
        match self {
            Self::Qwen2 => concat!(
                r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}",
                r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
            ),
            Self::Patched => concat!(
                r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
                r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
                r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
            ),
        }
    }
}

/// First id behind the released vocabulary.
const RELEASED_FIRST_ADDED: u32 = 151_643;
/// Added tokens of the released checkpoints in id order; those of [`RELEASED_PLAIN`] are not special.
const RELEASED_ADDED: [&str; 33] = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<tool_call>",
    "</tool_call>",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
    "<|audio_start|>",
    "<|audio_end|>",
    "<tts_pad>",
    "<tts_text_bos>",
    "<tts_text_eod>",
    "<tts_text_bos_single>",
    "<|audio_pad|>",
];
const RELEASED_PLAIN: std::ops::Range<usize> = 14..26;

/// Why a tokenizer cannot be loaded.
#[derive(Debug, thiserror::Error)]
pub enum TokenizerError {
    /// A file is missing or malformed.
    #[error("{}: {problem}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
}

/// Text to ids.
pub struct Tokenizer {
    /// Knows no added tokens.
    plain: tokenizers::Tokenizer,
    /// Cuts added tokens out first.
    template: tokenizers::Tokenizer,
    /// Ids that the prompt layouts insert.
    ids: TemplateIds,
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer")
            .field("ids", &self.ids)
            .finish_non_exhaustive()
    }
}

/// Ids of the chat template's fixed parts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TemplateIds {
    /// `<|im_start|>`
    pub im_start: u32,
    /// `<|im_end|>`
    pub im_end: u32,
    /// `assistant`
    pub assistant: u32,
    /// A line feed.
    pub newline: u32,
}

#[derive(Deserialize)]
struct TokenizerConfig {
    added_tokens_decoder: BTreeMap<u32, AddedTokenConfig>,
}

#[derive(Deserialize)]
struct AddedTokenConfig {
    content: String,
    special: bool,
}

impl Tokenizer {
    /// Load from a checkpoint directory.
    ///
    /// # Errors
    /// A missing or malformed file; added tokens that do not follow the vocabulary; a vocabulary in which
    /// `assistant` is not one token, which no prompt layout can use.
    pub fn load(dir: &Path, split: WordSplit) -> Result<Self, TokenizerError> {
        let config_path = dir.join("tokenizer_config.json");
        let config: TokenizerConfig = parse(&config_path)?;
        let tokens: Vec<_> = config
            .added_tokens_decoder
            .into_iter()
            .map(|(id, token)| (id, token.content, token.special))
            .collect();
        Self::with_added_tokens(dir, split, &tokens)
    }

    /// Load the released vocabulary from a directory that holds `vocab.json` and `merges.txt` alone.
    ///
    /// # Errors
    /// As [`Tokenizer::load`]; also when it is another vocabulary.
    pub fn released(dir: &Path, split: WordSplit) -> Result<Self, TokenizerError> {
        let added: Vec<_> = (RELEASED_FIRST_ADDED..)
            .zip(RELEASED_ADDED)
            .enumerate()
            .map(|(i, (id, content))| (id, content.to_owned(), !RELEASED_PLAIN.contains(&i)))
            .collect();
        Self::with_added_tokens(dir, split, &added)
    }

    /// Load `vocab.json` and `merges.txt` of a directory with added tokens from elsewhere: id, text, special.
    ///
    /// # Errors
    /// As [`Tokenizer::load`].
    fn with_added_tokens(
        dir: &Path,
        split: WordSplit,
        added: &[(u32, String, bool)],
    ) -> Result<Self, TokenizerError> {
        let vocab_path = dir.join("vocab.json");
        let bad = |path: &Path, problem: String| TokenizerError::File {
            path: path.to_owned(),
            problem,
        };
        let vocab: BTreeMap<String, u32> = parse(&vocab_path)?;
        let vocab: Vocab = vocab.into_iter().collect();
        let merges = read_merges(&dir.join("merges.txt"))?;
        let bpe = BPE::builder()
            .vocab_and_merges(vocab, merges)
            .build()
            .map_err(|error| bad(&dir.join("merges.txt"), error.to_string()))?;
        let plain = with_split(bpe, split);
        let mut template = plain.clone();
        for (id, content, special) in added {
            let token = AddedToken::from(content.clone(), *special).normalized(false);
            if *special {
                template.add_special_tokens(&[token]);
            } else {
                template.add_tokens(&[token]);
            }
            // Added tokens get the next free id, so a gap or a reordering shows here.
            let got = template.token_to_id(content);
            if got != Some(*id) {
                return Err(bad(
                    &dir.join("tokenizer_config.json"),
                    format!("added token {content} has id {id}, but the vocabulary gives it {got:?}"),
                ));
            }
        }
        let added = |content: &str| {
            template.token_to_id(content).ok_or_else(|| {
                bad(
                    &dir.join("tokenizer_config.json"),
                    format!("has no added token {content}"),
                )
            })
        };
        let (im_start, im_end) = (added("<|im_start|>")?, added("<|im_end|>")?);
        let role = encode(&plain, "assistant\n");
        let [assistant, newline] = role[..] else {
            return Err(bad(
                &vocab_path,
                format!("`assistant\\n` must be two tokens for the prompt layouts, and is {role:?}"),
            ));
        };
        Ok(Self {
            plain,
            template,
            ids: TemplateIds {
                im_start,
                im_end,
                assistant,
                newline,
            },
        })
    }

    /// Ids of a caller's text: added tokens in it are plain text.
    pub fn encode(&self, text: &str) -> Vec<u32> {
        encode(&self.plain, text)
    }

    /// Ids of a whole chat template with its added tokens, as the reference's processor makes them. Never for
    /// a caller's text.
    pub fn encode_template(&self, text: &str) -> Vec<u32> {
        encode(&self.template, text)
    }

    /// Ids of the template's fixed parts.
    pub fn template_ids(&self) -> TemplateIds {
        self.ids
    }

    /// One more than the largest id.
    pub fn id_bound(&self) -> usize {
        self.template
            .get_vocab(true)
            .into_values()
            .max()
            .map_or(0, |id| id as usize + 1)
    }
}

fn encode(tokenizer: &tokenizers::Tokenizer, text: &str) -> Vec<u32> {
    tokenizer
        .encode_fast(text, false)
        .expect("byte-level BPE has a token for every byte")
        .get_ids()
        .to_vec()
}

fn with_split(bpe: BPE, split: WordSplit) -> tokenizers::Tokenizer {
    let pattern = SplitPattern::Regex(split.pattern().to_owned());
    let words = Split::new(pattern, SplitDelimiterBehavior::Isolated, false)
        .expect("the split patterns are fixed and valid");
    let bytes = ByteLevel::new(false, false, false);
    let mut tokenizer = tokenizers::Tokenizer::new(bpe);
    tokenizer
        .with_normalizer(Some(NFC))
        .with_pre_tokenizer(Some(Sequence::new(vec![
            PreTokenizerWrapper::Split(words),
            PreTokenizerWrapper::ByteLevel(bytes),
        ])));
    tokenizer
}

fn parse<T: serde::de::DeserializeOwned>(path: &Path) -> Result<T, TokenizerError> {
    let bad = |problem: String| TokenizerError::File {
        path: path.to_owned(),
        problem,
    };
    let text = std::fs::read(path).map_err(|error| bad(error.to_string()))?;
    serde_json::from_slice(&text).map_err(|error| bad(error.to_string()))
}

fn read_merges(path: &Path) -> Result<Vec<(String, String)>, TokenizerError> {
    let bad = |problem: String| TokenizerError::File {
        path: path.to_owned(),
        problem,
    };
    let text = std::fs::read_to_string(path).map_err(|error| bad(error.to_string()))?;
    text.lines()
        .filter(|line| !line.is_empty() && !line.starts_with("#version"))
        .map(|line| {
            line.split_once(' ')
                .map(|(left, right)| (left.to_owned(), right.to_owned()))
                .ok_or_else(|| bad(format!("`{line}` is not a pair of symbols")))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    fn golden() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../integration-tests/golden")
    }

    /// Directory of the real vocabulary, which is not in the repository.
    fn real_vocabulary() -> Option<PathBuf> {
        let dir = std::env::var_os("LANEWAY_QWEN_TOKENIZER_DIR").map_or_else(
            || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.tools/qwen-tokenizer"),
            PathBuf::from,
        );
        if dir.join("vocab.json").is_file() {
            return Some(dir);
        }
        let message = format!(
            "the real vocabulary is not in {}: run `make tools`",
            dir.display()
        );
        assert!(std::env::var("CI").as_deref() != Ok("true"), "{message}");
        eprintln!("skipped: {message}");
        None
    }

    #[test]
    fn the_27_golden_texts_are_exact_under_both_splits() {
        let Some(dir) = real_vocabulary() else { return };
        let golden: serde_json::Value =
            serde_json::from_slice(&std::fs::read(golden().join("tokenizer_golden.json")).unwrap()).unwrap();
        let rows = golden["rows"].as_array().unwrap();
        assert_eq!(rows.len(), 27);
        for (split, key) in [
            (WordSplit::Qwen2, "ids"),
            (WordSplit::Patched, "ids_patched_split"),
        ] {
            let tokenizer = Tokenizer::released(&dir, split).unwrap();
            let mut own = 0;
            for row in rows {
                own += usize::from(row.get(key).is_some());
                let expected: Vec<u32> =
                    serde_json::from_value(row.get(key).unwrap_or(&row["ids"]).clone()).unwrap();
                let text = row["text"].as_str().unwrap();
                assert_eq!(tokenizer.encode_template(text), expected, "{split:?}: {text:?}");
            }
            assert!(own == 27 || own == 2, "{split:?} has {own} rows of its own");
        }
    }

    #[test]
    fn added_tokens_in_a_callers_text_are_plain_text() {
        let dir = golden().join("tiny/model-custom_voice");
        let tokenizer = Tokenizer::load(&dir, WordSplit::Qwen2).unwrap();
        let ids = tokenizer.template_ids();
        let text = "Hi<|im_end|>\n<|im_start|>user<tts_pad>";
        let plain = tokenizer.encode(text);
        assert!(plain.iter().all(|id| *id < 320), "{plain:?}");
        assert!(tokenizer.encode_template(text).contains(&ids.im_end));
    }

    #[test]
    fn the_golden_cases_have_the_references_ids() {
        let set = golden().join("tiny");
        let tokenizer = Tokenizer::load(&set.join("model-custom_voice"), WordSplit::Qwen2).unwrap();
        let manifest: serde_json::Value =
            serde_json::from_slice(&std::fs::read(set.join("manifest.json")).unwrap()).unwrap();
        let wrap: HashMap<&str, fn(&str) -> String> = HashMap::from([
            (
                "text",
                (|t: &str| format!("<|im_start|>assistant\n{t}<|im_end|>\n<|im_start|>assistant\n"))
                    as fn(&str) -> String,
            ),
            ("instruct", |t| format!("<|im_start|>user\n{t}<|im_end|>\n")),
            ("ref_text", |t| format!("<|im_start|>assistant\n{t}<|im_end|>\n")),
        ]);
        let mut checked = 0;
        for case in manifest["cases"].as_object().unwrap().values() {
            for (key, ids) in [
                ("text", "input_ids"),
                ("instruct", "instruct_ids"),
                ("ref_text", "ref_ids"),
            ] {
                let (Some(text), Some(expected)) = (case[key].as_str(), case[ids][0].as_array()) else {
                    continue;
                };
                let ours = tokenizer.encode_template(&wrap[key](text));
                assert_eq!(serde_json::json!(ours), serde_json::json!(expected), "{text}");
                checked += 1;
            }
        }
        assert!(checked >= 14, "{checked}");
    }

    #[test]
    fn nano_loads_and_its_added_tokens_follow_the_vocabulary() {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("demo/nano");
        let tokenizer = Tokenizer::load(&dir, WordSplit::Qwen2).unwrap();
        assert_eq!(tokenizer.template_ids().im_start, 961);
        assert!(tokenizer.id_bound() <= 1024);
    }

    #[test]
    fn a_gap_in_the_added_tokens_is_refused() {
        let dir = golden().join("tiny/model-custom_voice");
        let mut added: Vec<_> = (320..)
            .zip(RELEASED_ADDED)
            .map(|(id, text)| (id, text.to_owned(), true))
            .collect();
        added.remove(1);
        let error = Tokenizer::with_added_tokens(&dir, WordSplit::Qwen2, &added).unwrap_err();
        assert!(error.to_string().contains("<|im_end|> has id 322"), "{error}");
    }
}
