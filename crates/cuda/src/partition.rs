//! Partitions: disjoint sets of SMs, each a green context that a stream is made in.
//!
//! A green context is never made current: its streams alone are used, so no thread has to enter it.

use std::mem::zeroed;
use std::ptr::null_mut;
use std::sync::Arc;

use cudarc::driver::sys;
use laneway_device::{DeviceError, Result};
use parking_lot::Mutex;

use crate::context::{Context, Garbage, Handle, Stream};

/// The smallest groups of SMs that the hardware divides into.
pub(crate) struct Partitions {
    context: Arc<Context>,
    /// SMs of a group; 0 where the device does not divide.
    granularity: u32,
    /// SMs of all groups: what the hardware keeps together need not be all that it has.
    sms: u32,
    /// Groups that no partition has.
    free: Mutex<Vec<Group>>,
}

#[derive(Clone, Copy)]
struct Group(sys::CUdevResource);

// SAFETY: plain data of the driver's; it refers to SMs by number.
unsafe impl Send for Group {}

impl Partitions {
    /// Divide the device. A device that refuses to has no partitions; the log says why.
    pub(crate) fn new(context: &Arc<Context>) -> Self {
        let (granularity, free) = divide(context).unwrap_or_else(|error| {
            tracing::info!(%error, "SM partitions are not available");
            (0, Vec::new())
        });
        Self {
            context: Arc::clone(context),
            granularity,
            sms: granularity * free.len() as u32,
            free: Mutex::new(free),
        }
    }

    pub(crate) fn granularity(&self) -> u32 {
        self.granularity
    }

    /// A partition of `sms` for a stream called `stream`.
    pub(crate) fn take(self: &Arc<Self>, sms: u32, stream: &str) -> Result<Partition> {
        let refuse = |remedy: String| DeviceError::Unsupported {
            device: self.context.name.clone(),
            what: format!("a partition of {sms} SMs for stream {stream}"),
            remedy,
        };
        if self.granularity == 0 {
            return Err(refuse("leave out `sms` on this device".to_owned()));
        }
        let mut free = self.free.lock();
        let free_sms = free.len() as u32 * self.granularity;
        if let Some(remedy) = size_problem(sms, self.granularity, self.sms) {
            return Err(refuse(remedy));
        }
        if sms > free_sms {
            return Err(refuse(format!("at most {free_sms} SMs are in no partition yet")));
        }
        let rest = free.len() - (sms / self.granularity) as usize;
        let mut resources: Vec<_> = free[rest..].iter().map(|group| group.0).collect();
        let green = create(&self.context, &mut resources)?;
        let groups = free.split_off(rest);
        Ok(Partition {
            owner: Arc::clone(self),
            green,
            groups,
        })
    }
}

/// A set of SMs; they go back on drop.
pub(crate) struct Partition {
    owner: Arc<Partitions>,
    green: Handle<sys::CUgreenCtx_st>,
    groups: Vec<Group>,
}

impl Partition {
    pub(crate) fn sms(&self) -> u32 {
        self.groups.len() as u32 * self.owner.granularity
    }

    /// A stream confined to the partition. The caller destroys it.
    pub(crate) fn create_stream(&self, priority: i32) -> Result<Stream> {
        let context = &self.owner.context;
        context.bind()?;
        let mut stream = null_mut();
        let flags = sys::CUstream_flags_enum::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: the green context lives as long as `self`; the address is valid for a write.
        let result = unsafe { sys::cuGreenCtxStreamCreate(&mut stream, self.green.0, flags, priority) };
        context.check("cuGreenCtxStreamCreate", result)?;
        Ok(Handle(stream))
    }
}

impl Drop for Partition {
    fn drop(&mut self) {
        self.owner.context.discard(Garbage::GreenContext(self.green));
        self.owner.free.lock().append(&mut self.groups);
    }
}

