//! The layers of a configuration, merged, with the place that each value came from.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use config::builder::DefaultState;
use config::{Config, ConfigBuilder, ConfigError, Source, Value, ValueKind};

use super::tree::{KeyPath, Segment, Tree};
use super::{ENVIRONMENT_PREFIX, Sources, yaml};
use crate::raw::defaults;
use crate::violation::{Location, Reason, Violation};

/// Highest list index that an environment variable or a flag may name.
const MAX_INDEX: usize = 255;

/// All layers in one.
#[derive(Debug)]
pub(crate) struct Layers {
    pub(crate) merged: Tree,
    /// The file could not be read, so whatever it would have said is not worth checking.
    pub(crate) broken: bool,
    locations: BTreeMap<KeyPath, Location>,
    lines: Vec<String>,
}

/// Values of the keys that have a fixed default.
pub(crate) fn default_layer() -> Tree {
    let number = |value: u32| Tree::Int(i64::from(value));
    let text = |value: &str| Tree::Str(value.to_owned());
    let map = |entries: Vec<(&str, Tree)>| {
        Tree::Map(
            entries
                .into_iter()
                .map(|(key, value)| (key.to_owned(), value))
                .collect(),
        )
    };
    map(vec![
        ("max_seq_len", number(defaults::MAX_SEQ_LEN)),
        ("replicas", number(defaults::REPLICAS)),
        (
            "limits",
            map(vec![
                ("max_rows", number(defaults::MAX_ROWS)),
                ("max_prefill_tokens", number(defaults::MAX_PREFILL_TOKENS)),
                ("max_queue", number(defaults::MAX_QUEUE)),
                ("max_text_chars", number(defaults::MAX_TEXT_CHARS)),
                ("max_frames", number(defaults::MAX_FRAMES)),
            ]),
        ),
        (
            "services",
            map(vec![
                (
                    "engine_manager",
                    map(vec![("listen", text(defaults::ENGINE_MANAGER_LISTEN))]),
                ),
                ("gateway", map(vec![("listen", text(defaults::GATEWAY_LISTEN))])),
                ("worker", map(vec![("listen", text(defaults::WORKER_LISTEN))])),
                ("drain_timeout", text(defaults::DRAIN_TIMEOUT)),
                ("stall_timeout", text(defaults::STALL_TIMEOUT)),
            ]),
        ),
    ])
}

impl Layers {
    pub(crate) fn merge(sources: &Sources, violations: &mut Vec<Violation>) -> Self {
        let mut layers = Self {
            merged: default_layer(),
            broken: false,
            locations: BTreeMap::new(),
            lines: Vec::new(),
        };
        let mut config = Config::builder().add_source(Layer::whole(&layers.merged));
        if let Some((path, text)) = &sources.file {
            let file = layers.read_file(path, text.as_deref().map_err(String::as_str), violations);
            config = config.add_source(Layer::whole(&file));
        }
        for (path, value, location) in overrides(sources, violations) {
            if let Some(mut violation) = beyond_its_list(&config, &path) {
                violation.location = location;
                violations.push(violation);
                continue;
            }
            config = config.add_source(Layer::one(&path, &value));
            layers.place(&path, &value, &location);
        }
        match config.build() {
            Ok(merged) => layers.merged = from_value(merged.cache),
            Err(error) => {
                layers.broken = true;
                let remedy = "write each key in its own section";
                violations.push(Violation::new(
                    Reason::OverrideMalformed,
                    "",
                    error.to_string(),
                    remedy,
                ));
            }
        }
        layers
    }

    /// The place of a value, or of what it would be in.
    pub(crate) fn location(&self, path: &KeyPath) -> Location {
        let mut at = Some(path.clone());
        while let Some(path) = at {
            if let Some(location) = self.locations.get(&path) {
                return location.clone();
            }
            at = path.parent();
        }
        Location::Default
    }

    /// The line of the file that a location names.
    pub(crate) fn source_line(&self, location: &Location) -> Option<String> {
        match location {
            Location::File { line, .. } => self.lines.get(line.checked_sub(1)?).cloned(),
            _ => None,
        }
    }

