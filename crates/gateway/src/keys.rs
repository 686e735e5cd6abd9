//! Who may call: API keys from a file, each with limits of its own.
//!
//! Owns: the keys and what each of them uses. The task that [`watch`] spawns reads the file again when it changes and
//! ends with the gateway. A file that cannot be read then changes nothing: the keys that were read last stay.
//!
//! One key a line: `name key [requests_per_minute=N] [concurrent=N]`; `#` begins a comment.

use std::fmt;
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use governor::clock::{Clock as _, DefaultClock};
use governor::{DefaultDirectRateLimiter, Quota, RateLimiter};
use laneway_proto::{ErrorCode, Failure};
use subtle::ConstantTimeEq as _;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio_util::task::AbortOnDropHandle;

use crate::caller::KeyName;

/// Longest name of a key, which metrics carry.
const MAX_NAME_CHARS: usize = 64;

/// Shortest key: what is shorter can be guessed.
const MIN_KEY_CHARS: usize = 16;

/// Between looks at the file.
const POLL: Duration = Duration::from_secs(1);

/// Largest file.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// When a caller should come again whose calls of before still run.
const WHEN_BUSY: Duration = Duration::from_secs(1);

/// What is wrong with a file of keys.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum KeyFileError {
    /// It cannot be read.
    #[error("{0}")]
    Unreadable(String),
    /// A line is not as it should be.
    #[error("line {line}: {problem}")]
    Line {
        /// Its number, from 1.
        line: usize,
        /// What is wrong and what to write instead.
        problem: String,
    },
    /// Nobody could call.
    #[error("it holds no key; write lines like: name key requests_per_minute=60 concurrent=4")]
    Empty,
}

/// The keys that were read last. Cheap to clone.
#[derive(Debug, Clone)]
pub struct ApiKeys(Arc<watch::Sender<Arc<[Key]>>>, Arc<Path>);

/// One key and what it uses.
struct Key {
    name: KeyName,
    secret: String,
    requests_per_minute: Option<NonZeroU32>,
    concurrent: Option<NonZeroU32>,
    usage: Arc<Usage>,
}

/// Survives a reload that leaves the key as it was.
struct Usage {
    rate: Option<DefaultDirectRateLimiter>,
    places: Option<Arc<Semaphore>>,
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The secret is in no log.
        f.debug_struct("Key")
            .field("name", &self.name.as_str())
            .finish_non_exhaustive()
    }
}

/// A call that was let in, until it is dropped.
#[derive(Debug)]
pub(crate) struct Pass {
    pub(crate) key: KeyName,
    _place: Option<OwnedSemaphorePermit>,
}

/// A call that was not let in.
#[derive(Debug)]
pub(crate) struct TurnedAway {
    pub(crate) failure: Failure,
    /// Whose limit it is. Empty when the key is nobody's.
    pub(crate) key: KeyName,
}

impl ApiKeys {
    /// Read them for the first time.
    ///
    /// # Errors
    /// The file cannot be read, or holds a line that is no key, or none that is.
    pub fn read(path: PathBuf) -> Result<Self, KeyFileError> {
        let keys = parsed(&text(&path)?, &[])?;
        Ok(Self(Arc::new(watch::Sender::new(keys)), path.into()))
    }

    /// Let a call in that says this in `authorization`.
    ///
    /// # Errors
    /// `Unauthenticated`, `RateLimited`.
    pub(crate) fn enter(&self, authorization: Option<&[u8]>) -> Result<Pass, TurnedAway> {
        let Some(authorization) = authorization else {
            return Err(unknown("send `authorization: Bearer` and an API key"));
        };
        let secret = bearer(authorization).ok_or_else(|| unknown("the scheme has to be `Bearer`"))?;
        self.enter_with(secret)
    }

    /// Whether there is such a key. Counts as no call.
    ///
    /// # Errors
    /// `Unauthenticated`.
    pub(crate) fn check(&self, secret: &[u8]) -> Result<(), TurnedAway> {
        find(&self.0.borrow(), secret).map(|_| ())
    }

