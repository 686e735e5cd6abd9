//! The files beside a configuration: whether they are there and whole. What is in them is the worker's to read.

use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use serde_json::Value;

/// Directory of the released `vocab.json` and `merges.txt`, for configurations that bring no tokenizer.
pub const TOKENIZER_DIR_VARIABLE: &str = "LANEWAY_QWEN_TOKENIZER_DIR";

/// Where `make tools` puts them, from the top of a checkout.
const TOOLS_VOCABULARY: &str = ".tools/qwen-tokenizer";

/// The files of a vocabulary.
const VOCABULARY: [&str; 2] = ["vocab.json", "merges.txt"];

/// Largest header of a weight file; a larger claim is a broken file.
const MAX_HEADER_BYTES: u64 = 100 << 20;

/// Directory of the released vocabulary: what [`TOKENIZER_DIR_VARIABLE`] says, else what `make tools` made in the
/// checkout that this program is run in or was built in.
pub fn released_vocabulary() -> Option<PathBuf> {
    if let Some(directory) = std::env::var_os(TOKENIZER_DIR_VARIABLE) {
        return Some(directory.into());
    }
    let starts = [std::env::current_dir(), std::env::current_exe()];
    starts.iter().flatten().find_map(|start| vocabulary_above(start))
}

fn vocabulary_above(start: &Path) -> Option<PathBuf> {
    let mut above = start
        .ancestors()
        .map(|directory| directory.join(TOOLS_VOCABULARY));
    above.find(|directory| vocabulary_problem(directory).is_none())
}

/// Which file of a vocabulary is not in a directory.
pub(crate) fn vocabulary_problem(directory: &Path) -> Option<String> {
    let missing = VOCABULARY.map(|name| directory.join(name)).into_iter();
    missing
        .filter(|path| !path.is_file())
        .map(|path| format!("{} is not there", path.display()))
        .next()
}

/// What is missing from a checkpoint directory, or cut short.
pub(crate) fn checkpoint_problems(directory: &Path) -> Vec<String> {
    let weights = [directory.to_owned(), directory.join("speech_tokenizer")];
    let weights = weights.iter().flat_map(|directory| weight_files(directory));
    weights
        .filter_map(|path| Some(format!("{} {}", path.display(), weights_problem(&path)?)))
        .chain(vocabulary_problem(directory))
        .collect()
}

/// `model.safetensors`, or the shards that an index lists.
fn weight_files(directory: &Path) -> Vec<PathBuf> {
    let index = std::fs::read(directory.join("model.safetensors.index.json")).ok();
    let index: Option<Value> = index.and_then(|text| serde_json::from_slice(&text).ok());
    let shards = index.as_ref().and_then(|index| index["weight_map"].as_object());
    let mut names: Vec<&str> = match shards {
        Some(shards) => shards.values().filter_map(Value::as_str).collect(),
        None => vec!["model.safetensors"],
    };
    names.sort_unstable();
    names.dedup();
    names.into_iter().map(|name| directory.join(name)).collect()
}

/// What is wrong with a weight file, from its header and its length.
fn weights_problem(path: &Path) -> Option<String> {
    let mut file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Some("is not there".to_owned()),
        Err(error) => return Some(format!("cannot be read: {error}")),
    };
    let bytes = file.metadata().ok()?.len();
    let cut_short = Some(format!("has {bytes} bytes: not a safetensors file, or cut short"));
    let mut length = [0; 8];
    if file.read_exact(&mut length).is_err() {
        return cut_short;
    }
    let header_bytes = u64::from_le_bytes(length);
    if header_bytes > MAX_HEADER_BYTES || header_bytes + 8 > bytes {
        return cut_short;
    }
    let mut header = vec![0; header_bytes as usize];
    let read = file.read_exact(&mut header).ok();
    let header: Option<Value> = read.and_then(|()| serde_json::from_slice(&header).ok());
    let Some(tensors) = header.as_ref().and_then(Value::as_object) else {
        return cut_short;
    };
    let ends = tensors
        .values()
        .filter_map(|tensor| tensor["data_offsets"][1].as_u64());
    let needed = ends.max().unwrap_or(0).saturating_add(8 + header_bytes);
    (bytes < needed).then(|| format!("has {bytes} bytes of {needed}: it is cut short"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEADER: &[u8] = br#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#;

    fn whole_file() -> Vec<u8> {
        let length = (HEADER.len() as u64).to_le_bytes();
        [&length[..], HEADER, &[0; 8]].concat()
    }

    #[test]
    fn a_weight_file_is_whole_or_what_is_wrong_is_said() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("model.safetensors");
        let check = |bytes: &[u8], expected: Option<&str>| {
            std::fs::write(&path, bytes).unwrap();
            let problem = weights_problem(&path);
            match expected {
                None => assert_eq!(problem, None),
                Some(expected) => assert!(problem.as_ref().unwrap().contains(expected), "{problem:?}"),
            }
        };
        let whole = whole_file();
        check(&whole, None);
        check(&whole[..whole.len() - 1], Some("cut short"));
        check(&whole[..20], Some("not a safetensors file"));
        check(b"weights", Some("has 7 bytes: not a safetensors file"));
        std::fs::remove_file(&path).unwrap();
        assert_eq!(weights_problem(&path).unwrap(), "is not there");
    }

    #[test]
    fn every_missing_file_of_a_checkpoint_is_named() {
        let directory = tempfile::tempdir().unwrap();
        let problems = checkpoint_problems(directory.path()).join("\n");
        for name in [
            "/model.safetensors",
            "speech_tokenizer/model.safetensors",
            "vocab.json",
        ] {
            assert!(problems.contains(name), "{problems}");
        }
    }

    #[test]
    fn a_vocabulary_is_found_above() {
        let top = tempfile::tempdir().unwrap();
        let (deep, tools) = (top.path().join("a/b"), top.path().join(TOOLS_VOCABULARY));
        assert_eq!(vocabulary_above(&deep), None);
        std::fs::create_dir_all(&tools).unwrap();
        for name in VOCABULARY {
            std::fs::write(tools.join(name), "").unwrap();
        }
        assert_eq!(vocabulary_above(&deep), Some(tools));
    }
}
