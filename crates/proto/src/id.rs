//! Strong ids. On the wire they are strings; behind the edge they are these.

use std::fmt;

/// Longest id, in bytes.
const MAX_ID_BYTES: usize = 128;

/// A string that cannot be an id.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidId {
    /// Nothing.
    #[error("an id is empty; use 1 to 128 of A-Z a-z 0-9 . _ : -")]
    Empty,
    /// Too long.
    #[error("an id of {0} bytes is longer than 128")]
    TooLong(usize),
    /// A character outside the set.
    #[error("an id holds {0:?}; use 1 to 128 of A-Z a-z 0-9 . _ : -")]
    Character(char),
}

fn check(id: &str) -> Result<(), InvalidId> {
    if id.is_empty() {
        return Err(InvalidId::Empty);
    }
    if id.len() > MAX_ID_BYTES {
        return Err(InvalidId::TooLong(id.len()));
    }
    match id
        .chars()
        .find(|c| !(c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | ':' | '-')))
    {
        Some(c) => Err(InvalidId::Character(c)),
        None => Ok(()),
    }
}

macro_rules! string_id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name(String);

        impl $name {
            /// Check a string.
            ///
            /// # Errors
            /// It is empty, longer than 128 bytes or holds a character outside `A-Z a-z 0-9 . _ : -`.
            pub fn new(id: impl Into<String>) -> Result<Self, InvalidId> {
                let id = id.into();
                check(&id)?;
                Ok(Self(id))
            }

            /// As on the wire.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl From<$name> for String {
            fn from(id: $name) -> String {
                id.0
            }
        }

        impl TryFrom<String> for $name {
            type Error = InvalidId;

            fn try_from(id: String) -> Result<Self, InvalidId> {
                Self::new(id)
            }
        }
    };
}

string_id!(
    /// A request, unique among those that run.
    RequestId
);
string_id!(
    /// A worker process.
    WorkerId
);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_survive_the_wire() {
        let id = RequestId::new("a-Z_0.9:x").unwrap();
        assert_eq!(RequestId::try_from(String::from(id.clone())), Ok(id));
        assert!(WorkerId::new("w".repeat(128)).is_ok());
    }

    #[test]
    fn what_cannot_be_an_id_is_refused() {
        assert_eq!(RequestId::new(""), Err(InvalidId::Empty));
        assert_eq!(RequestId::new("x".repeat(129)), Err(InvalidId::TooLong(129)));
        for (id, character) in [("a b", ' '), ("a/b", '/'), ("ä", 'ä'), ("a\n", '\n')] {
            assert_eq!(RequestId::new(id), Err(InvalidId::Character(character)));
        }
    }
}