    /// Let a call in that has this key.
    ///
    /// # Errors
    /// As [`ApiKeys::enter`].
    pub(crate) fn enter_with(&self, secret: &[u8]) -> Result<Pass, TurnedAway> {
        let keys = self.0.borrow().clone();
        let key = find(&keys, secret)?;
        key.enter().map_err(|failure| TurnedAway {
            failure,
            key: key.name.clone(),
        })
    }

    /// Read the file again whenever it changes.
    pub(crate) fn watch(&self) -> AbortOnDropHandle<()> {
        let Self(keys, path) = self.clone();
        AbortOnDropHandle::new(tokio::spawn(async move {
            let mut last = None;
            loop {
                tokio::time::sleep(POLL).await;
                let (from, old) = (path.clone(), keys.borrow().clone());
                let read = tokio::task::spawn_blocking(move || {
                    let text = text(&from)?;
                    Ok::<_, KeyFileError>((parsed(&text, &old), text))
                });
                let (read, seen) = match read.await {
                    Ok(Ok((read, text))) => (read, Ok(text)),
                    Ok(Err(error)) => (Err(error.clone()), Err(error)),
                    Err(_) => return,
                };
                // What was said once is not said again.
                if last.as_ref() == Some(&seen) {
                    continue;
                }
                let first = last.replace(seen).is_none();
                match read {
                    Ok(read) => {
                        if !first {
                            tracing::info!(n_keys = read.len(), "API keys read");
                        }
                        keys.send_replace(read);
                    }
                    Err(error) => tracing::error!(%error, "API keys not read: the last ones stay"),
                }
            }
        }))
    }
}

/// The scheme, as it stands before a key.
const BEARER: &[u8] = b"Bearer ";

/// The key in an `authorization` of that scheme.
pub(crate) fn bearer(authorization: &[u8]) -> Option<&[u8]> {
    let (scheme, secret) = authorization.split_at_checked(BEARER.len())?;
    scheme.eq_ignore_ascii_case(BEARER).then(|| secret.trim_ascii())
}

fn find<'a>(keys: &'a [Key], secret: &[u8]) -> Result<&'a Key, TurnedAway> {
    // Every key is compared whole: how long it takes says nothing of how near a guess was.
    let found = keys.iter().fold(None, |found, key| {
        let same = bool::from(key.secret.as_bytes().ct_eq(secret));
        if same { Some(key) } else { found }
    });
    found.ok_or_else(|| unknown("no such API key"))
}

fn unknown(problem: &str) -> TurnedAway {
    TurnedAway {
        failure: Failure::new(ErrorCode::Unauthenticated, problem),
        key: KeyName::default(),
    }
}

impl Key {
    fn enter(&self) -> Result<Pass, Failure> {
        let place = match &self.usage.places {
            None => None,
            Some(places) => Some(places.clone().try_acquire_owned().map_err(|_| {
                let most = self.concurrent.map_or(0, NonZeroU32::get);
                let problem = format!("{most} calls with this API key run already");
                Failure::new(ErrorCode::RateLimited, problem).retry_after(WHEN_BUSY)
            })?),
        };
        if let Some(rate) = &self.usage.rate {
            rate.check().map_err(|not_until| {
                let most = self.requests_per_minute.map_or(0, NonZeroU32::get);
                let problem = format!("this API key may make {most} calls a minute");
                let delay = not_until.wait_time_from(DefaultClock::default().now());
                Failure::new(ErrorCode::RateLimited, problem).retry_after(delay)
            })?;
        }
        Ok(Pass {
            key: self.name.clone(),
            _place: place,
        })
    }

    fn is_as(&self, other: &Key) -> bool {
        (&self.secret, self.requests_per_minute, self.concurrent)
            == (&other.secret, other.requests_per_minute, other.concurrent)
    }
}