    fn read_file(&mut self, path: &Path, text: Result<&str, &str>, violations: &mut Vec<Violation>) -> Tree {
        let at = |line, column| Location::File {
            path: path.to_owned(),
            line,
            column,
        };
        self.locations.insert(KeyPath::default(), at(1, 1));
        let text = match text {
            Ok(text) => text,
            Err(error) => {
                self.broken = true;
                let message = format!("{} cannot be read: {error}", path.display());
                let remedy = "name a configuration file that exists and may be read";
                let mut violation = Violation::new(Reason::FileUnreadable, "", message, remedy);
                violation.location = at(1, 1);
                violations.push(violation);
                return Tree::Map(BTreeMap::new());
            }
        };
        self.lines = text.lines().map(str::to_owned).collect();

        let empty = || Tree::Map(BTreeMap::new());
        let (tree, positions, faults) = match yaml::parse(text) {
            Ok(yaml::Parsed {
                tree: tree @ Tree::Map(_),
                positions,
                faults,
            }) => (tree, positions, faults),
            // What is missing from an empty file is reported key by key.
            Ok(yaml::Parsed { tree: Tree::Null, .. }) => (empty(), Vec::new(), Vec::new()),
            Ok(_) => {
                let fault = yaml::Fault {
                    reason: Reason::InvalidValue,
                    path: KeyPath::default(),
                    position: yaml::Position { line: 1, column: 1 },
                    message: "a configuration is a mapping".to_owned(),
                    remedy: "begin with `model: …`",
                };
                self.broken = true;
                (empty(), Vec::new(), vec![fault])
            }
            Err(fault) => {
                self.broken = true;
                (empty(), Vec::new(), vec![fault])
            }
        };
        for (path, position) in positions {
            self.locations.insert(path, at(position.line, position.column));
        }
        for fault in faults {
            let mut violation =
                Violation::new(fault.reason, fault.path.to_string(), fault.message, fault.remedy);
            violation.location = at(fault.position.line, fault.position.column);
            violation.source_line = self.source_line(&violation.location);
            violations.push(violation);
        }
        tree
    }

    /// From now on `path` and what is in it come from `location`.
    fn place(&mut self, path: &KeyPath, value: &Tree, location: &Location) {
        if !matches!(value, Tree::Map(_)) {
            self.locations.retain(|known, _| !known.0.starts_with(&path.0));
        }
        self.locations.insert(path.clone(), location.clone());
        // What it is in is of the same place where nobody else has it.
        let mut above = path.parent();
        while let Some(path) = above.filter(|path| !path.0.is_empty()) {
            if self.locations.contains_key(&path) || self.merged.get(&path.0).is_some() {
                break;
            }
            self.locations.insert(path.clone(), location.clone());
            above = path.parent();
        }
        match value {
            Tree::Map(map) => map
                .iter()
                .for_each(|(key, value)| self.place(&path.key(key), value, location)),
            Tree::List(list) => {
                list.iter()
                    .enumerate()
                    .for_each(|(i, value)| self.place(&path.index(i), value, location));
            }
            _ => {}
        }
    }
}

/// Names of the environment variables that set a key with a default, or one of the root.
pub(super) fn environment_names() -> Vec<String> {
    fn leaves(tree: &Tree, name: &str, names: &mut Vec<String>) {
        match tree {
            Tree::Map(map) => {
                for (key, value) in map {
                    leaves(value, &format!("{name}__{}", key.to_uppercase()), names);
                }
            }
            _ => names.push(name.to_owned()),
        }
    }
    let mut names = Vec::new();
    leaves(&default_layer(), "LANEWAY", &mut names);
    let of_the_root = ["MODEL", "WEIGHTS", "MODEL_CONFIG", "DEVICE", "PRECISION"];
    names.extend(of_the_root.map(|key| format!("{ENVIRONMENT_PREFIX}{key}")));
    names
}

/// An override of a list element that is neither there nor the next one: elements between would be empty.
fn beyond_its_list(config: &ConfigBuilder<DefaultState>, path: &KeyPath) -> Option<Violation> {
    let is_index = |segment: &Segment| matches!(segment, Segment::Index(_));
    if !path.0.iter().any(is_index) {
        return None;
    }
    let merged = from_value(config.clone().build().ok()?.cache);
    path.0.iter().enumerate().find_map(|(i, segment)| {
        let (Segment::Index(index), Some(Tree::List(list))) = (segment, merged.get(&path.0[..i])) else {
            return None;
        };
        if *index <= list.len() {
            return None;
        }
        let list_key = KeyPath(path.0[..i].to_vec());
        let message = format!(
            "there is no `{list_key}[{index}]`: the list has {} elements",
            list.len()
        );
        let remedy = format!(
            "count from 0: the last one is `{list_key}[{}]`",
            list.len().saturating_sub(1)
        );
        Some(Violation::new(
            Reason::OverrideMalformed,
            path.to_string(),
            message,
            remedy,
        ))
    })
}

