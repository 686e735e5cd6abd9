//! YAML to a [`Tree`] with the place of every key.
//!
//! One parse gives both, so that a position can never belong to another reading of the file. What a
//! configuration has no use for and what could make it mean something else than it seems to say is refused:
//! anchors (a few lines of them expand without bound), tags, a key written twice, several documents.

use std::collections::BTreeMap;

use saphyr_parser::{Event, Marker, Parser, ScalarStyle};

use super::tree::{KeyPath, Tree};
use crate::violation::Reason;

/// Deepest nesting; the deepest key of a configuration is at 5.
const MAX_DEPTH: usize = 32;

/// A line and a column, both from 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Position {
    pub(crate) line: usize,
    pub(crate) column: usize,
}

/// Something that keeps the text from being a configuration.
#[derive(Debug)]
pub(crate) struct Fault {
    pub(crate) reason: Reason,
    pub(crate) path: KeyPath,
    pub(crate) position: Position,
    pub(crate) message: String,
    pub(crate) remedy: &'static str,
}

/// What was read.
#[derive(Debug)]
pub(crate) struct Parsed {
    pub(crate) tree: Tree,
    /// Place of every mapping key and list element.
    pub(crate) positions: Vec<(KeyPath, Position)>,
    /// Faults that leave the rest readable.
    pub(crate) faults: Vec<Fault>,
}

/// Parse one document; an empty one is null.
pub(crate) fn parse(text: &str) -> Result<Parsed, Fault> {
    let mut reader = Reader {
        parser: Parser::new_from_str(text),
        positions: Vec::new(),
        faults: Vec::new(),
    };
    let root = KeyPath::default();
    let tree = loop {
        match reader.next(&root)? {
            (Event::StreamEnd, _) => break Tree::Null,
            (Event::StreamStart | Event::DocumentStart(_) | Event::Nothing, _) => {}
            (event, at) => break reader.value(event, at, &root, 0)?,
        }
    };
    loop {
        match reader.next(&root)? {
            (Event::StreamEnd, _) => break,
            (Event::DocumentStart(_), at) => {
                return Err(unsupported(
                    &root,
                    at,
                    "a second document begins here",
                    "write one file for a deployment",
                ));
            }
            _ => {}
        }
    }
    Ok(Parsed {
        tree,
        positions: reader.positions,
        faults: reader.faults,
    })
}

/// Read one value as YAML reads it: `[0, 16]`, `auto`, `32`. What is no YAML is text.
pub(crate) fn parse_value(text: &str) -> Tree {
    match parse(text) {
        Ok(parsed) if parsed.faults.is_empty() && !text.trim().is_empty() => parsed.tree,
        _ => Tree::Str(text.to_owned()),
    }
}

struct Reader<'a> {
    parser: Parser<'a, saphyr_parser::StrInput<'a>>,
    positions: Vec<(KeyPath, Position)>,
    faults: Vec<Fault>,
}

impl<'a> Reader<'a> {
    fn next(&mut self, path: &KeyPath) -> Result<(Event<'a>, Position), Fault> {
        match self.parser.next_event() {
            Some(Ok((event, span))) => Ok((event, position(&span.start))),
            None => Ok((Event::StreamEnd, Position { line: 1, column: 1 })),
            Some(Err(error)) => Err(Fault {
                reason: Reason::YamlSyntax,
                path: path.clone(),
                position: position(error.marker()),
                message: format!("this is not YAML: {}", error.info()),
                remedy: "mend the syntax; nothing after this place was read",
            }),
        }
    }