fn text(path: &Path) -> Result<String, KeyFileError> {
    let unreadable = |error: std::io::Error| KeyFileError::Unreadable(format!("cannot be read: {error}"));
    let n_bytes = std::fs::metadata(path).map_err(unreadable)?.len();
    if n_bytes > MAX_FILE_BYTES {
        let problem = format!("{n_bytes} bytes are over the limit of {MAX_FILE_BYTES}");
        return Err(KeyFileError::Unreadable(problem));
    }
    std::fs::read_to_string(path).map_err(unreadable)
}

/// The keys of a file. What is as it was in `old` goes on using what it used.
///
/// No word of a line is said: where words are missing, swapped or too many, any of them may be the key.
fn parsed(text: &str, old: &[Key]) -> Result<Arc<[Key]>, KeyFileError> {
    let mut keys: Vec<Key> = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        let line = line.split('#').next().unwrap_or_default();
        let problem = |problem: String| KeyFileError::Line {
            line: number,
            problem,
        };
        let mut words = line.split_whitespace();
        let Some(name) = words.next() else { continue };
        let secret = words
            .next()
            .ok_or_else(|| problem("one word is no name with its key; write: name key".to_owned()))?;
        if secret.chars().count() < MIN_KEY_CHARS || !secret.is_ascii() {
            let wanted = format!(
                "the key, which is the second word, has to have {MIN_KEY_CHARS} or more ASCII characters"
            );
            return Err(problem(wanted));
        }
        if name.chars().count() > MAX_NAME_CHARS {
            return Err(problem(format!("a name has {MAX_NAME_CHARS} characters at most")));
        }
        if keys
            .iter()
            .any(|key| key.name.as_str() == name || key.secret == secret)
        {
            return Err(problem("the name or the key is there already".to_owned()));
        }
        let (mut requests_per_minute, mut concurrent) = (None, None);
        for word in words {
            let (limit, to, value) = match word.split_once('=') {
                Some((limit @ "requests_per_minute", value)) => (limit, &mut requests_per_minute, value),
                Some((limit @ "concurrent", value)) => (limit, &mut concurrent, value),
                _ => {
                    let wanted =
                        "what is behind the key is no limit; there are: requests_per_minute=N, concurrent=N";
                    return Err(problem(wanted.to_owned()));
                }
            };
            let value = value.parse::<NonZeroU32>();
            *to = Some(value.map_err(|_| problem(format!("{limit}: write a number of 1 or more")))?);
        }
        let mut key = Key {
            name: KeyName::new(name),
            secret: secret.to_owned(),
            requests_per_minute,
            concurrent,
            usage: Arc::new(Usage {
                rate: requests_per_minute.map(|most| RateLimiter::direct(Quota::per_minute(most))),
                places: concurrent.map(|most| Arc::new(Semaphore::new(most.get() as usize))),
            }),
        };
        if let Some(as_it_was) = old.iter().find(|other| key.is_as(other)) {
            key.usage = as_it_was.usage.clone();
        }
        keys.push(key);
    }
    if keys.is_empty() {
        Err(KeyFileError::Empty)
    } else {
        Ok(keys.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALICE: &str = "Bearer alice-0123456789abc";
    const BOB: &str = "bearer  bob-0123456789abcde ";

    fn keys(text: &str) -> Result<ApiKeys, KeyFileError> {
        let keys = parsed(text, &[])?;
        Ok(ApiKeys(Arc::new(watch::Sender::new(keys)), Path::new("").into()))
    }

    fn two() -> ApiKeys {
        keys("# who\nalice alice-0123456789abc concurrent=1\n\nbob bob-0123456789abcde requests_per_minute=2 # a comment\n")
            .unwrap()
    }

    fn code(keys: &ApiKeys, authorization: &str) -> Result<Pass, ErrorCode> {
        keys.enter(Some(authorization.as_bytes()))
            .map_err(|turned_away| turned_away.failure.code)
    }

    #[test]
    fn only_a_key_of_the_file_is_let_in() {
        let keys = two();
        assert!(code(&keys, ALICE).is_ok());
        assert!(code(&keys, BOB).is_ok());
        for wrong in [
            "",
            "Bearer",
            "Bearer ",
            "Bearer alice-0123456789ab",
            "Bearer alice-0123456789abcd",
            "Basic alice-0123456789abc",
            "alice-0123456789abc",
        ] {
            assert_eq!(
                code(&keys, wrong).err(),
                Some(ErrorCode::Unauthenticated),
                "{wrong:?}"
            );
        }
        assert_eq!(
            keys.enter(None).unwrap_err().failure.code,
            ErrorCode::Unauthenticated
        );
        assert!(!format!("{keys:?}").contains("0123456789"), "no secret in a log");
    }

    #[test]
    fn each_key_has_limits_of_its_own() {
        let keys = two();
        let running = code(&keys, ALICE).unwrap();
        let busy = keys.enter(Some(ALICE.as_bytes())).unwrap_err();
        assert_eq!(busy.key.as_str(), "alice");
        let busy = busy.failure;
        assert_eq!(
            (busy.code, busy.retry_after),
            (ErrorCode::RateLimited, Some(WHEN_BUSY))
        );
        drop(running);
        assert!(
            code(&keys, ALICE).is_ok(),
            "a place is free again when its call ends"
        );
        for _ in 0..2 {
            assert!(code(&keys, BOB).is_ok());
        }
        let fast = keys.enter(Some(BOB.as_bytes())).unwrap_err().failure;
        assert_eq!(fast.code, ErrorCode::RateLimited);
        let delay = fast.retry_after.unwrap();
        assert!(
            delay > Duration::from_secs(20) && delay <= Duration::from_secs(30),
            "{delay:?}"
        );
        assert!(code(&keys, ALICE).is_ok(), "another key's limit is another's");
    }

    #[test]
    fn a_reload_keeps_what_an_unchanged_key_uses() {
        let old = parsed(
            "a 0123456789abcdef concurrent=1\nb b123456789abcdef concurrent=1",
            &[],
        )
        .unwrap();
        let _running: Vec<_> = old.iter().map(|key| key.enter().unwrap()).collect();
        let new = parsed(
            "a 0123456789abcdef concurrent=1\nb b123456789abcdef concurrent=2",
            &old,
        )
        .unwrap();
        assert!(new[0].enter().is_err());
        assert!(new[1].enter().is_ok());
    }

    #[test]
    fn a_file_that_is_wrong_is_refused_by_line() {
        let wrong = |text: &str| keys(text).unwrap_err().to_string();
        assert!(wrong("# nobody\n").contains("no key"));
        for (text, line, words) in [
            ("alice", 1, "write: name key"),
            ("\nalice short", 2, "16 or more"),
            (
                "a 0123456789abcdef concurrent=1 concurrent=two",
                1,
                "concurrent: write",
            ),
            ("a 0123456789abcdef\nb 0123456789abcdef", 2, "there already"),
            ("a 0123456789abcdef per_hour=3", 1, "requests_per_minute=N"),
            ("a 0123456789abcdef concurrent=0", 1, "1 or more"),
        ] {
            let said = wrong(text);
            assert!(
                said.contains(&format!("line {line}")) && said.contains(words),
                "{said}"
            );
        }
        let secret = "sk-0123456789abcdef";
        for text in [
            secret.to_owned(),
            format!("{secret} alice"),
            format!("alice={secret}"),
            format!("alice 0123456789abcdef {secret}"),
            format!("alice 0123456789abcdef concurrent={secret}"),
            format!("{secret} 0123456789abcdef\n{secret} 0123456789abcdef"),
        ] {
            let said = wrong(&text);
            assert!(!said.contains("0123456789"), "{text}: {said}");
        }
        let missing = ApiKeys::read("/nowhere/keys".into()).unwrap_err();
        assert!(matches!(missing, KeyFileError::Unreadable(_)), "{missing}");
    }
}
