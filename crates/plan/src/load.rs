//! From a file, the environment and flags to a [`Loaded`] configuration that knows where each value came from.
//!
//! Layers, the later one wins: defaults, the file, environment variables `LANEWAY__SECTION__KEY`, flags
//! `section.key=value`. `config` merges them. Values of the last two are read as YAML (`[0, 16]`, `auto`), and
//! numbers in their keys count list elements from 0 (`LANEWAY__NODE_GROUPS__1__LANE`).

mod de;
mod layers;
#[cfg(test)]
mod tests;
mod tree;
mod yaml;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use crate::deployment::{DeviceKind, ModelConfig, Precision, Weights};
use crate::raw::{RawDeployment, defaults};
use crate::violation::{Location, Reason, Violation};
use de::Misfit;
use layers::Layers;
use tree::KeyPath;
#[cfg(test)]
use tree::Tree;

/// Prefix of the environment variables that override the file.
pub const ENVIRONMENT_PREFIX: &str = "LANEWAY__";

/// Largest configuration file that is read.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// What a configuration is read from.
#[derive(Debug, Clone, Default)]
pub struct Sources {
    /// The file: its name for messages, whose directory relative paths start from, and its text or why it
    /// cannot be read.
    pub file: Option<(PathBuf, Result<String, String>)>,
    /// Environment variables. Only those with [`ENVIRONMENT_PREFIX`] count.
    pub environment: Vec<(String, String)>,
    /// Flags, `section.key=value`.
    pub flags: Vec<String>,
}

impl Sources {
    /// A file, this process's environment, and flags. This is the crate's only contact with the outside.
    pub fn read(file: &Path, flags: Vec<String>) -> Self {
        let unicode = |(name, value): (std::ffi::OsString, std::ffi::OsString)| {
            Some((name.into_string().ok()?, value.to_string_lossy().into_owned()))
        };
        let environment = std::env::vars_os().filter_map(unicode).collect();
        Self {
            file: Some((file.to_owned(), read_file(file))),
            environment,
            flags,
        }
    }

    /// Text that stands for a file of this name, and nothing else.
    pub fn text(file: impl Into<PathBuf>, text: impl Into<String>) -> Self {
        Self {
            file: Some((file.into(), Ok(text.into()))),
            ..Self::default()
        }
    }
}

fn read_file(path: &Path) -> Result<String, String> {
    let size = std::fs::metadata(path).map_err(|error| error.to_string())?.len();
    if size > MAX_FILE_BYTES {
        return Err(format!(
            "{size} bytes are more than a configuration needs ({MAX_FILE_BYTES} at most)"
        ));
    }
    std::fs::read_to_string(path).map_err(|error| error.to_string())
}

/// A configuration as read, with every violation found so far. [`Loaded::check`] finds the others and makes a
/// [`crate::Deployment`] when there are none.
#[derive(Debug)]
pub struct Loaded {
    /// `None` when nothing could be read.
    pub(crate) raw: Option<RawDeployment>,
    /// Entries that were there but did not fit, so that they are not reported as missing too.
    lost: BTreeSet<KeyPath>,
    pub(crate) violations: Vec<Violation>,
    layers: Layers,
}

/// Read all layers. Never fails: what is wrong is in the result.
pub fn load(sources: &Sources) -> Loaded {
    let mut violations = Vec::new();
    let layers = Layers::merge(sources, &mut violations);
    let mut loaded = Loaded {
        raw: None,
        lost: BTreeSet::new(),
        violations,
        layers,
    };
    if loaded.layers.broken {
        return loaded;
    }

    let mut merged = loaded.layers.merged.clone();
    let mut misfits = Vec::new();
    let raw = de::read(&mut merged, &layers::default_layer(), |misfit| {
        misfits.push(misfit)
    });
    for error in misfits {
        loaded.lost.insert(error.path.clone());
        let violation = describe(&error);
        loaded.add_at(&error.path, violation);
    }
    loaded.raw = raw;
    loaded
}

fn describe(error: &de::Error) -> Violation {
    let key = error.path.to_string();
    match &error.misfit {
        Misfit::UnknownKey { key: unknown, .. } if unknown == "side_stream" => Violation::new(
            Reason::SideStreamRemoved,
            key,
            "`side_stream` was removed: a node that runs beside the chain is on a lane",
            "write `lane: 1` in the node's group (or `lane: auto` with `lane_id: 1`)",
        ),
        Misfit::UnknownKey { key: unknown, known } => Violation::new(
            Reason::UnknownKey,
            key,
            format!("there is no key `{unknown}` here"),
            suggest(unknown, known.iter().copied(), "keys"),
        ),
        Misfit::UnknownChoice { choice, known } => Violation::new(
            Reason::InvalidValue,
            key,
            format!("`{choice}` is not one of its values"),
            suggest(choice, known.iter().copied(), "values"),
        ),
        Misfit::Missing(missing) => Violation::new(
            Reason::MissingKey,
            error.path.key(missing).to_string(),
            format!("`{missing}` is missing"),
            format!("write `{missing}: …` here"),
        ),
        Misfit::Invalid(message) => Violation::new(
            Reason::InvalidValue,
            key,
            message.clone(),
            "write a value of that form",
        ),
    }
}

