//! What GPUs the machine has: asked of the driver, without opening any of them.

use cudarc::driver::{result, sys};
use laneway_device::DeviceError;

/// First driver whose answer about SM partitions is understood here.
const PARTITION_QUERY_DRIVER: i32 = 13000;

/// One GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gpu {
    /// `cuda:0` is ordinal 0, as the driver numbers those that `CUDA_VISIBLE_DEVICES` leaves.
    pub ordinal: u32,
    /// Product name.
    pub name: String,
    /// All of its memory, in bytes.
    pub memory_bytes: u64,
    /// Streaming multiprocessors.
    pub sms: u32,
    /// A partition is a multiple of this many SMs; 0 where partitions are not supported.
    pub partition_granularity: u32,
    /// Compute capability, major and minor: (9, 0).
    pub compute_capability: (u32, u32),
}

/// The GPUs that the driver shows to this process; none on a machine without a driver or without a GPU.
///
/// # Errors
/// [`DeviceError::Unavailable`] when a driver is installed but does not answer.
pub fn gpus() -> Result<Vec<Gpu>, DeviceError> {
    // SAFETY: it only tries to open the driver's library. Every call below comes after it, because cudarc panics
    // when it loads a symbol of a library that is not there.
    if !unsafe { sys::is_culib_present() } {
        return Ok(Vec::new());
    }
    match result::init() {
        Ok(()) => {}
        Err(error) if error.0 == sys::CUresult::CUDA_ERROR_NO_DEVICE => return Ok(Vec::new()),
        Err(error) => return Err(silent("starting the NVIDIA driver", error)),
    }
    let failed = |error| silent("asking the NVIDIA driver for its GPUs", error);
    let count = result::device::get_count().map_err(failed)?;
    (0..count).map(|ordinal| gpu(ordinal).map_err(failed)).collect()
}

fn silent(what: &str, error: result::DriverError) -> DeviceError {
    DeviceError::Unavailable {
        device: "cuda".to_owned(),
        problem: format!("{what} failed ({error})"),
        remedy: "see whether `nvidia-smi` runs; without a GPU write `device: cpu`".to_owned(),
    }
}

fn gpu(ordinal: i32) -> Result<Gpu, result::DriverError> {
    use sys::CUdevice_attribute as Attribute;
    let device = result::device::get(ordinal)?;
    // SAFETY: `device` is what the driver just returned for this ordinal.
    let attribute = |which| unsafe { result::device::get_attribute(device, which) };
    let number = |which| attribute(which).map(|value| value.max(0) as u32);
    let major = number(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
    let minor = number(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
    // SAFETY: as above.
    let memory_bytes = unsafe { result::device::total_mem(device) }? as u64;
    Ok(Gpu {
        ordinal: ordinal as u32,
        name: result::device::get_name(device)?,
        memory_bytes,
        sms: number(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        partition_granularity: partition_granularity(device)?,
        compute_capability: (major, minor),
    })
}

/// SMs that a green context of this device is made of a multiple of.
fn partition_granularity(device: sys::CUdevice) -> Result<u32, result::DriverError> {
    let mut version = 0;
    // SAFETY: the driver writes one integer to a live one.
    unsafe { sys::cuDriverGetVersion(&mut version) }.result()?;
    // Older drivers lack the call, or the two fields read here.
    if version < PARTITION_QUERY_DRIVER {
        return Ok(0);
    }
    // SAFETY: a struct of integers and a union of integers and bytes, for which zeros are values.
    let mut resource: sys::CUdevResource = unsafe { std::mem::zeroed() };
    let kind = sys::CUdevResourceType::CU_DEV_RESOURCE_TYPE_SM;
    // SAFETY: `device` came from the driver, and `resource` is live and of the type that it fills.
    match unsafe { sys::cuDeviceGetDevResource(device, &mut resource, kind) } {
        sys::CUresult::CUDA_SUCCESS => {}
        sys::CUresult::CUDA_ERROR_NOT_SUPPORTED => return Ok(0),
        error => return Err(result::DriverError(error)),
    }
    // SAFETY: the call succeeded for this kind, so `sm` is the field that it wrote.
    let sm = unsafe { resource.__bindgen_anon_1.sm };
    Ok(sm.minSmPartitionSize.max(sm.smCoscheduledAlignment))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whatever the machine is, asking neither panics nor leaves numbers out.
    #[test]
    fn asking_for_gpus_is_safe_anywhere() {
        match gpus() {
            Ok(gpus) => {
                for gpu in gpus {
                    assert!(
                        gpu.memory_bytes > 0 && gpu.sms > 0 && !gpu.name.is_empty(),
                        "{gpu:?}"
                    );
                    assert!(gpu.compute_capability.0 > 0, "{gpu:?}");
                }
            }
            Err(error) => assert!(error.to_string().contains("device: cpu"), "{error}"),
        }
    }
}
