//! One voice, and its file: a line that says what it is, a line of JSON, then the samples as little-endian f32.

use std::fmt;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use bytes::Bytes;
use laneway_proto::v1;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use super::Registration;
use crate::caller::KeyName;

/// The first line; it says the version of the rest.
const MAGIC: &[u8] = b"laneway voice 1\n";

/// How a voice's file ends, and one that is being written.
const FINISHED: &str = "voice";
const UNFINISHED: &str = "part";

/// Longest line of JSON.
const MAX_FACTS_BYTES: usize = 64 * 1024;

/// How an id begins; the hash follows.
pub(crate) const ID_PREFIX: &str = "voice_";

/// Bytes of the hash that an id shows: no two voices of one directory share them.
const ID_BYTES: usize = 16;

/// What is said in a clip, and how it sounds.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Clip {
    /// Little-endian f32 mono.
    pub(crate) audio: Bytes,
    pub(crate) sample_rate: u32,
    /// Empty: only the speaker's vector is taken from it.
    pub(crate) text: String,
}

impl fmt::Debug for Clip {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // How somebody sounds is in no log.
        f.debug_struct("Clip")
            .field("n_bytes", &self.audio.len())
            .field("sample_rate", &self.sample_rate)
            .finish_non_exhaustive()
    }
}

impl Clip {
    pub(crate) fn ms(&self) -> u64 {
        (self.audio.len() / 4) as u64 * 1000 / u64::from(self.sample_rate.max(1))
    }
}

impl From<&Clip> for v1::ReferenceClip {
    fn from(clip: &Clip) -> Self {
        Self {
            audio: clip.audio.clone(),
            sample_rate: clip.sample_rate,
            text: clip.text.clone(),
        }
    }
}

/// A voice that was registered.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Registered {
    pub(crate) id: String,
    pub(crate) name: String,
    pub(crate) consent: String,
    /// Name of the API key that it was registered with. Empty where none was asked for, and for a voice of before owners
    /// were kept.
    pub(crate) owner: KeyName,
    /// In seconds since 1970.
    pub(crate) created_at: u64,
    pub(crate) clip: Clip,
}

/// The line of JSON. The id is the file's name.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Facts {
    name: String,
    text: String,
    consent: String,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    owner: String,
    sample_rate: u32,
    created_at: u64,
}

impl Registered {
    pub(super) fn new(registration: Registration, created_at: u64) -> Self {
        let Registration {
            name,
            consent,
            owner,
            clip,
        } = registration;
        Self {
            id: id(&name, &clip),
            name,
            consent,
            owner,
            created_at,
            clip,
        }
    }

    /// Whether a request that says this means it. Names have no case.
    pub(crate) fn is_called(&self, name: &str) -> bool {
        self.id == name || self.name.eq_ignore_ascii_case(name)
    }

    /// Whether a call with this key may forget it: it is the owner's, or nobody's, or no key is asked for.
    pub(super) fn is_for(&self, key: &KeyName) -> bool {
        self.owner == *key || self.owner.as_str().is_empty() || key.as_str().is_empty()
    }

    /// Of its file.
    pub(super) fn n_bytes(&self) -> u64 {
        (self.head().len() + self.clip.audio.len()) as u64
    }

    fn head(&self) -> Vec<u8> {
        let facts = Facts {
            name: self.name.clone(),
            text: self.clip.text.clone(),
            consent: self.consent.clone(),
            owner: self.owner.as_str().to_owned(),
            sample_rate: self.clip.sample_rate,
            created_at: self.created_at,
        };
        let mut head = MAGIC.to_vec();
        serde_json::to_writer(&mut head, &facts).expect("strings and numbers are JSON");
        head.push(b'\n');
        head
    }
}

/// The hash of what a voice is. A name of its own keeps two voices of one clip apart.
fn id(name: &str, clip: &Clip) -> String {
    let mut hash = Sha256::new();
    for part in [
        name.as_bytes(),
        clip.text.as_bytes(),
        &clip.sample_rate.to_le_bytes(),
        &clip.audio,
    ] {
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part);
    }
    let digits = hash
        .finalize()
        .iter()
        .take(ID_BYTES)
        .map(|byte| format!("{byte:02x}"))
        .collect::<String>();
    format!("{ID_PREFIX}{digits}")
}

/// For the owner's eyes only: what it holds is how people sound.
pub(super) fn make_directory(directory: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(directory)
}

fn path(directory: &Path, voice: &Registered, extension: &str) -> PathBuf {
    directory.join(&voice.id).with_extension(extension)
}

/// Left of a write that was cut short.
pub(super) fn is_unfinished(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == UNFINISHED)
}

/// Write a voice so that after a crash at any moment it is there whole or not at all.
pub(super) fn write(directory: &Path, voice: &Registered) -> io::Result<()> {
    let unfinished = path(directory, voice, UNFINISHED);
    let written = write_to(&unfinished, voice)
        .and_then(|()| fs::rename(&unfinished, path(directory, voice, FINISHED)))
        .and_then(|()| sync(directory));
    if written.is_err() {
        // It takes room. That it cannot be removed says no more than the first error.
        let _ = fs::remove_file(&unfinished);
    }
    written
}

fn write_to(path: &Path, voice: &Registered) -> io::Result<()> {
    let mut file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(path)?;
    file.write_all(&voice.head())?;
    file.write_all(&voice.clip.audio)?;
    file.sync_all()
}

/// A name in a directory lasts once the directory was written.
fn sync(directory: &Path) -> io::Result<()> {
    File::open(directory)?.sync_all()
}

/// Remove a voice's file.
pub(super) fn remove(directory: &Path, voice: &Registered) -> io::Result<()> {
    match fs::remove_file(path(directory, voice, FINISHED)) {
        // Somebody did so by hand.
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed.and_then(|()| sync(directory)),
    }
}

/// Read a voice back, and check that it is what its name says.
pub(super) fn read(path: &Path, max_bytes: u64) -> io::Result<Registered> {
    let wrong = |problem: &str| io::Error::new(io::ErrorKind::InvalidData, problem);
    if !fs::symlink_metadata(path)?.is_file() {
        return Err(wrong("it is not a plain file"));
    }
    let mut bytes = Vec::new();
    File::open(path)?
        .take(max_bytes.saturating_add(1))
        .read_to_end(&mut bytes)?;
    if bytes.len() as u64 > max_bytes {
        return Err(wrong("it is larger than all voices together may be"));
    }
    let rest = bytes
        .strip_prefix(MAGIC)
        .ok_or_else(|| wrong("it is not a voice"))?;
    let end = rest.iter().take(MAX_FACTS_BYTES).position(|byte| *byte == b'\n');
    let end = end.ok_or_else(|| wrong("its line of JSON does not end"))?;
    let facts: Facts = serde_json::from_slice(&rest[..end])?;
    let at = MAGIC.len() + end + 1;
    let clip = Clip {
        audio: Bytes::from(bytes).slice(at..),
        sample_rate: facts.sample_rate,
        text: facts.text,
    };
    let voice = Registered {
        id: id(&facts.name, &clip),
        name: facts.name,
        consent: facts.consent,
        owner: KeyName::new(&facts.owner),
        created_at: facts.created_at,
        clip,
    };
    let named = path
        .file_name()
        .is_some_and(|name| *name == *format!("{}.{FINISHED}", voice.id));
    if !named {
        return Err(wrong("its name is not the hash of what it holds: it is damaged"));
    }
    Ok(voice)
}
