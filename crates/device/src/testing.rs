//! Devices for tests, always under the sanitizer.

use std::sync::Arc;

use crate::sanitize::{self, Sanitizer};
use crate::{CpuConfig, CpuDevice, Device};

/// A CPU device under the sanitizer, with the machine's available memory.
///
/// # Panics
/// When the machine does not say how much memory it has.
pub fn cpu() -> (Arc<dyn Device>, Sanitizer) {
    let device = CpuDevice::new(CpuConfig { memory_bytes: None }).expect("the machine tells its memory");
    sanitize::wrap(Arc::new(device))
}
