//! What the driver answers, in this project's errors.

use cudarc::driver::result::DriverError;
use cudarc::driver::sys;
use laneway_device::{DeviceError, Result};

/// Name and meaning of a driver result, e.g. `CUDA_ERROR_ILLEGAL_ADDRESS (an illegal memory access was encountered)`.
pub(crate) fn text(result: sys::CUresult) -> String {
    let error = DriverError(result);
    let meaning = error
        .error_string()
        .map(|text| text.to_string_lossy().into_owned());
    match (error.error_name(), meaning) {
        (Ok(name), Ok(meaning)) => format!("{} ({meaning})", name.to_string_lossy()),
        _ => format!("{result:?}"),
    }
}

/// A driver call outside any stream.
pub(crate) fn check(device: &str, call: &str, result: sys::CUresult) -> Result<()> {
    match result {
        sys::CUresult::CUDA_SUCCESS => Ok(()),
        _ => Err(DeviceError::Driver {
            device: device.to_owned(),
            call: call.to_owned(),
            problem: text(result),
        }),
    }
}

/// A driver call for an operation on a stream.
pub(crate) fn check_on(stream: &str, op: &str, result: sys::CUresult) -> Result<()> {
    match result {
        sys::CUresult::CUDA_SUCCESS => Ok(()),
        _ => Err(DeviceError::StreamFailed {
            stream: stream.to_owned(),
            op: op.to_owned(),
            problem: text(result),
        }),
    }
}
