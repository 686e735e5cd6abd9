//! Devices by kind: what the machine has, and opening one.

use std::sync::Arc;

use anyhow::Context as _;
use laneway_cuda::{CudaConfig, open_cuda};
use laneway_device::{CpuConfig, Device, DeviceError, open_cpu};
use laneway_plan::deployment::{DeviceKind, Precision};
use laneway_plan::{DeviceInventory, DeviceSpec};

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
            ordinal: index as usize,
            precision: match precision {
                Precision::Bf16 => laneway_cuda::Precision::Bf16,
                Precision::F32 => laneway_cuda::Precision::F32,
            },
            memory_bytes: None,
            kernel_cache: None,
            shuffle_blocks: false,
            guard: false,
        })
        .map_err(|error| {
            let elsewhere = match error {
                DeviceError::Unavailable { .. } => "; `device: cpu` (`--device cpu`) needs no GPU",
                _ => "",
            };
            anyhow::Error::new(error).context(format!("open {name}{elsewhere}"))
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
