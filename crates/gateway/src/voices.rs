//! Registered voices: clips to clone, kept in a directory under names that requests may use.
//!
//! Owns: the directory, which no other gateway may use at the same time, and the clips, all of them in memory: they are
//! bounded in number and in bytes. [`Voices::open`] reads them once. Writing is for one thread at a time and blocks, so
//! async code calls it on the blocking threads. A voice is a file that is named by the hash of what it holds
//! (`voices/file.rs`); nothing that a caller says becomes part of a path. It is deleted by the API key that registered it.

mod clip;
mod file;
mod registration;
#[cfg(test)]
mod tests;

use std::fs;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use laneway_proto::{ErrorCode, Failure};
use laneway_telemetry::metric;
use parking_lot::{Mutex, RwLock};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::caller::KeyName;
use crate::facts::ModelFacts;
use crate::routing::overloaded;

pub(crate) use file::{Clip, Registered};
pub(crate) use registration::{Registration, checked};

/// Registrations that are read, checked and written at the same time: each holds a clip or two.
const AT_ONCE: usize = 2;

/// Held by the gateway that uses the directory.
const LOCK_FILE: &str = "lock";

/// Where voices are kept, and how many.
#[derive(Debug, Clone)]
pub struct VoicesConfig {
    /// Made where it is missing.
    pub directory: PathBuf,
    /// Most voices.
    pub max_voices: NonZeroUsize,
    /// Most bytes of their files, which are about those of their samples in memory too.
    pub max_bytes: u64,
}

/// Why a directory of voices cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum VoicesError {
    /// It cannot be read or written.
    #[error("{what}: {source}")]
    Io {
        /// What was tried.
        what: &'static str,
        /// Why it failed.
        source: std::io::Error,
    },
    /// Another gateway uses it.
    #[error("another gateway uses it; give each gateway a directory of its own")]
    InUse,
    /// It holds more than it may.
    #[error(
        "it holds {n_voices} voices of {n_bytes} bytes, over the limit of {max_voices} and {max_bytes}; \
         raise --max-voices and --max-voices-mib, or remove files"
    )]
    TooMuch {
        /// Voices in it.
        n_voices: usize,
        /// Their bytes.
        n_bytes: u64,
        /// Most voices.
        max_voices: usize,
        /// Most bytes.
        max_bytes: u64,
    },
}

/// The registered voices. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Voices(Arc<Kept>);

#[derive(Debug)]
struct Kept {
    config: VoicesConfig,
    /// By name. Whoever changes it holds `writing`.
    all: RwLock<Vec<Arc<Registered>>>,
    writing: Mutex<()>,
    places: Arc<Semaphore>,
    /// Locked for as long as it is open.
    _lock: fs::File,
}