/// Environment variables by name, then flags as given.
fn overrides(sources: &Sources, violations: &mut Vec<Violation>) -> Vec<(KeyPath, Tree, Location)> {
    let mut variables: Vec<_> = sources.environment.iter().collect();
    variables.sort();
    let variables = variables.into_iter().filter_map(|(name, value)| {
        let key = name
            .strip_prefix(ENVIRONMENT_PREFIX)?
            .to_lowercase()
            .replace("__", ".");
        Some((key, value.as_str(), Location::Environment(name.clone())))
    });
    let flags = sources.flags.iter().map(|flag| {
        let (key, value) = flag.split_once('=').unwrap_or((flag, ""));
        (
            key.trim().to_owned(),
            value,
            Location::Flag(key.trim().to_owned()),
        )
    });

    let mut read = Vec::new();
    for (key, value, location) in variables.chain(flags) {
        let path = parse_path(&key);
        let named = |segment: &Segment| match segment {
            Segment::Key(key) => yaml::is_name(key),
            Segment::Index(index) => *index <= MAX_INDEX,
        };
        if path.0.is_empty() || !path.0.iter().all(named) || value.trim().is_empty() {
            let message = "this sets no key";
            let remedy = "write LANEWAY__SECTION__KEY=value in the environment, section.key=value as a flag";
            let mut violation = Violation::new(Reason::OverrideMalformed, key, message, remedy);
            violation.location = location;
            violations.push(violation);
            continue;
        }
        read.push((path, yaml::parse_value(value), location));
    }
    read
}

/// Read `a.b[1].c` or `a.b.1.c`. A number counts list elements, except where ranks are the keys.
pub(crate) fn parse_path(text: &str) -> KeyPath {
    let mut path = KeyPath::default();
    for part in text.split(['.', '[']).map(|part| part.trim_end_matches(']')) {
        if part.is_empty() && path.0.is_empty() {
            continue;
        }
        let by_rank = match path.0.as_slice() {
            [Segment::Key(only)] => only == "rank_devices",
            [Segment::Key(first), Segment::Key(second)] => first == "mps" && second == "ranks",
            _ => path.0.is_empty(),
        };
        path = match part.parse() {
            Ok(index) if !by_rank => path.index(index),
            _ => path.key(part),
        };
    }
    path
}

/// One source of `config`.
#[derive(Debug, Clone)]
struct Layer(HashMap<String, Value>);

impl Layer {
    fn whole(tree: &Tree) -> Self {
        match tree {
            Tree::Map(map) => Self(
                map.iter()
                    .map(|(key, value)| (key.clone(), to_value(value)))
                    .collect(),
            ),
            _ => Self(HashMap::new()),
        }
    }

    fn one(path: &KeyPath, value: &Tree) -> Self {
        Self(HashMap::from([(path.to_string(), to_value(value))]))
    }
}

impl Source for Layer {
    fn clone_into_box(&self) -> Box<dyn Source + Send + Sync> {
        Box::new(self.clone())
    }

    fn collect(&self) -> Result<HashMap<String, Value>, ConfigError> {
        Ok(self.0.clone())
    }
}

fn to_value(tree: &Tree) -> Value {
    let kind = match tree {
        Tree::Null => ValueKind::Nil,
        Tree::Bool(value) => ValueKind::Boolean(*value),
        Tree::Int(number) => ValueKind::I64(*number),
        Tree::Float(number) => ValueKind::Float(*number),
        Tree::Str(text) => ValueKind::String(text.clone()),
        Tree::List(list) => ValueKind::Array(list.iter().map(to_value).collect()),
        Tree::Map(map) => ValueKind::Table(
            map.iter()
                .map(|(key, value)| (key.clone(), to_value(value)))
                .collect(),
        ),
    };
    Value::new(None, kind)
}

fn from_value(value: Value) -> Tree {
    match value.kind {
        ValueKind::Nil => Tree::Null,
        ValueKind::Boolean(value) => Tree::Bool(value),
        ValueKind::I64(number) => Tree::Int(number),
        ValueKind::Float(number) => Tree::Float(number),
        ValueKind::String(text) => Tree::Str(text),
        ValueKind::Array(list) => Tree::List(list.into_iter().map(from_value).collect()),
        ValueKind::Table(map) => Tree::Map(
            map.into_iter()
                .map(|(key, value)| (key, from_value(value)))
                .collect(),
        ),
        // The layers hold no other kinds of number.
        other => Tree::Str(other.to_string()),
    }
}