/// Environment variables that begin as ours do and set nothing, each with the nearest name that would. `known` are
/// the variables that are no keys of a configuration.
pub fn stray_variables<'a>(names: impl Iterator<Item = &'a str>, known: &[&str]) -> Vec<(&'a str, String)> {
    let keys = layers::environment_names();
    let all = || known.iter().copied().chain(keys.iter().map(String::as_str));
    let stray = names.filter(|name| {
        name.starts_with("LANEWAY_") && !name.starts_with(ENVIRONMENT_PREFIX) && !known.contains(name)
    });
    stray
        .filter_map(|name| {
            let nearest = all().min_by_key(|known| strsim::damerau_levenshtein(name, known))?;
            Some((name, nearest.to_owned()))
        })
        .collect()
}

/// The nearest of `known`, if any is near, and all of them.
pub(crate) fn suggest<'a>(unknown: &str, known: impl Iterator<Item = &'a str>, what: &str) -> String {
    let known: Vec<&str> = known.collect();
    let distance = |name: &str| strsim::damerau_levenshtein(&unknown.to_lowercase(), &name.to_lowercase());
    let nearest = known.iter().copied().min_by_key(|name| distance(name));
    let all = known
        .iter()
        .map(|name| format!("`{name}`"))
        .collect::<Vec<_>>()
        .join(", ");
    match nearest {
        Some(nearest) if 2 * distance(nearest) <= nearest.len() => {
            format!("write `{nearest}`; the {what} are {all}")
        }
        Some(_) => format!("the {what} are {all}"),
        None => format!("there are no {what} to choose from"),
    }
}

impl Loaded {
    /// Registry name of the model, when the file has one.
    pub fn model(&self) -> Option<&str> {
        self.raw.as_ref()?.model.as_deref()
    }

    /// Where the weights come from; a relative path in the file starts from the file's directory.
    pub fn weights(&self) -> Option<Weights> {
        match self.raw.as_ref()?.weights.clone()? {
            Weights::Path(path) => Some(Weights::Path(self.resolve("weights", &path))),
            other => Some(other),
        }
    }

    /// Where the model's sizes come from; a relative path in the file starts from the file's directory.
    pub fn model_config(&self) -> Option<ModelConfig> {
        match ModelConfig::from(self.raw.as_ref()?.model_config.as_deref()?) {
            ModelConfig::Directory(path) => Some(ModelConfig::Directory(self.resolve("model_config", &path))),
            preset => Some(preset),
        }
    }

    /// Kind of device, when the file has one.
    pub fn device(&self) -> Option<DeviceKind> {
        self.raw.as_ref()?.device
    }

    /// What weights are kept and products are taken in, when the file names a device.
    pub fn precision(&self) -> Option<Precision> {
        let raw = self.raw.as_ref()?;
        Some(raw.precision.unwrap_or(raw.device?.default_precision()))
    }

    /// Longest sequence in positions.
    pub fn max_seq_len(&self) -> u32 {
        self.raw
            .as_ref()
            .map_or(defaults::MAX_SEQ_LEN, |raw| raw.max_seq_len.get())
    }

    /// Most rows of a chain step.
    pub fn max_rows(&self) -> u32 {
        self.raw
            .as_ref()
            .map_or(defaults::MAX_ROWS, |raw| raw.limits.max_rows.get())
    }

    /// Most packed tokens of a prefill step.
    pub fn max_prefill_tokens(&self) -> u32 {
        self.raw.as_ref().map_or(defaults::MAX_PREFILL_TOKENS, |raw| {
            raw.limits.max_prefill_tokens.get()
        })
    }

    /// Positions of a page of a paged cache.
    pub fn page_size(&self, resource: &str) -> u32 {
        let sizes = self.raw.as_ref().and_then(|raw| raw.resources.get(resource));
        sizes
            .and_then(|sizes| sizes.page_size)
            .map_or(defaults::PAGE_SIZE, |size| size.get())
    }

    /// Add a violation; its location is that of its key, or of what the key would be in. A value that did not fit
    /// has been reported, and the default that stands in for it is nobody's fault.
    pub fn add(&mut self, violation: Violation) {
        let path = layers::parse_path(&violation.key);
        if self.lost.contains(&path) {
            return;
        }
        self.add_at(&path, violation);
    }

    fn add_at(&mut self, path: &KeyPath, mut violation: Violation) {
        violation.location = self.layers.location(path);
        violation.source_line = self.layers.source_line(&violation.location);
        self.violations.push(violation);
    }

    /// Whether any entry did not fit.
    pub(crate) fn lost_any(&self) -> bool {
        !self.lost.is_empty()
    }

    /// Whether a key that is absent now was written, but did not fit.
    pub(crate) fn was_lost(&self, key: &str) -> bool {
        self.lost.contains(&layers::parse_path(key))
    }

    fn resolve(&self, key: &str, path: &Path) -> PathBuf {
        match self.layers.location(&layers::parse_path(key)) {
            Location::File { path: file, .. } => file.parent().unwrap_or(Path::new("")).join(path),
            _ => path.to_owned(),
        }
    }
}
