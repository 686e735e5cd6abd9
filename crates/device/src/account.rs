//! The memory account of a device: what may be allocated, what is, and how it comes back.

use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::{DeviceError, Result};

/// Bytes allowed and bytes in use. For implementors of [`crate::Device`].
#[derive(Debug)]
pub struct MemoryAccount {
    device: String,
    limit_bytes: u64,
    used_bytes: AtomicU64,
}

impl MemoryAccount {
    /// An account of `limit_bytes`; `device` is its name in errors.
    pub fn new(device: String, limit_bytes: u64) -> Arc<Self> {
        Arc::new(Self {
            device,
            limit_bytes,
            used_bytes: AtomicU64::new(0),
        })
    }

    /// Bytes that may be taken in all.
    pub fn limit_bytes(&self) -> u64 {
        self.limit_bytes
    }

    /// Bytes taken now.
    pub fn used_bytes(&self) -> u64 {
        self.used_bytes.load(Ordering::Acquire)
    }

    /// Take `bytes` until the lease is dropped; `what` names the allocation in the error.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`].
    pub fn take(self: &Arc<Self>, what: &str, bytes: u64) -> Result<MemoryLease> {
        self.used_bytes
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |used| {
                used.checked_add(bytes).filter(|&sum| sum <= self.limit_bytes)
            })
            .map_err(|used| DeviceError::OutOfMemory {
                what: what.to_owned(),
                needed_bytes: bytes,
                free_bytes: self.limit_bytes.saturating_sub(used),
                device: self.device.clone(),
            })?;
        Ok(MemoryLease {
            account: Arc::clone(self),
            bytes,
        })
    }
}

/// Bytes taken from an account; they go back on drop.
#[derive(Debug)]
pub struct MemoryLease {
    account: Arc<MemoryAccount>,
    bytes: u64,
}

impl Drop for MemoryLease {
    fn drop(&mut self) {
        self.account.used_bytes.fetch_sub(self.bytes, Ordering::AcqRel);
    }
}

/// Memory that this process may still take: what the kernel calls available, or less when its control group
/// is capped below that. `None` where neither can be read.
pub(crate) fn available_memory_bytes() -> Option<u64> {
    let meminfo = fs::read_to_string("/proc/meminfo").ok()?;
    let available = meminfo_available_bytes(&meminfo)?;
    let group = |file: &str| {
        let text = fs::read_to_string(format!("/sys/fs/cgroup/{file}")).ok()?;
        text.trim().parse::<u64>().ok()
    };
    let capped = group("memory.max").map(|max| max.saturating_sub(group("memory.current").unwrap_or(0)));
    Some(capped.map_or(available, |capped| available.min(capped)))
}

fn meminfo_available_bytes(meminfo: &str) -> Option<u64> {
    let line = meminfo
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leases_return_what_they_took() {
        let account = MemoryAccount::new("cpu".to_owned(), 100);
        let first = account.take("a", 60).unwrap();
        let refused = account.take("b", 41).unwrap_err();
        assert_eq!(refused.to_string(), "allocate b: 41 bytes needed, 40 free on cpu");
        let second = account.take("c", 40).unwrap();
        assert_eq!(account.used_bytes(), 100);
        drop(first);
        assert_eq!(account.used_bytes(), 40);
        drop(second);
        assert_eq!(account.used_bytes(), 0);
    }

    #[test]
    fn a_size_that_overflows_is_refused() {
        let account = MemoryAccount::new("cpu".to_owned(), u64::MAX);
        let _one = account.take("one", 1).unwrap();
        assert!(account.take("all", u64::MAX).is_err());
    }

    #[test]
    fn reads_meminfo() {
        let text = "MemTotal:       16000 kB\nMemAvailable:   12345 kB\n";
        assert_eq!(meminfo_available_bytes(text), Some(12345 * 1024));
        assert_eq!(meminfo_available_bytes("MemTotal: 1 kB\n"), None);
    }
}
