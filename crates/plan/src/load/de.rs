//! From a [`Tree`] to a type, with the path and the kind of whatever does not fit.
//!
//! Serde stops at the first misfit. [`read`] takes that entry out, writes it down and goes on, so that every
//! unknown key and every bad value is found in one run.

use std::fmt;

use serde::Deserialize;
use serde::de::{self, DeserializeSeed, IntoDeserializer, MapAccess, SeqAccess, Unexpected, Visitor};

use super::tree::{KeyPath, Segment, Tree};

/// Why a value does not fit.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Misfit {
    /// No such key here; these there are.
    UnknownKey {
        key: String,
        known: &'static [&'static str],
    },
    /// No such choice; these there are.
    UnknownChoice {
        choice: String,
        known: &'static [&'static str],
    },
    /// A key is left out.
    Missing(&'static str),
    /// Anything else.
    Invalid(String),
}

/// A misfit and where it is.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Error {
    pub(crate) path: KeyPath,
    pub(crate) misfit: Misfit,
}

/// Read `tree` as a `T`, reporting each misfit. `None` when what is left cannot be read at all.
pub(crate) fn read<T: for<'de> Deserialize<'de>>(
    tree: &mut Tree,
    defaults: &Tree,
    mut report: impl FnMut(Error),
) -> Option<T> {
    loop {
        let error = match T::deserialize(&*tree) {
            Ok(value) => return Some(value),
            Err(error) => error,
        };
        let path = error.path.clone();
        report(error);
        tree.prune(&path, defaults)?;
    }
}

impl Error {
    fn new(misfit: Misfit) -> Self {
        Self {
            path: KeyPath::default(),
            misfit,
        }
    }

    fn within(mut self, segment: Segment) -> Self {
        self.path.0.insert(0, segment);
        self
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {:?}", self.path, self.misfit)
    }
}

impl std::error::Error for Error {}

impl de::Error for Error {
    fn custom<T: fmt::Display>(message: T) -> Self {
        Error::new(Misfit::Invalid(message.to_string()))
    }

    fn invalid_type(found: Unexpected<'_>, expected: &dyn de::Expected) -> Self {
        Error::custom(format!("{} is not {}", describe(found), in_words(expected)))
    }

    fn invalid_value(found: Unexpected<'_>, expected: &dyn de::Expected) -> Self {
        Error::invalid_type(found, expected)
    }

    fn unknown_field(field: &str, known: &'static [&'static str]) -> Self {
        let misfit = Misfit::UnknownKey {
            key: field.to_owned(),
            known,
        };
        Error::new(misfit).within(Segment::Key(field.to_owned()))
    }

    fn unknown_variant(variant: &str, known: &'static [&'static str]) -> Self {
        Error::new(Misfit::UnknownChoice {
            choice: variant.to_owned(),
            known,
        })
    }

    fn missing_field(field: &'static str) -> Self {
        Error::new(Misfit::Missing(field))
    }
}

fn describe(found: Unexpected<'_>) -> String {
    match found {
        Unexpected::Unit | Unexpected::Option => "nothing".to_owned(),
        Unexpected::Map => "a mapping".to_owned(),
        Unexpected::Seq => "a list".to_owned(),
        Unexpected::Str(text) => format!("`{text}`"),
        Unexpected::Signed(number) => format!("`{number}`"),
        Unexpected::Unsigned(number) => format!("`{number}`"),
        Unexpected::Float(number) => format!("`{number}`"),
        Unexpected::Bool(value) => format!("`{value}`"),
        other => other.to_string(),
    }
}

/// Serde names Rust types; a person reads words.
fn in_words(expected: &dyn de::Expected) -> String {
    match expected.to_string().as_str() {
        "u32" => format!("a whole number from 0 to {}", u32::MAX),
        "a nonzero u32" => format!("a whole number from 1 to {}", u32::MAX),
        "a string" => "text".to_owned(),
        "a sequence" => "a list".to_owned(),
        "a map" => "a mapping".to_owned(),
        other if other.starts_with("struct ") => "a mapping".to_owned(),
        other if other.starts_with("enum ") || other == "string or map" => "one of its names".to_owned(),
        other => other.to_owned(),
    }
}

