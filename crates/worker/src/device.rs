//! Devices by kind: what the machine has, and opening one.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Context as _;
use laneway_cuda::{CudaConfig, open_cuda};
use laneway_device::{CpuConfig, Device, open_cpu};
use laneway_plan::deployment::{DeviceKind, Precision};
use laneway_plan::{DeviceInventory, DeviceSpec};

/// Directory of compiled kernels; `$XDG_CACHE_HOME/laneway/kernels` or `~/.cache/laneway/kernels` without it.
/// Empty: none, and every start compiles them.
pub const KERNEL_CACHE_VARIABLE: &str = "LANEWAY_KERNEL_CACHE";

/// The devices that a worker can open here: the CPU, and each GPU that the driver shows.
///
/// # Errors
/// The machine does not say what memory it has.
pub fn local_devices() -> anyhow::Result<DeviceInventory> {
    let cpu = open(DeviceKind::Cpu, 0, Precision::F32)?;
    let mut inventory = DeviceInventory::cpu(cpu.facts().memory_bytes);
    match laneway_cuda::gpus() {
        Ok(gpus) => inventory.devices.extend(gpus.into_iter().map(|gpu| DeviceSpec {
            name: DeviceKind::Cuda.name(gpu.ordinal),
            memory_bytes: gpu.memory_bytes,
            sms: gpu.sms,
            partition_granularity: gpu.partition_granularity,
        })),
        // A broken driver is no reason to keep a worker from the CPU; who asks for a GPU is told there is none.
        Err(error) => tracing::warn!(%error, "no GPU can be used"),
    }
    Ok(inventory)
}

/// Open device `index` of a kind, under the stream sanitizer when
/// [`laneway_device::sanitize::SANITIZE_VARIABLE`] is 1.
///
/// # Errors
/// There is no such device, it cannot compute in `precision`, or its driver does not answer.
pub fn open(kind: DeviceKind, index: u32, precision: Precision) -> anyhow::Result<Arc<dyn Device>> {
    let name = kind.name(index);
    match (kind, precision) {
        (DeviceKind::Cpu, Precision::F32) => {
            open_cpu(CpuConfig { memory_bytes: None }).context("open the CPU device")
        }
        (DeviceKind::Cpu, Precision::Bf16) => {
            anyhow::bail!("open the CPU device: it computes in f32 only; write f32, or choose a GPU")
        }
        (DeviceKind::Cuda, precision) => open_cuda(CudaConfig {
            ordinal: index,
            precision: match precision {
                Precision::Bf16 => laneway_cuda::Precision::Bf16,
                Precision::F32 => laneway_cuda::Precision::F32,
            },
            memory_bytes: None,
            kernel_cache: kernel_cache(|variable| std::env::var(variable).ok()),
            shuffle_blocks: false,
            guard: false,
        })
        .with_context(|| {
            format!("open {name}: without an NVIDIA GPU and its driver write `device: cpu` (`--device cpu`)")
        }),
    }
}

/// Where compiled kernels are kept, by these environment variables.
fn kernel_cache(variable: impl Fn(&str) -> Option<String>) -> Option<PathBuf> {
    if let Some(directory) = variable(KERNEL_CACHE_VARIABLE) {
        return Some(PathBuf::from(directory)).filter(|directory| !directory.as_os_str().is_empty());
    }
    let absolute = |variable: Option<String>| variable.map(PathBuf::from).filter(|path| path.is_absolute());
    let cache = absolute(variable("XDG_CACHE_HOME"))
        .or_else(|| absolute(variable("HOME")).map(|home| home.join(".cache")))?;
    Some(cache.join("laneway/kernels"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cache(variables: &[(&str, &str)]) -> Option<PathBuf> {
        kernel_cache(|name| {
            let found = variables.iter().find(|(variable, _)| *variable == name)?;
            Some(found.1.to_owned())
        })
    }

    #[test]
    fn compiled_kernels_are_kept_where_the_user_keeps_caches() {
        assert_eq!(
            cache(&[("HOME", "/home/a")]),
            Some("/home/a/.cache/laneway/kernels".into())
        );
        assert_eq!(
            cache(&[("HOME", "/home/a"), ("XDG_CACHE_HOME", "/cache")]),
            Some("/cache/laneway/kernels".into())
        );
        let own = |directory| cache(&[("HOME", "/home/a"), (KERNEL_CACHE_VARIABLE, directory)]);
        assert_eq!(own("/kernels"), Some("/kernels".into()));
        assert_eq!(own(""), None);
        assert_eq!(cache(&[("XDG_CACHE_HOME", "relative")]), None);
        assert_eq!(cache(&[]), None);
    }

    #[test]
    fn a_device_that_cannot_be_opened_says_what_to_write_instead() {
        let refused = |kind, index, precision| format!("{:#}", open(kind, index, precision).unwrap_err());
        assert!(refused(DeviceKind::Cpu, 0, Precision::Bf16).contains("write f32"));
        // No machine has this many.
        let gpu = refused(DeviceKind::Cuda, 255, Precision::Bf16);
        assert!(gpu.contains("cuda:255") && gpu.contains("`device: cpu`"), "{gpu}");
    }

    #[test]
    fn the_cpu_is_always_there() {
        let inventory = local_devices().unwrap();
        assert!(inventory.find("cpu").unwrap().memory_bytes > 0);
        assert!(open(DeviceKind::Cpu, 0, Precision::F32).is_ok());
    }
}