/// What to ask for instead of `sms`; `None` when it is fine.
fn size_problem(sms: u32, granularity: u32, all: u32) -> Option<String> {
    let largest = all / granularity * granularity;
    if sms >= granularity && sms <= largest && sms.is_multiple_of(granularity) {
        return None;
    }
    let below = (sms / granularity * granularity).min(largest);
    let above = sms.next_multiple_of(granularity).max(granularity);
    Some(match (below, above) {
        (0, above) => format!("the smallest partition has {above} SMs"),
        (below, above) if above > largest => format!("the largest partition has {below} SMs"),
        (below, above) => {
            format!("ask for {below} or {above} SMs: partitions are multiples of {granularity}")
        }
    })
}

/// Granularity, and the device's SMs in groups of that many. SMs left over belong to no group.
fn divide(context: &Context) -> Result<(u32, Vec<Group>)> {
    // SAFETY: plain data, for which zero is a value.
    let mut whole: sys::CUdevResource = unsafe { zeroed() };
    let kind = sys::CUdevResourceType::CU_DEV_RESOURCE_TYPE_SM;
    // SAFETY: the device exists; the address is valid for a write.
    let result = unsafe { sys::cuDeviceGetDevResource(context.device, &mut whole, kind) };
    context.check("cuDeviceGetDevResource", result)?;
    // SAFETY: as above.
    let mut remaining: sys::CUdevResource = unsafe { zeroed() };
    let mut count = context.properties.sms;
    // SAFETY: as above.
    let mut groups: Vec<sys::CUdevResource> = vec![unsafe { zeroed() }; count as usize];
    // The driver rounds a minimum of 1 up to what the hardware divides into.
    // SAFETY: `groups` has room for `count` groups; all addresses are valid.
    let result = unsafe {
        sys::cuDevSmResourceSplitByCount(groups.as_mut_ptr(), &mut count, &whole, &mut remaining, 0, 1)
    };
    context.check("cuDevSmResourceSplitByCount", result)?;
    groups.truncate(count as usize);
    // SAFETY: a resource of the SM kind holds this member.
    let sms_of = |group: &sys::CUdevResource| unsafe { group.__bindgen_anon_1.sm.smCount };
    let granularity = groups.first().map_or(0, sms_of);
    // Groups of another size would make a partition larger than it says.
    groups.retain(|group| sms_of(group) == granularity);
    Ok((granularity, groups.into_iter().map(Group).collect()))
}

fn create(context: &Context, resources: &mut [sys::CUdevResource]) -> Result<Handle<sys::CUgreenCtx_st>> {
    context.bind()?;
    let mut desc = null_mut();
    // SAFETY: the resources come from one split of this device; the address is valid for a write.
    let result =
        unsafe { sys::cuDevResourceGenerateDesc(&mut desc, resources.as_mut_ptr(), resources.len() as u32) };
    context.check("cuDevResourceGenerateDesc", result)?;
    let mut green = null_mut();
    let flags = sys::CUgreenCtxCreate_flags::CU_GREEN_CTX_DEFAULT_STREAM as u32;
    // SAFETY: the descriptor was just made for this device, whose primary context is retained.
    let result = unsafe { sys::cuGreenCtxCreate(&mut green, desc, context.device, flags) };
    context.check("cuGreenCtxCreate", result)?;
    Ok(Handle(green))
}

#[cfg(test)]
mod tests {
    use super::size_problem;

    #[test]
    fn a_refusal_names_the_nearest_sizes() {
        let problem = |sms| size_problem(sms, 8, 132);
        assert_eq!(problem(8), None);
        assert_eq!(problem(128), None);
        assert_eq!(
            problem(20).unwrap(),
            "ask for 16 or 24 SMs: partitions are multiples of 8"
        );
        assert_eq!(problem(0).unwrap(), "the smallest partition has 8 SMs");
        assert_eq!(problem(3).unwrap(), "the smallest partition has 8 SMs");
        assert_eq!(problem(130).unwrap(), "the largest partition has 128 SMs");
        assert_eq!(problem(132).unwrap(), "the largest partition has 128 SMs");
        assert_eq!(problem(400).unwrap(), "the largest partition has 128 SMs");
    }
}