    fn value(&mut self, event: Event<'a>, at: Position, path: &KeyPath, depth: usize) -> Result<Tree, Fault> {
        if depth > MAX_DEPTH {
            return Err(unsupported(
                path,
                at,
                "this is nested too deeply",
                "no key lies this deep",
            ));
        }
        match event {
            Event::Scalar(_, _, _, Some(_))
            | Event::SequenceStart(_, Some(_))
            | Event::MappingStart(_, Some(_)) => Err(unsupported(
                path,
                at,
                "tags (`!name`) have no meaning here",
                "write the plain value",
            )),
            Event::Scalar(_, _, anchor, _)
            | Event::SequenceStart(anchor, _)
            | Event::MappingStart(anchor, _)
                if anchor > 0 =>
            {
                Err(unsupported(
                    path,
                    at,
                    "anchors (`&name`) have no meaning here",
                    "write the value out",
                ))
            }
            Event::Alias(_) => Err(unsupported(
                path,
                at,
                "aliases (`*name`) have no meaning here",
                "write the value out",
            )),
            Event::Scalar(text, ScalarStyle::Plain, ..) => Ok(plain(&text)),
            Event::Scalar(text, ..) => Ok(Tree::Str(text.into_owned())),
            Event::SequenceStart(..) => self.list(path, depth),
            Event::MappingStart(..) => self.map(path, depth),
            // The parser emits nothing else where a value may stand.
            _ => Ok(Tree::Null),
        }
    }

    fn list(&mut self, path: &KeyPath, depth: usize) -> Result<Tree, Fault> {
        let mut list = Vec::new();
        loop {
            let (event, at) = self.next(path)?;
            if matches!(event, Event::SequenceEnd | Event::StreamEnd) {
                return Ok(Tree::List(list));
            }
            let element = path.index(list.len());
            self.positions.push((element.clone(), at));
            list.push(self.value(event, at, &element, depth + 1)?);
        }
    }

    fn map(&mut self, path: &KeyPath, depth: usize) -> Result<Tree, Fault> {
        let mut map = BTreeMap::new();
        loop {
            let (event, at) = self.next(path)?;
            let key = match event {
                Event::MappingEnd | Event::StreamEnd => return Ok(Tree::Map(map)),
                Event::Scalar(text, _, 0, None) if is_name(&text) => text.into_owned(),
                _ => {
                    let remedy = "keys are names or numbers: letters, digits, `_` and `-`";
                    return Err(unsupported(path, at, "this is not a key", remedy));
                }
            };
            let entry = path.key(&key);
            let (event, value_at) = self.next(&entry)?;
            if map.contains_key(&key) {
                self.faults.push(Fault {
                    reason: Reason::DuplicateKey,
                    path: entry.clone(),
                    position: at,
                    message: format!("`{key}` is written twice in one mapping"),
                    remedy: "keep one of the two",
                });
                // Read past it; the first one stands.
                let known = self.positions.len();
                self.value(event, value_at, &entry, depth + 1)?;
                self.positions.truncate(known);
                continue;
            }
            self.positions.push((entry.clone(), at));
            let value = self.value(event, value_at, &entry, depth + 1)?;
            map.insert(key, value);
        }
    }
}

/// `config` reads a top-level key as a path expression, so only plain names may reach it.
pub(crate) fn is_name(text: &str) -> bool {
    !text.is_empty()
        && text
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || c == '_' || c == '-')
}

fn unsupported(path: &KeyPath, position: Position, message: &str, remedy: &'static str) -> Fault {
    let (path, message) = (path.clone(), message.to_owned());
    Fault {
        reason: Reason::YamlUnsupported,
        path,
        position,
        message,
        remedy,
    }
}

fn position(marker: &Marker) -> Position {
    Position {
        line: marker.line(),
        column: marker.col() + 1,
    }
}

/// The core schema of YAML 1.2 for an unquoted scalar. Whole numbers beyond 64 bits stay text.
fn plain(text: &str) -> Tree {
    match text {
        "" | "~" | "null" | "Null" | "NULL" => return Tree::Null,
        "true" | "True" | "TRUE" => return Tree::Bool(true),
        "false" | "False" | "FALSE" => return Tree::Bool(false),
        _ => {}
    }
    let digits = text.strip_prefix(['-', '+']).unwrap_or(text);
    let numeric = digits.starts_with(|c: char| c.is_ascii_digit() || c == '.');
    if digits.bytes().all(|b| b.is_ascii_digit())
        && let Ok(number) = text.parse()
    {
        return Tree::Int(number);
    }
    match text.parse() {
        Ok(number) if numeric => Tree::Float(number),
        _ => Tree::Str(text.to_owned()),
    }
}
