//! A configuration before it has types: what every layer is read into, and key paths through it.

use std::collections::BTreeMap;
use std::fmt;

/// One value.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Tree {
    Null,
    Bool(bool),
    Int(i64),
    Float(f64),
    Str(String),
    List(Vec<Tree>),
    Map(BTreeMap<String, Tree>),
}

/// One step of a key path.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Segment {
    Key(String),
    Index(usize),
}

/// From the root to a value, `node_groups[1].lane`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Default)]
pub(crate) struct KeyPath(pub(crate) Vec<Segment>);

impl KeyPath {
    pub(crate) fn key(&self, key: &str) -> Self {
        self.with(Segment::Key(key.to_owned()))
    }

    pub(crate) fn index(&self, index: usize) -> Self {
        self.with(Segment::Index(index))
    }

    fn with(&self, segment: Segment) -> Self {
        let mut path = self.clone();
        path.0.push(segment);
        path
    }

    /// The path without its last segment, or `None` at the root.
    pub(crate) fn parent(&self) -> Option<Self> {
        let (_, rest) = self.0.split_last()?;
        Some(KeyPath(rest.to_vec()))
    }
}

impl fmt::Display for KeyPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, segment) in self.0.iter().enumerate() {
            match segment {
                Segment::Key(key) if i == 0 => write!(f, "{key}")?,
                Segment::Key(key) => write!(f, ".{key}")?,
                Segment::Index(index) => write!(f, "[{index}]")?,
            }
        }
        Ok(())
    }
}

impl Tree {
    /// The value at a path.
    pub(crate) fn get(&self, path: &[Segment]) -> Option<&Tree> {
        let Some((first, rest)) = path.split_first() else {
            return Some(self);
        };
        let child = match (self, first) {
            (Tree::Map(map), Segment::Key(key)) => map.get(key),
            (Tree::List(list), Segment::Index(index)) => list.get(*index),
            _ => None,
        };
        child?.get(rest)
    }

    /// Take out what a path leads to: the mapping entry nearest above its end, so that the numbers of list
    /// elements stay true. What the entry is replaced with comes from `defaults`, where that has it.
    /// Returns the path of the entry, or `None` when there is no such entry.
    pub(crate) fn prune(&mut self, path: &KeyPath, defaults: &Tree) -> Option<KeyPath> {
        let end = path
            .0
            .iter()
            .rposition(|segment| matches!(segment, Segment::Key(_)))?;
        let (entry, _) = path.0.split_at(end + 1);
        let (Segment::Key(key), above) = entry.split_last()? else {
            return None;
        };
        let Tree::Map(map) = self.get_mut(above)? else {
            return None;
        };
        let old = map.remove(key)?;
        match defaults.get(entry) {
            Some(default) if *default != old => {
                map.insert(key.clone(), default.clone());
            }
            _ => {}
        }
        Some(KeyPath(entry.to_vec()))
    }

    fn get_mut(&mut self, path: &[Segment]) -> Option<&mut Tree> {
        let Some((first, rest)) = path.split_first() else {
            return Some(self);
        };
        let child = match (self, first) {
            (Tree::Map(map), Segment::Key(key)) => map.get_mut(key),
            (Tree::List(list), Segment::Index(index)) => list.get_mut(*index),
            _ => None,
        };
        child?.get_mut(rest)
    }
}