impl<'de> de::Deserializer<'de> for &'de Tree {
    type Error = Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        match self {
            Tree::Null => visitor.visit_unit(),
            Tree::Bool(value) => visitor.visit_bool(*value),
            Tree::Int(number) => visitor.visit_i64(*number),
            Tree::Float(number) => visitor.visit_f64(*number),
            Tree::Str(text) => visitor.visit_str(text),
            Tree::List(list) => visitor.visit_seq(Elements { list, next: 0 }),
            Tree::Map(map) => visitor.visit_map(Entries {
                entries: map.iter(),
                value: None,
            }),
        }
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        match self {
            Tree::Null => visitor.visit_none(),
            _ => visitor.visit_some(self),
        }
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        visitor: V,
    ) -> Result<V::Value, Error> {
        visitor.visit_newtype_struct(self)
    }

    /// Serde would also fill a struct from a list, by the order of its fields.
    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        _: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        match self {
            Tree::List(_) => Err(de::Error::invalid_type(Unexpected::Seq, &visitor)),
            _ => self.deserialize_any(visitor),
        }
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _: &'static str,
        known: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        match self {
            Tree::Str(text) => visitor.visit_enum(text.as_str().into_deserializer()),
            other => {
                let choice = match other {
                    Tree::Bool(value) => value.to_string(),
                    Tree::Int(number) => number.to_string(),
                    Tree::Float(number) => number.to_string(),
                    _ => String::new(),
                };
                Err(Error::new(Misfit::UnknownChoice { choice, known }))
            }
        }
    }

    serde::forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf unit unit_struct seq
        tuple tuple_struct map identifier ignored_any
    }
}

struct Elements<'de> {
    list: &'de [Tree],
    next: usize,
}

impl<'de> SeqAccess<'de> for Elements<'de> {
    type Error = Error;

    fn next_element_seed<T: DeserializeSeed<'de>>(&mut self, seed: T) -> Result<Option<T::Value>, Error> {
        let Some(element) = self.list.get(self.next) else {
            return Ok(None);
        };
        self.next += 1;
        let index = self.next - 1;
        seed.deserialize(element)
            .map(Some)
            .map_err(|error| error.within(Segment::Index(index)))
    }
}

struct Entries<'de> {
    entries: std::collections::btree_map::Iter<'de, String, Tree>,
    value: Option<(&'de str, &'de Tree)>,
}

impl<'de> MapAccess<'de> for Entries<'de> {
    type Error = Error;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> Result<Option<K::Value>, Error> {
        let Some((key, value)) = self.entries.next() else {
            return Ok(None);
        };
        self.value = Some((key, value));
        let key_error = |error: Error| match error.misfit {
            Misfit::UnknownKey { .. } => error,
            _ => error.within(Segment::Key(key.clone())),
        };
        seed.deserialize(Key(key)).map(Some).map_err(key_error)
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, Error> {
        let (key, value) = self.value.take().expect("serde asks for a key before its value");
        seed.deserialize(value)
            .map_err(|error| error.within(Segment::Key(key.to_owned())))
    }
}

/// A mapping key: a name, or a number where the type asks for one.
struct Key<'de>(&'de str);

impl<'de> de::Deserializer<'de> for Key<'de> {
    type Error = Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_borrowed_str(self.0)
    }

    fn deserialize_u32<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        match self.0.parse() {
            Ok(number) => visitor.visit_u32(number),
            Err(_) => Err(de::Error::custom(format!(
                "the key `{}` is not a rank: a whole number from 0",
                self.0
            ))),
        }
    }

    serde::forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u64 u128 f32 f64 char str string bytes byte_buf option unit unit_struct
        newtype_struct seq tuple tuple_struct map struct enum identifier ignored_any
    }
}
