//! Downloading a checkpoint from the Hugging Face hub into its usual cache; from there on it is a directory.

use std::path::{Path, PathBuf};

use hf_hub::api::sync::{ApiBuilder, ApiError, ApiRepo};
use hf_hub::{Repo, RepoType};

use super::{CheckpointError, Result};

/// Files that every checkpoint has, beside its weights.
pub const HUB_FILES: [&str; 7] = [
    "config.json",
    "generation_config.json",
    "vocab.json",
    "merges.txt",
    "tokenizer_config.json",
    "speech_tokenizer/config.json",
    "speech_tokenizer/model.safetensors",
];
const WEIGHTS: &str = "model.safetensors";
const SHARD_INDEX: &str = "model.safetensors.index.json";

/// Fetch what is not in the cache yet; the directory that holds it all.
pub(crate) fn download(repo: &str, revision: &str) -> Result<PathBuf> {
    let fail = |file: &str, problem: String| CheckpointError::Hub {
        repo: repo.to_owned(),
        revision: revision.to_owned(),
        file: file.to_owned(),
        problem,
    };
    // `HF_HOME`, `HF_ENDPOINT` and the stored token count, as in every tool of that hub.
    let api = ApiBuilder::from_env()
        .build()
        .map_err(|error| fail("anything", error.to_string()))?;
    let api = api.repo(Repo::with_revision(
        repo.to_owned(),
        RepoType::Model,
        revision.to_owned(),
    ));
    let get = |file: &str| api.get(file).map_err(|error| fail(file, describe(&error)));
    let config = get(HUB_FILES[0])?;
    for file in &HUB_FILES[1..] {
        get(file)?;
    }
    download_weights(&api, &get)?;
    Ok(config.parent().unwrap_or(Path::new(".")).to_owned())
}

/// One file, or the shards of an index when there is no single file.
fn download_weights(api: &ApiRepo, get: &dyn Fn(&str) -> Result<PathBuf>) -> Result<()> {
    if api.get(WEIGHTS).is_ok() {
        return Ok(());
    }
    let index = match api.get(SHARD_INDEX) {
        Ok(path) => path,
        // Neither is there: the error for the usual name tells more.
        Err(_) => return get(WEIGHTS).map(drop),
    };
    for shard in super::weights::shards(&index)? {
        get(&shard)?;
    }
    Ok(())
}

fn describe(error: &ApiError) -> String {
    let mut text = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        source = cause.source();
    }
    text
}