impl Voices {
    /// Read the voices of a directory. What is left of a write that was cut short is removed; files that are no voices
    /// are told of and left alone.
    ///
    /// # Errors
    /// The directory cannot be used, another gateway uses it, or it holds more than it may.
    pub fn open(config: VoicesConfig) -> Result<Self, VoicesError> {
        let io = |what| move |source| VoicesError::Io { what, source };
        file::make_directory(&config.directory).map_err(io("make the directory"))?;
        let lock = fs::File::create(config.directory.join(LOCK_FILE)).map_err(io("make the lock file"))?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(fs::TryLockError::WouldBlock) => return Err(VoicesError::InUse),
            Err(fs::TryLockError::Error(source)) => return Err(io("lock the directory")(source)),
        }
        let mut all = read_all(&config).map_err(io("read the directory"))?;
        all.sort_by(|a, b| a.name.cmp(&b.name));
        let n_bytes: u64 = all.iter().map(|voice| voice.n_bytes()).sum();
        if all.len() > config.max_voices.get() || n_bytes > config.max_bytes {
            return Err(VoicesError::TooMuch {
                n_voices: all.len(),
                n_bytes,
                max_voices: config.max_voices.get(),
                max_bytes: config.max_bytes,
            });
        }
        Ok(Self(Arc::new(Kept {
            config,
            all: RwLock::new(all),
            writing: Mutex::new(()),
            places: Arc::new(Semaphore::new(AT_ONCE)),
            _lock: lock,
        })))
    }

    /// A place for a registration, from before its clip is read until it is written.
    ///
    /// # Errors
    /// `Overloaded`.
    pub(crate) fn enter(&self) -> Result<OwnedSemaphorePermit, Failure> {
        let place = self.0.places.clone().try_acquire_owned();
        place.map_err(|_| overloaded("other voices are being registered"))
    }

    /// Say how many there are.
    pub(crate) fn count(&self) {
        metrics::gauge!(metric::GATEWAY_VOICES).set(self.0.all.read().len() as f64);
    }

    /// The model as callers see it: with the registered voices that it can clone.
    pub(crate) fn known_to(&self, model: &Arc<ModelFacts>) -> Arc<ModelFacts> {
        let all = self.0.all.read();
        if !model.takes_reference || all.is_empty() {
            return model.clone();
        }
        let fitting = all.iter().filter(|voice| {
            voice.clip.sample_rate == model.sample_rate
                && voice.clip.ms() <= u64::from(model.max_reference_ms)
        });
        let mut facts = ModelFacts::clone(model);
        facts.voices.extend(fitting.map(crate::facts::Voice::from));
        Arc::new(facts)
    }

    /// Keep a voice. It blocks.
    ///
    /// # Errors
    /// `VoiceExists`, `VoicesFull`, or `Internal` when it cannot be written.
    pub(crate) fn register(&self, registration: Registration) -> Result<Arc<Registered>, Failure> {
        let _writing = self.0.writing.lock();
        let same_name = self.find(&registration.name);
        let created_at = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0, |since| since.as_secs());
        let voice = Arc::new(Registered::new(registration, created_at));
        if let Some(there) = same_name {
            if there.id == voice.id && there.is_for(&voice.owner) {
                return Ok(there);
            }
            let remedy = match there.is_for(&voice.owner) {
                true => "delete it first",
                false => "choose another name",
            };
            let problem = format!("another clip is registered as \"{}\"; {remedy}", there.name);
            return Err(Failure::of_field(ErrorCode::VoiceExists, "name", problem));
        }
        self.check_room(voice.n_bytes())?;
        file::write(&self.0.config.directory, &voice).map_err(|error| unwritten("write", &error))?;
        let mut all = self.0.all.write();
        let at = all.partition_point(|other| other.name < voice.name);
        all.insert(at, voice.clone());
        drop(all);
        self.count();
        tracing::info!(voice = voice.id, name = voice.name, "voice registered");
        Ok(voice)
    }

    /// Forget the voice of this name or id for a call with this key. It blocks.
    ///
    /// # Errors
    /// `UnknownVoice`, `VoiceOfAnother`, or `Internal` when its file cannot be removed.
    pub(crate) fn delete(&self, name: &str, key: &KeyName) -> Result<Arc<Registered>, Failure> {
        let _writing = self.0.writing.lock();
        let Some(voice) = self.find(name) else {
            let problem = format!("no voice \"{}\" is registered", crate::validate::shortened(name));
            return Err(Failure::of_field(ErrorCode::UnknownVoice, "voice", problem));
        };
        if !voice.is_for(key) {
            let problem = format!(
                "\"{}\" was registered with another API key, which alone may delete it",
                voice.name
            );
            return Err(Failure::of_field(ErrorCode::VoiceOfAnother, "voice", problem));
        }
        file::remove(&self.0.config.directory, &voice).map_err(|error| unwritten("remove", &error))?;
        self.0.all.write().retain(|other| other.id != voice.id);
        self.count();
        tracing::info!(voice = voice.id, name = voice.name, "voice deleted");
        Ok(voice)
    }

    fn find(&self, name: &str) -> Option<Arc<Registered>> {
        let all = self.0.all.read();
        all.iter().find(|voice| voice.is_called(name)).cloned()
    }

    fn check_room(&self, n_more_bytes: u64) -> Result<(), Failure> {
        let all = self.0.all.read();
        let VoicesConfig {
            max_voices,
            max_bytes,
            ..
        } = &self.0.config;
        let full = |problem: String| Err(Failure::new(ErrorCode::VoicesFull, problem));
        if all.len() >= max_voices.get() {
            return full(format!(
                "{max_voices} voices are registered, and no more are kept; delete one first"
            ));
        }
        let n_bytes: u64 = all.iter().map(|voice| voice.n_bytes()).sum();
        if n_bytes + n_more_bytes > *max_bytes {
            let left = max_bytes.saturating_sub(n_bytes);
            return full(format!(
                "the voice takes {n_more_bytes} bytes and {left} are left of {max_bytes}; delete one first"
            ));
        }
        Ok(())
    }
}

fn read_all(config: &VoicesConfig) -> std::io::Result<Vec<Arc<Registered>>> {
    let mut all: Vec<Arc<Registered>> = Vec::new();
    for entry in fs::read_dir(&config.directory)? {
        let path = entry?.path();
        if path.file_name().is_some_and(|name| name == LOCK_FILE) {
            continue;
        }
        if file::is_unfinished(&path) {
            fs::remove_file(&path)?;
            continue;
        }
        match file::read(&path, config.max_bytes) {
            Ok(voice) if all.iter().any(|other| other.is_called(&voice.name)) => {
                ignored(&path, "its name is there already");
            }
            Ok(voice) => all.push(Arc::new(voice)),
            Err(error) => ignored(&path, &error.to_string()),
        }
    }
    Ok(all)
}

fn ignored(path: &Path, problem: &str) {
    tracing::error!(file = %path.display(), problem, "file in the directory of voices ignored");
}

/// What the operator has to hear of, and the caller need not.
fn unwritten(what: &str, error: &std::io::Error) -> Failure {
    tracing::error!(%error, "cannot {what} a voice");
    Failure::internal()
}
