//! Compiled kernels on disk.
//!
//! One file for each source and set of options. Its name is a hash of both; which NVRTC made it is no part of that,
//! since the point of the cache is to start without loading one. A file that is damaged, or that the driver
//! does not take, is made anew.

use std::path::{Path, PathBuf};
use std::{env, fs, io, process};

const MAGIC: &[u8; 8] = b"LWCUBIN1";

/// A directory of compiled kernels.
#[derive(Debug, Clone)]
pub(crate) struct KernelCache {
    dir: PathBuf,
}

impl KernelCache {
    /// In `dir`; `None`: where this user's caches are. `None` comes back when the environment does not say where that is.
    pub(crate) fn new(dir: Option<PathBuf>) -> Option<Self> {
        let dir = dir.or_else(|| default_dir(env::var_os("XDG_CACHE_HOME"), env::var_os("HOME")))?;
        Some(Self { dir })
    }

    fn path(&self, name: &str, key: u64) -> PathBuf {
        self.dir.join(format!("{name}-{key:016x}.cubin"))
    }

    /// The cubin, when the file is there and whole.
    pub(crate) fn load(&self, name: &str, key: u64) -> Option<Vec<u8>> {
        let path = self.path(name, key);
        let bytes = fs::read(&path).ok()?;
        let cubin = unpack(&bytes);
        if cubin.is_none() {
            tracing::warn!(path = %path.display(), "damaged file in the kernel cache: compiling again");
        }
        cubin.map(<[u8]>::to_vec)
    }

    /// Keep a cubin. The file appears whole or not at all.
    pub(crate) fn store(&self, name: &str, key: u64, cubin: &[u8]) -> io::Result<()> {
        fs::create_dir_all(&self.dir)?;
        let path = self.path(name, key);
        let partial = self
            .dir
            .join(format!("{name}-{key:016x}.{}.partial", process::id()));
        fs::write(&partial, pack(cubin))?;
        fs::rename(&partial, &path)
    }

    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }
}

fn default_dir(cache_home: Option<std::ffi::OsString>, home: Option<std::ffi::OsString>) -> Option<PathBuf> {
    let set = |value: Option<std::ffi::OsString>| value.filter(|value| !value.is_empty()).map(PathBuf::from);
    let base = set(cache_home).or_else(|| Some(set(home)?.join(".cache")))?;
    Some(base.join("laneway/kernels"))
}

/// Hash of a list of texts.
pub(crate) fn key<'a>(texts: impl IntoIterator<Item = &'a str>) -> u64 {
    // The length keeps ["ab", "c"] apart from ["a", "bc"].
    texts.into_iter().fold(FNV_BASIS, |hash, text| {
        fnv(fnv(hash, &(text.len() as u64).to_le_bytes()), text.as_bytes())
    })
}

const FNV_BASIS: u64 = 0xcbf2_9ce4_8422_2325;

/// FNV-1a: the same on every machine and release.
fn fnv(hash: u64, bytes: &[u8]) -> u64 {
    bytes.iter().fold(hash, |hash, &byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
    })
}

fn pack(cubin: &[u8]) -> Vec<u8> {
    let mut bytes = MAGIC.to_vec();
    bytes.extend(fnv(FNV_BASIS, cubin).to_le_bytes());
    bytes.extend(cubin);
    bytes
}

fn unpack(bytes: &[u8]) -> Option<&[u8]> {
    let (hash, cubin) = bytes.strip_prefix(MAGIC)?.split_first_chunk::<8>()?;
    (fnv(FNV_BASIS, cubin) == u64::from_le_bytes(*hash)).then_some(cubin)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_stored_comes_back_and_damage_does_not() {
        let dir = tempfile::tempdir().unwrap();
        let cache = KernelCache::new(Some(dir.path().join("a/b"))).unwrap();
        assert_eq!(cache.load("gemm", 7), None);
        cache.store("gemm", 7, b"code").unwrap();
        assert_eq!(cache.load("gemm", 7).unwrap(), b"code");
        assert_eq!(cache.load("gemm", 8), None);

        let path = cache.path("gemm", 7);
        let mut bytes = fs::read(&path).unwrap();
        let last = bytes.len() - 1;
        bytes[last] ^= 1;
        fs::write(&path, &bytes).unwrap();
        assert_eq!(cache.load("gemm", 7), None, "a flipped bit");
        fs::write(&path, &bytes[..10]).unwrap();
        assert_eq!(cache.load("gemm", 7), None, "a short file");
        cache.store("gemm", 7, b"again").unwrap();
        assert_eq!(cache.load("gemm", 7).unwrap(), b"again");
    }

    #[test]
    fn the_key_keeps_texts_apart() {
        assert_ne!(key(["ab", "c"]), key(["a", "bc"]));
        assert_ne!(key(["a", ""]), key(["a"]));
        assert_eq!(key(["a", "b"]), key(["a", "b"]));
    }

    #[test]
    fn the_default_is_where_this_users_caches_are() {
        let dir = |cache: &str, home: &str| default_dir(Some(cache.into()), Some(home.into()));
        assert_eq!(dir("/c", "/h").unwrap(), Path::new("/c/laneway/kernels"));
        assert_eq!(dir("", "/h").unwrap(), Path::new("/h/.cache/laneway/kernels"));
        assert_eq!(default_dir(None, None), None);
    }
}
